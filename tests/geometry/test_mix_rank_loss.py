"""Exact mix geodesics near and beyond rank loss: followed correctly or refused, never crossed silently."""

from __future__ import annotations

import contextlib

import pytest
import torch

from geosharp.geometry.mix_geodesic import LeftManifold
from oracles.cone import end_of_line
from oracles.framed import Framed
from oracles.quotient import Quotient, distance, flat, random_pair


def _planted(rates, n=5, m=4, seed=0):
    """A block whose mix geodesic is known: G = U√(s(1 + 2bt)), column by column."""
    h = len(rates)
    U, V = (torch.linalg.qr(side)[0] for side in random_pair(n, m, h, seed=seed))
    root = torch.linspace(1.5, 0.5, h, dtype=torch.float64).sqrt()
    framed = Framed((U * root, V * root), "mix")
    b = torch.tensor(rates, dtype=torch.float64)
    z = framed.coordinates((framed.canonical[0] * b, framed.canonical[1] * b))
    return framed, z, b


def test_planted_paths_solve_the_geodesic_equation():
    framed, z, b = _planted([0.4, -0.3, 0.1])
    expected = tuple(side * (1 + 2 * b).sqrt() for side in framed.canonical)
    assert distance(framed.project(z), z) < 1e-14
    assert distance(Quotient("mix").geodesic(framed.canonical, framed.lift(z))[0], expected) < 1e-11
    assert distance(framed.path("exact", z), expected) < 1e-11


@pytest.mark.parametrize("rates", [[-0.45], [0.4, -0.49]])
def test_a_path_that_keeps_its_rank_is_followed_to_its_end(rates):
    framed, z, b = _planted(rates)
    expected = tuple(side * (1 + 2 * b).sqrt() for side in framed.canonical)
    assert distance(framed.path("exact", z), expected) < 1e-9


def test_just_before_rank_loss_the_path_is_right_or_refused():
    framed, z, b = _planted([0.4, -0.49999])
    expected = tuple(side * (1 + 2 * b).sqrt() for side in framed.canonical)
    with contextlib.suppress(LeftManifold):
        assert distance(framed.path("exact", z), expected) < 1e-7


@pytest.mark.parametrize("rates", [[-0.50001], [-0.6], [-3.0], [-1000.0], [0.4, -0.6, 0.1], [2.0, 1.0, -0.5001]])
def test_a_path_that_loses_rank_is_refused(rates):
    framed, z, _ = _planted(rates)
    with pytest.raises(LeftManifold):
        framed.path("exact", z)
    assert all(torch.isfinite(side).all() for side in framed.path("second-order", z))


@pytest.mark.parametrize("rate", [-0.51, -3.0])
def test_a_path_that_loses_rank_is_refused_in_float32(rate):
    framed, z, _ = _planted([0.4, rate])
    single = Framed(tuple(side.float() for side in framed.pair), "mix")
    with pytest.raises(LeftManifold):
        single.path("exact", tuple(side.float() for side in z))


def test_rank_loss_starts_at_the_smallest_singular_value_over_root_two():
    framed, z, _ = _planted([-0.5])
    assert float(flat(z).norm()) == pytest.approx(float(framed.singular.min()) / 2**0.5, rel=1e-12)


def _line(tilt, rate=-1.0, seed=0):
    """h = 1: a radial fall with a small sideways velocity, which the conserved angular momentum turns into a near miss."""
    framed = Framed(random_pair(4, 3, 1, seed=seed), "mix")
    G, H = framed.canonical
    side = torch.linalg.svd(G)[0][:, 1:2]
    z = framed.coordinates((rate * G + tilt * side * G.norm(), rate * H))
    return framed, z


@pytest.mark.parametrize("tilt", [1.0, 0.3, 0.1])
def test_near_misses_of_rank_loss_are_followed_to_their_end(tilt):
    framed, z = _line(tilt)
    assert distance(framed.path("exact", z), end_of_line(framed, z)) < 1e-9


@pytest.mark.parametrize("tilt", [1e-2, 1e-4, 1e-8])
def test_very_near_misses_are_right_or_refused(tilt):
    framed, z = _line(tilt)
    with contextlib.suppress(LeftManifold):
        assert distance(framed.path("exact", z), end_of_line(framed, z)) < 1e-6


def test_far_walks_are_the_solution_or_refused():
    refused = 0
    for seed in range(5):  # square blocks: the product moves on a straight line, so rank loss is where that line is singular
        framed = Framed(random_pair(2, 2, 2, seed=seed), "mix")
        z = framed.horizontal(seed + 50, 3 * float(framed.singular.min()))
        (G, H), (x, y) = framed.canonical, framed.lift(z)
        start, change = G @ H.T, x @ H.T + G @ y.T
        zeros = -1 / torch.linalg.eigvals(torch.linalg.solve(start, change))  # det(start + t change) = 0
        crossed = bool(((zeros.imag.abs() < 1e-9) & (zeros.real > 0) & (zeros.real < 1)).any())
        if crossed:
            refused += 1
            with pytest.raises(LeftManifold):
                framed.path("exact", z)
        else:
            A, B = framed.path("exact", z)
            assert torch.allclose(A @ B.T, start + change, atol=1e-10)
    assert 0 < refused < 5
