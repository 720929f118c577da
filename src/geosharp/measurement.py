"""The record: what was measured, how far to trust it, what it cost, where it came from.

One unit of work is one `Row`: (model, measure, radius, batch). A `Measurement` is a view over the rows of one measure at
one radius; `Measurements` is a sequence of those. All three are plain data, and all turn into JSON and back.

>>> row = Row(measure="adaptive-l2", rho=0.1, batch=0, value=0.5, base_loss=1.0, outcome="stationary")
>>> m = Measurement((row,))
>>> m.value, m.batch_stderr, Measurement.from_json(m.to_json()) == m
(0.5, None, True)
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, overload

from geosharp.errors import GeosharpError

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor

RECORD_VERSION = 1

ADVICE: dict[str, str] = {
    "stationary": "The search ended by itself at a first-order stationary point of the ball: the residual is below the tolerance. "
    "This need not be the global maximum; restarts= shows whether other maxima are higher.",
    "budget": "The step budget ended before the search did: the value is a lower bound. Raise steps=.",
    "diverged": "The loss became non-finite on the way; the value is the best finite one. Lower rho or use dtype=float64.",
    "below-resolution": "The effect is under the measured noise floor of the loss: treat the value as zero. Raise rho or use "
    "dtype=float64.",
    "left-manifold": "A mix geodesic reached a point where a block loses rank; the value is the best before it. Lower rho, or use "
    "geodesic-inv, whose geodesics never do.",
    "estimated": "A Monte-Carlo estimate given these batches: read it with its stderr.",
    "computed": "Computed without iteration or sampling.",
}
"""What each outcome means and what to do about it."""

_SEVERITY = ("computed", "estimated", "stationary", "budget", "below-resolution", "left-manifold", "diverged")


@dataclass(frozen=True)
class Row:
    """One finished unit of work: one measure, one radius, one batch."""

    measure: str
    rho: float | None
    batch: int
    value: float
    base_loss: float
    outcome: str
    stderr: float = 0.0
    batch_size: int = 0
    residual: float | None = None
    noise: float | None = None
    evaluations: int = 0
    forward_passes: int = 0
    seconds: float = 0.0
    restart_values: tuple[float, ...] = ()
    trace: tuple[tuple[float, float], ...] = ()
    key: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The row as JSON-ready data."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Row:
        """The inverse of `to_dict`."""
        values = dict(data)
        values["restart_values"] = tuple(values.get("restart_values", ()))
        values["trace"] = tuple((float(f), float(r)) for f, r in values.get("trace", ()))
        return cls(**values)


@dataclass(frozen=True)
class Provenance:
    """What determines the values, and beside it what does not (versions, device, shared cost)."""

    geometry: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    invariant_to: tuple[str, ...] = ()
    not_invariant_to: tuple[str, ...] = ()
    model: Mapping[str, Any] = field(default_factory=dict)
    shared_seconds: float = 0.0
    versions: Mapping[str, str] = field(default_factory=dict)
    device: str = "cpu"


@dataclass(frozen=True)
class Measurement:
    """One measure at one radius on some batches: a view over its rows."""

    rows: tuple[Row, ...]
    provenance: Provenance = field(default_factory=Provenance)
    perturbed: tuple[Mapping[str, Tensor], ...] = field(default=(), compare=False, repr=False)
    """With `keep_worst=True`: one state dict per batch, in the user's own gauge, loadable with `strict=True`."""

    def __post_init__(self) -> None:
        if not self.rows:
            raise GeosharpError("expected at least one row in a Measurement, got none; measure at least one batch")

    @property
    def measure(self) -> str:
        """The public name of the measure."""
        return self.rows[0].measure

    @property
    def rho(self) -> float | None:
        """The radius, or None for a measure that has none."""
        return self.rows[0].rho

    @property
    def per_batch(self) -> tuple[float, ...]:
        """The value on each batch."""
        return tuple(row.value for row in self.rows)

    @property
    def value(self) -> float:
        """The mean over batches of the per-batch value."""
        return math.fsum(self.per_batch) / len(self.rows)

    @property
    def stderr(self) -> float:
        """The Monte-Carlo error of `value` given these batches; 0 for a deterministic measure."""
        return math.sqrt(math.fsum(row.stderr**2 for row in self.rows)) / len(self.rows)

    @property
    def batch_stderr(self) -> float | None:
        """The standard error of the mean over batches, from their spread; None for one batch."""
        n = len(self.rows)
        if n < 2:
            return None
        mean = self.value
        return math.sqrt(math.fsum((v - mean) ** 2 for v in self.per_batch) / (n - 1) / n)

    @property
    def outcome(self) -> str:
        """The most severe outcome among the batches."""
        return max((row.outcome for row in self.rows), key=_SEVERITY.index)

    @property
    def advice(self) -> str:
        """What the outcome means and what to do about it."""
        return ADVICE[self.outcome]

    @property
    def evaluations(self) -> int:
        """Loss-and-gradient evaluations spent, over all batches."""
        return sum(row.evaluations for row in self.rows)

    @property
    def forward_passes(self) -> int:
        """Forward-only evaluations spent, over all batches."""
        return sum(row.forward_passes for row in self.rows)

    @property
    def seconds(self) -> float:
        """Wall-clock seconds of the rows themselves, without the shared set-up."""
        return math.fsum(row.seconds for row in self.rows)

    @property
    def base_loss(self) -> float:
        """The mean over batches of the unperturbed loss."""
        return math.fsum(row.base_loss for row in self.rows) / len(self.rows)

    @property
    def invariant_to(self) -> tuple[str, ...]:
        """The symmetries, verified on this model, that leave this value unchanged."""
        return self.provenance.invariant_to

    @property
    def not_invariant_to(self) -> tuple[str, ...]:
        """Symmetries of this model, found or known, that this value is not claimed to respect."""
        return self.provenance.not_invariant_to

    def to_dict(self) -> dict[str, Any]:
        """The record as JSON-ready data; `perturbed` is left out (save it with safetensors)."""
        return {
            "record_version": RECORD_VERSION,
            "measure": self.measure,
            "rho": self.rho,
            "value": self.value,
            "stderr": self.stderr,
            "batch_stderr": self.batch_stderr,
            "outcome": self.outcome,
            "advice": self.advice,
            "provenance": dataclasses.asdict(self.provenance),
            "rows": [row.to_dict() for row in self.rows],
        }

    def to_json(self, **options: Any) -> str:
        """The record as JSON text; non-finite numbers are written as strings, so that any reader can read it."""
        return json.dumps(_plain(self.to_dict()), allow_nan=False, **options)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Measurement:
        """The inverse of `to_dict`."""
        if data.get("record_version") != RECORD_VERSION:
            raise GeosharpError(f"expected a record of version {RECORD_VERSION}, got {data.get('record_version')!r}")
        provenance = dict(data["provenance"])
        for name in ("invariant_to", "not_invariant_to"):
            provenance[name] = tuple(provenance[name])
        return cls(tuple(Row.from_dict(row) for row in data["rows"]), Provenance(**provenance))

    @classmethod
    def from_json(cls, text: str) -> Measurement:
        """The inverse of `to_json`."""
        return cls.from_dict(_from_plain(json.loads(text)))

    def __str__(self) -> str:
        radius = "" if self.rho is None else f" at rho={self.rho:g}"
        error = "" if self.stderr == 0 else f" ± {self.stderr:.2g}"
        return f"{self.measure}{radius}: {self.value:.6g}{error} [{self.outcome}]"


class Measurements(Sequence[Measurement]):
    """Several measurements of one model, in the order asked for."""

    def __init__(self, items: Sequence[Measurement]) -> None:
        self._items = tuple(items)

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, index: int) -> Measurement: ...
    @overload
    def __getitem__(self, index: slice) -> Measurements: ...
    def __getitem__(self, index: int | slice) -> Measurement | Measurements:
        return Measurements(self._items[index]) if isinstance(index, slice) else self._items[index]

    def __iter__(self) -> Iterator[Measurement]:
        return iter(self._items)

    def __repr__(self) -> str:
        return "\n".join(map(str, self._items)) or "Measurements([])"

    def get(self, measure: str, rho: float | None = None) -> Measurement:
        """The measurement of this name (and radius, where there are several)."""
        found = [m for m in self._items if m.measure == measure and (rho is None or m.rho == rho)]
        if len(found) != 1:
            have = ", ".join(f"{m.measure}" + ("" if m.rho is None else f"@{m.rho:g}") for m in self._items)
            raise GeosharpError(f"expected one measurement {measure!r} with rho={rho}, got {len(found)}; there are: {have}")
        return found[0]

    def to_frame(self) -> pd.DataFrame:
        """One line a measurement, as a pandas frame (needs pandas)."""
        import pandas as pd

        names = ("measure", "rho", "value", "stderr", "batch_stderr", "outcome", "evaluations", "base_loss", "seconds")
        return pd.DataFrame([{name: getattr(m, name) for name in names} for m in self._items], columns=list(names))

    def to_json(self, **options: Any) -> str:
        """All records as one JSON list."""
        return json.dumps([_plain(m.to_dict()) for m in self._items], allow_nan=False, **options)

    @classmethod
    def from_json(cls, text: str) -> Measurements:
        """The inverse of `to_json`."""
        return cls([Measurement.from_dict(_from_plain(item)) for item in json.loads(text)])


def record_key(content: Mapping[str, Any]) -> str:
    """The hash of what determines a value; equal content gives an equal key on every machine.

    >>> record_key({"a": 1, "b": 2.0}) == record_key({"b": 2.0, "a": 1})
    True
    """
    text = json.dumps(_plain(dict(content)), sort_keys=True, allow_nan=False)
    return hashlib.blake2b(text.encode(), digest_size=20).hexdigest()


_WORDS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _from_plain(value: Any) -> Any:
    if isinstance(value, dict):
        if set(value) == {"float"} and value["float"] in _WORDS:
            return _WORDS[value["float"]]
        return {key: _from_plain(item) for key, item in value.items()}
    return [_from_plain(item) for item in value] if isinstance(value, list) else value
