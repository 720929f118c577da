"""Mixtures of attention (JetMoE): a query map and an output map for each expert, keys and values for all experts together.

A head's keys meet the queries of every expert and its values are read by every expert's output map, so all of them are in
one stack for each head of keys.
"""

from __future__ import annotations

from torch import nn

from geosharp.symmetry.between import number
from geosharp.symmetry.features import Features, join
from geosharp.symmetry.layouts.projections import finished, map_at
from geosharp.symmetry.site import AttentionSite
from geosharp.symmetry.view import View

_WIDTHS = ("head_dim", "kv_channels")


def mixture(name: str, module: nn.Module, parent: nn.Module | None) -> list[AttentionSite]:
    """The attention layer of a module with `kv_proj` and experts of query and output maps."""
    both, width = map_at(module, name, "kv_proj"), number(module, *_WIDTHS)
    weights = [_experts(module, path) for path in ("input_linear", "output_linear")]
    if both is None or width is None or weights[0] is None or weights[1] is None or both.outputs % (2 * width):
        return []
    (count, queries, _), (_, _, contexts) = weights[0], weights[1]
    groups, half, made = both.outputs // (2 * width), both.outputs // 2, both.made()
    if queries != half or contexts != half:
        return []
    query, output = (View(join(name, "experts", path, "weight")) for path in ("input_linear", "output_linear"))
    site = AttentionSite(
        name=name or "attention",
        heads=count * groups,
        width=width,
        query=tuple(Features(query[expert]).split(0, groups, -1) for expert in range(count)),
        key=(made[:half].split(0, groups, -1),),
        value=(made[half:].split(0, groups, -1),),
        output=tuple(Features(output[expert].T).split(0, groups, -1) for expert in range(count)),
        value_shift_is_free=False,
    )
    return finished(site, module, name)


def _experts(module: nn.Module, path: str) -> tuple[int, int, int] | None:
    """The sizes (experts, outputs, inputs) of the maps of all experts, where they are one parameter."""
    weight = getattr(getattr(getattr(module, "experts", None), path, None), "weight", None)
    return (weight.shape[0], weight.shape[1], weight.shape[2]) if isinstance(weight, nn.Parameter) and weight.ndim == 3 else None
