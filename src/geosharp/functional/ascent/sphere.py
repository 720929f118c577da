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
from geosharp.functional.ascent.subspace import Memory

HOPS = 12
HOP_LENGTH = 4.0
"""Momentum steps of this many radii; found by comparison, see the decision note."""
HOP_MOMENTUM = 0.75
ONE_BASIN = 0.9
"""Cosine between the gradients at the centre and at the first point on the sphere above which no hops are made."""
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
    begin = start.copy()
    current = search.evaluate(on_sphere * (search.ball.radius / _norm(on_sphere)))
    if _cosine(begin.gradient, current.gradient) < ONE_BASIN:
        current = _hop(search, begin, current)
    if float(torch.dot(current.z, current.gradient)) >= 0:
        _refine(search, current)
    if not search.stationary:
        auto_pgd(search)


def _norm(z: Tensor) -> float:
    return float(torch.linalg.vector_norm(z))


def _cosine(a: Tensor, b: Tensor) -> float:
    size = _norm(a) * _norm(b)
    return float(torch.dot(a, b)) / size if size > 0 else 1.0


def _hop(search: Search, previous: Found, current: Found) -> Found:
    """Momentum steps that are long enough to leave a basin; returns the best point found on the sphere."""
    radius = search.ball.radius
    best = current.copy()
    work = previous  # its memory is free once the first step is made
    for _ in range(min(HOPS, search.budget // 2)):
        # z + α(y - z) + (1-α)(z - z_prev) with y = z + η∇F/‖∇F‖ projected first; built in the memory of z_prev.
        size = HOP_LENGTH * radius / max(_norm(current.gradient), 1e-300)
        target = search.ball.project_(torch.add(current.z, current.gradient, alpha=size, out=work.gradient))
        work.z.mul_(-(1 - HOP_MOMENTUM)).add_(current.z, alpha=2 * (1 - HOP_MOMENTUM)).add_(target, alpha=HOP_MOMENTUM)
        search.ball.project_(work.z)
        work, current = current, search.evaluate(work.z, work.gradient)
        if current.value > best.value and search.ball.on_boundary(current.z):
            best.z.copy_(current.z)
            best.gradient.copy_(current.gradient)
            best.value = current.value
    return best


def _refine(search: Search, current: Found) -> None:
    """L-BFGS on the sphere with backtracking; ends when stationary, when F turns inwards, or with the budget."""
    radius = search.ball.radius
    memory = Memory(current.z, current.gradient, radius)
    spare = Found(torch.empty_like(current.z), 0.0, torch.empty_like(current.z))
    shrink = 1.0
    while not (search.stationary and current.value >= search.best.value):
        step = memory.ascent_step()
        if step.length == 0.0 or shrink < 1e-6:
            return
        shrink = min(shrink, LONGEST_STEP * radius / step.length)
        memory.move(step, shrink, out=spare.z)
        trial = search.evaluate(spare.z, spare.gradient)
        if trial.value < current.value:
            shrink *= _backtrack(step.slope * shrink, trial.value - current.value)
            continue
        shrink = 1.0
        spare, current = current, trial
        if memory.accept(current.z, current.gradient) < 0:
            return


def _backtrack(expected: float, got: float) -> float:
    """The maximizer of the parabola through what was expected and what was found, kept in [0.1, 0.5]."""
    return max(0.1, min(0.5, expected / (2 * (expected - got))))
