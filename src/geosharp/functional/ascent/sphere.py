"""The default solver: visit a few basins of the sphere, L-BFGS in each, and finish in the best.

Local maxima at finite radius differ by which examples they break and by the side of each direction of large curvature on
which they lie. Three starts find most of what many random ones find: up the gradient in two steps; the mirror image of
what that led to, about the gradient at the centre (the other side of every curved direction); and the direction that a
ball of twice the radius prefers. docs/decisions/0002-solver.md has the comparison that chose them.
Where the maximum found lies nearly along the gradient at the centre there is one basin, and others are not looked for.

A direction of large curvature along which the gradient at the centre vanishes (a dead unit, a fitted one) is seen by none of
these: a point without it looks stationary and is a saddle. So before the search ends, a short power iteration asks whether F
rises more across than along; then it goes there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from geosharp.functional.ascent.auto_pgd import auto_pgd
from geosharp.functional.ascent.ball import EuclideanBall
from geosharp.functional.ascent.search import Found, Search
from geosharp.functional.ascent.spectral import projected_ascent
from geosharp.functional.ascent.subspace import Memory

ONE_BASIN = 0.9
"""Cosine with the gradient at the centre: above it the gradient has hardly turned, or the maximum lies along it."""
VISIT = 9
"""Evaluations in a basin before it is compared with the others."""
UPHILL = (0.5,)
BEYOND = (0.5, 1.0, 2.0)
"""Radii, in radii of the ball, at which a start follows the gradient before it is put on the sphere."""
PROBES = 3
"""Power iterations that look for curvature across."""
LONGEST_STEP = 1.0
"""In radii."""


def explore_and_refine(search: Search) -> None:
    """Climb on the sphere, and inside where F turns inwards; on other balls fall back on Auto-PGD."""
    if not isinstance(search.ball, EuclideanBall):
        auto_pgd(search)
        return
    warm = bool(search.best.z.any())
    toward = search.best.z if warm else search.uphill
    if not bool(toward.any()):
        return  # a critical centre, and nothing to follow
    first = search.evaluate(search.ball.extreme(toward))
    climber = _Climber(search, first)
    if _cosine(search.uphill, first.gradient) >= ONE_BASIN:
        found = climber.climb(first)
    else:
        start = None if warm else _follow(search, UPHILL)
        found = climber.climb(start or first, VISIT)
    if _cosine(search.uphill, found.z) < ONE_BASIN:
        _visit_other_basins(search, climber, found)
    elif not search.stationary:
        climber.climb(search.best)
    across = _across(search)
    if across is not None and climber.climb(across, VISIT).value >= search.best.value:
        climber.climb(search.best)
    if not search.stationary:
        projected_ascent(search)


def _visit_other_basins(search: Search, climber: _Climber, found: Found) -> None:
    climber.climb(search.evaluate(_mirrored(found.z, search.uphill)), VISIT)
    climber.climb(search.best)
    beyond, known = _follow(search, BEYOND), search.best.value
    if beyond is not None:
        climber.climb(beyond, VISIT)
        if search.best.value > known:
            climber.climb(search.best)


def _across(search: Search) -> Found | None:
    """The better of ± a point halfway between the best one and a direction in which F rises more; nothing where none is found.

    At a maximum on the sphere no curvature across exceeds z·∇F/‖z‖². Differences of gradients over the whole radius show
    the curvature that the ball sees.
    """
    best, radius = search.best, search.ball.radius
    direction, size = search.F.cheap_probe(seed=0), 0.0
    for _ in range(PROBES):
        seen = search.look(direction.mul_(radius / max(float(torch.linalg.vector_norm(direction)), 1e-300)))
        if seen is None:
            return None
        direction = seen.sub_(search.uphill)
        size = float(torch.linalg.vector_norm(direction))
    if size * radius <= float(torch.dot(best.z, best.gradient)) or size == 0.0:
        return None
    direction.sub_(best.z, alpha=float(torch.dot(direction, best.z)) / max(float(torch.dot(best.z, best.z)), 1e-300))
    side = search.ball.extreme(direction)
    sides = [search.evaluate(search.ball.extreme(torch.add(best.z, side, alpha=sign))) for sign in (1, -1)]
    return max(sides, key=lambda found: found.value)


def _follow(search: Search, radii: Sequence[float]) -> Found | None:
    """The point of the sphere along the gradient at the end of a ladder of radii; nothing where F ends on the way."""
    direction = search.uphill
    for share in radii:
        seen = search.look(EuclideanBall(share * search.ball.radius).extreme(direction))
        if seen is None:
            return None
        direction = seen
    return search.evaluate(search.ball.extreme(direction))


def _mirrored(z: Tensor, axis: Tensor) -> Tensor:
    """z turned half around an axis: the component along it stays, the rest changes its sign."""
    square = float(torch.dot(axis, axis))
    along = float(torch.dot(z, axis)) / square if square > 0 else 0.0
    return torch.add(-z, axis, alpha=2 * along)


def _cosine(a: Tensor, b: Tensor) -> float:
    size = float(torch.linalg.vector_norm(a)) * float(torch.linalg.vector_norm(b))
    return float(torch.dot(a, b)) / size if size > 0 else 1.0


class _Climber:
    """L-BFGS on the sphere with backtracking; every climb reuses the memory of the one before."""

    def __init__(self, search: Search, like: Found) -> None:
        self.search = search
        self.memory = Memory(like.z, search.ball.radius)
        # Of three, one is neither the current point nor the best one.
        self.buffers = [(torch.empty_like(like.z), torch.empty_like(like.z)) for _ in range(3)]

    def _free(self, current: Found) -> tuple[Tensor, Tensor]:
        kept = (current.z, self.search.best.z)
        return next((z, gradient) for z, gradient in self.buffers if all(z is not other for other in kept))

    def climb(self, current: Found, limit: int | None = None) -> Found:
        """The end of a climb from a point on the sphere.

        It stops when stationary, where F turns inwards, after `limit` evaluations, or with the budget.
        """
        search, memory, left = self.search, self.memory, limit
        memory.restart(current.z, current.gradient)
        shrink = 1.0
        while current.residual > search.tolerance and left != 0:
            step = memory.ascent_step()
            if step.length == 0.0 or shrink < 1e-6:
                break
            shrink = min(shrink, LONGEST_STEP * memory.radius / step.length)
            z, gradient = self._free(current)
            trial = search.evaluate(memory.move(step, shrink, out=z), gradient)
            left = None if left is None else left - 1
            if trial.value < current.value:
                shrink *= _backtrack(step.slope * shrink, trial.value - current.value)
                continue
            shrink = 1.0
            current = trial
            if memory.accept(current.z, current.gradient) < 0:
                break
        return current


def _backtrack(expected: float, got: float) -> float:
    """The maximizer of the parabola through what was expected and what was found, kept in [0.1, 0.5]."""
    return max(0.1, min(0.5, expected / (2 * (expected - got))))
