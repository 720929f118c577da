"""A map, a residual, a norm (BERT's and its kin's `output`): what the norm takes out of the map is not seen.

A layer norm subtracts the mean over channels, so one vector added to all of the map's rows is free; an affine map in a
norm's place (MobileBERT) shares its bias with the map's. Both touch weights of product blocks, so they are not quotiented.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from geosharp.nested import tensors
from geosharp.symmetry.features import LinearMap, join
from geosharp.symmetry.layouts.projections import map_at
from geosharp.symmetry.reading import Known, Reading
from geosharp.symmetry.view import View, parameter_of


def post_norm(name: str, module: nn.Module, parent: nn.Module | None) -> list[Reading]:
    """What the `LayerNorm` beside a `dense` leaves free of it."""
    norm, dense = next(filter(all, _pairs(name, module)), (None, None))
    if dense is None or norm is None or getattr(getattr(norm, "weight", None), "numel", int)() != dense.outputs:
        return []
    if isinstance(norm, nn.LayerNorm) or _takes_out_the_mean(norm):
        size = dense.inputs + dense.has_bias
        return [_known(join(name, "mean"), "output mean", size, "its entries are coordinates already", _Mean(dense))]
    if type(norm).__name__ == "NoNorm" and dense.bias is not None:
        into = View(join(name, "LayerNorm.bias")), View(join(name, "LayerNorm.weight"))
        return [_known(join(name, "bias"), "output bias", dense.outputs, "both biases are coordinates", _Bias(dense.bias, *into))]
    return []


def _pairs(name: str, module: nn.Module) -> Iterator[tuple[nn.Module | None, LinearMap | None]]:
    for path, norm in (("dense", "LayerNorm"), ("post_proj", "layer_norm")):
        yield getattr(module, norm, None), map_at(module, name, path)


def _takes_out_the_mean(norm: nn.Module) -> bool:
    """Whether a norm under a name of its own (DeBERTa's, I-BERT's) is a layer norm, seen by calling it."""
    weight = getattr(norm, "weight", None)
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        return False
    probe = torch.linspace(-1, 2, weight.numel(), dtype=weight.dtype, device=weight.device)[None, None] ** 3
    try:
        with torch.no_grad():
            there, moved = (next(tensors(norm(x))) for x in (probe, probe + 1))
            other = next(tensors(norm(probe.flip(-1) ** 2)))
    except Exception:  # whatever else it needs, it is not a plain norm
        return False
    return bool(torch.allclose(there, moved, atol=1e-4)) and not bool(torch.allclose(there, other, atol=1e-4))


def _known(name: str, kind: str, dimension: int, reason: str, tangents: _Mean | _Bias) -> Reading:
    return Reading((), (), (Known(name, kind, f"R^{dimension}", dimension, reason, tangents),))


@dataclass(frozen=True)
class _Mean:
    """One vector added to all rows of a map, biases included."""

    dense: LinearMap

    def __call__(self, values: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        features = self.dense.made()
        for view in (features.weight, features.bias):
            if view is not None:
                parameter = parameter_of(values, view)
                for i in range(self.dense.inputs if view is features.weight else 1):
                    change = torch.zeros_like(parameter)
                    at = view.of(change)
                    (at[:, i] if at.ndim == 2 else at).fill_(1)
                    yield {view.parameter: change}


@dataclass(frozen=True)
class _Bias:
    """A bias before a gain and one after it."""

    before: View
    after: View
    gain: View

    def __call__(self, values: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        gain = parameter_of(values, self.gain)
        for i in range(gain.numel()):
            unit = torch.zeros_like(gain)
            unit[i] = 1
            yield {self.before.parameter: unit, self.after.parameter: -gain * unit}
