"""Projected gradient ascent with Barzilai-Borwein step lengths: for a maximum inside the ball, where no sphere helps."""

from __future__ import annotations

import torch

from geosharp.functional.ascent.search import Search

SHORTEST = 1e-6
"""In radii: a step below this is not worth an evaluation."""
LONGEST = 4.0


def projected_ascent(search: Search) -> None:
    """Climb from the best point until it is stationary, steps vanish, or the budget ends."""
    radius = search.ball.radius
    current = search.best
    length = radius / max(float(torch.linalg.vector_norm(current.gradient)), 1e-300)
    while current.residual > search.tolerance:
        size = float(torch.linalg.vector_norm(current.gradient))
        length = min(length, LONGEST * radius / max(size, 1e-300))
        if length * size < SHORTEST * radius:
            return
        trial = search.evaluate(search.ball.project_(torch.add(current.z, current.gradient, alpha=length)))
        if trial.value < current.value:
            length /= 4
            continue
        step, change = trial.z - current.z, trial.gradient - current.gradient
        bend = -float(torch.dot(step, change))
        length = float(torch.dot(step, step)) / bend if bend > 0 else 4 * length
        current = trial
