"""Straight, second-order and exact paths, against Christoffel symbols and integration of the geodesic equation."""

from __future__ import annotations

import math

import pytest
import torch

from oracles.cone import end_of_line, squared_size
from oracles.framed import Framed, scaled
from oracles.quotient import Quotient, distance, flat, random_like, random_pair, unflat, velocity

SHAPES = {"real": ((5, 4, 2), False), "complex": ((4, 3, 2), True), "complex line": ((4, 3, 1), True), "square": ((2, 2, 2), False)}


@pytest.fixture(params=SHAPES)
def shape(request):
    return SHAPES[request.param]


@pytest.fixture(params=["inv", "mix"])
def metric(request):
    return request.param


def _framed(shape, metric, seed=0, epsilon=0.0):
    (n, m, h), complex_ = shape
    return Framed(random_pair(n, m, h, seed=seed, complex_=complex_), metric, epsilon=epsilon)


# Christoffel forms --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", [0.0, 0.3])
@pytest.mark.parametrize("complex_", [False, True])
def test_christoffel_forms_are_those_of_the_metric_tensor(metric, complex_, epsilon):
    quotient = Quotient(metric, epsilon)
    at = random_pair(3, 2, 2, complex_=complex_) if not complex_ else random_pair(2, 2, 1, complex_=True)
    xi = random_like(at, torch.Generator().manual_seed(7))
    dense = torch.einsum("kij,i,j->k", quotient.christoffel_by_autograd(at), flat(xi), flat(xi))
    assert (dense - flat(quotient.christoffel(at, xi))).norm() < 1e-12 * dense.norm()
    other = Quotient("mix" if metric == "inv" else "inv", epsilon)
    assert (dense - flat(other.christoffel(at, xi))).norm() > 1e-2 * dense.norm()


# Second order -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", [0.0, 0.3])
def test_second_order_path_is_the_tables_form(shape, metric, epsilon):
    framed = _framed(shape, metric, epsilon=epsilon)
    z = framed.horizontal(1, 0.7)
    xi, at = framed.lift(z), framed.canonical
    bend = Quotient(metric, framed.absolute_epsilon).christoffel(at, xi)
    expected = at[0] + xi[0] - 0.5 * bend[0], at[1] + xi[1] - 0.5 * bend[1]
    assert distance(framed.path("second-order", z), expected) < 1e-13
    printed = at[0] + xi[0] - 2 * bend[0], at[1] + xi[1] - 2 * bend[1]  # the final paper's line 3
    assert distance(framed.path("second-order", z), printed) > 1e-3


def test_second_order_path_is_the_tables_form_in_the_users_gauge(shape, metric):
    framed = _framed(shape, metric)
    z = framed.horizontal(1, 0.7)
    xi, at = framed.users(framed.lift(z)), framed.users(framed.canonical)
    bend = Quotient(metric).christoffel(at, xi)
    expected = at[0] + xi[0] - 0.5 * bend[0], at[1] + xi[1] - 0.5 * bend[1]
    assert distance(framed.users(framed.path("second-order", z)), expected) < 1e-12


def test_walks_project_their_coordinates(shape, metric):
    framed = _framed(shape, metric)
    z = scaled(random_like(framed.pair, torch.Generator().manual_seed(5)), 0.1 * framed.singular.min().item())
    assert distance(framed.project(z), z) > 0.1
    for path in ("straight", "second-order", "exact"):
        assert distance(framed.path(path, z), framed.path(path, framed.project(z))) < 1e-13


@pytest.mark.parametrize(("path", "order"), [("straight", 2), ("second-order", 3)])
def test_path_error_has_the_slope_of_its_order(shape, metric, path, order):
    framed = _framed(shape, metric)
    radii = [0.02 * framed.singular.min().item() * 2**k for k in range(4)]
    unit = framed.horizontal(1)
    errors = [distance(framed.path(path, scaled(unit, r)), framed.path("exact", scaled(unit, r))) for r in radii]
    slopes = torch.tensor(errors).log2().diff()
    assert (slopes - order).abs().max() < 0.15


# Exact --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0.3, 1.5])
def test_exact_inv_path_is_the_solution_of_the_geodesic_equation(shape, size):
    framed = _framed(shape, "inv")
    z = framed.horizontal(1, size)
    end, speed = Quotient("inv").geodesic(framed.canonical, framed.lift(z))
    assert distance(framed.path("exact", z), end) < 1e-10
    ours = velocity(lambda t: framed.path("exact", scaled(z, t)), 1.0)
    assert distance(ours, speed) < 1e-10


def test_exact_inv_path_is_the_solution_in_the_users_gauge(shape):
    framed = _framed(shape, "inv")
    z = framed.horizontal(1)
    end, _ = Quotient("inv").geodesic(framed.users(framed.canonical), framed.users(framed.lift(z)))
    assert distance(framed.users(framed.path("exact", z)), end) < 1e-10


def test_exact_inv_path_is_the_naive_closed_form(shape):
    framed = _framed(shape, "inv")
    z = framed.horizontal(1, 2.0)
    assert distance(framed.path("exact", z), _naive(framed.canonical, framed.lift(z))) < 1e-12


def _naive(at, xi):
    """exp(Ω - Ωᴴ) G exp(P⁻¹ξᴴG) with Ω = ξ P⁻¹ Gᴴ, and the same for H."""
    sides = []
    for G, x in zip(at, xi, strict=True):
        inverse = torch.linalg.inv(G.mH @ G)
        Omega = x @ inverse @ G.mH
        sides.append(torch.matrix_exp(Omega - Omega.mH) @ G @ torch.matrix_exp(inverse @ x.mH @ G))
    return tuple(sides)


def test_exact_complex_path_is_the_real_path_of_twice_the_size(metric):
    # a + ib -> [[a, -b], [b, a]] embeds ℂ-blocks as a totally geodesic set of real ones.
    framed = _framed(SHAPES["complex"], metric)
    z = framed.horizontal(1, 0.4 * framed.singular.min().item())

    def real(matrix):
        return torch.cat([torch.cat([matrix.real, -matrix.imag], 1), torch.cat([matrix.imag, matrix.real], 1)], 0)

    big = Framed(tuple(real(side) for side in framed.canonical), metric)
    at = big.users(big.canonical)
    xi = tuple(real(side) for side in framed.lift(z))
    end = big.users(big.path("exact", big.coordinates(big.from_users(xi))))
    assert distance(at, tuple(real(side) for side in framed.canonical)) < 1e-13
    assert distance(end, tuple(real(side) for side in framed.path("exact", z))) < 1e-10


@pytest.mark.parametrize("size", [0.2, 0.6])
def test_exact_mix_path_is_the_solution_of_the_geodesic_equation_below_the_smallest_singular_value(shape, size):
    framed = _framed(shape, "mix")
    z = framed.horizontal(1, size * framed.singular.min().item())
    end, speed = Quotient("mix").geodesic(framed.canonical, framed.lift(z))
    assert distance(framed.path("exact", z), end) < 1e-10
    ours = velocity(lambda t: framed.path("exact", scaled(z, t)), 1.0)
    assert distance(ours, speed) < 1e-9


def test_exact_mix_path_is_the_solution_in_the_users_gauge(shape):
    framed = _framed(shape, "mix")
    z = framed.horizontal(1, 0.5 * framed.singular.min().item())
    end, _ = Quotient("mix").geodesic(framed.users(framed.canonical), framed.users(framed.lift(z)))
    assert distance(framed.users(framed.path("exact", z)), end) < 1e-9


def test_exact_paths_conserve_energy_and_stay_horizontal(shape, metric):
    framed, quotient = _framed(shape, metric), Quotient(metric)
    size = 1.0 if metric == "inv" else 0.6 * framed.singular.min().item()
    z = framed.horizontal(1, size)
    for path, agree in (("exact", True), ("second-order", False)):
        place = framed.path(path, z)
        speed = velocity(lambda t, path=path: framed.path(path, scaled(z, t)), 1.0)
        tilt = flat(speed) - quotient.horizontal(place) @ flat(speed)
        error = abs(quotient.norm(place, speed) / size - 1) + quotient.norm(place, unflat(tilt, place)) / size
        assert (error < 1e-9) if agree else (error > 1e-4)


def test_exact_inv_paths_never_lose_rank():
    framed = _framed(SHAPES["real"], "inv")
    G, H = framed.path("exact", framed.horizontal(1, 6.0))
    G2, H2 = framed.path("exact", framed.horizontal(1, -6.0))
    assert all(int(torch.linalg.matrix_rank(side)) == 2 for side in (G, H, G2, H2))


# float32 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spread", [1.0, 1e2, 1e5])
def test_paths_are_accurate_in_float32_for_every_spread_of_singular_values(metric, spread):
    U, V = (torch.linalg.qr(side)[0] for side in random_pair(12, 10, 4))
    spin = torch.linalg.qr(random_pair(4, 4, 4, seed=1)[0])[0]
    s = torch.logspace(0, -math.log10(spread), 4, dtype=torch.float64)
    single = Framed((((U * s) @ spin).float(), (V @ spin).float()), metric)
    double = Framed(tuple(side.double() for side in single.pair), metric)
    z = double.horizontal(1, 1.0 if metric == "inv" else 0.3 / spread)
    for path in ("straight", "second-order", "exact"):
        if path == "exact" and metric == "mix" and spread > 1e2:
            continue  # the fastest directions of such a path are below float32
        exact = double.path(path, z)
        ours = single.path(path, tuple(side.float() for side in z))
        root = double.frame.root[0]  # errors in each column relative to that column's size
        error = distance(tuple(side.double() / root for side in ours), tuple(side / root for side in exact))
        assert error < (1e-6 if metric == "inv" else 1e-5)


def test_the_naive_closed_form_is_not_accurate_in_float32():
    U, V = (torch.linalg.qr(side)[0] for side in random_pair(12, 10, 4))
    spin = torch.linalg.qr(random_pair(4, 4, 4, seed=1)[0])[0]
    s = torch.logspace(0, -5, 4, dtype=torch.float64)
    framed = Framed(((U * s) @ spin, V @ spin), "inv")
    at, xi = framed.pair, framed.users(framed.lift(framed.horizontal(1)))
    single = _naive(*(tuple(side.float() for side in pair) for pair in (at, xi)))
    assert distance(tuple(side.double() for side in single), _naive(at, xi)) > 1e-3


def test_mix_geodesics_of_square_blocks_are_straight_lines_of_the_product():
    for complex_ in (False, True):
        framed = Framed(random_pair(3, 3, 3, complex_=complex_), "mix")
        z = framed.horizontal(1, 0.6 * framed.singular.min().item())
        (G, H), (x, y) = framed.canonical, framed.lift(z)
        A, B = framed.path("exact", z)
        assert distance((A @ B.mH, A), (G @ H.mH + x @ H.mH + G @ y.mH, A)) < 1e-11


def test_the_squared_size_of_the_product_is_a_parabola_along_mix_geodesics(shape):
    framed = _framed(shape, "mix")
    for size in (0.3, 0.6):
        z = framed.horizontal(1, size * framed.singular.min().item())
        for path, agree in (("exact", True), ("second-order", False)):
            G, H = framed.path(path, z)
            error = float((G @ H.mH).abs().square().sum()) / squared_size(framed, z) - 1
            assert abs(error) < 1e-11 if agree else abs(error) > 1e-6


@pytest.mark.parametrize("complex_", [False, True])
def test_mix_geodesics_of_width_one_are_great_circles(complex_):
    framed = Framed(random_pair(4, 3, 1, complex_=complex_), "mix")
    for size in (0.3, 1.0, 3.0):
        z = framed.horizontal(11, size * float(framed.singular))
        assert distance(Quotient("mix").geodesic(framed.canonical, framed.lift(z))[0], end_of_line(framed, z)) < 1e-11
        assert distance(framed.path("exact", z), end_of_line(framed, z)) < 1e-11
