"""The options of a call: which part of the engine each belongs to, and what the measures asked for have.

Three instances: `rho=0.1` for a ball, `symmetries="published"` for the session, `micro_batch=8` for the objective.
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from geosharp.errors import GeosharpError, did_you_mean
from geosharp.functional.ascent import SOLVERS
from geosharp.functional.result import Options
from geosharp.measures import Measure

Rho = float | Sequence[float]

OBJECTIVE = ("loss", "weight", "params", "dtype", "micro_batch", "logit_normalization", "autocast")
SESSION = ("symmetries", "allow_no_symmetry")
GEOMETRY = ("epsilon", "elementwise_path")
FUNCTIONAL = ("rho", "steps", "tolerance", "restarts", "solver", "samples", "keep_worst")
KNOWN = (*OBJECTIVE, *SESSION, *GEOMETRY, *FUNCTIONAL, "seed")


def divided(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The options of the objective, of the session, and the rest."""
    objective = {name: value for name, value in options.items() if name in OBJECTIVE}
    session = {name: value for name, value in options.items() if name in SESSION}
    rest = {name: value for name, value in options.items() if name not in (*OBJECTIVE, *SESSION)}
    return objective, session, rest


def checked(measures: Sequence[Measure], options: Mapping[str, Any]) -> tuple[list[Measure], Options, int]:
    """Options against what the measures have: an option that none has is an error with a suggestion."""
    have = frozenset().union(*(measure.run.options for measure in measures))
    if any(measure.geometry.metric is not None for measure in measures):
        have |= {"epsilon"}
    have |= {"elementwise_path", "seed"}
    for name in options:
        if name not in KNOWN:
            raise GeosharpError(f"unknown option {name!r}{did_you_mean(name, KNOWN)}")
        if name not in have:
            names = ", ".join(measure.name for measure in measures)
            takes = ", ".join(sorted(have - {"seed", "elementwise_path"})) or "none"
            raise GeosharpError(f"{names} has no option {name!r} (options it has: {takes}){did_you_mean(name, have)}")
    changes = {name: options[name] for name in GEOMETRY if name in options}
    changed = [_with_geometry(measure, changes) for measure in measures]
    chosen = {name: options[name] for name in FUNCTIONAL if name in options and name != "rho"}
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
    found: tuple[Any, ...] = tuple(rho) if isinstance(rho, Iterable) else (rho,)
    for radius in found:
        if not isinstance(radius, numbers.Real) or not 0 < float(radius) < float("inf"):
            raise GeosharpError(f"expected rho to be positive and finite, got {radius!r}")
    if not found or len(set(found)) < len(found):
        raise GeosharpError(f"expected distinct radii, got {list(found)}")
    return tuple(sorted(float(radius) for radius in found))
