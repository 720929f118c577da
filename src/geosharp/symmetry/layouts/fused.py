"""Attention whose queries, keys and values are made by one linear map.

Three instances: all queries, then all keys, then all values (GPT-2, ModernBERT, timm; Phi-3 with fewer keys); head by head
a query, a key and a value (GPT-NeoX, BLOOM); group by group some queries, a key and a value (Falcon).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from geosharp.symmetry.features import Features, LinearMap
from geosharp.symmetry.layouts.projections import Heads, adapted, common, finished, head_count, key_heads, map_at, output_map
from geosharp.symmetry.site import AttentionSite

_BY_HEADS = ("query_key_value",)
_BY_SIDES = ("c_attn", "Wqkv", "qkv", "qkv_proj", "in_proj", "W_pack", "attn_qkv", "to_qkv", "att_proj", "qkv_linear")

Divided = tuple[tuple[Features, ...], Features, Features]
Order = Callable[[Features, Heads], Divided]


def fused(name: str, module: nn.Module, parent: nn.Module | None) -> list[AttentionSite]:
    """The attention layer of a module with one map for queries, keys and values: by the order of its name, then by the other."""
    for path in (*_BY_HEADS, *_BY_SIDES):
        whole = map_at(module, name, path)
        if whole is not None:
            orders = (by_heads, by_sides) if path in _BY_HEADS or _is_interleaved(module, whole) else (by_sides, by_heads)
            return _sites(name, module, parent, whole, orders)
    return []


def _is_interleaved(module: nn.Module, whole: LinearMap) -> bool:
    """GPT-BigCode's `c_attn` is a plain linear map, and without multi-query divided head by head."""
    return not whole.transposed and getattr(module, "multi_query", None) is False


def _sites(name: str, module: nn.Module, parent: nn.Module | None, whole: LinearMap, orders: tuple[Order, ...]) -> list[AttentionSite]:
    heads = _heads(module, whole.outputs)
    output = None if heads is None else output_map(module, name, parent, heads.queries * heads.width)
    if heads is None or output is None:
        return []
    found = []
    for order in orders[: 1 if heads.groups == 1 else 2]:
        query, key, value = order(whole.made(), heads)
        site = AttentionSite(
            name=common(whole.path, output.path),
            heads=heads.queries,
            width=heads.width,
            query=query,
            key=(key,),
            value=(value,),
            output=heads.of_groups(output.used()),
            output_bias=output.bias,
            broken=adapted(whole, output),
        )
        found += finished(site, module, name)
    return found


def _heads(module: nn.Module, outputs: int) -> Heads | None:
    """Queries, keys and values of so many features together; where nothing else is said, as many keys as queries."""
    count = head_count(module)
    for groups in (key_heads(module) or count, count):
        if count and groups and count % groups == 0 and outputs % (count + 2 * groups) == 0:
            return Heads(groups, count // groups, outputs // (count + 2 * groups))
    return None


def by_sides(features: Features, heads: Heads) -> Divided:
    """All queries, all keys, all values."""
    queries, keys = heads.queries * heads.width, heads.groups * heads.width
    key, value = (features[start : start + keys].split(0, heads.groups, -1) for start in (queries, queries + keys))
    return heads.of_groups(features[:queries]), key, value


def by_heads(features: Features, heads: Heads) -> Divided:
    """Group by group its queries, its key, its value."""
    per_group = heads.per_group
    parts = features.split(0, heads.groups, per_group + 2, -1)
    return tuple(parts[:, j] for j in range(per_group)), parts[:, per_group], parts[:, per_group + 1]

