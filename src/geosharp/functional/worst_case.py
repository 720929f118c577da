"""max over the ball of F(z) - F(0): worst-case sharpness.

`stationary` says that the search ended by itself at a point with a residual below the tolerance: a first-order statement,
not a claim that it is the global maximum. Several local maxima exist at larger radii, and `restarts` shows their spread.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from geosharp.functional.ascent import SOLVERS
from geosharp.functional.ascent.ball import Ball, Box, EuclideanBall
from geosharp.functional.ascent.search import Found, Search, SearchEnded
from geosharp.functional.noise import rounding
from geosharp.functional.pulled_back import PulledBack
from geosharp.functional.result import Options, Result

CRITICAL = 10.0
"""The centre counts as critical when the first-order gain on the ball is below this many noise floors."""
NUDGE = 1e-3
"""How far from a critical centre the search starts, in radii (math.md 7)."""
POWER_STEPS = 4


@dataclass(frozen=True)
class WorstCase:
    """The functional: options rho, steps, tolerance, restarts, solver."""

    norm: Literal["l2", "linf"] = "l2"
    options: frozenset[str] = frozenset({"rho", "steps", "tolerance", "restarts", "solver", "keep_worst"})
    needs_radius: bool = True

    def ball(self, radius: float) -> Ball:
        """The ball of a radius."""
        return EuclideanBall(radius) if self.norm == "l2" else Box(radius)

    def __call__(self, F: PulledBack, options: Options) -> list[Result]:
        """One result a radius, ascending; each radius starts from the smaller one's point."""
        started = time.perf_counter()
        before = (F.evaluations, F.forward_passes)
        F, value, gradient = F.start()
        center = Found(F.zero(), value, gradient)
        options = dataclasses.replace(options, noise=max(options.noise, rounding(F, value)))
        results, start, failure = [], center, ""
        for radius in options.rho:
            if failure:  # a larger ball contains the point at which the smaller one's search failed
                search = Search(F, self.ball(radius), start, center.gradient, 0, options.tolerance, failure=failure)
                others: tuple[float, ...] = ()
            else:
                search, others = self._climb(F, center, start, radius, options)
            start, failure = search.best, search.failure
            results.append(self._result(F, search, others, center.value, radius, options, started, before))
            started, before = time.perf_counter(), (F.evaluations, F.forward_passes)
        return results

    def _climb(self, F: PulledBack, center: Found, start: Found, radius: float, options: Options) -> tuple[Search, tuple[float, ...]]:
        search = Search(F, self.ball(radius), start, center.gradient, options.steps, options.tolerance)
        _solve(search, options)
        values = [search.best.value - center.value]
        generator = torch.Generator().manual_seed(options.seed)
        for _ in range(options.restarts):
            other = Search(F, self.ball(radius), center, center.gradient, options.steps, options.tolerance)
            _solve(other, options, first=search.ball.project_(search.ball.extreme(F.probe(generator))))
            values.append(other.best.value - center.value)
            if other.best.value > search.best.value:
                search = other
        return search, tuple(values) if options.restarts else ()

    def _result(
        self, F: PulledBack, search: Search, others: tuple[float, ...], base: float, radius: float, options: Options,
        started: float, before: tuple[int, int],
    ) -> Result:  # fmt: skip
        value = search.best.value - base
        return Result(
            value=value,
            base_loss=base,
            outcome=_outcome(search, value, options.noise),
            rho=radius,
            residual=search.best.residual,
            noise=options.noise,
            restart_values=others,
            trace=tuple((best - base, residual) for best, residual in search.trace),
            state=F.state_at(search.best.z) if options.keep_worst else None,
            evaluations=F.evaluations - before[0],
            forward_passes=F.forward_passes - before[1],
            seconds=time.perf_counter() - started,
        )


def _solve(search: Search, options: Options, first: Tensor | None = None) -> None:
    try:
        if first is not None:
            search.evaluate(first)
        elif not bool(search.best.z.any()) and _is_critical(search, options.noise):
            _leave_critical_point(search, options.seed)
        SOLVERS[options.solver](search)
        search.ended_by_itself = True
    except SearchEnded:
        pass


def _is_critical(search: Search, noise: float) -> bool:
    gradient = search.best.gradient
    gain = float(torch.dot(search.ball.extreme(gradient), gradient))
    return gain <= CRITICAL * noise


def _leave_critical_point(search: Search, seed: int) -> None:
    """Start at ± a small step along a power-iteration direction of the Hessian: from a minimum, ascent would not start.

    Near a critical point ∇F(δv) ≈ δ Hv, so gradients at small steps are the power iteration.
    """
    F, radius = search.F, search.ball.radius
    direction = F.probe(torch.Generator().manual_seed(seed))
    step = NUDGE * radius
    for _ in range(POWER_STEPS):
        size = float(torch.linalg.vector_norm(direction))
        if size == 0.0:
            return
        direction.mul_(step / size)
        turned = search.evaluate(search.ball.project_(direction)).gradient - search.uphill
        if not bool(turned.any()):
            break
        direction = turned
    direction = direction * (step / float(torch.linalg.vector_norm(direction)))
    search.evaluate(search.ball.project_(direction))
    search.evaluate(search.ball.project_(-direction))


def _outcome(search: Search, value: float, noise: float) -> str:
    if search.failure:
        return search.failure
    if value <= noise:
        return "below-resolution"
    return "stationary" if search.stationary and search.ended_by_itself else "budget"
