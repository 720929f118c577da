"""Law 4: walk(0) is the canonical form with the outputs of the user's model; each path has its order; exact is exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from geosharp.functional.pulled_back import PulledBack
from geosharp.symmetry.block import Factors
from laws.kinds import KINDS, METRICS, PATHS, WholeMetric, factors_of, flat, random_point
from oracles.quotient import Pair, Quotient, distance


@pytest.fixture(params=KINDS)
def name(request: Any) -> str:
    return str(request.param)


@pytest.fixture(params=METRICS)
def metric(request: Any) -> str:
    return str(request.param)


def walked(F: PulledBack, z: Tensor) -> dict[str, Tensor]:
    with torch.no_grad():
        return F.chart.walk(F.chart.split(z))


def pairs(block: Factors, values: dict[str, Tensor]) -> list[Pair]:
    left, right = block.read(values)
    return list(zip(left, right, strict=True))


@pytest.mark.parametrize("path", PATHS)
def test_the_walk_from_zero_has_the_outputs_of_the_users_model(name: str, metric: str, path: str) -> None:
    kind = KINDS[name]
    F = kind.pull_back(metric, path)
    theirs = kind.outputs(kind.model())
    ours = F.objective.outputs({**F.objective.fixed, **walked(F, F.zero())}, F.parts[0][0])
    assert (ours - theirs).norm() < 1e-12 * theirs.norm()


@pytest.mark.parametrize("path", PATHS)
def test_the_state_at_zero_is_the_users_own(name: str, metric: str, path: str) -> None:
    kind = KINDS[name]
    model = kind.model()
    state = kind.pull_back(metric, path).state_at(torch.zeros(kind.pull_back(metric, path).size, dtype=torch.float64))
    for key, value in model.state_dict().items():
        assert (state[key] - value).abs().max() < 1e-12 * max(1.0, float(value.abs().max())), key


@pytest.mark.parametrize("path", PATHS)
def test_the_state_elsewhere_has_the_loss_of_the_walk(name: str, metric: str, path: str) -> None:
    kind = KINDS[name]
    F, model = kind.pull_back(metric, path), kind.model()
    z = random_point(F, 0.05)
    model.load_state_dict(F.state_at(z), strict=True)
    ours = F.objective.outputs({**F.objective.fixed, **walked(F, z)}, F.parts[0][0])
    theirs = kind.outputs(model)
    assert (ours - theirs).norm() < 1e-11 * theirs.norm()
    assert (theirs - kind.outputs(kind.model())).norm() > 1e-6 * theirs.norm()


def test_the_canonical_form_balances_every_block_and_is_one_for_an_orbit(name: str, metric: str) -> None:
    import geosharp as gs

    kind = KINDS[name]
    F = kind.pull_back(metric)
    at = walked(F, F.zero())
    for block in factors_of(F):
        for G, H in pairs(block, at):
            P, Q = G.mH @ G, H.mH @ H
            assert (P - Q).abs().max() < 1e-12 * P.abs().max()
            assert (P - torch.diag(torch.diagonal(P))).abs().max() < 1e-12 * P.abs().max()
    twin = gs.reparametrize(kind.model(), scale=5.0, seed=4, symmetries=kind.symmetries)
    there = walked(gs.pull_back(twin, [kind.batch], metric=metric, symmetries=kind.symmetries), F.zero())
    here = flat(at)
    assert (flat(there) - here).norm() < 1e-10 * here.norm()
    assert (flat(dict(kind.model().named_parameters())) - here).norm() > 1e-3 * here.norm()


def elementwise_exact(F: PulledBack, whole: WholeMetric, xi: dict[str, Tensor]) -> dict[str, Tensor]:
    """w·exp(ξ/w) where no block acts: the geodesic of diag(1/w²)."""
    return {n: torch.where(w != 0, w * torch.exp(xi[n] / torch.where(w != 0, w, 1.0)), w) for n, w in whole.at.items()}


def along_the_ode(F: PulledBack, metric: str, z: Tensor) -> tuple[list[Pair], Tensor]:
    """The ends of all blocks by integrating the geodesic equation, and the element-wise weights by their closed form."""
    whole, xi = WholeMetric(F, metric), F.lift(z)
    quotient = Quotient(metric)
    ends = []
    for block in factors_of(F):
        for at, velocity in zip(pairs(block, whole.at), pairs(block, xi), strict=True):
            ends.append(quotient.geodesic(at, velocity)[0])
    rest = elementwise_exact(F, whole, xi)
    return ends, torch.cat([rest[n][mask] for n, mask in sorted(whole.outside.items())])


def ends_of(F: PulledBack, z: Tensor, metric: str) -> tuple[list[Pair], Tensor]:
    outside, values = WholeMetric(F, metric).outside, walked(F, z)
    blocks = [pair for block in factors_of(F) for pair in pairs(block, values)]
    return blocks, torch.cat([values[n][mask] for n, mask in sorted(outside.items())])


def smallest(F: PulledBack) -> float:
    return min(float(stack.frame.singular.min()) for stack in F.chart.stacks)


def test_exact_paths_are_the_solution_of_the_geodesic_equation(name: str, metric: str) -> None:
    """inv to 1e-10; mix is an integration too, below the radius where it may lose rank."""
    F = KINDS[name].pull_back(metric, "exact", elementwise_path="exact")
    z = random_point(F, 1.0 if metric == "inv" else 1.0 * smallest(F))
    (blocks, rest), (expected, expected_rest) = ends_of(F, z, metric), along_the_ode(F, metric, z)
    assert max(distance(ours, theirs) for ours, theirs in zip(blocks, expected, strict=True)) < 1e-10
    assert (rest - expected_rest).norm() < 1e-12 * expected_rest.norm()


@pytest.mark.parametrize(("path", "order"), [("straight", 2), ("second-order", 3)])
def test_the_error_of_a_path_has_the_slope_of_its_order(name: str, metric: str, path: str, order: int) -> None:
    """Against the exact path, which the test above holds against the equation."""
    F, exact = (KINDS[name].pull_back(metric, p, elementwise_path=p) for p in (path, "exact"))
    z = random_point(F, 0.02 * (1.0 if metric == "inv" else smallest(F)))
    errors = []
    for factor in (1.0, 2.0, 4.0):
        (blocks, rest), (ends, exact_rest) = ends_of(F, factor * z, metric), ends_of(exact, factor * z, metric)
        apart = [a - b for ours, theirs in zip(blocks, ends, strict=True) for a, b in zip(ours, theirs, strict=True)]
        error = sum(float(difference.abs().square().sum()) for difference in apart)
        errors.append((error**0.5, float((rest - exact_rest).norm())))
    slopes = torch.tensor(errors, dtype=torch.float64).log2().diff(dim=0)
    assert (slopes - order).abs().max() < 0.2, slopes
