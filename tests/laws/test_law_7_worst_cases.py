"""A worst case never exceeds its radius and never falls below F(0); its trace and a list of radii are monotone."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import geosharp as gs
import plain_networks as plain
import zoo
from geosharp import measures
from geosharp.functional.worst_case import WorstCase
from laws.kinds import KINDS, METRICS, PATHS, SMALL
from oracles.quotient import Quotient
from oracles.trust_region import trust_region

WORST = [name for name in measures.names() if isinstance(measures.resolve(name).run, WorstCase)]
RADII = (0.02, 0.1, 0.5)
SOLVERS = ("default", "auto-pgd")


@functools.cache
def model() -> nn.Module:
    return zoo.make("bert", heads=2, width=8, spread=0.6)


@functools.cache
def batches() -> list[dict[str, Tensor]]:
    return [zoo.batch_of("bert", slice(0, 6)), zoo.batch_of("bert", slice(6, 10))]


@functools.cache
def measured(name: str, solver: str) -> gs.Measurements:
    return gs.measure(model(), batches(), name, rho=RADII, steps=8, solver=solver, keep_worst=True)


def loss_with(network: nn.Module, state: Any, batch: Any) -> float:
    """The user's own way: load, and call."""
    loaded = copy.deepcopy(network)
    loaded.load_state_dict(dict(state), strict=True)
    return zoo.loss_of(loaded, batch)


# What is reported is there ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("name", WORST)
def test_the_users_model_with_the_worst_parameters_has_the_reported_loss(name: str, solver: str) -> None:
    for m in measured(name, solver):
        assert len(m.perturbed) == len(m.rows) == 2
        for row, state, batch in zip(m.rows, m.perturbed, batches(), strict=True):
            assert loss_with(model(), state, batch) == pytest.approx(row.base_loss + row.value, rel=1e-10, abs=1e-12)
            assert row.base_loss == pytest.approx(zoo.loss_of(model(), batch), rel=1e-12)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("name", WORST)
def test_values_traces_and_radii_are_monotone(name: str, solver: str) -> None:
    found = measured(name, solver)
    assert [m.rho for m in found] == list(RADII)
    for m in found:
        for row in m.rows:
            best = [value for value, _ in row.trace]
            assert min(best) >= 0
            assert best == sorted(best)
            assert row.value == best[-1] >= 0
            assert row.evaluations <= 9
            assert all(0 <= residual <= 1 for _, residual in row.trace)
    for smaller, larger in itertools.pairwise(found):
        assert all(a <= b for a, b in zip(smaller.per_batch, larger.per_batch, strict=True))
    assert len({row.key for m in found for row in m.rows}) == 6


def test_a_row_says_which_smaller_radii_it_started_from() -> None:
    alone = gs.sharpness(model(), batches(), "geodesic-inv", rho=RADII[-1], steps=8)
    assert {row.key for row in alone.rows}.isdisjoint(row.key for row in measured("geodesic-inv", "default")[-1].rows)


# The radius, computed without the chart ------------------------------------------------------------------------------


def radius_of(name: str, state: Any, network: nn.Module) -> float:
    """‖z‖ of a straight perturbation of element-wise coordinates."""
    norm = math.inf if name.endswith("linf") else 2
    parts = []
    for key, weight in network.named_parameters():
        moved = (state[key] - weight.detach()).flatten()
        scale = torch.ones_like(moved) if name.startswith("standard") else weight.detach().abs().flatten()
        assert bool((moved[scale == 0] == 0).all())
        parts.append(moved[scale > 0] / scale[scale > 0])
    return float(torch.linalg.vector_norm(torch.cat(parts), ord=norm))


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("name", ["standard-l2", "standard-linf", "adaptive-l2", "adaptive-linf"])
def test_the_worst_parameters_lie_in_the_ball(name: str, solver: str) -> None:
    for m in measured(name, solver):
        assert m.rho is not None
        for state in m.perturbed:
            assert 0.5 * m.rho < radius_of(name, state, model()) <= m.rho * (1 + 1e-9)


@pytest.mark.parametrize("metric", METRICS)
def test_the_worst_parameters_of_a_product_lie_in_its_ball(metric: str) -> None:
    """By the metric's own inner product at the user's parameters: straight path, in the canonical gauge."""
    kind = KINDS["product"]
    network = kind.model()
    rho = 0.2
    F = kind.pull_back(metric, "straight")
    found = gs.sharpness(network, [kind.batch], f"geodesic-{metric}-first-order", rho=rho, symmetries=kind.symmetries, keep_worst=True)
    (blocks,) = kind.blocks(network).values()
    canonical = F.chart.walk(F.chart.split(F.zero()))
    start = F.state_at(F.zero())
    total = 0.0
    (block,) = blocks
    (G, _), (G1, H1), (Gc, Hc) = block.read(start), block.read(found.perturbed[0]), block.read(canonical)
    A = torch.linalg.lstsq(G[0], Gc[0]).solution  # the gauge: canonical = user's · A
    ends = (G1[0] @ A - Gc[0], H1[0] @ torch.linalg.inv(A).mT - Hc[0])
    total += float(Quotient(metric).inner((Gc[0], Hc[0]), ends, ends))
    for name, weight in canonical.items():
        if name not in block.parameters:
            total += float(((found.perturbed[0][name] - weight) / weight).square().sum())
    assert total**0.5 == pytest.approx(rho, rel=1e-8)


# Small radii, restarts, centres ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("metric", METRICS)
def test_the_worst_parameters_of_a_vanishing_ball_are_the_models_own(metric: str, path: str) -> None:
    suffix = {"straight": "-first-order", "second-order": "", "exact": "-exact"}[path]
    found = gs.sharpness(model(), batches(), f"geodesic-{metric}{suffix}", rho=1e-9, steps=2, keep_worst=True)
    own = model().state_dict()
    for state in found.perturbed:
        assert list(state) == list(own)
        assert max(float((state[name] - own[name]).abs().max()) for name in own) < 1e-7


def test_restarts_never_lower_a_value_and_show_their_spread() -> None:
    options: dict[str, Any] = {"rho": 1.0, "steps": 12, "seed": 3}
    plain_run = gs.sharpness(model(), batches()[:1], "geodesic-inv", **options)
    restarted = gs.sharpness(model(), batches()[:1], "geodesic-inv", restarts=3, **options)
    values = restarted.rows[0].restart_values
    assert len(values) == 4
    assert values[0] == plain_run.value
    assert restarted.value == max(values)
    assert restarted.evaluations <= 1 + 4 * 12


class Bowl(nn.Module):
    """Outputs are weights; with a squared loss around them the model sits exactly at its minimum."""

    def __init__(self, curvature: Tensor, at: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(at.clone())
        self.register_buffer("root", torch.linalg.cholesky(curvature).mT.contiguous())
        self.register_buffer("at", at.clone())

    def forward(self, x: Tensor) -> Tensor:
        return (self.root @ (self.weight - self.at)).expand(len(x), -1)


def bowl(size: int = 6, seed: int = 0) -> tuple[Bowl, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    factor = torch.randn(size, size, generator=generator, dtype=torch.float64)
    at = torch.randn(size, generator=generator, dtype=torch.float64)
    return Bowl(factor @ factor.mT + 0.1 * torch.eye(size, dtype=torch.float64), at), factor, at


BOWL_BATCH = [(torch.zeros(4, 1, dtype=torch.float64), torch.zeros(4, dtype=torch.long))]


def half_square(outputs: Tensor, batch: Any) -> Tensor:
    return 0.5 * outputs.square().sum(-1).mean()


@pytest.mark.parametrize("solver", SOLVERS)
def test_at_an_exact_minimum_the_ascent_starts_all_the_same(solver: str) -> None:
    network, _, _ = bowl()
    largest = float(torch.linalg.eigvalsh(network.root.mT @ network.root)[-1])
    found = gs.sharpness(network, BOWL_BATCH, "standard-l2", rho=0.3, loss=half_square, steps=200, tolerance=1e-6, solver=solver)
    assert found.value == pytest.approx(0.5 * 0.3**2 * largest, rel=1e-6)
    network.weight.data.add_(0.1)  # power: elsewhere the value is another
    moved = gs.sharpness(network, BOWL_BATCH, "standard-l2", rho=0.3, loss=half_square, steps=200)
    assert moved.value > 1.1 * found.value


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("rho", [0.1, 0.5, 3.0])
def test_on_a_quadratic_it_is_the_trust_region_solution(rho: float, solver: str) -> None:
    for seed in range(3):
        network, _, at = bowl(seed=seed)
        H = (network.root.mT @ network.root).detach()
        away = torch.linspace(-0.4, 0.6, len(at), dtype=torch.float64)
        network.weight.data.add_(away)
        found = gs.sharpness(network, BOWL_BATCH, "standard-l2", rho=rho, loss=half_square, steps=2000, tolerance=1e-9, solver=solver)
        accuracy = 1e-8 if solver == "default" else 1e-5  # halved unit steps converge slowly
        assert found.value == pytest.approx(trust_region((H @ away).numpy(), H.numpy(), rho)[0], rel=accuracy)


@pytest.mark.parametrize("hidden", [0.0, 1e-12, 1e-4])
def test_a_curved_direction_that_the_gradient_does_not_show_is_found_all_the_same(hidden: float) -> None:
    """Along the gradient F rises to 0.20, and the point there is stationary; across, to 1.00."""
    network = Bowl(torch.eye(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64))
    g = torch.tensor([0.06, 0.06, 0.05, hidden], dtype=torch.float64)
    bend = torch.tensor([-3.0, -1.0, 0.5, 2.0], dtype=torch.float64)
    found = gs.sharpness(
        network, BOWL_BATCH, "standard-l2", rho=1.0, loss=lambda outputs, _: outputs[0] @ g + 0.5 * (bend * outputs[0] ** 2).sum()
    )
    assert found.outcome == "stationary"
    assert found.value == pytest.approx(trust_region(g.numpy(), torch.diag(bend).numpy(), 1.0)[0], rel=1e-3)


@pytest.mark.parametrize("name", SMALL)
def test_a_declared_block_obeys_too(name: str) -> None:
    kind = KINDS[name]
    for metric in METRICS:
        found = gs.measure(kind.model(), [kind.batch], f"geodesic-{metric}", rho=RADII, symmetries=kind.symmetries, keep_worst=True)
        values = [m.value for m in found]
        assert 0 < values[0] <= values[1] <= values[2]
        for m in found:
            loaded = kind.model()
            loaded.load_state_dict(dict(m.perturbed[0]), strict=True)
            loss = float(nn.functional.cross_entropy(kind.outputs(loaded), kind.batch[1]))
            assert loss == pytest.approx(m.base_loss + m.value, rel=1e-10)


def test_the_checks_would_notice_a_point_outside_the_ball() -> None:
    state = dict(measured("adaptive-l2", "default")[-1].perturbed[0])
    own = model().state_dict()
    outside = {name: own[name] + 1.01 * (value - own[name]) for name, value in state.items()}
    assert radius_of("adaptive-l2", outside, model()) > RADII[-1] * (1 + 1e-3)
    assert abs(loss_with(model(), outside, batches()[0]) / loss_with(model(), state, batches()[0]) - 1) > 1e-4


def test_a_network_of_zero_weights_in_a_plain_layer_does_not_move_them() -> None:
    network = plain.seeded(plain.Perceptron)
    with torch.no_grad():
        network.first.weight[0].zero_()
    found = gs.sharpness(network, [plain.batch_of_vectors()], "adaptive-l2", rho=0.5, keep_worst=True)
    assert bool((found.perturbed[0]["first.weight"][0] == 0).all())
    assert found.provenance.geometry["zero_weights"] == plain.INPUTS
