"""Real pretrained weights in float32: what is claimed invariant stays, through moves that change adaptive sharpness."""

from __future__ import annotations

import functools

import pytest
from real_text import minilm, text_batch
from rewriting import GAUSSIAN, GEODESIC, INVARIANT, SHIFTS, Line, lines

STEPS = 3


@functools.cache
def batch():
    return text_batch(slice(0, 8), length=24)


@functools.cache
def table() -> dict[tuple[str, str], Line]:
    found = lines(minilm(), batch(), {**GAUSSIAN, **SHIFTS}, (*INVARIANT, "adaptive-l2"), steps=STEPS)
    return {(line.rewriting, line.measure): line for line in found}


@pytest.mark.parametrize("rewriting", [*GAUSSIAN, *SHIFTS])
@pytest.mark.parametrize("measure", INVARIANT)
def test_geodesic_measures_stay_where_they_are(rewriting: str, measure: str) -> None:
    line = table()[rewriting, measure]
    assert line.change <= line.tolerance
    assert any("query-key GL(32) x 72" in group for group in line.before.invariant_to)


@pytest.mark.parametrize("rewriting", GAUSSIAN)
def test_adaptive_sharpness_moves_by_more_than_a_percent(rewriting: str) -> None:
    line = table()[rewriting, "adaptive-l2"]
    assert line.change > 0.01
    assert line.drift < 1e-3
    assert line.before.invariant_to == ()


@pytest.mark.parametrize("measure", [measure for measure in GEODESIC if not measure.startswith("average")])
def test_the_loss_rises_enough_for_the_comparison_to_mean_something(measure: str) -> None:
    found = table()["A = 1 G", measure].before
    assert found.value > 0.05 * found.base_loss


def test_published_blocks_see_shifts_that_the_function_does_not() -> None:
    published = lines(minilm(), batch(), SHIFTS, ("geodesic-inv", "geodesic-mix"), steps=STEPS, symmetries="published")
    for line in published:
        assert line.change > 100 * table()[line.rewriting, line.measure].change
        assert line.change > 0.01
        assert any(line.rewriting[2] == group[0] for group in line.before.not_invariant_to)  # b_k: "key bias", b_v: "value bias"
