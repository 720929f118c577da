"""The bookkeeping that every solver shares: evaluations, the best point, the trace, and why it ended."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from geosharp.functional.ascent.ball import Ball
from geosharp.functional.pulled_back import PulledBack
from geosharp.geometry.mix_geodesic import LeftManifold


@dataclass
class Found:
    """A point with its value and gradient, from one pass."""

    z: Tensor
    value: float
    gradient: Tensor

    def copy(self) -> Found:
        """The same on memory of its own."""
        return Found(self.z.clone(), self.value, self.gradient.clone())


class SearchEnded(Exception):
    """Raised inside a solver when there is nothing left to do; the reason is in the search."""


@dataclass
class Search:
    """One ascent: from `best` (evaluated already, on memory of its own) with at most `budget` further evaluations.

    A solver calls `evaluate` and may stop by returning. `best` only ever improves.
    """

    F: PulledBack
    ball: Ball
    best: Found
    budget: int
    tolerance: float
    failure: str = ""
    best_residual: float = 1.0
    trace: list[tuple[float, float]] = field(default_factory=list)
    """(best value so far, residual of the point just evaluated), one entry an evaluation."""

    def __post_init__(self) -> None:
        self.best_residual = self.ball.residual(self.best.z, self.best.gradient)
        self.trace.append((self.best.value, self.best_residual))

    def evaluate(self, z: Tensor, out: Tensor | None = None) -> Found:
        """F and its gradient at a feasible point; keeps the best; ends the search on failure or when it may stop."""
        if self.budget <= 0:
            raise SearchEnded
        self.budget -= 1
        try:
            value, gradient = self.F.value_and_grad(z, out)
        except LeftManifold:
            self.failure = "left-manifold"
            raise SearchEnded from None
        if not math.isfinite(value) or not bool(torch.isfinite(gradient.sum())):
            self.failure = "diverged"
            raise SearchEnded
        found = Found(z, value, gradient)
        residual = self.ball.residual(z, gradient)
        if value > self.best.value:
            self.best.z.copy_(z)
            self.best.gradient.copy_(gradient)
            self.best.value, self.best_residual = value, residual
        self.trace.append((self.best.value, residual))
        return found

    @property
    def stationary(self) -> bool:
        """Whether the best point satisfies the first-order conditions to the tolerance."""
        return self.best_residual <= self.tolerance
