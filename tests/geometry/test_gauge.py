"""The canonical gauge: one representative an orbit, and the exact way back."""

from __future__ import annotations

import pytest
import torch

from geosharp.errors import RankError
from geosharp.geometry.gauge import canonical_frame
from oracles.framed import Framed, frame_of
from oracles.quotient import distance, moved, random_element, random_pair

KINDS = {
    "real": ((7, 6, 3), {}, False),
    "complex": ((5, 4, 2), {"complex_": True}, False),
    "complex line": ((5, 4, 1), {"complex_": True}, False),
    "positive": ((5, 4, 1), {}, True),
    "square": ((3, 3, 3), {}, False),
}


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


def _orbit(kind, seed=0):
    """A pair, its twin elsewhere on the orbit, and whether only positive scalars act."""
    (n, m, h), options, positive = kind
    pair = random_pair(n, m, h, seed=seed, **options)
    return pair, moved(pair, random_element(h, seed=seed + 10, positive=positive, **options)), positive


def test_bases_are_orthonormal_and_gram_matrices_are_the_singular_values(kind):
    pair, _, positive = _orbit(kind)
    framed = Framed(pair, "inv", positive=positive)
    eye = torch.eye(pair[0].shape[1], dtype=pair[0].dtype)
    for basis, side in zip((framed.frame.left[0], framed.frame.right[0]), framed.canonical, strict=True):
        assert (basis.mH @ basis - eye).abs().max() < 1e-13
        assert (side.mH @ side - torch.diag(framed.frame.singular[0, 0]).to(side.dtype)).abs().max() < 1e-12
    assert (framed.frame.singular[0, 0].diff() <= 0).all()


def test_singular_values_are_those_of_the_product(kind):
    pair, _, positive = _orbit(kind)
    expected = torch.linalg.svdvals(pair[0] @ pair[1].mH)[: pair[0].shape[1]]
    assert (frame_of(pair, positive=positive).singular[0, 0] - expected).abs().max() < 1e-12


def test_the_function_is_unchanged(kind):
    pair, _, positive = _orbit(kind)
    G, H = Framed(pair, "inv", positive=positive).canonical
    assert (G @ H.mH - pair[0] @ pair[1].mH).abs().max() < 1e-13


def test_the_way_back_restores_both_factors(kind):
    pair, twin, positive = _orbit(kind)
    for given in (pair, twin):
        framed = Framed(given, "inv", positive=positive)
        assert distance(framed.users(framed.canonical), given) < 1e-13


def test_canonical_form_is_the_same_all_over_an_orbit(kind):
    for seed in range(5):
        pair, twin, positive = _orbit(kind, seed)
        assert distance(twin, pair) > 1e-2
        first, second = (Framed(given, "inv", positive=positive).canonical for given in (pair, twin))
        assert distance(second, first) < 1e-10


def test_another_product_has_another_canonical_form():
    pair, _, _ = _orbit(KINDS["real"])
    other = Framed((pair[0] + 1e-6, pair[1]), "inv").canonical
    assert distance(other, Framed(pair, "inv").canonical) > 1e-8


@pytest.mark.parametrize("name", ["real", "complex", "complex line", "square"])
def test_largest_entry_of_each_left_column_is_real_and_positive(name):
    for seed in range(5):
        pair, _, _ = _orbit(KINDS[name], seed)
        U = frame_of(pair).left[0]
        pivots = U.gather(0, U.abs().argmax(0, keepdim=True))[0]
        assert (pivots.real > 0).all()
        assert pivots.abs().sub(pivots.real).abs().max() < 1e-14


def test_a_positive_block_keeps_the_signs_of_its_factors():
    pair, _, _ = _orbit(KINDS["positive"])
    G, H = Framed((-pair[0], -pair[1]), "inv", positive=True).canonical
    assert ((G / -pair[0]) > 0).all()
    assert ((H / -pair[1]) > 0).all()
    turned = Framed((-pair[0], -pair[1]), "inv").canonical  # GL(1) contains the sign: one representative for both
    assert distance(turned, Framed(pair, "inv").canonical) < 1e-13
    assert distance((G, H), Framed(pair, "inv", positive=True).canonical) == pytest.approx(2)


def test_a_stack_is_its_blocks_one_by_one():
    pairs = [random_pair(5, 4, 2, seed=seed) for seed in range(3)]
    names = ["a", "b", "c"]
    options = {"positive": False, "epsilon": 0.1, "stored": torch.float64, "compute": torch.float64}
    left, right = (torch.stack([pair[side] for pair in pairs]) for side in (0, 1))
    stack = canonical_frame(left, right, names, **options)
    for i, pair in enumerate(pairs):
        one = frame_of(pair, epsilon=0.1)
        for part in ("left", "right", "singular", "epsilon", "back_left", "back_right"):
            assert (getattr(stack, part)[i] - getattr(one, part)[0]).abs().max() < 1e-12


def test_epsilon_is_relative_to_each_blocks_largest_singular_value():
    pair = random_pair(5, 4, 2)
    frame = frame_of(pair, epsilon=0.25)
    assert float(frame.epsilon) == pytest.approx(0.25 * float(torch.linalg.matrix_norm(pair[0] @ pair[1].T, 2)), rel=1e-12)


# Trouble ------------------------------------------------------------------------------------------------------------


def _nearly_deficient(ratio: float):
    U, V = (torch.linalg.qr(random_pair(6, 5, 3, seed=seed)[side])[0] for seed, side in ((1, 0), (2, 1)))
    root = torch.tensor([1.0, 0.5, ratio], dtype=torch.float64).sqrt()
    return U * root, V * root


@pytest.mark.parametrize("side", [0, 1])
def test_a_rank_deficient_factor_is_refused_by_name(side):
    pair = list(random_pair(6, 5, 3))
    pair[side] = torch.cat([pair[side][:, :2], pair[side][:, :1]], 1)
    with pytest.raises(RankError, match=r"layer\.3\.query_key"):
        frame_of(tuple(pair), name="layer.3.query_key")


def test_more_width_than_rows_is_refused_by_name():
    with pytest.raises(RankError, match="wide one"):
        frame_of(random_pair(4, 2, 3), name="wide one")


def test_the_second_block_of_a_stack_is_the_one_that_is_named():
    good, bad = random_pair(6, 5, 3), _nearly_deficient(1e-17)
    left, right = (torch.stack([good[side], bad[side]]) for side in (0, 1))
    with pytest.raises(RankError, match="'bad'"):
        canonical_frame(left, right, ["good", "bad"], positive=False, epsilon=0.0, stored=torch.float64, compute=torch.float64)


def test_the_rank_limit_is_the_resolution_of_the_stored_weights():
    pair = _nearly_deficient(1e-6)  # below 10 · eps(float32) · √6 = 2.9e-6, far above that of float64
    frame_of(pair)
    options = {"positive": False, "epsilon": 0.0, "compute": torch.float64}
    with pytest.raises(RankError, match="epsilon="):
        canonical_frame(pair[0][None], pair[1][None], ["x"], stored=torch.float32, **options)
    frame = canonical_frame(pair[0][None], pair[1][None], ["x"], stored=torch.float32, **{**options, "epsilon": 1e-3})
    assert float(frame.epsilon) == pytest.approx(1e-3)


@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("epsilon", [0.0, 1e-3])
def test_the_zero_block_is_refused_even_with_epsilon(positive, epsilon):
    G, H = random_pair(5, 4, 1)
    for pair in ((G, 0 * H), (0 * G, H), (0 * G, 0 * H)):
        with pytest.raises(RankError, match="adapter"):
            frame_of(pair, positive=positive, epsilon=epsilon)


def test_a_wide_block_with_epsilon_still_restores_the_users_gauge():
    pair = moved(_nearly_deficient(1e-9), random_element(3))
    framed = Framed(pair, "inv", epsilon=1e-2)
    assert distance(framed.users(framed.canonical), pair) < 1e-6
