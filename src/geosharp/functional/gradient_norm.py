"""‖∇F(0)‖: the first-order part of any worst case, at no radius."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from geosharp.functional.pulled_back import PulledBack
from geosharp.functional.result import Options, Result


@dataclass(frozen=True)
class GradientNorm:
    """The functional; it has no options."""

    options: frozenset[str] = frozenset()
    needs_radius: bool = False

    def __call__(self, F: PulledBack, options: Options) -> list[Result]:
        """One result."""
        started, before = time.perf_counter(), F.evaluations
        value, gradient = F.base()
        size = float(torch.linalg.vector_norm(gradient))
        return [Result(size, value, "computed", evaluations=F.evaluations - before, seconds=time.perf_counter() - started)]
