"""Π, the orthogonal projector onto the horizontal space, in whitened coordinates (math.md 5).

With a = Uᴴz_G, c = Vᴴz_H and E(a, c)_ij = -t_i (t_i a_ij - t_j conj(c_ji)) / (t_i² + t_j²):
z_G += U E(a, c), z_H += V E(c, a). The metric enters only through the weights t.
"""

from __future__ import annotations

from torch import Tensor


def correction(a: Tensor, c: Tensor, weight: Tensor) -> Tensor:
    """E(a, c); `weight` is t as (B, 1, h)."""
    row = weight.mT
    return -row * (row * a - weight * c.mH) / (row * row + weight * weight)


def project(left: Tensor, right: Tensor, z_left: Tensor, z_right: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Both sides of Π z for a frame (U, V)."""
    a = left.mH @ z_left
    c = right.mH @ z_right
    return z_left + left @ correction(a, c, weight), z_right + right @ correction(c, a, weight)
