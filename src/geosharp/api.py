"""The functions that users call."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from geosharp import batches as data
from geosharp.batches import Batch
from geosharp.clone import tied_names, unwrap
from geosharp.errors import GeosharpError, did_you_mean
from geosharp.functional.ascent import SOLVERS
from geosharp.functional.pulled_back import PulledBack
from geosharp.functional.result import Options, Result
from geosharp.functional.worst_case import noise_floor
from geosharp.geometry.build import Geometry
from geosharp.losses import LogitNormalization, Loss, Weight
from geosharp.measurement import Measurement, Measurements, Provenance, Row, record_key
from geosharp.measures import Measure, resolve
from geosharp.objective import Objective, preserved_random_state
from geosharp.session import Session, few_rows
from geosharp.symmetry.block import rename
from geosharp.symmetry.discover import Found, Symmetries, candidate_blocks

Rho = float | Sequence[float]


def sharpness(model: nn.Module, batches: Iterable[Batch], measure: str | Measure = "geodesic-inv", **options: Any) -> Measurement:
    """One measure of one model at one radius; all options of `geosharp.measure`."""
    found = _measure(model, batches, [measure], **options)
    if len(found) != 1:
        raise GeosharpError(f"expected one radius, got {len(found)}; use geosharp.measure for several")
    return found[0]


def measure(model: nn.Module, batches: Iterable[Batch], measures: str | Measure | Sequence[str | Measure], **options: Any) -> Measurements:
    """Several measures of one model; the batches are read once.

    Options: rho (a radius or several); steps, tolerance, restarts, solver ("default" or "auto-pgd"), keep_worst for worst
    cases; samples for averages; symmetries ("all", "published", "none" or declared blocks), allow_no_symmetry, epsilon,
    elementwise_path; params (name patterns), loss, weight, dtype, micro_batch, logit_normalization, autocast; seed.
    """
    several = [measures] if isinstance(measures, (str, Measure)) else list(measures)
    return _measure(model, batches, several, **options)


def compare(
    models: Mapping[str, nn.Module | Callable[[], nn.Module]],
    batches: Iterable[Batch],
    measures: str | Measure | Sequence[str | Measure],
    **options: Any,
) -> dict[str, Measurements]:
    """Many models of one architecture, one in memory at a time where they are given as functions that load them.

    Refused when two models have different sets of blocks: their geodesic values would not be comparable.
    """
    held = list(data.each_batch(batches))
    results: dict[str, Measurements] = {}
    first: tuple[str, set[str]] | None = None
    for name, source in models.items():
        model = source if isinstance(source, nn.Module) else source()
        found = measure(model, held, measures, **options)
        blocks = {f"{kind}" for item in found for kind in item.provenance.geometry.get("blocks", ())}
        if first is None:
            first = (name, blocks)
        elif blocks != first[1]:
            difference = ", ".join(sorted(blocks ^ first[1]))
            raise GeosharpError(f"expected models with the same blocks, got a difference between {first[0]!r} and {name!r}: {difference}")
        results[name] = found
        del model
    if not results:
        raise GeosharpError("expected at least one model, got none")
    return results


def symmetries(
    model: nn.Module, batches: Iterable[Batch] | None = None, *, symmetries: Symmetries = "all", params: str | Sequence[str] | None = None
) -> Found:
    """The blocks of a model: found, refused and why. Without batches nothing is verified."""
    with preserved_random_state():
        session = Session(Objective(model, params=params), symmetries)
        if batches is None:
            return session.structure()
        return session.verify_on(session.objective.prepare(next(data.each_batch(batches))))


def verify(model: nn.Module, batches: Iterable[Batch], **options: Any) -> Found:
    """The blocks of a model, each shown on a few rows of the first batch, or refused."""
    return globals()["symmetries"](model, batches, **options)


def reparametrize(model: nn.Module, scale: float = 10.0, seed: int = 0, *, symmetries: Symmetries = "all") -> nn.Module:
    """A copy elsewhere on the same orbit: same function, other weights.

    Every block (found by structure, or declared) is moved by a random group element with singular values spread over
    [1/scale, scale]. Rounding makes the copy's function differ by about machine precision times scale².
    """
    if not scale >= 1:
        raise GeosharpError(f"expected scale to be at least 1, got {scale}")
    with preserved_random_state():
        twin = copy.deepcopy(model)
        inner, _ = unwrap(twin)
        alias = tied_names(inner)
        values = {name: p.data for name, p in inner.named_parameters(remove_duplicate=False) if name not in alias}
        blocks, _, _ = candidate_blocks(inner, values, symmetries, values, alias)
        if not blocks:
            raise GeosharpError("expected a model with symmetry blocks, found none; declare them with symmetries=")
        generator = torch.Generator().manual_seed(seed)
        elements = [(block, block.random_element(values, generator, scale)) for block in (rename(b, alias) for b in blocks)]
        with torch.no_grad():
            for block, element in sorted(elements, key=lambda pair: hasattr(pair[0], "left")):
                block.act(values, element)
    return twin


def pull_back(
    model: nn.Module, batches: Iterable[Batch], *, metric: str | None = "inv", path: str = "second-order", **options: Any
) -> PulledBack:
    """The pulled-back loss F on a Euclidean ball: F.dim, F.value_and_grad(z), F.hvp(z, v), F.lift(z).

    Over several batches F is the loss of all examples together. `metric` None with elementwise="identity" is the plain loss.
    """
    geometry_names = {field.name for field in dataclasses.fields(Geometry)}
    geometry = Geometry(metric, path, **{name: options.pop(name) for name in list(options) if name in geometry_names})
    objective_options, session_options, rest = _divided(options)
    if rest:
        raise GeosharpError(f"unknown option {next(iter(rest))!r} for pull_back")
    with preserved_random_state():
        session = Session(Objective(model, **objective_options), **session_options)
        prepared = [session.objective.prepare(batch) for batch in data.each_batch(batches)]
        if len(prepared) > 1 or session.objective.micro_batch is not None:
            session.objective.check_additive(prepared[0])
        return session.pulled_back(geometry, prepared)


# The engine room ------------------------------------------------------------------------------------------------

_OBJECTIVE = ("loss", "weight", "params", "dtype", "micro_batch", "logit_normalization", "autocast")
_SESSION = ("symmetries", "allow_no_symmetry")
_GEOMETRY = ("epsilon", "elementwise_path")
_FUNCTIONAL = ("rho", "steps", "tolerance", "restarts", "solver", "samples", "keep_worst")
OPTIONS = (*_OBJECTIVE, *_SESSION, *_GEOMETRY, *_FUNCTIONAL, "seed")


def _divided(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    objective = {name: value for name, value in options.items() if name in _OBJECTIVE}
    session = {name: value for name, value in options.items() if name in _SESSION}
    rest = {name: value for name, value in options.items() if name not in (*_OBJECTIVE, *_SESSION)}
    return objective, session, rest


def _measure(model: nn.Module, batches: Iterable[Batch], wanted: Sequence[str | Measure], **options: Any) -> Measurements:
    started = time.perf_counter()
    measures = [resolve(item) for item in wanted]
    if not measures:
        raise GeosharpError("expected at least one measure, got none")
    objective_options, session_options, rest = _divided(options)
    measures, functional_options, seed = _checked(measures, rest)
    with preserved_random_state():
        objective = Objective(model, **objective_options)
        run = _Run(Session(objective, **session_options), measures, functional_options, seed)
        with _prepared(objective, batches) as prepared:
            for index, batch in prepared:
                if index == 0:
                    run.shared = time.perf_counter() - started
                run.add(index, batch)
        return run.finish(rest)


@contextlib.contextmanager
def _prepared(objective: Objective, batches: Iterable[Batch]) -> Iterator[Iterator[tuple[int, Batch]]]:
    def each() -> Iterator[tuple[int, Batch]]:
        for index, batch in enumerate(data.each_batch(batches)):
            prepared = objective.prepare(batch)
            if index == 0 and objective.micro_batch is not None:
                objective.check_additive(prepared)
            yield index, prepared

    yield each()


def _checked(measures: Sequence[Measure], options: Mapping[str, Any]) -> tuple[list[Measure], Options, int]:
    """Options against what the measures have: an option that none has is an error with a suggestion."""
    have = frozenset().union(*(measure.run.options for measure in measures))
    if any(measure.geometry.metric is not None for measure in measures):
        have |= {"epsilon"}
    have |= {"elementwise_path", "seed"}
    for name in options:
        if name not in OPTIONS:
            raise GeosharpError(f"unknown option {name!r}{did_you_mean(name, OPTIONS)}")
        if name not in have:
            names = ", ".join(measure.name for measure in measures)
            takes = ", ".join(sorted(have - {"seed", "elementwise_path"})) or "none"
            raise GeosharpError(f"{names} has no option {name!r} (options it has: {takes}){did_you_mean(name, have)}")
    changes = {name: options[name] for name in _GEOMETRY if name in options}
    changed = [_with_geometry(measure, changes) for measure in measures]
    chosen = {name: options[name] for name in _FUNCTIONAL if name in options and name != "rho"}
    found = Options(rho=_radii(measures, options.get("rho")), **chosen)
    if found.solver not in SOLVERS:
        raise GeosharpError(f"expected solver to be one of {', '.join(SOLVERS)}, got {found.solver!r}{did_you_mean(found.solver, SOLVERS)}")
    for name, least in (("steps", 1), ("restarts", 0), ("samples", 2)):
        value = getattr(found, name)
        if not isinstance(value, int) or value < least:
            raise GeosharpError(f"expected {name} to be an integer of at least {least}, got {value!r}")
    if not found.tolerance >= 0:
        raise GeosharpError(f"expected tolerance to be >= 0, got {found.tolerance!r}")
    return changed, found, int(options.get("seed", 0))


def _with_geometry(measure: Measure, changes: Mapping[str, Any]) -> Measure:
    geometry = measure.geometry
    mine = {name: value for name, value in changes.items() if name != "epsilon" or geometry.metric is not None}
    return dataclasses.replace(measure, geometry=dataclasses.replace(geometry, **mine)) if mine else measure


def _radii(measures: Sequence[Measure], rho: Rho | None) -> tuple[float, ...]:
    if rho is None:
        needy = [measure.name for measure in measures if measure.run.needs_radius]
        if needy:
            raise GeosharpError(f"{needy[0]} needs a radius: give rho=, a number or several")
        return ()
    found = (rho,) if isinstance(rho, (int, float)) else tuple(rho)
    for radius in found:
        if not isinstance(radius, (int, float)) or not 0 < radius < float("inf"):
            raise GeosharpError(f"expected rho to be positive and finite, got {radius!r}")
    if not found or len(set(found)) < len(found):
        raise GeosharpError(f"expected distinct radii, got {list(found)}")
    return tuple(sorted(float(radius) for radius in found))


class _Run:
    """Rows as they come, batch by batch."""

    def __init__(self, session: Session, measures: Sequence[Measure], options: Options, seed: int) -> None:
        self.session, self.measures, self.options, self.seed = session, measures, options, seed
        self.rows: dict[tuple[int, float | None], list[Row]] = {}
        self.worst: dict[tuple[int, float | None], list[Mapping[str, Any]]] = {}
        self.noise: dict[Geometry, float] = {}
        self.first: Batch | None = None
        self.shared = 0.0

    def add(self, index: int, batch: Batch) -> None:
        """All measures and radii on one batch."""
        self.first = batch if self.first is None else self.first
        content = data.content_hash(batch)
        seed = int(record_key({"seed": self.seed, "batch": content})[:12], 16)
        for position, measure in enumerate(self.measures):
            F = self.session.pulled_back(measure.geometry, [batch])
            options = dataclasses.replace(self.options, seed=seed, noise=self._noise(measure, F))
            try:
                results = measure.run(F, options)
            except GeosharpError as error:
                raise type(error)(f"{measure.name} on batch {index}: {error}") from error
            for result in results:
                place = (position, result.rho)
                self.rows.setdefault(place, []).append(self._row(measure, result, index, batch, content))
                if result.state is not None:
                    self.worst.setdefault(place, []).append(result.state)

    def _noise(self, measure: Measure, F: PulledBack) -> float:
        if not measure.run.needs_radius:
            return 0.0
        if measure.geometry not in self.noise:
            # On a few rows of the first batch: cheap, and averages over fewer examples, so rather too large than too small.
            self.noise[measure.geometry] = noise_floor(F.on([few_rows(self.first)]), self.seed)
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

    def finish(self, options: Mapping[str, Any]) -> Measurements:
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
    return "default" if function is None else f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__name__)}"


__all__ = ["LogitNormalization", "Loss", "Weight", "compare", "measure", "pull_back", "reparametrize", "sharpness", "symmetries", "verify"]
