"""Auto-PGD (Croce & Hein 2020), the published algorithm, in whitened coordinates (math.md 7).

Steepest ascent is the gradient itself and the projection a scaling, so that n steps cost n passes and nothing else.
"""

from __future__ import annotations

import math

import torch

from geosharp.functional.ascent.search import Search

MOMENTUM = 0.75
"""α of Croce & Hein 2020."""
SUCCESS = 0.75
"""The share of steps since the last checkpoint that must set a new best."""


def checkpoints(steps: int) -> list[int]:
    """p = 0, 0.22, then p += max(Δ - 0.03, 0.06), as step numbers without repeats.

    >>> checkpoints(20)
    [5, 9, 12, 14, 16, 18, 19, 20]
    """
    places = [0.0, 0.22]
    while places[-1] < 1:
        places.append(places[-1] + max(places[-1] - places[-2] - 0.03, 0.06))
    return sorted({math.ceil(round(place * steps, 9)) for place in places if 0 < place <= 1} | {steps})


def auto_pgd(search: Search) -> None:
    """Climb until the budget or the tolerance ends it."""
    ball, steps = search.ball, search.budget
    marks = set(checkpoints(steps)) if steps else set()
    current = search.best
    previous = current.z
    size, fresh = 2 * ball.radius, True
    last_mark, improved = 0, 0
    size_at_mark, best_at_mark = size, search.best.value
    for step in range(1, steps + 1):
        target = ball.project_(torch.add(current.z, ball.steepest(current.gradient), alpha=size))
        share = 1.0 if fresh else MOMENTUM
        moved = current.z + share * (target - current.z) + (1 - share) * (current.z - previous)
        fresh, previous = False, current.z
        before = search.best.value
        current = search.evaluate(ball.project_(moved))
        improved += current.value > before
        if search.stationary and current.value >= search.best.value:
            return
        if step in marks:
            stalled = size_at_mark == size and best_at_mark == search.best.value
            rare = improved < SUCCESS * (step - last_mark)
            size_at_mark, best_at_mark = size, search.best.value
            if stalled or rare:
                size /= 2
                current = search.best
                previous, fresh = current.z, True
            last_mark, improved = step, 0
