"""The functions that users call."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from geosharp import batches as data
from geosharp.batches import Batch
from geosharp.clone import tied_names, unwrap
from geosharp.errors import GeosharpError
from geosharp.functional.pulled_back import PulledBack
from geosharp.geometry.build import Geometry
from geosharp.isolation import undisturbed
from geosharp.losses import LogitNormalization, Loss, Weight
from geosharp.measurement import Measurement, Measurements
from geosharp.measures import Measure, resolve
from geosharp.objective import Objective
from geosharp.options import Rho, checked, divided
from geosharp.run import Run, prepared
from geosharp.session import Session
from geosharp.symmetry.block import moved
from geosharp.symmetry.discover import Found, Symmetries, candidates, structure


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
    `loss(outputs, batch)` returns a mean; it is also called on the first rows of the first batch alone.
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
    with undisturbed():
        held = list(data.each_batch(batches))
    results: dict[str, Measurements] = {}
    first: tuple[str, set[str]] | None = None
    for name, source in models.items():
        with undisturbed():
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
    model: nn.Module,
    batches: Iterable[Batch] | None = None,
    *,
    symmetries: Symmetries = "all",
    params: str | Sequence[str] | None = None,
    complete: bool = False,
) -> Found:
    """The blocks of a model: found, refused and why, known and not used; prints as a table.

    Without batches nothing is verified; of the batches the first few rows are used, and no labels are needed. With
    `complete` the null space of each attention module is found too (for models from small configs): are these all?
    """
    with undisturbed():
        session = Session(Objective(model, params=params), symmetries)
        if batches is None:
            if complete:
                raise GeosharpError("expected batches with complete=True: the modules are called on inputs of their own shapes")
            return session.structure()
        batch = session.objective.prepare(next(data.each_batch(batches)))
        session.objective.copies_inputs = True  # some models change their inputs in place, and finding out costs more than copies
        return session.complete(batch) if complete else session.verify_once(batch)


def verify(
    model: nn.Module, batches: Iterable[Batch], *, symmetries: Symmetries = "all", params: str | Sequence[str] | None = None
) -> Found:
    """The blocks of a model, each shown on a few rows of the first batch, or refused."""
    return _symmetries(model, batches, symmetries=symmetries, params=params)


_symmetries = symmetries


def reparametrize(
    model: nn.Module, scale: float = 10.0, seed: int = 0, *, symmetries: Symmetries = "all", batches: Iterable[Batch] | None = None
) -> nn.Module:
    """A copy elsewhere on the same orbit: same function, other weights.

    Every block (found by structure, or declared) is moved by a random group element with singular values spread over
    [1/scale, scale]. Rounding makes the copy's function differ by about machine precision times scale². With `batches` only
    what is verified on them is moved; without, a layout's likeliest reading of the structure is taken at its word.
    """
    if not scale >= 1:
        raise GeosharpError(f"expected scale to be at least 1, got {scale}")
    if batches is not None:
        symmetries = _symmetries(model, batches, symmetries=symmetries).used
    with undisturbed():
        twin = copy.deepcopy(model)
        inner, _ = unwrap(twin)
        alias = tied_names(inner)
        values = {name: p.data for name, p in inner.named_parameters(remove_duplicate=False) if name not in alias}
        trained = {name for name, value in inner.named_parameters() if value.requires_grad}
        parts, _, _ = candidates(inner, values, symmetries, trained or values, alias)
        blocks, _ = structure(parts, values)
        if not blocks:
            raise GeosharpError("expected a model with symmetry blocks, found none; declare them with symmetries=")
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            moved([(block, block.random_element(values, generator, scale)) for block in blocks], values)
    return twin


def pull_back(
    model: nn.Module, batches: Iterable[Batch], *, metric: str | None = "inv", path: str = "second-order", **options: Any
) -> PulledBack:
    """The pulled-back loss F on a Euclidean ball: F.dim, F.value_and_grad(z), F.hvp(z, v), F.lift(z).

    Over several batches F is the loss of all examples together. `metric` None with elementwise="identity" is the plain loss.
    """
    geometry_names = {field.name for field in dataclasses.fields(Geometry)}
    geometry = Geometry(metric, path, **{name: options.pop(name) for name in list(options) if name in geometry_names})
    objective_options, session_options, rest = divided(options)
    if rest:
        raise GeosharpError(f"unknown option {next(iter(rest))!r} for pull_back")
    with undisturbed():
        session = Session(Objective(model, **objective_options), **session_options)
        ready = [batch for _, batch in prepared(session.objective, batches)]
        if len(ready) > 1:
            session.objective.check_additive(ready[0])
        return session.pulled_back(geometry, ready)


def _measure(model: nn.Module, batches: Iterable[Batch], wanted: Sequence[str | Measure], **options: Any) -> Measurements:
    started = time.perf_counter()
    measures = [resolve(item) for item in wanted]
    if not measures:
        raise GeosharpError("expected at least one measure, got none")
    objective_options, session_options, rest = divided(options)
    measures, functional_options, seed = checked(measures, rest)
    with undisturbed():
        objective = Objective(model, **objective_options)
        run = Run(Session(objective, **session_options), measures, functional_options, seed)
        for index, batch in prepared(objective, batches):
            if index == 0:
                run.shared = time.perf_counter() - started
            run.add(index, batch)
        return run.finish()


__all__ = [
    "LogitNormalization", "Loss", "Rho", "Weight", "compare", "measure", "pull_back", "reparametrize", "sharpness", "symmetries", "verify",
]  # fmt: skip
