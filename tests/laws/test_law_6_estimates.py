"""Law 6: every estimate agrees with a dense oracle within its own standard error, and that error is what it says.

Three instances: half ρ² times the trace of F's Hessian at small ρ, a square loss where that is the whole truth at any ρ, and
a Monte-Carlo over the user's own weights that shares nothing with the library.
"""

from __future__ import annotations

import functools
import math
import statistics
from typing import Any

import pytest
import torch
from scipy.stats import t as student
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import geosharp as gs
import plain_networks as plain
from geosharp.functional.pulled_back import PulledBack
from geosharp.measures import CATALOGUE
from laws.kinds import KINDS, Kind, dense
from oracles.quotient import Quotient, flat, unflat

AVERAGES = [name for name in CATALOGUE if name.startswith("average-")]
FLAT = [name for name in AVERAGES if CATALOGUE[name].geometry.metric is None]


def moment(name: str) -> float:
    """E[z²]/ρ² of a coordinate: 1 for a Gaussian, 1/3 in a box."""
    return 1 / 3 if name.endswith("linf") else 1.0


def F_of(kind: Kind, name: str) -> PulledBack:
    """The function that a measure averages."""
    geometry = CATALOGUE[name].geometry
    return kind.pull_back(geometry.metric, geometry.path, dense=True, elementwise=geometry.elementwise)


def trace(F: PulledBack) -> float:
    """Of the dense Hessian at 0, which vanishes outside range Π."""
    H = dense(lambda v: F.hvp(F.zero(), v), F.size)
    assert (dense(F.project, F.size) @ H - H).abs().max() < 1e-12 * H.abs().max()
    return float(H.trace())


def averages(kind: Kind, name: str, **options: Any) -> gs.Measurements:
    """The measure as a user asks for it."""
    if CATALOGUE[name].geometry.metric is not None:
        options["symmetries"] = kind.symmetries
    return gs.measure(kind.model(), [kind.batch], name, params=kind.params, **options)


# Small radii: half the trace ------------------------------------------------------------------------------------------


def test_the_catalogue_has_an_average_of_every_ball() -> None:
    assert {name.removeprefix("average-") for name in AVERAGES} == {name for name in CATALOGUE if f"average-{name}" in CATALOGUE}
    assert len(AVERAGES) == 10
    assert len(FLAT) == 4


@pytest.mark.parametrize("name", AVERAGES)
@pytest.mark.parametrize("kind", ["product", "line"])
def test_at_a_small_radius_an_average_is_half_the_trace_of_the_hessian(kind: str, name: str) -> None:
    """What is left is of order ρ⁴: with common random numbers a third of the change of value/ρ² between ρ and 2ρ."""
    rho, samples = 0.01, 20 if name.endswith("mix-exact") else 300
    truth = 0.5 * rho**2 * moment(name) * trace(F_of(KINDS[kind], name))
    found, wider = averages(KINDS[kind], name, rho=(rho, 2 * rho), samples=samples)
    assert abs(wider.value / 4 - found.value) / 3 < 0.1 * found.stderr
    assert found.outcome == "estimated"
    assert abs(found.value - truth) < 3 * found.stderr


def test_at_a_small_radius_the_average_of_a_transformer_is_half_its_trace() -> None:
    kind, name, rho = KINDS["bert"], "average-geodesic-mix", 0.01
    found = averages(kind, name, rho=rho, samples=400)[0]
    truth = 0.5 * rho**2 * trace(F_of(kind, name))
    assert found.stderr < 0.5 * abs(truth)
    assert abs(found.value - truth) < 3 * found.stderr


@pytest.mark.parametrize("metric", ["inv", "mix"])
def test_averages_tell_the_trace_of_one_path_from_that_of_another(metric: str) -> None:
    kind, rho = KINDS["line"], 0.01
    for name, other in ((f"average-geodesic-{metric}", "-first-order"), (f"average-geodesic-{metric}-first-order", "")):
        found = averages(kind, name, rho=rho, samples=400)[0]
        wrong = 0.5 * rho**2 * trace(F_of(kind, f"average-geodesic-{metric}{other}"))
        assert abs(found.value - wrong) > 5 * found.stderr


# A square loss: the whole truth at any radius -------------------------------------------------------------------------

SEEDS, SAMPLES, WIDE = 200, 30, 1.5


def mean_square(outputs: Tensor, batch: Any) -> Tensor:
    """½ mean ‖f(x) - y‖²."""
    return 0.5 * (outputs - batch[1]).square().sum(1).mean()


def linear_task(rows: int = 9, seed: int = 0) -> tuple[nn.Module, Any]:
    """A linear map with a bias, and targets it does not fit."""
    generator = torch.Generator().manual_seed(seed)
    X, Y = (torch.randn(rows, size, generator=generator, dtype=torch.float64) for size in (4, 2))
    return plain.seeded(nn.Linear, 4, 2), (X, Y)


def linear_hessian(name: str, model: nn.Module, batch: Any) -> Tensor:
    """[X 1]ᵀ[X 1]/n for every output, scaled by the weights on both sides under diag(1/w²)."""
    X = torch.cat([batch[0], torch.ones(len(batch[0]), 1, dtype=torch.float64)], 1)
    H = torch.kron(torch.eye(2, dtype=torch.float64), X.T @ X / len(X))
    w = torch.cat([model.weight.detach(), model.bias.detach()[:, None]], 1).reshape(-1)  # type: ignore[union-attr,operator]
    return w[:, None] * H * w if "adaptive" in name else H


@functools.cache
def quadratic_runs() -> dict[str, list[gs.Measurement]]:
    """Every flat measure on the linear task with many seeds."""
    model, batch = linear_task()
    runs = [gs.measure(model, [batch], FLAT, rho=WIDE, samples=SAMPLES, seed=seed, loss=mean_square) for seed in range(SEEDS)]
    return {name: [run.get(name) for run in runs] for name in FLAT}


def quadratic_truth(name: str) -> tuple[float, float]:
    """Mean and variance of one pair's ½zᵀHz: of the fourth moment only the diagonal of H sees more than of the second."""
    H, second = linear_hessian(name, *linear_task()), moment(name)
    fourth = 1 / 5 if name.endswith("linf") else 3.0
    diagonal = float(H.diagonal().square().sum())
    variance = 0.25 * ((fourth - second**2) * diagonal + 2 * second**2 * (float(H.square().sum()) - diagonal))
    return 0.5 * WIDE**2 * second * float(H.trace()), WIDE**4 * variance


def coverage(runs: list[Any], truth: float, factor: float = 1.0) -> float:
    """The share of 95 % intervals, of measurements or of rows, that hold the truth."""
    quantile = student.ppf(0.975, SAMPLES // 2 - 1) * factor
    return statistics.fmean(abs(run.value - truth) <= quantile * run.stderr for run in runs)


@pytest.mark.parametrize("name", FLAT)
def test_on_a_square_loss_the_average_is_half_the_trace_at_any_radius(name: str) -> None:
    """Within 3 stderr for several seeds, with samples that make the stderr itself known; the mean of many within their joint error."""
    truth, variance = quadratic_truth(name)
    runs = quadratic_runs()[name]
    model, batch = linear_task()
    for seed in range(6):
        found = gs.sharpness(model, [batch], name, rho=WIDE, samples=400, seed=seed, loss=mean_square)
        assert abs(found.value - truth) < 3 * found.stderr < 0.3 * truth
    mean, joint = statistics.fmean(run.value for run in runs), math.sqrt(variance / (SAMPLES // 2) / SEEDS)
    assert joint < 0.02 * truth
    assert abs(mean - truth) < 3 * joint


@pytest.mark.parametrize("name", FLAT)
def test_the_standard_error_is_the_true_one_and_its_intervals_cover(name: str) -> None:
    """Counting both halves of a pair as samples (stderr/√2) would cover too little."""
    truth, variance = quadratic_truth(name)
    runs = quadratic_runs()[name]
    squared = statistics.fmean(run.stderr**2 for run in runs)
    assert squared == pytest.approx(variance / (SAMPLES // 2), rel=0.1)
    assert statistics.variance(run.value for run in runs) == pytest.approx(squared, rel=0.3)
    assert 0.90 <= coverage(runs, truth) <= 0.99
    assert coverage(runs, truth, 1 / math.sqrt(2)) < 0.90


# A Monte-Carlo that shares nothing with the library --------------------------------------------------------------------


class ByHand:
    """The network with a bottleneck, its tangent vectors in the user's gauge, its loss written out."""

    def __init__(self, kind: Kind, metric: str, path: str, *, horizontal: bool = True) -> None:
        model, (self.x, self.labels) = kind.model(), kind.batch
        values = {name: value.detach() for name, value in model.named_parameters()}
        self.at = (torch.cat([values["first.weight"].T, values["first.bias"][None]]), values["second.weight"])
        self.rest = [values[name] for name in ("second.bias", "head.weight", "head.bias")]
        self.quotient, self.path = Quotient(metric), path
        whitened = torch.linalg.inv(torch.linalg.cholesky(self.quotient.tensor(self.at))).T
        self.basis = self.quotient.horizontal(self.at) @ whitened if horizontal else whitened

    def end(self, xi: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Where the path that leaves along ξ is at time 1."""
        if self.path == "exact" and self.quotient.metric == "mix":
            return self.quotient.geodesic(self.at, xi)[0]
        if self.path == "exact":
            slopes = [x @ torch.linalg.pinv(p) for p, x in zip(self.at, xi, strict=True)]
            cores = [torch.linalg.solve(p.T @ p, x.T @ p) for p, x in zip(self.at, xi, strict=True)]
            G, H = (torch.matrix_exp(w - w.T) @ p @ torch.matrix_exp(c) for w, p, c in zip(slopes, self.at, cores, strict=True))
            return G, H
        gammas = self.quotient.christoffel(self.at, xi) if self.path == "second-order" else (0.0, 0.0)
        G, H = (p + x - 0.5 * gamma for p, x, gamma in zip(self.at, xi, gammas, strict=True))
        return G, H

    def loss(self, z: Tensor) -> float:
        """At one draw of coordinates: tangent vectors of the block first, then relative changes of all other weights."""
        size = self.basis.shape[1]
        G, H = self.end(unflat(self.basis @ z[:size], self.at))
        parts = z[size:].split([w.numel() for w in self.rest])
        bias, head, last = (w + w * part.reshape(w.shape) for w, part in zip(self.rest, parts, strict=True))
        hidden = torch.tanh((self.x @ G[:-1] + G[-1]) @ H.T + bias)
        return float(cross_entropy(hidden @ head.T + last, self.labels))

    def average(self, rho: float, pairs: int) -> tuple[float, float]:
        """Mean rise and its standard error."""
        size = flat(self.at).numel() + sum(w.numel() for w in self.rest)
        draws = rho * torch.randn(pairs, size, generator=torch.Generator().manual_seed(987), dtype=torch.float64)
        base = self.loss(torch.zeros(size, dtype=torch.float64))
        rises = [0.5 * (self.loss(z) + self.loss(-z)) - base for z in draws]
        return statistics.fmean(rises), statistics.stdev(rises) / math.sqrt(pairs)


@pytest.mark.parametrize("suffix", ["", "-exact", "-first-order"])
@pytest.mark.parametrize("metric", ["inv", "mix"])
def test_a_monte_carlo_in_the_users_own_weights_has_the_same_mean(metric: str, suffix: str) -> None:
    kind, rho = KINDS["line"], 0.15
    slow = (metric, suffix) == ("mix", "-exact")
    name, path = f"average-geodesic-{metric}{suffix}", {"": "second-order", "-exact": "exact", "-first-order": "straight"}[suffix]
    found = averages(kind, name, rho=rho, samples=40 if slow else 700)[0]

    def distance(other: str) -> float:
        mean, stderr = ByHand(kind, metric, other).average(rho, 20 if slow and other == "exact" else 350)
        return abs(found.value - mean) / math.hypot(found.stderr, stderr)

    assert distance(path) < 3
    assert distance("second-order" if path == "straight" else "straight") > 4


@pytest.mark.parametrize("metric", ["inv", "mix"])
def test_draws_are_projected_and_not_rescaled(metric: str) -> None:
    """Under mix, where it shows, draws on all coordinates, vertical ones too, have another mean."""
    kind, rho = KINDS["product"], 0.15
    found = averages(kind, f"average-geodesic-{metric}", rho=rho, samples=1000)[0]
    for horizontal in (True, False) if metric == "mix" else (True,):
        mean, stderr = ByHand(kind, metric, "second-order", horizontal=horizontal).average(rho, 500)
        assert (abs(found.value - mean) < 3 * math.hypot(found.stderr, stderr)) == horizontal


# Pairs and batches ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", ["inv", "mix"])
def test_pairs_take_out_the_linear_term(metric: str) -> None:
    """Independent draws of as many evaluations have ρ²‖∇F‖²/N on top."""
    kind, rho, samples, seeds = KINDS["line"], 0.01, 20, 40
    F = kind.pull_back(metric)
    base, gradient = F.value_and_grad(F.zero())
    generator = torch.Generator().manual_seed(5)
    single = [statistics.fmean(F.value(rho * F.probe(generator)) - base for _ in range(samples)) for _ in range(seeds)]
    paired = [averages(kind, f"average-geodesic-{metric}", rho=rho, samples=samples, seed=seed)[0] for seed in range(seeds)]
    assert all(run.forward_passes == samples + 1 for run in paired)
    linear = float(gradient.square().sum()) * rho**2 / samples
    assert statistics.variance(single) == pytest.approx(linear, rel=0.5)
    assert statistics.variance(run.value for run in paired) < 0.05 * linear


BATCHES = [plain.batch_of_vectors(12, seed) for seed in range(3)]


def test_the_errors_of_batches_add_up_as_independent_ones_and_their_spread_is_another_number() -> None:
    model, options = KINDS["line"].model(), {"rho": 0.05, "samples": 40, "symmetries": KINDS["line"].symmetries}
    found = gs.sharpness(model, BATCHES, "average-geodesic-inv", **options)
    single = [gs.sharpness(model, [batch], "average-geodesic-inv", **options) for batch in BATCHES]
    assert found.per_batch == tuple(one.value for one in single)
    assert found.value == pytest.approx(statistics.fmean(found.per_batch), rel=1e-14)
    assert found.stderr == pytest.approx(math.sqrt(sum(one.stderr**2 for one in single)) / 3, rel=1e-14)
    assert found.batch_stderr == pytest.approx(statistics.stdev(found.per_batch) / math.sqrt(3), rel=1e-12)
    assert all(one.batch_stderr is None and one.stderr > 0 for one in single)


def test_intervals_of_one_batch_cover_its_trace_and_the_combined_ones_the_mean() -> None:
    """Probes differ from batch to batch: with the same ones the errors would not be independent."""
    kind, rho, name = KINDS["line"], 0.003, "average-geodesic-inv"
    model, options = kind.model(), {"rho": rho, "samples": SAMPLES, "symmetries": kind.symmetries}
    truths = [0.5 * rho**2 * trace(gs.pull_back(model, [batch], symmetries=kind.symmetries)) for batch in BATCHES[:2]]
    runs = [gs.sharpness(model, BATCHES[:2], name, seed=seed, **options) for seed in range(200)]
    first = [run.rows[0] for run in runs]
    assert 0.90 <= coverage(runs, statistics.fmean(truths)) <= 0.99
    assert 0.90 <= coverage(first, truths[0]) <= 0.99
    assert coverage(first, 0.5 * rho**2 * trace(F_of(kind, f"{name}-first-order"))) < 0.5
    assert abs(statistics.correlation([row.value for row in first], [run.rows[1].value for run in runs])) < 0.25
    assert statistics.stdev(run.value for run in runs) == pytest.approx(statistics.fmean(run.stderr for run in runs), rel=0.2)


@pytest.mark.parametrize("name", ["geodesic-inv", "adaptive-l2", "gradient-norm", "riemannian-gradient-norm-mix"])
def test_what_is_not_sampled_has_no_monte_carlo_error(name: str) -> None:
    options: dict[str, Any] = {} if "norm" in name else {"rho": 0.05}
    found = gs.sharpness(KINDS["line"].model(), BATCHES, name, symmetries=KINDS["line"].symmetries, **options)
    assert (found.stderr, found.outcome != "estimated", found.batch_stderr is not None) == (0.0, True, True)


def test_one_pair_has_no_error_that_one_could_estimate() -> None:
    assert averages(KINDS["line"], "average-geodesic-inv", rho=0.05, samples=2)[0].stderr == math.inf
