"""Attention whose queries, keys and values are made by one linear map.

Four instances: all queries, then all keys, then all values (GPT-2, ModernBERT, timm; Phi-3 with fewer keys); head by head
a query, a key and a value (GPT-NeoX, BLOOM); group by group some queries, a key and a value (Falcon); shard by shard queries,
values, keys (CodeGen). Biases may be parameters of their own (DeBERTa, BEiT-like layers), positions may have maps of theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from geosharp.symmetry.code import numbers_named
from geosharp.symmetry.features import Features, LinearMap, join
from geosharp.symmetry.layouts.projections import Heads, adapted, common, finished, head_count, key_heads, map_at, output_map
from geosharp.symmetry.site import AttentionSite
from geosharp.symmetry.view import View

_BY_HEADS = ("query_key_value",)
_SHARDS = "mp_num"
"""The local variable of a forward pass that says into how many shards heads are divided."""
_BY_SIDES = ("c_attn", "Wqkv", "qkv", "qkv_proj", "in_proj", "W_pack", "attn_qkv", "to_qkv", "att_proj", "qkv_linear")

Divided = tuple[tuple[Features, ...], Features, Features]
Order = Callable[[Features, Heads], Divided]


def fused(name: str, module: nn.Module, parent: nn.Module | None) -> list[AttentionSite]:
    """The attention layer of a module with one map for queries, keys and values: by the order of its name, then by the other."""
    for path in (*_BY_HEADS, *_BY_SIDES):
        whole = map_at(module, name, path)
        if whole is not None:
            if shards := numbers_named(module, _SHARDS):
                return _sharded(name, module, parent, whole, shards[0])
            orders = (by_heads, by_sides) if path in _BY_HEADS or _is_interleaved(module, whole) else (by_sides, by_heads)
            return _sites(name, module, parent, whole, orders)
    return []


def _is_interleaved(module: nn.Module, whole: LinearMap) -> bool:
    """GPT-BigCode's `c_attn` is a plain linear map, and without multi-query divided head by head; so is DeBERTa's `in_proj`."""
    own_biases = isinstance(getattr(module, "q_bias", None), Tensor) and whole.path.endswith("in_proj")
    return own_biases or (not whole.transposed and getattr(module, "multi_query", None) is False)


def _sites(name: str, module: nn.Module, parent: nn.Module | None, whole: LinearMap, orders: tuple[Order, ...]) -> list[AttentionSite]:
    heads = _heads(module, whole.outputs)
    output = None if heads is None else output_map(module, name, parent, heads.queries * heads.width)
    if heads is None or output is None:
        return []
    position_query, position_key = (_positions(name, module, heads, path) for path in ("pos_q_proj", "pos_proj"))
    meets_keys = bool(position_query)
    found = []
    for order in orders[: 1 if heads.groups == 1 else 2]:
        query, key, value = order(whole.made(), heads)
        site = AttentionSite(
            name=common(whole.path, output.path),
            heads=heads.queries,
            width=heads.width,
            query=(*(_with_bias(name, module, "q_bias", one, heads) for one in query), *position_query),
            key=(_with_bias(name, module, "k_bias", key, heads), *position_key),
            value=(_with_bias(name, module, "v_bias", value, heads),),
            output=heads.of_groups(output.used()),
            output_bias=output.bias,
            key_shifts_free=(not meets_keys, *(True for _ in position_key)),
            value_shift_is_free=getattr(module, "head_weights_proj", None) is None,
            broken=adapted(whole, output),
        )
        found += finished(site, module, name)
    return found


def _with_bias(name: str, module: nn.Module, path: str, features: Features, heads: Heads) -> Features:
    """Features with the bias that their module holds as a parameter of its own."""
    bias = getattr(module, path, None)
    if features.bias is not None or not isinstance(bias, nn.Parameter) or bias.numel() != heads.groups * heads.width:
        return features
    return Features(features.weight, View(join(name, path)).unflatten(0, (heads.groups, -1)))


def _positions(name: str, module: nn.Module, heads: Heads, path: str) -> tuple[Features, ...]:
    """A map of positions that meet keys, or queries: they join the stacks."""
    extra = map_at(module, name, path)
    fits = extra is not None and extra.outputs == heads.groups * heads.width
    return (extra.made().split(0, heads.groups, -1),) if extra is not None and fits else ()


# Shards ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sharded(Features):
    """Features (shards, heads of a shard, width), sliced and split as if the first two axes were one."""

    def split(self, axis: int, *sizes: int) -> _Sharded:
        """One axis behind the heads as several."""
        return _Sharded(self.weight.unflatten(axis + 1, sizes), self.bias and self.bias.unflatten(axis + 1, sizes))

    def __getitem__(self, index: Any) -> _Sharded:
        """Basic indexing of the axes behind the heads."""
        every, *rest = index
        whole = (every, slice(None), *rest)
        return _Sharded(self.weight[whole], None if self.bias is None else self.bias[whole])


def _sharded(name: str, module: nn.Module, parent: nn.Module | None, whole: LinearMap, shards: int) -> list[AttentionSite]:
    """Shard by shard its queries, its values, its keys."""
    heads = _heads(module, whole.outputs)
    output = None if heads is None else output_map(module, name, parent, heads.queries * heads.width)
    if heads is None or output is None or heads.per_group > 1 or heads.queries % shards:
        return []
    sizes = (shards, 3, heads.queries // shards, heads.width)
    made, used = whole.made().split(0, *sizes), output.used().split(0, *sizes[:1], *sizes[2:])
    query, value, key = (_Sharded(made.weight[:, i], made.bias and made.bias[:, i]) for i in range(3))
    site = AttentionSite(
        name=common(whole.path, output.path),
        heads=heads.queries,
        width=heads.width,
        query=(query,),
        key=(key,),
        value=(value,),
        output=(_Sharded(used.weight, used.bias),),
        output_bias=output.bias,
        broken=adapted(whole, output),
    )
    return finished(site, module, name)


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
