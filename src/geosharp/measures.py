"""The catalogue: public name -> geometry x functional. A table one can read, and the door for measures of one's own.

>>> resolve("geodesic-inv").geometry.metric
'inv'
>>> resolve("geodesic-in")
Traceback (most recent call last):
    ...
geosharp.errors.GeosharpError: expected a measure, got 'geodesic-in'; did you mean "geodesic-inv"? (geosharp.measures.names() lists all)
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from geosharp.errors import GeosharpError, did_you_mean
from geosharp.functional.average_case import AverageCase
from geosharp.functional.gradient_norm import GradientNorm
from geosharp.functional.pulled_back import PulledBack
from geosharp.functional.result import Options, Result
from geosharp.functional.worst_case import WorstCase
from geosharp.geometry.build import Geometry


class Functional(Protocol):
    """Something measured on the pulled-back loss of one batch."""

    @property
    def options(self) -> frozenset[str]:
        """The names of the options it has."""
        ...

    @property
    def needs_radius(self) -> bool:
        """Whether it is a function of rho."""
        ...

    def __call__(self, F: PulledBack, options: Options) -> list[Result]:
        """One result a radius, or one."""
        ...


Function = Callable[..., "float | tuple[float, float]"]


@dataclass(frozen=True)
class Own:
    """A user's function of F as a functional.

    It may take `rho` and `generator`, and returns a value or (value, standard error).
    """

    function: Function
    options: frozenset[str] = field(init=False)
    needs_radius: bool = field(init=False)

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise GeosharpError(f"expected functional= to be a function of F, got {type(self.function).__name__}")
        names = set(inspect.signature(self.function).parameters)
        object.__setattr__(self, "needs_radius", "rho" in names)
        object.__setattr__(self, "options", frozenset({"rho"} & names))

    def __call__(self, F: PulledBack, options: Options) -> list[Result]:
        """Call the function once a radius, with a fresh generator of the same seed each time."""
        names = set(inspect.signature(self.function).parameters)
        results = []
        for rho in options.rho if self.needs_radius else (None,):
            started, before = time.perf_counter(), (F.evaluations, F.forward_passes)
            arguments: dict[str, Any] = {"rho": rho} if self.needs_radius else {}
            if "generator" in names:
                arguments["generator"] = torch.Generator().manual_seed(options.seed)
            found = self.function(F, **arguments)
            value, stderr = found if isinstance(found, tuple) else (found, 0.0)
            base = F.value(F.zero())
            results.append(
                Result(
                    float(value),
                    base,
                    "estimated" if stderr else "computed",
                    rho=rho,
                    stderr=float(stderr),
                    evaluations=F.evaluations - before[0],
                    forward_passes=F.forward_passes - before[1],
                    seconds=time.perf_counter() - started,
                )
            )
        return results


@dataclass(frozen=True)
class Measure:
    """A geometry and a functional under a name.

    `functional` is one of this library's or any function `fn(F)`, `fn(F, rho)`, `fn(F, rho, generator)`.
    """

    geometry: Geometry = field(default_factory=Geometry)
    functional: Functional | Function = field(default_factory=WorstCase)
    name: str = "custom"
    about: str = ""
    definition_version: int = 1

    @property
    def run(self) -> Functional:
        """The functional, a plain function wrapped."""
        known = isinstance(self.functional, (WorstCase, AverageCase, GradientNorm, Own)) or hasattr(self.functional, "needs_radius")
        return self.functional if known else Own(self.functional)  # type: ignore[arg-type,return-value]


CATALOGUE: dict[str, Measure] = {}


def register(name: str, measure: Measure) -> Measure:
    """Make a measure available by name; a name that is taken is an error."""
    import dataclasses

    if name in CATALOGUE:
        raise GeosharpError(f"expected a new name, got {name!r}, which is taken")
    named = dataclasses.replace(measure, name=name)
    CATALOGUE[name] = named
    return named


def names() -> list[str]:
    """All public names."""
    return list(CATALOGUE)


def resolve(measure: str | Measure) -> Measure:
    """A measure from its name."""
    if isinstance(measure, Measure):
        return measure
    if not isinstance(measure, str):
        raise GeosharpError(f"expected a measure's name or a Measure, got {type(measure).__name__}")
    if measure not in CATALOGUE:
        hint = did_you_mean(measure, CATALOGUE)
        raise GeosharpError(f"expected a measure, got {measure!r}{hint} (geosharp.measures.names() lists all)")
    return CATALOGUE[measure]


_STANDARD = Geometry(elementwise="identity")
_ADAPTIVE = Geometry()
_BALLS = {
    "standard-l2": (_STANDARD, "l2", "identity metric, 2-norm ball"),
    "standard-linf": (_STANDARD, "linf", "identity metric, max-norm ball"),
    "adaptive-l2": (_ADAPTIVE, "l2", "metric diag(1/w²), 2-norm ball"),
    "adaptive-linf": (_ADAPTIVE, "linf", "metric diag(1/w²), max-norm ball"),
}
for _metric in ("inv", "mix"):
    for _suffix, _path in (("", "second-order"), ("-exact", "exact"), ("-first-order", "straight")):
        _BALLS[f"geodesic-{_metric}{_suffix}"] = (
            Geometry(_metric, _path),
            "l2",
            f"quotient metric {_metric} on blocks, diag(1/w²) elsewhere, {_path} path, 2-norm ball",
        )
for _name, (_geometry, _norm, _about) in _BALLS.items():
    register(_name, Measure(_geometry, WorstCase(_norm), about=f"worst case: {_about}"))  # type: ignore[arg-type]
    register(f"average-{_name}", Measure(_geometry, AverageCase(_norm), about=f"average case: {_about}"))  # type: ignore[arg-type]
register("gradient-norm", Measure(_STANDARD, GradientNorm(), about="Euclidean norm of the gradient"))
for _metric in ("inv", "mix"):
    register(
        f"riemannian-gradient-norm-{_metric}",
        Measure(Geometry(_metric, "second-order"), GradientNorm(), about=f"norm of the gradient in the quotient metric {_metric}"),
    )
