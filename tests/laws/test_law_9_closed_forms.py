"""Law 9: on networks small enough for pen and paper, the library gives what pen and paper give.

Three instances: one pair of weights, a diagonal network with inputs XᵀX = I, a quadratic loss. With b = η_u/u = η_v/v the
square loss of u⊙v is a function of β = β₀g(b), and the path says what g is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor, nn

import geosharp as gs
import plain_networks as plain
from geosharp.functional.pulled_back import PulledBack
from laws.kinds import METRICS, dense
from oracles.quotient import Quotient, unflat
from oracles.trust_region import trust_region

CAREFUL: dict[str, Any] = {"steps": 200, "tolerance": 1e-7, "restarts": 4}
Array = np.ndarray


class Pairs(nn.Module):
    """x ↦ x·(u ⊙ v), every coordinate a block GL(1)."""

    def __init__(self, u: Any, v: Any) -> None:
        super().__init__()
        self.u, self.v = (nn.Parameter(torch.tensor(side, dtype=torch.float64)) for side in (u, v))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.u * self.v)


PAIRS = gs.Factors("pairs", (gs.View("u")[:, None, None],), (gs.View("v")[:, None, None],))


def square(outputs: Tensor, batch: Any) -> Tensor:
    """‖f(X) - y‖²: a sum, as the closed forms have it."""
    return (outputs - batch[1]).square().sum()


def diagonal(beta: Any, target: Any, seed: int = 0) -> tuple[Pairs, list[Any], dict[str, Any]]:
    """A badly balanced u⊙v = β₀, and a batch with XᵀX = I, Xᵀy = β* and a part of y that no β reaches."""
    generator = torch.Generator().manual_seed(seed)
    u = 1 + 3 * torch.rand(len(beta), generator=generator, dtype=torch.float64)
    Q = torch.linalg.qr(torch.randn(7, 7, generator=generator, dtype=torch.float64))[0]
    X, rest = Q[:, : len(beta)], 0.3 * Q[:, -1]
    beta, target = (torch.tensor(np.asarray(side, dtype=float)) for side in (beta, target))
    return Pairs(u.tolist(), (beta / u).tolist()), [(X, X @ target + rest)], {"loss": square, "symmetries": PAIRS}


def rise(growth: Array, beta: Array, target: Array) -> Array:
    """L - L₀ at β = β₀·growth: Σ β₀²(g² - 1) - 2β₀β*(g - 1), over the last dimension; growth is e^{2b} on inv's geodesics."""
    return (beta**2 * (growth**2 - 1) - 2 * beta * target * (growth - 1)).sum(-1)


def brute_force(value: Callable[[Array], Array], radius: float, size: int) -> float:
    """The maximum on a ball: a cloud of points on many spheres, the best of them polished."""
    cloud = np.random.default_rng(0).standard_normal((10, 4000, size))
    cloud *= radius * np.linspace(0.1, 1.0, 10)[:, None, None] / np.linalg.norm(cloud, axis=-1, keepdims=True)
    cloud = cloud.reshape(-1, size)

    def down(b: Array) -> float:
        return -float(value(b * min(1.0, radius / max(float(np.linalg.norm(b)), 1e-300))))

    options = {"xatol": 1e-11, "fatol": 1e-14, "maxiter": 4000}
    return max(-minimize(down, start, method="Nelder-Mead", options=options).fun for start in cloud[np.argsort(value(cloud))[-6:]])


def along(F: PulledBack, b: Any) -> Tensor:
    """The coordinates of the tangent vector (ub, vb)."""
    at = F.chart.walk(F.chart.split(F.zero()))
    return F.chart.join(F.chart.coordinates({name: value.detach() * torch.tensor(b) for name, value in at.items()}))


@pytest.mark.parametrize("rho", [0.01, 0.3, 1.0, 2.0])
@pytest.mark.parametrize(
    ("first", "second", "x", "y"), [(2.0, 0.5, 1.0, 0.0), (1.5, -0.4, 2.0, 3.0), (0.7, 1.1, 1.0, 5.0), (1.0, 1.0, 1.0, 1.4)]
)
def test_the_scalar_toy_has_its_closed_form_all_over_its_orbit(first: float, second: float, x: float, y: float, rho: float) -> None:
    """S = max over |b| <= ρ/√2 of y₀²(e^{4b} - 1) - 2yy₀(e^{2b} - 1). Convex in e^{2b}: it is at an end."""
    y0 = first * second * x

    def closed(bound: float) -> float:
        return float(rise(np.exp(2 * np.linspace(-bound, bound, 2001)[:, None]), np.array([y0]), np.array([y])).max())

    expected = closed(rho / math.sqrt(2))
    one = torch.ones(1, dtype=torch.float64)
    options: dict[str, Any] = {"loss": square, "symmetries": PAIRS, "rho": rho, **CAREFUL}
    for c in (1.0, 100.0, -0.03):
        found = gs.sharpness(Pairs([first * c], [second / c]), [(x * one[None], y * one)], "geodesic-inv-exact", **options)
        assert found.value == pytest.approx(expected, rel=1e-9)
    assert closed(rho) > 1.01 * expected


GROWTH: dict[tuple[str, str], Callable[[Array], Array]] = {
    ("inv", "straight"): lambda b: (1 + b) ** 2,
    ("inv", "second-order"): lambda b: (1 + b + b**2 / 2) ** 2,
    ("inv", "exact"): lambda b: np.exp(2 * b),
    ("mix", "straight"): lambda b: (1 + b) ** 2,
    ("mix", "second-order"): lambda b: (1 + b - b**2 / 2) ** 2,
    ("mix", "exact"): lambda b: 1 + 2 * b,
}
BETA, TARGET = np.array([1.3, -0.6, 0.9]), np.array([0.4, 1.1, 2.5])


@pytest.mark.parametrize(("metric", "path"), GROWTH)
def test_every_path_of_a_diagonal_network_is_its_formula_pointwise(metric: str, path: str) -> None:
    """‖η‖² is 2‖b‖² under inv and 2‖β₀⊙b‖² under mix; no other path has the same values."""
    model, batches, options = diagonal(BETA, TARGET)
    F = gs.pull_back(model, batches, metric=metric, path=path, **options)
    base = F.value(F.zero())
    assert F.dim == 3
    for seed in range(5):
        b = np.random.default_rng(seed).uniform(-0.45, 0.45, 3)
        z = along(F, b)
        assert float(z.norm()) == pytest.approx(math.sqrt(2) * np.linalg.norm(b if metric == "inv" else BETA * b), rel=1e-12)
        found = F.value(z) - base
        for other, growth in GROWTH.items():
            if growth(b) == pytest.approx(GROWTH[metric, path](b), rel=1e-9):
                assert found == pytest.approx(rise(growth(b), BETA, TARGET), rel=1e-9), other
            else:
                assert abs(found / rise(growth(b), BETA, TARGET) - 1) > 1e-3, other


@pytest.mark.parametrize("rho", [0.1, 0.5, 1.2])
@pytest.mark.parametrize(
    ("beta", "target"), [([1.3, -0.6], [0.4, 1.1]), ([1.0, 1.0], [1.0, 1.0]), (BETA, TARGET), ([0.5, 0.4, -0.9], [3.0, -1.0, -0.9])]
)
def test_the_worst_case_of_a_diagonal_network_is_a_brute_force_maximum(beta: Any, target: Any, rho: float) -> None:
    model, batches, options = diagonal(beta, target)
    found = gs.sharpness(model, batches, "geodesic-inv-exact", rho=rho, **options, **CAREFUL).value
    beta, target = np.array(beta), np.array(target)
    expected = brute_force(lambda b: rise(np.exp(2 * b), beta, target), rho / math.sqrt(2), len(beta))
    assert found == pytest.approx(expected, rel=1e-8)


def test_the_worst_case_of_mix_is_that_of_the_product_in_a_ball() -> None:
    """β₀(1 + 2b) with 2‖β₀⊙b‖² <= ρ² is the ball ‖β - β₀‖ <= √2ρ: S = 2√2ρ‖β₀ - β*‖ + 2ρ²."""
    model, batches, options = diagonal(BETA, TARGET)
    for rho in (0.05, 0.2):
        found = gs.sharpness(model, batches, "geodesic-mix-exact", rho=rho, **options, **CAREFUL)
        expected = 2 * math.sqrt(2) * rho * np.linalg.norm(BETA - TARGET) + 2 * rho**2
        assert (found.value, found.outcome) == (pytest.approx(expected, rel=1e-8), "stationary")


def expansion(beta: Array, target: Array) -> tuple[Array, Array]:
    """4b·r + 4bᵀDb as gradient and Hessian in b: r = β₀(β₀ - β*), D = diag(β₀(2β₀ - β*))."""
    return 4 * beta * (beta - target), np.diag(8 * beta * (2 * beta - target))


@pytest.mark.parametrize("path", ["second-order", "exact"])
def test_gradient_and_hessian_of_a_diagonal_network_are_those_of_the_expansion(path: str) -> None:
    model, batches, options = diagonal(BETA, TARGET)
    F = gs.pull_back(model, batches, path=path, **options)
    g, A = expansion(BETA, TARGET)
    units = torch.stack([along(F, unit) for unit in np.eye(3)], 1)
    _, gradient = F.value_and_grad(F.zero())
    assert np.abs((units.T @ gradient).numpy() - g).max() < 1e-12
    assert np.abs((units.T @ dense(lambda v: F.hvp(F.zero(), v), F.size) @ units).numpy() - A).max() < 1e-12


# In the second, no slope along the largest curvature and one of size ρ elsewhere: the hard case at every radius.
CASES: dict[str, tuple[Callable[[float], tuple[Array, Array]], str]] = {
    "slope": (lambda rho: (BETA, TARGET), "easy"),
    "near a minimum": (lambda rho: (BETA, BETA + rho * np.array([0.0, 0.4, -0.3])), "hard"),
    "minimum": (lambda rho: (BETA, BETA), "hard"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_trust_region_of_the_expansion_is_the_worst_case_up_to_the_cube_of_the_radius(name: str) -> None:
    make, case = CASES[name]
    errors, careless = [], []
    for rho in (0.02, 0.01, 0.005):
        beta, target = make(rho)
        model, batches, options = diagonal(beta, target)
        found = gs.sharpness(model, batches, "geodesic-inv-exact", rho=rho, **options, **CAREFUL).value
        g, A = expansion(beta, target)
        expected, kind = trust_region(g, A, rho / math.sqrt(2))
        assert kind == case
        errors.append(abs(found - expected))
        careless.append(abs(found - trust_region(g, A / 2, rho / math.sqrt(2))[0]))
    for steps, order in ((errors, 3), (careless, 2)):
        assert [math.log2(a / b) for a, b in itertools.pairwise(steps)] == [pytest.approx(order, abs=0.15)] * 2


@pytest.mark.parametrize(("rho", "geodesic", "adaptive"), [(0.3, "", ""), (0.7, "", ""), (0.75, "8.402", "8.423"), (1.2, "10.73", "13.69")])
def test_a_pair_is_at_most_as_sharp_as_without_its_symmetry(rho: float, geodesic: str, adaptive: str) -> None:
    """β* = 6β₀ on straight paths, errata 6 to the digit: β₀(1 + a)(1 + c) with a = c against any a, c."""
    model, batches, options = diagonal([1.0], [6.0])
    one, six = np.array([1.0]), np.array([6.0])
    ours = gs.sharpness(model, batches, "geodesic-inv-first-order", rho=rho, **options, **CAREFUL).value
    theirs = gs.sharpness(model, batches, "adaptive-l2", rho=rho, loss=square, **CAREFUL).value
    ends = (1 + np.array([[-rho], [rho]]) / math.sqrt(2)) ** 2
    assert ours == pytest.approx(rise(ends, one, six).max(), rel=1e-9)
    assert theirs == pytest.approx(brute_force(lambda b: rise((1 + b).prod(-1)[..., None], one, six), rho, 2), rel=1e-8)
    if geodesic:
        assert (f"{ours:.4g}", f"{theirs:.4g}") == (geodesic, adaptive)
    else:
        assert ours == pytest.approx(theirs, rel=1e-9)


SPECTRA = {"indefinite": [-3.0, -1.0, 0.5, 2.0], "convex": [0.1, 0.5, 1.0, 4.0], "concave": [-6.0, -4.0, -3.0, -2.0]}


@pytest.mark.parametrize("rho", [0.2, 1.0])
@pytest.mark.parametrize("orthogonal", [False, True])
@pytest.mark.parametrize("name", SPECTRA)
def test_a_quadratic_loss_on_a_plain_ball_is_a_trust_region_problem(name: str, orthogonal: bool, rho: float) -> None:
    """g·b + ½bᵀAb, where b is how far the weights of a linear map on one row have moved: easy, hard and inactive cases."""
    noise = np.random.default_rng(1)
    Q, c = np.linalg.qr(noise.standard_normal((4, 4)))[0], noise.standard_normal(4)
    c[-1] *= not orthogonal
    A, g = Q @ np.diag(SPECTRA[name]) @ Q.T, (0.1 if orthogonal else 1.0) * Q @ c / np.linalg.norm(c)
    expected, case = trust_region(g, A, rho)
    assert case == ("inactive" if name == "concave" and (orthogonal or rho == 1.0) else "hard" if orthogonal else "easy")
    assert expected == pytest.approx(brute_force(lambda b: b @ g + 0.5 * ((b @ A) * b).sum(-1), rho, 4), rel=1e-8)
    model, one = plain.seeded(lambda: nn.Linear(1, 4, bias=False)), torch.ones(1, 1, dtype=torch.float64)
    start = model.weight.detach()[:, 0].clone()

    def quadratic(outputs: Tensor, _: Any) -> Tensor:
        b = outputs[0] - start
        return torch.from_numpy(g) @ b + 0.5 * b @ torch.from_numpy(A) @ b

    found = gs.sharpness(model, [(one, one)], "standard-l2", rho=rho, loss=quadratic, **CAREFUL)
    assert 0 < found.value <= expected * (1 + 1e-12)
    assert found.value == pytest.approx(expected, rel=1e-8)


def shallow(metric: str, X: Tensor, Y: Tensor | None = None) -> tuple[nn.Module, PulledBack]:
    """x ↦ W₂W₁x with a declared GL(2), and its F; without Y the targets are its own outputs."""
    model = plain.seeded(lambda: nn.Sequential(nn.Linear(5, 2, bias=False), nn.Linear(2, 4, bias=False)))
    block = gs.Factors("product", (gs.View("0.weight").T,), (gs.View("1.weight"),))
    batch = (X, model(X).detach() if Y is None else Y)
    return model, gs.pull_back(model, [batch], metric=metric, loss=square, symmetries=block)


@pytest.mark.parametrize("metric", METRICS)
def test_the_hessian_of_a_shallow_linear_network_is_the_dense_one_in_the_users_own_gauge(metric: str) -> None:
    """Every eigenvalue, so trace and λ_max too; h² of them are structural zeros, and without Π they are others."""
    generator = torch.Generator().manual_seed(0)
    X, Y = (torch.randn(9, size, generator=generator, dtype=torch.float64) for size in (5, 4))
    model, F = shallow(metric, X, Y)
    oracle, at = Quotient(metric), (model[0].weight.detach().T, model[1].weight.detach())
    whitened = torch.linalg.inv(torch.linalg.cholesky(oracle.tensor(at))).T

    def spectrum(basis: Tensor) -> Tensor:
        def loss(c: Tensor) -> Tensor:
            xi = unflat(basis @ c, at)
            G, H = (p + x - 0.5 * gamma for p, x, gamma in zip(at, xi, oracle.christoffel(at, xi), strict=True))
            return (X @ G @ H.T - Y).square().sum()

        return torch.linalg.eigvalsh(torch.autograd.functional.hessian(loss, torch.zeros(18, dtype=torch.float64)))

    found = torch.linalg.eigvalsh(dense(lambda v: F.hvp(F.zero(), v), F.size))
    expected = spectrum(oracle.horizontal(at) @ whitened)
    assert (found - expected).abs().max() < 1e-10 * expected.abs().max()
    assert (found.abs() < 1e-10 * found.abs().max()).sum() == 4 == F.size - F.dim
    assert (spectrum(whitened) - expected).abs().max() > 1e-3 * expected.abs().max()


def test_at_a_minimum_with_white_inputs_the_spectrum_is_that_of_the_quotient_norm() -> None:
    """Under mix, ‖dM‖² is 2, 1 or 0 times ‖z‖² on h², h(n + m - 2h) and h² directions (math.md 3)."""
    _, F = shallow("mix", torch.eye(5, dtype=torch.float64))
    found = torch.linalg.eigvalsh(dense(lambda v: F.hvp(F.zero(), v), F.size)) / 2
    assert (found - torch.tensor([0.0] * 4 + [1.0] * 10 + [2.0] * 4)).abs().max() < 1e-12
