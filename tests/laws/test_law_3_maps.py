"""Law 3, on the whole chart of real and declared models: lift, its adjoint, its inverse, Π, and the derivatives of F."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import geosharp as gs
import zoo
from geosharp.functional.pulled_back import PulledBack
from laws.kinds import KINDS, METRICS, PATHS, SMALL, WholeMetric, dense, flat, random_point


@pytest.fixture(params=KINDS)
def name(request: Any) -> str:
    return str(request.param)


@pytest.fixture(params=METRICS)
def metric(request: Any) -> str:
    return str(request.param)


@pytest.fixture
def F(name: str, metric: str) -> PulledBack:
    return KINDS[name].pull_back(metric)


def random_tangent(F: PulledBack, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(v.shape, generator=generator, dtype=torch.float64) for n, v in F.lift(F.zero()).items()}


def inner(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return float(torch.dot(flat(a), flat(b)))


# Lift and its two ways back -------------------------------------------------------------------------------------------


def test_lift_is_an_isometry_orthogonal_to_vertical_vectors(F: PulledBack, metric: str) -> None:
    whole = WholeMetric(F, metric)
    for seed in range(3):
        z, other = random_point(F, 1.0, seed), random_point(F, 1.0, seed + 10)
        xi, zeta = F.lift(z), F.lift(other)
        assert whole.inner(xi, zeta) == pytest.approx(float(torch.dot(F.project(z), F.project(other))), rel=1e-10, abs=1e-12)
        assert whole.inner(xi, xi) == pytest.approx(float(F.project(z).square().sum()), rel=1e-11)
        up = whole.vertical(seed)
        tilt = whole.inner(xi, up) / (whole.inner(xi, xi) * whole.inner(up, up)) ** 0.5
        assert abs(tilt) < 1e-12
        assert whole.inner(up, up) > 0.1


def test_lift_is_no_isometry_of_the_other_metric(F: PulledBack, metric: str) -> None:
    other = WholeMetric(F, "mix" if metric == "inv" else "inv")
    xi = F.lift(random_point(F, 1.0))
    assert abs(other.inner(xi, xi) / float(F.project(random_point(F, 1.0)).square().sum()) - 1) > 1e-3


def test_vertical_vectors_do_not_change_the_outputs_and_lifted_ones_do(F: PulledBack, metric: str, name: str) -> None:
    """The vertical space of the oracle is that of the model: the outputs' derivative vanishes along it."""
    whole, batch = WholeMetric(F, metric), F.parts[0][0]

    def slope(tangent: dict[str, Tensor]) -> float:
        size, step = flat(tangent).norm(), 1e-5
        ends = [F.objective.outputs({n: v + s * tangent[n] / size for n, v in whole.at.items()}, batch) for s in (step, -step)]
        return float((ends[0] - ends[1]).norm() / (2 * step))

    assert slope(whole.vertical()) < 1e-6
    assert slope(F.lift(random_point(F, 1.0))) > 1e-2


def test_pull_back_is_the_adjoint_of_lift(F: PulledBack) -> None:
    z, g = random_point(F, 1.0), random_tangent(F)
    adjoint = F.chart.join(F.chart.pull_back(g))
    assert float(torch.dot(adjoint, z)) == pytest.approx(inner(F.lift(z), g), rel=1e-10)


def test_coordinates_are_the_inverse_of_lift_and_another_function_than_its_adjoint(F: PulledBack) -> None:
    z = random_point(F, 1.0)
    back = F.chart.join(F.chart.coordinates(F.lift(z)))
    assert (back - F.project(z)).norm() < 1e-12
    assert (F.chart.join(F.chart.pull_back(F.lift(z))) - back).norm() > 1e-2


def test_coordinates_of_any_tangent_are_those_of_its_horizontal_part(F: PulledBack, metric: str) -> None:
    whole, xi = WholeMetric(F, metric), F.lift(random_point(F, 1.0))
    up = whole.vertical()
    tilted = {n: xi[n] + up[n] for n in xi}
    assert (F.chart.join(F.chart.coordinates(tilted)) - F.chart.join(F.chart.coordinates(xi))).norm() < 1e-10


def test_the_projector_is_idempotent_and_self_adjoint(F: PulledBack) -> None:
    z, other = random_point(F, 1.0), random_point(F, 1.0, 1)
    Pz = F.project(z)
    assert (F.project(Pz) - Pz).norm() < 1e-13
    assert float(torch.dot(Pz, other)) == pytest.approx(float(torch.dot(z, F.project(other))), abs=1e-13)
    assert (Pz - z).norm() > 1e-3


@pytest.mark.parametrize("name", ["bert", "gpt2", "vit", *SMALL])
def test_dim_is_the_rank_of_the_projector_and_of_lift(name: str, metric: str) -> None:
    F = KINDS[name].pull_back(metric, dense=True)
    Pi = dense(F.project, F.size)
    assert (Pi @ Pi - Pi).abs().max() < 1e-12
    assert (Pi - Pi.T).abs().max() < 1e-12
    assert float(torch.trace(Pi)) == pytest.approx(F.dim, abs=1e-9)
    J = dense(lambda z: flat(F.lift(z)), F.size)
    assert int(torch.linalg.matrix_rank(J, rtol=1e-10)) == F.dim
    assert (J @ Pi - J).abs().max() < 1e-12
    assert F.dim < F.size


# The walk and F -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_the_derivative_of_walk_at_zero_is_lift(name: str, metric: str, path: str) -> None:
    F = KINDS[name].pull_back(metric, path, elementwise_path=path)
    z = random_point(F, 1.0)
    _, slope = torch.autograd.functional.jvp(lambda at: flat(F.chart.walk(F.chart.split(at))), F.zero(), z)
    lifted = flat(F.lift(z))
    assert (slope - lifted).norm() < 1e-10 * lifted.norm()


def through_autograd(F: PulledBack, z: Tensor, order: int = 1) -> tuple[float, Tensor, Tensor]:
    """F, its gradient, and z itself with the graph behind, all by plain autograd through the walk."""
    z = z.clone().requires_grad_()
    values = F.chart.walk(F.chart.split(z))
    loss = torch.stack([F.objective.loss(values, batch, second_order=order == 2) * share for batch, share in F.parts]).sum()
    (gradient,) = torch.autograd.grad(loss, z, create_graph=order == 2)
    return float(loss.detach()), gradient, z


@pytest.mark.parametrize(("path", "elementwise_path"), [*zip(PATHS, PATHS, strict=True), ("second-order", "straight")])
def test_value_and_gradient_are_those_of_autograd(name: str, metric: str, path: str, elementwise_path: str) -> None:
    F = KINDS[name].pull_back(metric, path, elementwise_path=elementwise_path)
    for z in (F.zero(), random_point(F, 0.2)):
        value, gradient = F.value_and_grad(z)
        expected_value, expected, _ = through_autograd(F, z)
        assert value == pytest.approx(expected_value, rel=1e-12)
        assert value == pytest.approx(F.value(z), rel=1e-12)
        assert (gradient - expected).norm() < 1e-11 * expected.norm()


@pytest.mark.parametrize("path", PATHS)
def test_the_gradient_is_that_of_finite_differences_and_lies_in_the_range_of_the_projector(name: str, metric: str, path: str) -> None:
    F = KINDS[name].pull_back(metric, path)
    z, direction, step = random_point(F, 0.1), random_point(F, 1.0, 1), 1e-4
    _, gradient = F.value_and_grad(z)
    ahead, behind, far, farther = (F.value(z + s * step * direction) for s in (1, -1, 2, -2))
    slope = (8 * (ahead - behind) - (far - farther)) / (12 * step)
    assert float(torch.dot(gradient, direction)) == pytest.approx(slope, rel=1e-6, abs=1e-8)
    assert (F.project(gradient) - gradient).norm() < 1e-10 * gradient.norm()


@pytest.mark.parametrize("path", PATHS)
def test_f_depends_on_the_projected_point_only(name: str, metric: str, path: str) -> None:
    F = KINDS[name].pull_back(metric, path)
    z = random_point(F, 0.2)
    assert F.value(F.project(z)) == pytest.approx(F.value(z), rel=1e-12)
    assert F.value(z) != pytest.approx(F.value(F.zero()), rel=1e-6)


@pytest.mark.parametrize("path", ["straight", "second-order"])
@pytest.mark.parametrize("name", SMALL)
def test_products_are_those_of_the_dense_symmetric_hessian(name: str, metric: str, path: str) -> None:
    F = KINDS[name].pull_back(metric, path)
    z = random_point(F, 0.1)
    _, gradient, at = through_autograd(F, z, order=2)
    H = torch.stack([torch.autograd.grad(g, at, retain_graph=True)[0] for g in gradient])
    ours = dense(lambda v: F.hvp(z, v), F.size)
    assert (ours - H).norm() < 1e-10 * H.norm()
    assert (ours - ours.T).norm() < 1e-10 * H.norm()
    assert (dense(F.project, F.size) @ ours - ours).norm() < 1e-10 * H.norm()


@pytest.mark.parametrize("path", ["second-order", "exact"])
def test_products_are_symmetric_and_those_of_finite_differences(name: str, metric: str, path: str) -> None:
    F = KINDS[name].pull_back(metric, path)
    z, v, w = random_point(F, 0.05), random_point(F, 1.0, 1), random_point(F, 1.0, 2)
    Hv, Hw = F.hvp(z, v), F.hvp(z, w)
    scale = float(Hv.norm() * w.norm())
    assert float(torch.dot(Hv, w)) == pytest.approx(float(torch.dot(Hw, v)), abs=1e-11 * scale)
    step = 1e-4
    (_, a), (_, b), (_, c), (_, d) = (F.value_and_grad(z + s * step * v) for s in (1, -1, 2, -2))
    assert ((8 * (a - b) - (c - d)) / (12 * step) - Hv).norm() < 1e-6 * Hv.norm()


def test_the_hessian_is_symmetric_where_a_batch_holds_padding_tokens(metric: str) -> None:
    """Autograd masks the gradient of an embedding's padding row: as a coordinate it would break the symmetry by percents."""
    kind = KINDS["bert"]
    batch = {**kind.batch, "input_ids": kind.batch["input_ids"].clone()}
    batch["input_ids"][:, ::3] = 0
    F = gs.pull_back(kind.model(), [batch], metric=metric)
    assert F.chart.counts["padding_entries"] == 8
    v, w = random_point(F, 1.0, 1), random_point(F, 1.0, 2)
    Hv, Hw = F.hvp(F.zero(), v), F.hvp(F.zero(), w)
    assert float(torch.dot(Hv, w)) == pytest.approx(float(torch.dot(Hw, v)), abs=1e-11 * float(Hv.norm() * w.norm()))
    step = 1e-4
    change = F.value_and_grad(step * v)[1] - F.value_and_grad(-step * v)[1]
    assert (change / (2 * step) - Hv).norm() < 1e-5 * Hv.norm()


def test_several_batches_are_one_loss_of_all_examples(metric: str) -> None:
    model, rows = zoo.make("bert", heads=2, width=8), (slice(0, 4), slice(4, 12))
    split = gs.pull_back(model, [zoo.batch_of("bert", part) for part in rows], metric=metric)
    whole = gs.pull_back(model, [zoo.batch_of("bert", slice(0, 12))], metric=metric)
    z, v = random_point(whole, 0.1), random_point(whole, 1.0, 1)
    (a, g), (b, k) = split.value_and_grad(z), whole.value_and_grad(z)
    assert a == pytest.approx(b, rel=1e-12)
    assert (g - k).norm() < 1e-11 * k.norm()
    assert (split.hvp(z, v) - whole.hvp(z, v)).norm() < 1e-10 * whole.hvp(z, v).norm()
