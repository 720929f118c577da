"""Element-wise coordinates: everything that is not in a product block (math.md 4).

Three instances: the identity metric (standard sharpness), diag(1/w²) with the straight path (adaptive sharpness), and
diag(1/w²) with its own geodesic w·exp(z). A weight that is exactly 0 never moves under diag(1/w²).

Under diag(1/w²) the lift is w⊙z, with the sign: the same balls as |w|⊙z, and coordinates (so fixed random probes too) that
stay what they are when a GL(1) symmetry flips the sign of a weight.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

ElementwiseMetric = Literal["identity", "adaptive"]
ElementwisePath = Literal["straight", "second-order", "exact"]


def scale_of(weight: Tensor, metric: ElementwiseMetric, free: Tensor | None) -> Tensor | None:
    """The factor of `lift`: 1 (returned as None) or w, and 0 where `free` is False."""
    if metric == "identity":
        return None if free is None else free.to(weight.dtype)
    return weight if free is None else weight * free


def walk(
    weight: Tensor, scale: Tensor | None, z: Tensor, metric: ElementwiseMetric, path: ElementwisePath, *, out: Tensor | None = None
) -> Tensor:
    """The weights reached with whitened coordinates z, written into `out` where it is given."""
    if scale is None:
        return torch.add(weight, z, out=out)
    if metric == "identity" or path == "straight":
        return torch.addcmul(weight, scale, z, out=out)
    moved = weight + scale * (z + 0.5 * z * z if path == "second-order" else torch.expm1(z))
    return moved if out is None else out.copy_(moved)


def pull_back(
    gradient: Tensor, weight: Tensor, scale: Tensor | None, z: Tensor, metric: ElementwiseMetric, path: ElementwisePath, out: Tensor
) -> Tensor:
    """The gradient in z, written into `out`: the gradient in the weights times the derivative of `walk`."""
    if scale is None:
        return out.copy_(gradient)
    torch.mul(gradient, scale, out=out)
    if metric == "identity" or path == "straight":
        return out
    return out.mul_(1 + z if path == "second-order" else torch.exp(z))
