"""`check_measure` passes every measure of the catalogue and catches planted bad ones, each by the law it breaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import geosharp as gs
import zoo
from clear_errors import one_clear_line
from geosharp import measures
from geosharp.functional.pulled_back import PulledBack
from geosharp.functional.worst_case import WorstCase
from geosharp.testing import check_measure

CATALOGUE = tuple(measures.names())


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_measure_of_the_catalogue_conforms(name: str) -> None:
    found = check_measure(name, **({"samples": 8} if name.startswith("average") else {}))
    assert found.measure == name
    assert bool(found.invariant_to) == (measures.resolve(name).geometry.metric is not None)


@pytest.mark.parametrize("name", ["geodesic-mix", "average-geodesic-inv-exact", "adaptive-linf"])
def test_on_a_transformer_of_ones_own(name: str) -> None:
    model = zoo.make("bert", heads=2, width=8, spread=0.6)
    few = {"samples": 6} if name.startswith("average") else {"steps": 6}
    assert len(check_measure(name, model, [zoo.batch_of("bert", slice(0, 6))], **few).rows) == 1


def raw_norm(F: PulledBack) -> float:
    """Of the weights as they are, not of the orbit."""
    return float(sum(value.square().sum() for value in F.objective.values.values()))


def of_global_random_numbers(F: PulledBack) -> float:
    return float(torch.rand(()))


def in_place(F: PulledBack) -> float:
    with torch.no_grad():
        next(iter(F.objective.values.values())).add_(1e-3)
    return 1.0


def not_finite(F: PulledBack) -> float:
    return float("nan")


def overconfident(F: PulledBack, rho: float, generator: torch.Generator) -> tuple[float, float]:
    """An estimate that depends on the gauge, with an error that is far too small."""
    return rho * raw_norm(F), 1e-12


BAD: dict[str, tuple[str, Callable[..., Any]]] = {
    "weights as they are": ("law 2", raw_norm),
    "a false error": ("law 2", overconfident),
    "global random numbers": ("law 8", of_global_random_numbers),
    "writes into the model": ("law 8", in_place),
    "not a number": ("the record", not_finite),
}


@pytest.mark.parametrize("name", BAD)
def test_a_planted_bad_measure_is_caught_by_its_law(name: str) -> None:
    law, function = BAD[name]
    with pytest.raises(AssertionError, match=f"planted breaks {law}"):
        check_measure(gs.Measure(gs.Geometry("inv"), function, name="planted"))


class Falling(WorstCase):
    """A worst case that is larger on the smaller ball."""

    def __call__(self, F: PulledBack, options: Any) -> Any:
        import dataclasses

        return [dataclasses.replace(r, value=1 / r.rho, trace=tuple(reversed(r.trace))) for r in super().__call__(F, options)]


def test_a_worst_case_that_falls_with_its_radius_is_caught() -> None:
    with pytest.raises(AssertionError, match="law 7: a larger ball has a smaller maximum"):
        check_measure(gs.Measure(gs.Geometry("inv"), Falling(), name="planted"))


def test_an_estimate_with_probes_of_its_own_may_move_within_its_error() -> None:
    def estimated(F: PulledBack, rho: float, generator: torch.Generator) -> tuple[float, float]:
        draws = torch.tensor([F.value(rho * F.probe(generator)) for _ in range(20)], dtype=torch.float64)
        return float(draws.mean()), float(draws.std()) / 20**0.5

    found = check_measure(gs.Measure(gs.Geometry("inv"), estimated, name="mine"))
    assert found.stderr > 0


def test_a_model_without_batches_is_one_clear_line() -> None:
    with one_clear_line("batches="):
        check_measure("adaptive-l2", torch.nn.Linear(2, 2))
