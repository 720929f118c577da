"""The two balls a worst case is taken over: what is steepest ascent, the projection and stationarity on each."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

ON_SPHERE = 1e-4
"""A point this close to the sphere, in radii, lies on it up to rounding."""


class Ball(Protocol):
    """A ball around 0 in whitened coordinates."""

    @property
    def radius(self) -> float:
        """The radius."""
        ...

    def project_(self, z: Tensor) -> Tensor:
        """The nearest point of the ball, in place."""
        ...

    def steepest(self, gradient: Tensor) -> Tensor:
        """The unit step of steepest ascent."""
        ...

    def extreme(self, gradient: Tensor) -> Tensor:
        """The point of the ball that is furthest along the gradient."""
        ...

    def residual(self, z: Tensor, gradient: Tensor, scale: float) -> float:
        """0 exactly at first-order stationary points, at most about 1; not finite where the gradient is not.

        `scale` is the size of the gradient at the centre.
        """
        ...


@dataclass(frozen=True)
class EuclideanBall:
    """‖z‖₂ <= radius."""

    radius: float

    def project_(self, z: Tensor) -> Tensor:
        """Scaled back to the sphere, in place."""
        norm = float(torch.linalg.vector_norm(z))
        return z.mul_(self.radius / norm) if norm > self.radius else z

    def steepest(self, gradient: Tensor) -> Tensor:
        """The normalized gradient."""
        size: Tensor = torch.linalg.vector_norm(gradient).clamp_min(torch.finfo(gradient.dtype).tiny)
        return gradient / size

    def extreme(self, gradient: Tensor) -> Tensor:
        """The point of the sphere along the gradient."""
        return gradient * (self.radius / max(float(torch.linalg.vector_norm(gradient)), torch.finfo(gradient.dtype).tiny))

    def residual(self, z: Tensor, gradient: Tensor, scale: float) -> float:
        """‖∇F - (z·∇F) z/‖z‖²‖ / ‖∇F‖ on the sphere (1 where F falls outwards), ‖∇F‖ / ‖∇F(0)‖ inside."""
        size = float(torch.linalg.vector_norm(gradient))
        if size == 0.0 or not math.isfinite(size):
            return size
        along = float(torch.dot(z, gradient))
        norm = float(torch.linalg.vector_norm(z))
        if norm < self.radius * (1 - ON_SPHERE):
            return min(1.0, size / scale) if scale > 0 else 1.0
        if along < 0:
            return 1.0
        cosine = min(1.0, along / (norm * size))
        return math.sqrt((1 - cosine) * (1 + cosine))


@dataclass(frozen=True)
class Box:
    """‖z‖_∞ <= radius."""

    radius: float

    def project_(self, z: Tensor) -> Tensor:
        """Each coordinate clamped, in place."""
        return z.clamp_(-self.radius, self.radius)

    def steepest(self, gradient: Tensor) -> Tensor:
        """The signs of the gradient."""
        return torch.sign(gradient)

    def extreme(self, gradient: Tensor) -> Tensor:
        """The corner along the gradient."""
        return torch.sign(gradient).mul_(self.radius)

    def residual(self, z: Tensor, gradient: Tensor, scale: float) -> float:
        """The Frank-Wolfe gap over its largest first-order value: 1 - z·∇F / (radius ‖∇F‖₁)."""
        most = self.radius * float(gradient.abs().sum())
        if most == 0.0 or not math.isfinite(most):
            return most
        return min(1.0, 1.0 - float(torch.dot(z, gradient)) / most)
