"""What a loss cannot resolve: effects under this floor are not told from zero."""

from __future__ import annotations

import torch

from geosharp.functional.pulled_back import PulledBack
from geosharp.geometry.mix_geodesic import LeftManifold


def measured_noise(F: PulledBack, seed: int) -> float:
    """How much the loss moves when each weight changes by its last digits: |F(z) - F(0)| for a z of rounding's size.

    The digits are those of the coarsest dtype on the way to the loss: with logits cast to float32 inside, float64 weights
    have no more of them.
    """
    base = F.value(F.zero())
    like = F.chart.reference
    z = torch.rand(F.size, generator=torch.Generator().manual_seed(seed), dtype=like.dtype).to(like)
    try:
        moved = F.value(z.sub_(0.5).mul_(4 * torch.finfo(F.objective.resolution).eps))
    except LeftManifold:
        return 0.0
    return abs(moved - base)


def rounding(F: PulledBack, base: float) -> float:
    """What no loss of this size can resolve. Half precision inside shows in `measured_noise`; losses are float32 at least."""
    eps = min(torch.finfo(F.objective.resolution).eps, torch.finfo(torch.float32).eps)
    return 4 * eps * abs(base)
