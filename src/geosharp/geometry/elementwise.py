"""Element-wise coordinates: everything that is not in a product block (math.md 4).

Three instances: the identity metric (standard sharpness), diag(1/w²) with the straight path (adaptive sharpness), and
diag(1/w²) with its own geodesic w·exp(sign(w)·z). A weight that is exactly 0 never moves under diag(1/w²).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

ElementwiseMetric = Literal["identity", "adaptive"]
ElementwisePath = Literal["straight", "second-order", "exact"]


def scale_of(weight: Tensor, metric: ElementwiseMetric, free: Tensor | None) -> Tensor | None:
    """The factor of `lift`: 1 (returned as None) or |w|, and 0 where `free` is False."""
    if metric == "identity":
        return None if free is None else free.to(weight.dtype)
    scale = weight.abs()
    return scale if free is None else scale * free


def walk(
    weight: Tensor, scale: Tensor | None, z: Tensor, metric: ElementwiseMetric, path: ElementwisePath, *, out: Tensor | None = None
) -> Tensor:
    """The weights reached with whitened coordinates z, written into `out` where it is given."""
    if scale is None:
        return torch.add(weight, z, out=out)
    if metric == "identity" or path == "straight":
        return torch.addcmul(weight, scale, z, out=out)
    if path == "second-order":
        moved = weight + scale * z + 0.5 * _where_free(weight, scale) * z * z
    else:
        moved = weight + _where_free(weight, scale) * torch.expm1(torch.sign(weight) * z)
    return moved if out is None else out.copy_(moved)


def pull_back(
    gradient: Tensor, weight: Tensor, scale: Tensor | None, z: Tensor, metric: ElementwiseMetric, path: ElementwisePath, out: Tensor
) -> Tensor:
    """The gradient in z, written into `out`: the gradient in the weights times the derivative of `walk`."""
    if scale is None:
        return out.copy_(gradient)
    if metric == "identity" or path == "straight":
        return torch.mul(gradient, scale, out=out)
    if path == "second-order":
        return torch.mul(gradient, scale + _where_free(weight, scale) * z, out=out)
    return torch.mul(gradient, scale * torch.exp(torch.sign(weight) * z), out=out)


def _where_free(weight: Tensor, scale: Tensor) -> Tensor:
    return torch.where(scale > 0, weight, torch.zeros_like(weight))
