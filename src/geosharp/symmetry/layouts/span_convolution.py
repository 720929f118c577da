"""ConvBERT's mixed attention: half of the heads attend, half are convolutions whose kernels the queries make.

Queries meet keys in the logits and, feature by feature, the convolved keys; so GL(h) shrinks to one factor a feature.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from geosharp.symmetry.block import Factors
from geosharp.symmetry.features import Features, LinearMap, join
from geosharp.symmetry.layouts.projections import Heads, adapted, common, divided, finished, map_at, output_map
from geosharp.symmetry.reading import Dropped, Known, Reading
from geosharp.symmetry.site import AttentionSite
from geosharp.symmetry.view import View, parameter_of

_MAPS = ("query", "key", "value", "conv_out_layer", "conv_kernel_layer")


@dataclass(frozen=True)
class _Mixed:
    maps: dict[str, LinearMap]
    heads: Heads
    output: LinearMap
    separable: str

    @property
    def half(self) -> int:
        return self.heads.queries * self.heads.width

    def contexts(self) -> tuple[Features, Features]:
        """The columns of the output map for attending heads, and for convolving ones."""
        features = self.output.used()
        first, second = (features[start : start + self.half].split(0, self.heads.groups, -1) for start in (0, self.half))
        return first, second


def _found(name: str, module: nn.Module, parent: nn.Module | None) -> _Mixed | None:
    if not hasattr(module, "key_conv_attn_layer"):
        return None
    maps = {path: one for path in _MAPS if (one := map_at(module, name, path)) is not None}
    if len(maps) < len(_MAPS):
        return None
    heads = divided(module, maps["query"].outputs, maps["key"].outputs)
    output = output_map(module, name, parent, 2 * maps["query"].outputs)
    return None if heads is None or output is None else _Mixed(maps, heads[0], output, join(name, "key_conv_attn_layer"))


def span_attention(name: str, module: nn.Module, parent: nn.Module | None) -> list[AttentionSite]:
    """The attending heads."""
    mixed = _found(name, module, parent)
    if mixed is None:
        return []
    query, key, value = (mixed.maps[path].made().split(0, mixed.heads.groups, -1) for path in ("query", "key", "value"))
    convolved = Features(View(join(mixed.separable, "pointwise.weight"))[:, :, 0], View(join(mixed.separable, "bias"))[:, 0])
    site = AttentionSite(
        name=common(mixed.maps["query"].path, mixed.output.path),
        heads=mixed.heads.queries,
        width=mixed.heads.width,
        query=(query,),
        key=(key, convolved.split(0, mixed.heads.groups, -1)),
        value=(value,),
        output=(mixed.contexts()[0],),
        output_bias=mixed.output.bias,
        only_channels=True,
        key_shifts_free=(True, False),
        broken=adapted(*mixed.maps.values(), mixed.output),
    )
    return [dataclasses.replace(one, gated=False) for one in finished(site, module, name)]


def span_convolution(name: str, module: nn.Module, parent: nn.Module | None) -> list[Reading]:
    """The convolving heads: values and output as in attention; the depthwise and the pointwise kernel, channel by channel."""
    mixed = _found(name, module, parent)
    if mixed is None:
        return []
    label = common(mixed.maps["query"].path, mixed.output.path)
    if reason := adapted(*mixed.maps.values(), mixed.output):
        return [Reading((), (Dropped(f"{label}.convolution", reason),))]
    made = mixed.maps["conv_out_layer"].made().split(0, mixed.heads.groups, -1)
    depthwise = Features(View(join(mixed.separable, "depthwise.weight"))[:, 0])
    pointwise = Features(View(join(mixed.separable, "pointwise.weight"))[:, :, 0].T)
    convolved = Features(View(join(mixed.separable, "pointwise.weight"))[:, :, 0], View(join(mixed.separable, "bias"))[:, 0])
    kernel = mixed.maps["conv_kernel_layer"]
    blocks = (
        Factors(f"{label}.convolution_output", made.matrix(), mixed.contexts()[1].matrix(), kind="convolution-output"),
        Factors(f"{label}.kernel_channels", convolved.scalars(), kernel.used().scalars(), kind="kernel channels"),
        Factors(f"{label}.separable", depthwise.scalars(), pointwise.scalars(), kind="separable convolution"),
    )
    each, heads = kernel.inputs + kernel.has_bias, mixed.heads.queries
    reason = "its maps stay element-wise"
    known = Known(f"{label}.kernel", "kernel shift", f"R^{each}", heads * each, reason, _KernelShifts(kernel, heads))
    return [Reading(blocks, (), (known,))]


@dataclass(frozen=True)
class _KernelShifts:
    """One row added to all positions of a head's kernel: the soft-max over positions does not see it."""

    kernel: LinearMap
    heads: int

    def __call__(self, values: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        features = self.kernel.made().split(0, self.heads, -1)
        for view, rest in ((features.weight, self.kernel.inputs), (features.bias, 1)):
            if view is None:
                continue
            parameter = parameter_of(values, view)
            for head in range(self.heads):
                for i in range(rest):
                    change = torch.zeros_like(parameter)
                    part = view.of(change)[head]
                    (part[:, i] if part.ndim == 2 else part).fill_(1)
                    yield {view.parameter: change}
