"""The features between two linear maps: rows of the one that makes them, columns of the one that reads them.

Three instances: the queries of all heads, (heads, width); the frequency pairs of rotary keys, (heads, pairs) twice; the
hidden neurons of a feed-forward layer, (neurons,). A map is always written with its features first, (features…, other),
whatever way round its module stores it, so that slicing by heads is the same for every family.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from geosharp.symmetry.view import ComplexView, View


@dataclass(frozen=True)
class Features:
    """Some features of one linear map: its weights as (features…, other) and its biases as (features…)."""

    weight: View
    bias: View | None = None

    def split(self, axis: int, *sizes: int) -> Features:
        """One axis of features as several."""
        return Features(self.weight.unflatten(axis, sizes), self.bias and self.bias.unflatten(axis, sizes))

    def __getitem__(self, index: Any) -> Features:
        """Basic indexing of the feature axes."""
        return Features(self.weight[index], None if self.bias is None else self.bias[index])

    def matrix(self) -> tuple[View, ...]:
        """Features (copies, width) as rows of a block: weights (copies, other, width), biases (copies, 1, width)."""
        bias = () if self.bias is None else (self.bias[..., None, :],)
        return (self.weight.mT, *bias)

    def scalars(self) -> tuple[View, ...]:
        """Every feature as a copy of width 1: weights (features…, other, 1), biases (features…, 1, 1)."""
        bias = () if self.bias is None else (self.bias[..., None, None],)
        return (self.weight[..., None], *bias)


def pairs(features: Features, *, interleaved: bool) -> tuple[ComplexView, ...]:
    """Features (heads, 2 · pairs) as complex copies of width 1: pairs (j, j + half), or (2j, 2j + 1)."""
    if interleaved:
        divided = features.split(1, -1, 2)
        real, imag = divided[:, :, 0], divided[:, :, 1]
    else:
        divided = features.split(1, 2, -1)
        real, imag = divided[:, 0], divided[:, 1]
    return tuple(ComplexView(a, b) for a, b in zip(real.scalars(), imag.scalars(), strict=True))


@dataclass(frozen=True)
class LinearMap:
    """A linear module as it is found at a path, whatever way round it stores its weight."""

    path: str
    outputs: int
    inputs: int
    transposed: bool
    has_bias: bool
    adapted: bool = False
    """Whether an adapter adds to it: then its weight alone is not the map."""

    @property
    def bias(self) -> View | None:
        """The whole bias."""
        return View(f"{self.path}.bias") if self.has_bias else None

    def made(self) -> Features:
        """Its outputs as features: (outputs, inputs), with biases."""
        weight = View(f"{self.path}.weight")
        return Features(weight.T if self.transposed else weight, self.bias)

    def used(self) -> Features:
        """Its inputs as features: (inputs, outputs)."""
        weight = View(f"{self.path}.weight")
        return Features(weight if self.transposed else weight.T)


def linear_map(module: object, path: str) -> LinearMap | None:
    """`nn.Linear`, the transposed `Conv1D`, or either inside an adapter; nothing where weights are packed or not there."""
    base = getattr(module, "base_layer", None)
    if isinstance(base, nn.Module):
        found = linear_map(base, f"{path}.base_layer")
        return found and replace(found, adapted=found.adapted or adds(module))
    weight = getattr(module, "weight", None)
    transposed = type(module).__name__ == "Conv1D" and hasattr(module, "nf")
    if not (isinstance(module, nn.Linear) or transposed) or not isinstance(weight, Tensor):
        return None
    if weight.ndim != 2 or not weight.is_floating_point():
        return None
    outputs, inputs = weight.shape[::-1] if transposed else weight.shape
    return LinearMap(path, outputs, inputs, transposed, isinstance(getattr(module, "bias", None), Tensor))


def adds(module: object) -> bool:
    """Whether what is wrapped around a linear map changes its outputs now: an adapter may be merged, switched off or not chosen."""
    if getattr(module, "merged", False) or getattr(module, "disable_adapters", False):
        return False
    kinds, active = getattr(module, "adapter_layer_names", None), getattr(module, "active_adapters", None)
    return kinds is None or active is None or any(adapter in getattr(module, kind, ()) for kind in kinds for adapter in active)


def join(*parts: str) -> str:
    """A dotted path from parts, of which some may be empty."""
    return ".".join(filter(None, parts))
