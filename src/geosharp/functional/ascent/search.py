"""The bookkeeping that every solver shares: evaluations, the best point, the trace, and why it ended."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from geosharp.functional.ascent.ball import Ball
from geosharp.functional.pulled_back import PulledBack
from geosharp.geometry.mix_geodesic import LeftManifold


@dataclass(frozen=True)
class Found:
    """A point with its value and gradient, from one pass; the residual is that of the ball it was found for."""

    z: Tensor
    value: float
    gradient: Tensor
    residual: float = 1.0


class SearchEnded(Exception):
    """Raised inside a solver when there is nothing left to do; the reason is in the search."""


@dataclass
class Search:
    """One ascent: from `best` (evaluated already) with at most `budget` further evaluations.

    A solver calls `evaluate` and `look`, and may stop by returning. `best` only ever improves; it is what `evaluate`
    returned, so a solver must not write into the memory of the best point.
    """

    F: PulledBack
    ball: Ball
    best: Found
    uphill: Tensor
    """∇F(0)."""
    budget: int
    tolerance: float
    failure: str = ""
    ended_by_itself: bool = False
    """Whether the solver returned with nothing left to try, rather than with the budget."""
    trace: list[tuple[float, float]] = field(default_factory=list)
    """(best value so far, residual of the point just evaluated or 1 for a look), one entry an evaluation."""

    def __post_init__(self) -> None:
        self._scale = float(torch.linalg.vector_norm(self.uphill))
        self.best = dataclasses.replace(self.best, residual=self.ball.residual(self.best.z, self.best.gradient, self._scale))
        self.trace.append((self.best.value, self.best.residual))

    def evaluate(self, z: Tensor, out: Tensor | None = None) -> Found:
        """F and its gradient at a feasible point; keeps the best; ends the search on failure or with the budget."""
        found = self._at(z, out)
        if isinstance(found, str):
            self.failure = found
            raise SearchEnded
        if found.value > self.best.value:
            self.best = found
        self.trace.append((self.best.value, found.residual))
        return found

    def look(self, z: Tensor) -> Tensor | None:
        """The gradient at a point that may lie outside the ball; never the best, and nothing ends where F does."""
        found = self._at(z, None)
        self.trace.append((self.best.value, 1.0))
        return None if isinstance(found, str) else found.gradient

    def _at(self, z: Tensor, out: Tensor | None) -> Found | str:
        if self.budget <= 0:
            raise SearchEnded
        self.budget -= 1
        try:
            value, gradient = self.F.value_and_grad(z, out)
        except LeftManifold:
            return "left-manifold"
        residual = self.ball.residual(z, gradient, self._scale)
        # The size of the gradient is in its residual: not finite when one entry is not.
        if not math.isfinite(value) or not math.isfinite(residual):
            return "diverged"
        return Found(z, value, gradient, residual)

    @property
    def stationary(self) -> bool:
        """Whether the best point satisfies the first-order conditions to the tolerance."""
        return self.best.residual <= self.tolerance
