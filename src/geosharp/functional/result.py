"""What a functional returns for one batch (and radius), before it becomes a row of the record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Result:
    """A value with its error and how it was found."""

    value: float
    base_loss: float
    outcome: str
    rho: float | None = None
    stderr: float = 0.0
    residual: float | None = None
    noise: float | None = None
    restart_values: tuple[float, ...] = ()
    trace: tuple[tuple[float, float], ...] = ()
    state: Mapping[str, Tensor] | None = None
    """The user's state dict at the worst point, where it was asked for."""
    evaluations: int = 0
    forward_passes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Options:
    """What the caller asked for; each functional names the options it has."""

    rho: tuple[float, ...] = ()
    steps: int = 39
    tolerance: float = 3e-3
    restarts: int = 0
    solver: str = "default"
    samples: int = 50
    seed: int = 0
    """Derived from the user's seed and the batch, not from the weights: probes are the same all over an orbit."""
    noise: float = 0.0
    """The measured noise floor of the loss."""
    keep_worst: bool = False
