"""Is a measure well behaved? `check_measure` holds one against the laws of this library on a real model.

Three instances: a measure of the catalogue by name; a `Measure` of one's own with `geosharp.Geometry` and a function of F;
the same on one's own model and batches.

>>> import geosharp as gs
>>> mine = gs.Measure(gs.Geometry("inv"), lambda F, rho: 0.5 * rho**2 * float(F.value_and_grad(F.zero())[1].norm()), name="mine")
>>> check_measure(mine).measure
'mine'
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from geosharp.api import measure as measure_all
from geosharp.api import reparametrize, verify
from geosharp.batches import Batch, content_hash, each_batch
from geosharp.errors import GeosharpError
from geosharp.functional.worst_case import WorstCase
from geosharp.measurement import Measurement, Measurements
from geosharp.measures import Measure, Own, resolve
from geosharp.symmetry.block import Block, Factors
from geosharp.symmetry.discover import Symmetries
from geosharp.symmetry.view import View

STANDARD_ERRORS = 5.0
"""How far the values of an estimate with probes of its own may lie apart on one orbit."""


def check_measure(
    measure: str | Measure,
    model: nn.Module | None = None,
    batches: Iterable[Batch] | None = None,
    *,
    symmetries: Symmetries | None = None,
    rho: float = 0.05,
    tolerance: float = 1e-9,
    **options: Any,
) -> Measurement:
    """Raise an `AssertionError` that names the law a measure breaks, or return what it measured.

    Checked: equal calls give equal values (law 8), nothing of the model or of torch's random state changes (law 8), the
    record survives JSON, a bad radius is refused, the value is the same all over the orbit of every symmetry that the
    record claims (law 2), and a worst case keeps to its ball (law 7). The default model is a small float64 network with two
    linear maps in a row; on a float32 model give a tolerance of 1e-4.
    """
    chosen = resolve(measure)
    if model is None:
        model, batches, symmetries = _bottleneck()
    elif batches is None:
        raise GeosharpError("expected batches= with a model of your own, got none")
    held = list(each_batch(batches)) if batches is not None else []
    options["symmetries"] = "all" if symmetries is None else symmetries
    case = _Case(chosen, model, held, rho, tolerance, options)
    found = case.first()
    case.same_again_and_nothing_touched(found)
    case.record_survives(found)
    case.refuses_bad_radii()
    case.invariant_as_claimed(found)
    if isinstance(chosen.run, WorstCase):
        case.keeps_to_its_ball()
    return found


class _Case:
    """One measure on one model."""

    def __init__(
        self, measure: Measure, model: nn.Module, batches: Sequence[Batch], rho: float, tolerance: float, options: dict[str, Any]
    ) -> None:
        self.measure, self.model, self.batches = measure, model, batches
        self.rho, self.tolerance, self.options = rho, tolerance, options
        self.radius = {"rho": rho} if measure.run.needs_radius else {}

    def measured(self, model: nn.Module | None = None, **changes: Any) -> Measurements:
        """The measure with this case's options."""
        return measure_all(model or self.model, self.batches, self.measure, **{**self.options, **self.radius, **changes})

    def hold(self, condition: bool, law: str, what: str) -> None:
        """The law, or an error that names it."""
        if not condition:
            raise AssertionError(f"{self.measure.name} breaks {law}: {what}")

    def first(self) -> Measurement:
        """The value; a measure that writes into the model may be noticed by its own values no longer fitting the model's loss."""
        before = _fingerprint(self.model)
        try:
            return self.measured()[-1]
        except GeosharpError:
            self.hold(_fingerprint(self.model) == before, "law 8", "the model or torch's random state is not what it was before the call")
            raise

    def same_again_and_nothing_touched(self, found: Measurement) -> None:
        """Law 8."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(271828)  # a measure that draws global random numbers finds others than before
            before = _fingerprint(self.model)
            again = self.measured()[-1]
            after = _fingerprint(self.model)
        self.hold(after == before, "law 8", "the model or torch's random state is not what it was before the call")
        self.hold(_same(again.per_batch, found.per_batch), "law 8", f"the same call gave {found.value!r} and {again.value!r}")

    def record_survives(self, found: Measurement) -> None:
        """Finite values, one row a batch, and JSON there and back."""
        self.hold(math.isfinite(found.value), "the record", f"its value is {found.value}")
        self.hold(found.stderr >= 0, "the record", f"its stderr is {found.stderr}")
        self.hold(len(found.rows) == len(self.batches), "the record", f"{len(found.rows)} rows for {len(self.batches)} batches")
        self.hold(Measurement.from_json(found.to_json()) == found, "the record", "it is another one after JSON")

    def refuses_bad_radii(self) -> None:
        """A radius that makes no sense is one clear line."""
        for bad in (-1.0, math.nan) if self.radius else (1.0,):
            try:
                self.measured(rho=bad)
            except GeosharpError:
                continue
            raise AssertionError(f"{self.measure.name} breaks the house rules: it takes rho={bad}")

    def invariant_as_claimed(self, found: Measurement, seeds: int = 2) -> None:
        """Law 2, for the symmetries in `invariant_to`."""
        blocks = self._claimed(found)
        for seed in range(seeds if blocks else 0):
            twin = reparametrize(self.model, scale=3.0, seed=seed, symmetries=blocks)
            moved = self.measured(twin, symmetries=self.options["symmetries"])[-1]
            allowed = self.tolerance * abs(found.value)
            if isinstance(self.measure.run, Own):
                allowed += STANDARD_ERRORS * math.hypot(found.stderr, moved.stderr)
            self.hold(
                abs(moved.value - found.value) <= allowed,
                "law 2",
                f"it claims {', '.join(found.invariant_to)} and gave {found.value!r} and {moved.value!r} for one function",
            )

    def _claimed(self, found: Measurement) -> list[Block]:
        if not found.invariant_to:
            return []
        known = verify(self.model, self.batches, symmetries=self.options["symmetries"])
        labels = {label.rsplit(" x ", 1)[0] for label in found.invariant_to}
        return [block for block in known.used if known.kinds([block])[0].rsplit(" x ", 1)[0] in labels]

    def keeps_to_its_ball(self) -> None:
        """Law 7."""
        radii = (self.rho / 2, self.rho)
        small, large = self.measured(rho=radii, keep_worst=True)
        self.hold(all(value >= 0 for value in (*small.per_batch, *large.per_batch)), "law 7", "a value below F(0)")
        self.hold(
            all(a <= b for a, b in zip(small.per_batch, large.per_batch, strict=True)), "law 7", "a larger ball has a smaller maximum"
        )
        for row in large.rows:
            best = [value for value, _ in row.trace]
            self.hold(best == sorted(best), "law 7", "the best value in the trace falls")
        for state in large.perturbed:
            copy.deepcopy(self.model).load_state_dict(dict(state), strict=True)


def _same(a: Sequence[float], b: Sequence[float]) -> bool:
    return [value.hex() for value in a] == [value.hex() for value in b]


def _fingerprint(model: nn.Module) -> str:
    """Weights, buffers, gradients, modes and torch's random state."""
    parameters = dict(model.named_parameters())
    return content_hash(
        {
            "parameters": parameters,
            "gradients": {name: parameter.grad for name, parameter in parameters.items()},
            "trainable": [(name, parameter.requires_grad) for name, parameter in parameters.items()],
            "buffers": dict(model.named_buffers()),
            "modes": [(name, module.training) for name, module in model.named_modules()],
            "random": torch.get_rng_state(),
        }
    )


def _bottleneck() -> tuple[nn.Module, list[Batch], Symmetries]:
    """Two linear maps in a row, a non-linearity and a head, in float64, all weights different from 0; two batches."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double().eval()
        batches: list[Batch] = [(torch.randn(10, 6, dtype=torch.float64), torch.randint(0, 3, (10,))) for _ in range(2)]
    block = Factors("bottleneck", (View("0.weight").T, View("0.bias")), (View("1.weight"),))
    return model, batches, block
