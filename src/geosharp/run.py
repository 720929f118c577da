"""Rows as they come: all measures and radii on each batch, read once."""

from __future__ import annotations

import contextlib
import dataclasses
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from geosharp import batches as data
from geosharp.batches import Batch
from geosharp.errors import GeosharpError, SymmetryError
from geosharp.functional.noise import measured_noise
from geosharp.functional.pulled_back import PulledBack
from geosharp.functional.result import Options, Result
from geosharp.geometry.build import Geometry
from geosharp.measurement import Measurement, Measurements, Provenance, Row, record_key
from geosharp.measures import Measure
from geosharp.objective import Objective
from geosharp.session import Session


def prepared(objective: Objective, batches: Iterable[Batch]) -> Iterator[tuple[int, Batch]]:
    """Checked batches on the model's device with their numbers; the first one shows the precision and that parts add up."""
    for index, batch in enumerate(data.each_batch(batches)):
        with about(f"batch {index}"):
            ready = objective.prepare(batch)
            if index == 0:
                objective.watch_precision(data.few(ready))
                if objective.micro_batch is not None:
                    objective.check_additive(ready)
        yield index, ready


@contextlib.contextmanager
def about(what: str) -> Iterator[None]:
    """Errors raised inside say what they are about."""
    try:
        yield
    except GeosharpError as error:
        raise type(error)(f"{what}: {error}") from error


class Run:
    """The rows of one call, batch by batch."""

    def __init__(self, session: Session, measures: Sequence[Measure], options: Options, seed: int) -> None:
        self.session, self.measures, self.options, self.seed = session, measures, options, seed
        self.rows: dict[tuple[int, float | None], list[Row]] = {}
        self.worst: dict[tuple[int, float | None], list[Mapping[str, Any]]] = {}
        self.noise: dict[Geometry, float] = {}
        self.own_loss: dict[int, float] = {}
        self.first: Batch | None = None
        self.shared = 0.0

    def add(self, index: int, batch: Batch) -> None:
        """All measures and radii on one batch."""
        self.first = batch if self.first is None else self.first
        content = data.content_hash(batch)
        seed = int(record_key({"seed": self.seed, "batch": content})[:12], 16)
        for position, measure in enumerate(self.measures):
            with about(f"{measure.name} on batch {index}"):
                F = self.session.pulled_back(measure.geometry, [batch])
                options = dataclasses.replace(self.options, seed=seed, noise=self._noise(measure, F))
                own = self._own_loss(batch, index) if measure.geometry.metric is not None else None
                results = measure.run(F, options)
                if own is not None:
                    self._check_base(results, own)
            for result in results:
                place = (position, result.rho)
                self.rows.setdefault(place, []).append(self._row(measure, result, index, batch, content))
                if result.state is not None:
                    self.worst.setdefault(place, []).append(result.state)

    def _own_loss(self, batch: Batch, index: int) -> float:
        if index not in self.own_loss:
            self.own_loss = {index: self.session.objective.loss_of_parts(batch)}
        return self.own_loss[index]

    def _check_base(self, results: Sequence[Result], own: float) -> None:
        """Blocks are shown on a few rows; on all of them, and with the loss itself, the canonical form has the model's own loss."""
        tolerance = min(max(1e4 * torch.finfo(self.session.objective.resolution).eps, 1e-7), 0.2) * max(abs(own), 1.0)
        for result in results:
            if not abs(result.base_loss - own) <= tolerance:
                raise SymmetryError(
                    f"expected the model's loss of {own:.6g} at its canonical form too, got {result.base_loss:.6g}: a block that a few "
                    "rows showed is no symmetry on the whole batch; look with gs.verify on other rows, or declare blocks"
                )

    def _noise(self, measure: Measure, F: PulledBack) -> float:
        if not measure.run.needs_radius:
            return 0.0
        if measure.geometry not in self.noise:
            # On a few rows of the first batch: cheap, and averages over fewer examples, so rather too large than too small.
            self.noise[measure.geometry] = measured_noise(F.on([data.few(self.first)]), self.seed)
        return self.noise[measure.geometry]

    def _row(self, measure: Measure, result: Result, index: int, batch: Batch, content: str) -> Row:
        smaller = [radius for radius in self.options.rho if result.rho is not None and radius < result.rho]
        return Row(
            measure=measure.name,
            rho=result.rho,
            batch=index,
            value=result.value,
            base_loss=result.base_loss,
            outcome=result.outcome,
            stderr=result.stderr,
            batch_size=data.rows(batch),
            residual=result.residual,
            noise=result.noise,
            evaluations=result.evaluations,
            forward_passes=result.forward_passes,
            seconds=result.seconds,
            restart_values=result.restart_values,
            trace=result.trace,
            key=record_key({**self._content(measure), "rho": result.rho, "warm_start": smaller, "batch": content}),
        )

    def _content(self, measure: Measure) -> dict[str, Any]:
        """What determines a value besides batch and radius."""
        objective = self.session.objective
        return {
            "weights": self.session.weights_hash,
            "measure": measure.name,
            "definition_version": measure.definition_version,
            "geometry": dataclasses.asdict(measure.geometry),
            "symmetries": repr(self.session.symmetries),
            "params": list(objective.values),
            "dtype": str(objective.dtype),
            "autocast": str(objective.autocast),
            "micro_batch": objective.micro_batch,
            "logit_normalization": objective.logit_normalization,
            "loss": _name_of(objective.custom_loss),
            "seed": self.seed,
            **self._options(measure),
        }

    def _options(self, measure: Measure) -> dict[str, Any]:
        names = measure.run.options - {"rho", "keep_worst"}
        return {name: getattr(self.options, name) for name in sorted(names)}

    def finish(self) -> Measurements:
        """One measurement a measure and radius, in the order asked for."""
        found = []
        for place, rows in sorted(self.rows.items(), key=lambda item: (item[0][0], item[0][1] or 0.0)):
            measure = self.measures[place[0]]
            found.append(Measurement(tuple(rows), self._provenance(measure), tuple(self.worst.get(place, ()))))
        return Measurements(found)

    def _provenance(self, measure: Measure) -> Provenance:
        session, objective = self.session, self.session.objective
        invariant, others = session.claims(measure.geometry, self.first)
        return Provenance(
            geometry=session.describe(measure.geometry),
            options={
                **self._options(measure), "seed": self.seed, "dtype": str(objective.dtype).removeprefix("torch."),
                "logit_normalization": objective.logit_normalization, "micro_batch": objective.micro_batch,
                "autocast": str(objective.autocast), "loss": _name_of(objective.custom_loss),
            },
            invariant_to=invariant,
            not_invariant_to=others,
            model={
                "class": type(objective.user_model).__name__, "weights": session.weights_hash,
                "parameters": sum(value.numel() for value in objective.values.values()),
            },
            shared_seconds=self.shared,
            versions={"torch": torch.__version__, "python": platform.python_version()},
            device=str(objective.device),
        )  # fmt: skip


def _name_of(function: object) -> str:
    if function is None:
        return "default"
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__name__)}"
