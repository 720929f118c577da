"""The default solver: a few long momentum steps to find a good basin, then L-BFGS on the sphere.

Local maxima at finite radius differ by which examples they break. Long steps hop between basins and converge slowly;
L-BFGS converges fast to whatever maximum is near. docs/decisions/0002-solver.md has the comparison that chose this.
When the gradient hardly turns between the centre and the sphere there is one basin, and the hops are skipped.
"""

from __future__ import annotations

import torch
from torch import Tensor

from geosharp.functional.ascent.auto_pgd import auto_pgd
from geosharp.functional.ascent.ball import EuclideanBall
from geosharp.functional.ascent.search import Found, Search

HOPS = 12
HOP_LENGTH = 4.0
"""Momentum steps of this many radii; found by comparison, see the decision note."""
HOP_MOMENTUM = 0.75
ONE_BASIN = 0.9
"""Cosine between the gradients at the centre and at the first point on the sphere above which no hops are made."""
MEMORY = 4
LONGEST_STEP = 1.0
"""In radii."""


def explore_and_refine(search: Search) -> None:
    """Climb on the sphere; inside the ball, or on other balls, fall back on Auto-PGD."""
    if not isinstance(search.ball, EuclideanBall):
        auto_pgd(search)
        return
    start = search.best
    on_sphere = start.z if bool(start.z.any()) else start.gradient
    if not bool(on_sphere.any()):
        return  # a critical centre, and nothing to follow
    first = search.evaluate(_scaled(on_sphere, search.ball.radius))
    if _cosine(start.gradient, first.gradient) < ONE_BASIN:
        _hop(search, start.copy(), first)
    current = search.best.copy()
    if not search.ball.on_boundary(current.z):
        current = first
    if float(torch.dot(current.z, current.gradient)) >= 0:
        _refine(search, current)
    if not search.stationary:
        auto_pgd(search)


def _scaled(z: Tensor, radius: float) -> Tensor:
    return z * (radius / float(torch.linalg.vector_norm(z)))


def _cosine(a: Tensor, b: Tensor) -> float:
    size = float(torch.linalg.vector_norm(a)) * float(torch.linalg.vector_norm(b))
    return float(torch.dot(a, b)) / size if size > 0 else 1.0


def _hop(search: Search, start: Found, first: Found) -> None:
    """Momentum steps that are long enough to leave a basin."""
    radius = search.ball.radius
    previous, current = start.z, first
    for _ in range(min(HOPS, search.budget // 2)):
        target = search.ball.project_(torch.add(current.z, search.ball.steepest(current.gradient), alpha=HOP_LENGTH * radius))
        moved = target.mul_(HOP_MOMENTUM).add_(current.z, alpha=2 * (1 - HOP_MOMENTUM)).sub_(previous, alpha=1 - HOP_MOMENTUM)
        previous = current.z
        current = search.evaluate(search.ball.project_(moved))


class _Memory:
    """The last pairs (step, change of the ascent direction) on memory of their own."""

    def __init__(self, like: Tensor) -> None:
        self.like = like
        self.pairs: list[tuple[Tensor, Tensor, float]] = []
        self.spare: list[tuple[Tensor, Tensor]] = []

    def offer(self, z_new: Tensor, z: Tensor, t_new: Tensor, t: Tensor) -> float | None:
        """Keep a pair of positive curvature; its scale s·y / y·y, or None where there is none."""
        if self.spare:
            step, change = self.spare.pop()
        elif len(self.pairs) < MEMORY:
            step, change = torch.empty_like(self.like), torch.empty_like(self.like)
        else:
            step, change, _ = self.pairs.pop(0)
        torch.sub(z_new, z, out=step)
        torch.sub(t, t_new, out=change)
        inner = float(torch.dot(step, change))
        square = float(torch.dot(change, change))
        if inner <= 1e-10 * float(torch.linalg.vector_norm(step)) * square**0.5:
            self.spare.append((step, change))
            return None
        self.pairs.append((step, change, inner))
        return inner / square

    def forget(self) -> None:
        self.spare += [(step, change) for step, change, _ in self.pairs]
        self.pairs = []

    def apply_(self, direction: Tensor, scale: float) -> Tensor:
        """The two-loop recursion, in place."""
        alphas = []
        for step, change, inner in reversed(self.pairs):
            alpha = float(torch.dot(step, direction)) / inner
            alphas.append(alpha)
            direction.add_(change, alpha=-alpha)
        direction.mul_(scale)
        for (step, change, inner), alpha in zip(self.pairs, reversed(alphas), strict=True):
            beta = float(torch.dot(change, direction)) / inner
            direction.add_(step, alpha=alpha - beta)
        return direction


def _refine(search: Search, current: Found) -> None:
    """L-BFGS on the sphere with backtracking; ends when stationary, when F turns inwards, or with the budget."""
    radius = search.ball.radius
    memory = _Memory(current.z)
    tangent, tangent_new, direction = (torch.empty_like(current.z) for _ in range(3))
    spare = Found(torch.empty_like(current.z), 0.0, torch.empty_like(current.z))
    along = _tangent(current, radius, tangent)
    scale = radius**2 / along if along > 0 else radius / float(torch.linalg.vector_norm(current.gradient))
    shrink = 1.0
    while not (search.stationary and current.value >= search.best.value):
        memory.apply_(direction.copy_(tangent), scale)
        direction.sub_(current.z, alpha=float(torch.dot(direction, current.z)) / radius**2)
        slope = float(torch.dot(direction, tangent))
        if slope <= 0:
            memory.forget()
            direction.copy_(tangent).mul_(scale)
            slope = float(torch.dot(direction, tangent))
        length = float(torch.linalg.vector_norm(direction))
        if length == 0.0 or shrink < 1e-6:
            return
        shrink = min(shrink, LONGEST_STEP * radius / length)
        torch.add(current.z, direction, alpha=shrink, out=spare.z)
        spare.z.mul_(radius / float(torch.linalg.vector_norm(spare.z)))
        trial = search.evaluate(spare.z, spare.gradient)
        if trial.value < current.value:
            shrink *= _backtrack(slope * shrink, trial.value - current.value)
            continue
        shrink = 1.0
        along = _tangent(trial, radius, tangent_new)
        found = memory.offer(trial.z, current.z, tangent_new, tangent)
        tangent_size = float(torch.linalg.vector_norm(tangent_new))
        scale = found if found is not None else min(2 * scale, radius / max(tangent_size, 1e-300))
        tangent, tangent_new = tangent_new, tangent
        spare, current = current, trial
        if along < 0:
            return


def _tangent(found: Found, radius: float, out: Tensor) -> float:
    """The gradient's part along the sphere into `out`; returns z·∇F."""
    along = float(torch.dot(found.z, found.gradient))
    torch.add(found.gradient, found.z, alpha=-along / radius**2, out=out)
    return along


def _backtrack(expected: float, got: float) -> float:
    """The maximizer of the parabola through what was expected and what was found, kept in [0.1, 0.5]."""
    return max(0.1, min(0.5, expected / (2 * (expected - got))))

