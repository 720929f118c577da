"""Π: the orthogonal projector onto the horizontal space, against least squares and against the Sylvester equation."""

from __future__ import annotations

import pytest
import torch
from scipy.linalg import solve_sylvester

from geosharp.geometry import horizontal
from oracles.framed import Framed
from oracles.quotient import Quotient, distance, flat, moved, random_element, random_like, random_pair, unflat

SHAPES = {
    "real": ((7, 6, 3), False, False),
    "complex": ((5, 4, 2), True, False),
    "complex line": ((5, 4, 1), True, False),
    "positive": ((5, 4, 1), False, True),
    "square": ((3, 3, 3), False, False),
    "scalar": ((1, 1, 1), False, False),
}


@pytest.fixture(params=SHAPES)
def shape(request):
    return SHAPES[request.param]


@pytest.fixture(params=["inv", "mix"])
def metric(request):
    return request.param


@pytest.fixture(params=[0.0, 0.3], ids=["", "epsilon"])
def epsilon(request):
    return request.param


def _framed(shape, metric, epsilon=0.0, seed=0):
    (n, m, h), complex_, positive = shape
    return Framed(random_pair(n, m, h, seed=seed, complex_=complex_), metric, positive, epsilon)


def _whitened(framed):
    """The dense horizontal projector in whitened coordinates: S⁻¹ (I - V(VᵀMV)⁻¹VᵀM) S."""
    like = framed.canonical
    quotient = Quotient(framed.metric, framed.absolute_epsilon)
    units = torch.eye(flat(like).numel(), dtype=torch.float64)
    scale = torch.stack([flat(framed.scaled(unflat(unit, like))) for unit in units], 1)
    return torch.linalg.solve(scale, quotient.horizontal(like) @ scale)


def test_projector_is_idempotent_and_self_adjoint(shape, metric, epsilon):
    Pi = _framed(shape, metric, epsilon).projector()
    assert (Pi @ Pi - Pi).abs().max() < 1e-13
    assert (Pi - Pi.T).abs().max() < 1e-13


def test_projector_is_the_one_found_by_least_squares(shape, metric, epsilon):
    framed = _framed(shape, metric, epsilon)
    assert (framed.projector() - _whitened(framed)).abs().max() < 1e-12


def test_weights_of_the_other_metric_give_another_projector(metric):
    framed, other = _framed(SHAPES["real"], metric), _framed(SHAPES["real"], "mix" if metric == "inv" else "inv")
    assert (framed.projector() - other.projector()).abs().max() > 1e-2


def test_lifted_projections_are_orthogonal_to_vertical_vectors(shape, metric, epsilon):
    framed = _framed(shape, metric, epsilon)
    at, quotient = framed.canonical, Quotient(metric, framed.absolute_epsilon)
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        z = random_like(at, generator)
        xi = framed.lift(z)
        Lambda = torch.randn(at[0].shape[1], at[0].shape[1], generator=generator, dtype=at[0].dtype)
        up = at[0] @ Lambda, -at[1] @ Lambda.mH
        sizes = quotient.norm(at, xi) * quotient.norm(at, up)
        assert abs(float(quotient.inner(at, xi, up))) < 1e-13 * max(sizes, 1e-3)
        assert abs(float(quotient.inner(at, framed.scaled(z), up))) > 1e-4 * sizes  # without Π they are not


def test_lift_is_an_isometry(shape, metric, epsilon):
    framed = _framed(shape, metric, epsilon)
    at, quotient = framed.canonical, Quotient(metric, framed.absolute_epsilon)
    z = random_like(at, torch.Generator().manual_seed(2))
    assert quotient.norm(at, framed.lift(z)) == pytest.approx(float(flat(framed.project(z)).norm()), rel=1e-12)
    assert quotient.norm(at, framed.scaled(z)) == pytest.approx(float(flat(z).norm()), rel=1e-12)


def test_lift_is_an_isometry_in_the_users_gauge_too(shape, metric):
    framed = _framed(shape, metric)
    z = random_like(framed.canonical, torch.Generator().manual_seed(2))
    users = framed.users(framed.canonical)
    assert Quotient(metric).norm(users, framed.users(framed.scaled(z))) == pytest.approx(float(flat(z).norm()), rel=1e-11)


def test_epsilon_is_not_invariant_in_the_users_gauge(metric):
    framed = _framed(SHAPES["real"], metric, 0.3)
    z = random_like(framed.canonical, torch.Generator().manual_seed(2))
    quotient = Quotient(metric, framed.absolute_epsilon)
    there = quotient.norm(framed.users(framed.canonical), framed.users(framed.scaled(z)))
    assert there != pytest.approx(float(flat(z).norm()), rel=1e-3)


def test_rank_of_the_projector(shape, metric, epsilon):
    (n, m, h), complex_, _ = shape
    expected = ((n + m) * h - h * h) * (2 if complex_ else 1)
    Pi = _framed(shape, metric, epsilon).projector()
    assert int(torch.linalg.matrix_rank(Pi)) == expected
    assert float(torch.trace(Pi)) == pytest.approx(expected, abs=1e-11)


# Any gauge: the Sylvester form of math.md section 3 -------------------------------------------------------------------


def _sylvester(at, xi, metric, *, printed=False):
    """The horizontal part of ξ in any gauge; `printed` is the seed text's Λ = X, which forgets a transpose."""
    (G, H), (x, y) = at, xi
    P, Q = G.mH @ G, H.mH @ H
    if metric == "mix":
        Lambda = 0.5 * (y.mH @ H @ torch.linalg.inv(Q) - torch.linalg.inv(P) @ G.mH @ x)
    else:
        A = P @ Q
        X = torch.from_numpy(solve_sylvester(A.numpy(), A.numpy(), (P @ H.mH @ y - x.mH @ G @ Q).numpy()))
        Lambda = X if printed else X.mH
    return x + G @ Lambda, y - H @ Lambda.mH


def test_agrees_with_the_sylvester_form_in_any_gauge(shape, metric):
    framed = _framed(shape, metric)
    element = random_element(shape[0][2], seed=5, complex_=shape[1], positive=shape[2])
    pair = moved(framed.users(framed.canonical), element)
    xi = random_like(pair, torch.Generator().manual_seed(3))
    there = Framed(pair, metric, positive=shape[2])
    ours = there.users(there.lift(there.coordinates(there.from_users(xi))))
    assert distance(ours, _sylvester(pair, xi, metric)) < 1e-10


def test_the_printed_sylvester_equation_is_not_horizontal():
    pair = random_pair(7, 6, 3)
    xi = random_like(pair, torch.Generator().manual_seed(3))
    quotient, vertical = Quotient("inv"), Quotient("inv").vertical(pair)

    def tilt(vector):
        inner = torch.stack([quotient.inner(pair, vector, unflat(column, pair)) for column in vertical.T])
        return float(inner.abs().max())

    assert tilt(_sylvester(pair, xi, "inv")) < 1e-12
    assert tilt(_sylvester(pair, xi, "inv", printed=True)) > 0.1


@pytest.mark.parametrize("name", ["real", "complex", "square"])
def test_horizontality_conditions_of_the_table(name, metric):
    (n, m, h), complex_, _ = SHAPES[name]
    (G, H) = pair = random_pair(n, m, h, complex_=complex_)
    x, y = Quotient(metric).unit_horizontal(pair)
    P, Q = G.mH @ G, H.mH @ H
    if metric == "inv":
        residual = torch.linalg.inv(P) @ x.mH @ G - H.mH @ y @ torch.linalg.inv(Q)
    else:
        residual = G.mH @ x @ Q - P @ y.mH @ H
    assert residual.abs().max() < 1e-11


def test_mix_norm_is_the_quotient_norm_of_the_change_of_the_product(metric):
    framed = _framed(SHAPES["real"], metric)
    at, (U, V) = framed.canonical, (framed.frame.left[0], framed.frame.right[0])
    z = framed.project(random_like(at, torch.Generator().manual_seed(4)))
    x, y = framed.lift(z)
    change = x @ at[1].T + at[0] @ y.T
    inside = U.T @ change @ V
    square = 0.5 * inside.square().sum() + (change @ V - U @ inside).square().sum() + (U.T @ change - inside @ V.T).square().sum()
    agree = float(square) == pytest.approx(float(flat(z).square().sum()), rel=1e-12)
    assert agree == (metric == "mix")  # power: inv has another quotient norm


@pytest.mark.parametrize("size", [1.0, 1e-9, 1e-13])
def test_a_tiny_neuron_is_projected_like_any_other_in_float32(metric, size):
    # Weight decay leaves dead neurons of such norms; Π depends on ratios of singular values only.
    pair = random_pair(5, 4, 1)
    z = random_like(pair, torch.Generator().manual_seed(2))
    expected = Framed(pair, metric, positive=True).project(z)
    small = Framed(((pair[0] * size).float(), (pair[1] * size).float()), metric, positive=True)
    found = small.project((z[0].float(), z[1].float()))
    assert distance((found[0].double(), found[1].double()), expected) < 1e-6


def test_projection_is_smooth_at_coinciding_singular_values(metric):
    # At a tie U and V are arbitrary, the projected tangent vector is not: turn both by the same orthogonal matrix.
    U, V = (torch.linalg.qr(part)[0] for part in random_pair(6, 5, 3))
    framed = Framed((U * 1.3, V * 1.3), metric)
    spun = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64))[0]
    z = random_like((U, V), torch.Generator().manual_seed(2))
    weight = framed.chart().stacks[0].weight
    one = horizontal.project(U[None], V[None], z[0][None], z[1][None], weight)
    two = horizontal.project((U @ spun)[None], (V @ spun)[None], (z[0] @ spun)[None], (z[1] @ spun)[None], weight)
    assert max((b - a @ spun).abs().max() for a, b in zip(one, two, strict=True)) < 1e-12
