"""E[F(z)] - F(0) over random z: average-case sharpness, an estimate with its standard error.

z ~ N(0, ρ²I) projected (ℓ2), or uniform in the box (ℓ∞). Probes come in pairs ±z, whose odd part cancels; the pairs are
the independent samples behind the standard error. Gaussian probes are gauge-equivariant: the same seed gives the same
value all over an orbit.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from geosharp.functional.noise import rounding
from geosharp.functional.pulled_back import PulledBack, check_base
from geosharp.functional.result import Options, Result
from geosharp.geometry.mix_geodesic import LeftManifold


@dataclass(frozen=True)
class AverageCase:
    """The functional: options rho, samples."""

    norm: Literal["l2", "linf"] = "l2"
    options: frozenset[str] = frozenset({"rho", "samples"})
    needs_radius: bool = True

    def __call__(self, F: PulledBack, options: Options) -> list[Result]:
        """One result a radius, with common random numbers."""
        started, before = time.perf_counter(), F.forward_passes
        base = F.value(F.zero())
        check_base(base)
        noise = max(options.noise, rounding(F, base))
        results = []
        for radius in options.rho:
            pairs, failure = self._pairs(F, radius, options, base)
            value = statistics.fmean(pairs) if pairs else math.nan
            stderr = statistics.stdev(pairs) / math.sqrt(len(pairs)) if len(pairs) > 1 else math.inf
            outcome = failure or ("below-resolution" if abs(value) <= noise else "estimated")
            results.append(
                Result(
                    value=value,
                    base_loss=base,
                    outcome=outcome,
                    rho=radius,
                    stderr=stderr,
                    noise=noise,
                    forward_passes=F.forward_passes - before,
                    seconds=time.perf_counter() - started,
                )
            )
            started, before = time.perf_counter(), F.forward_passes
        return results

    def _pairs(self, F: PulledBack, radius: float, options: Options, base: float) -> tuple[list[float], str]:
        """½(F(z) + F(-z)) - F(0) for each probe; probes with a non-finite loss end the estimate."""
        generator = torch.Generator().manual_seed(options.seed)
        found: list[float] = []
        for _ in range(max(1, math.ceil(options.samples / 2))):
            z = self._draw(F, radius, generator)
            try:
                value = 0.5 * (F.value(z) + F.value(-z)) - base
            except LeftManifold:
                return found, "left-manifold"
            if not math.isfinite(value):
                return found, "diverged"
            found.append(value)
        return found, ""

    def _draw(self, F: PulledBack, radius: float, generator: torch.Generator) -> Tensor:
        if self.norm == "l2":
            return F.probe(generator).mul_(radius)
        like = F.chart.reference
        uniform = 2 * torch.rand(F.size, generator=generator, dtype=torch.float64) - 1
        return F.project(uniform.to(like).mul_(radius))
