"""Law 5: paths that agree to second order have one Hessian; trivial symmetries give the sharpness measures one knows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import geosharp as gs
import plain_networks as plain
import zoo
from laws.kinds import KINDS, METRICS, SMALL, dense, random_point

VECTORS = plain.batch_of_vectors()


@pytest.fixture(params=METRICS)
def metric(request: Any) -> str:
    return str(request.param)


# Hessians at 0 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("elementwise_path", ["straight", "matching"])
@pytest.mark.parametrize("name", KINDS)
def test_second_order_and_exact_paths_have_one_hessian_at_zero_and_the_straight_path_another(
    name: str, metric: str, elementwise_path: str
) -> None:
    paths = ("second-order", "exact", "straight")
    chosen = {path: path if elementwise_path == "matching" else "straight" for path in paths}
    second, exact, straight = (KINDS[name].pull_back(metric, path, elementwise_path=chosen[path]) for path in paths)
    z = second.zero()
    for seed in range(2):
        v = random_point(second, 1.0, seed)
        product = second.hvp(z, v)
        assert (exact.hvp(z, v) - product).norm() < 1e-9 * product.norm()
        assert (straight.hvp(z, v) - product).norm() > 1e-3 * product.norm()


def fitted(model: nn.Module) -> tuple[nn.Module, list[Any]]:
    """The model and a batch whose targets are its own outputs: an exact minimum of the square loss."""
    with torch.no_grad():
        return model, [(VECTORS[0], model(VECTORS[0]))]


def test_at_a_critical_point_all_paths_have_one_hessian(metric: str) -> None:
    model, batches = fitted(plain.seeded(plain.Product))
    F = [
        gs.pull_back(model, batches, metric=metric, path=p, symmetries=plain.product_block()) for p in ("straight", "second-order", "exact")
    ]
    v = random_point(F[0], 1.0)
    products = [one.hvp(one.zero(), v) for one in F]
    assert products[0].norm() > 1e-3
    for other in products[1:]:
        assert (other - products[0]).norm() < 1e-9 * products[0].norm()


def test_the_riemannian_hessian_of_elementwise_weights_has_the_term_with_the_gradient() -> None:
    """diag(w) H diag(w) + diag(w g) on w·exp(z); without the second term on the straight path."""
    model = plain.seeded(plain.Perceptron)
    naive = Naive(model)
    w = naive.weights
    g = torch.autograd.functional.jacobian(naive.loss, w)
    H = torch.autograd.functional.hessian(naive.loss, w)
    plainly = w[:, None] * H * w
    for path, expected in (("straight", plainly), ("second-order", plainly + torch.diag(w * g)), ("exact", plainly + torch.diag(w * g))):
        F = gs.pull_back(model, [VECTORS], metric=None, elementwise_path=path)
        assert (dense(lambda v, F=F: F.hvp(F.zero(), v), F.size) - expected).norm() < 1e-11 * expected.norm()


# Sharpness without symmetries, computed naively ------------------------------------------------------------------------


class Naive:
    """The loss of a flat vector of the user's own parameters, and projected gradient ascent in plain torch."""

    def __init__(self, model: nn.Module, batch: Any = VECTORS, family: bool = False) -> None:
        self.model, self.batch, self.family = model, batch, family
        self.shapes = {name: p.shape for name, p in model.named_parameters()}
        self.weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    def loss(self, flat: Tensor) -> Tensor:
        pieces = flat.split([shape.numel() for shape in self.shapes.values()])
        state = {name: piece.reshape(shape) for (name, shape), piece in zip(self.shapes.items(), pieces, strict=True)}
        if self.family:
            return torch.func.functional_call(self.model, state, kwargs=self.batch).loss
        return cross_entropy(torch.func.functional_call(self.model, state, (self.batch[0],)), self.batch[1])

    def worst(self, rho: float, scale: Tensor, norm: str, steps: int = 400) -> float:
        """Fixed-point steps z ← ρ ∇/‖∇‖ (or ρ sign ∇), damped, ever more where the maximum is on a kink of ReLU.

        At these radii they converge to the only maximum.
        """
        z = torch.zeros_like(self.weights)
        best = base = float(self.loss(self.weights).detach())
        for step in range(steps):
            z.requires_grad_()
            value = self.loss(self.weights + scale * z)
            (gradient,) = torch.autograd.grad(value, z)
            best = max(best, float(value.detach()))
            share = 0.5 * min(1.0, 2 - 2 * step / steps)
            target = rho * gradient / gradient.norm() if norm == "l2" else rho * gradient.sign()
            z = ((1 - share) * z + share * target).detach()
            z = z * (rho / z.norm()) if norm == "l2" else z
        return best - base


NAIVE: dict[str, Any] = {
    "product": lambda: Naive(plain.seeded(plain.Product)),
    "neurons": lambda: Naive(plain.seeded(plain.Perceptron)),
    "vit": lambda: Naive(zoo.make("vit", heads=2, width=8), zoo.batch_of("vit", slice(0, 6)), family=True),
}


@pytest.mark.parametrize("name", NAIVE)
@pytest.mark.parametrize(("elementwise", "measure"), [("identity", "standard"), ("adaptive", "adaptive")])
def test_trivial_symmetry_is_the_naive_sharpness(name: str, elementwise: str, measure: str) -> None:
    naive = NAIVE[name]()
    scale = torch.ones_like(naive.weights) if measure == "standard" else naive.weights
    F = gs.pull_back(naive.model, [naive.batch], metric=None, elementwise=elementwise, path="straight")
    assert F.dim == F.size == naive.weights.numel()
    for seed in range(3):
        z = random_point(F, 0.3, seed)
        assert F.value(z) == pytest.approx(float(naive.loss(naive.weights + scale * z).detach()), rel=1e-12)
    rho = 0.05
    steps = 60 if name == "vit" else 1000
    for norm, radius in (("l2", rho), ("linf", rho / 20)):
        options: dict[str, Any] = {"steps": 100, "tolerance": 1e-7}
        found = gs.sharpness(naive.model, [naive.batch], f"{measure}-{norm}", rho=radius, **options)
        assert found.value == pytest.approx(naive.worst(radius, scale, norm, steps), rel=1e-6)


def test_weights_of_any_sign_and_zeros_are_adaptive_in_size_only() -> None:
    """F(z) = L(w + w z), and a zero stays."""
    naive = Naive(plain.seeded(plain.Perceptron))
    with torch.no_grad():
        naive.model.first.weight[0, 0] = 0.0
    naive = Naive(naive.model)
    F = gs.pull_back(naive.model, [VECTORS], metric=None)
    z = random_point(F, 0.5)
    assert F.dim == F.size - 1
    assert F.value(z) == pytest.approx(float(naive.loss(naive.weights + naive.weights * z).detach()), rel=1e-13)


# GL(1): at most adaptive ----------------------------------------------------------------------------------------------


class Diagonal(nn.Module):
    """x ↦ x·(u ⊙ v), every coordinate a GL(1) block of two scalars."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.u, self.v = nn.Parameter(torch.randn(size)), nn.Parameter(torch.randn(size))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.u * self.v)


PAIRS = gs.Factors("pairs", (gs.View("u")[:, None, None],), (gs.View("v")[:, None, None],))


def diagonal_batch(size: int, seed: int = 0) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(9, size, generator=generator, dtype=torch.float64)
    return [(x, torch.randn(9, generator=generator, dtype=torch.float64))]


@pytest.mark.parametrize("rho", [0.05, 0.3, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_with_scalar_pairs_the_worst_case_is_at_most_the_adaptive_one(rho: float, seed: int) -> None:
    """On scalars inv is diag(1/w²) and the straight horizontal paths are some of the adaptive ones."""
    model, batches = plain.seeded(Diagonal, 4, seed=seed), diagonal_batch(4, seed)
    options: dict[str, Any] = {"rho": rho, "steps": 150, "restarts": 6, "tolerance": 1e-8}
    adaptive = gs.sharpness(model, batches, "adaptive-l2", **options)
    geodesic = gs.sharpness(model, batches, "geodesic-inv-first-order", symmetries=PAIRS, **options)
    assert 0 < geodesic.value <= adaptive.value * (1 + 1e-9)


@pytest.mark.parametrize(("rho", "geodesic", "adaptive"), [(0.7, None, None), (0.75, 8.402, 8.423), (1.2, 10.73, 13.69)])
def test_at_most_is_not_equal(rho: float, geodesic: float | None, adaptive: float | None) -> None:
    """One pair with β* = 6β₀: equal at ρ = 0.7, less from there on (errata 6)."""
    model = plain.seeded(Diagonal, 1)
    with torch.no_grad():
        model.u.fill_(2.0)
        model.v.fill_(0.5)
    batches = [(torch.ones(1, 1, dtype=torch.float64), torch.full((1,), 6.0, dtype=torch.float64))]
    options: dict[str, Any] = {"rho": rho, "steps": 150, "restarts": 8, "tolerance": 1e-9}
    ours = gs.sharpness(model, batches, "geodesic-inv-first-order", symmetries=PAIRS, **options).value
    theirs = gs.sharpness(model, batches, "adaptive-l2", **options).value
    if geodesic is None or adaptive is None:
        assert ours == pytest.approx(theirs, rel=1e-9)
    else:
        assert (ours, theirs) == (pytest.approx(geodesic, abs=5e-3), pytest.approx(adaptive, abs=5e-3))


@pytest.mark.parametrize("name", SMALL)
def test_to_first_order_the_horizontal_ball_and_the_full_one_agree(name: str, metric: str) -> None:
    """The vertical gradient is zero: ‖∇F‖ is the norm of the full whitened gradient."""
    F = KINDS[name].pull_back(metric)
    _, gradient = F.value_and_grad(F.zero())
    values = {n: v.detach().requires_grad_() for n, v in F.chart.walk(F.chart.split(F.zero())).items()}
    loss = F.objective.loss(values, F.parts[0][0])
    found = dict(zip(values, torch.autograd.grad(loss, list(values.values())), strict=True))
    unprojected = F.chart.join(F.chart._dual(found, inverse=False))
    assert (unprojected - gradient).norm() < 1e-12
    assert (F.project(random_point(F, 1.0)) - random_point(F, 1.0)).norm() > 1e-3
