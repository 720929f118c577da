"""Attention whose maps each end in a batch norm (LeViT): the norms' gains and biases are what meets in the logits.

All queries, keys and values from one map, head by head; or keys and values from one and queries from another. After the
soft-max comes an activation, so values and output are no product.
"""

from __future__ import annotations

from torch import nn

from geosharp.symmetry.between import number
from geosharp.symmetry.features import Features, LinearMap, join, linear_map
from geosharp.symmetry.layouts.projections import gain_of
from geosharp.symmetry.site import AttentionSite, Norm

_ALL, _QUERIES, _OTHERS, _OUTPUT = "queries_keys_values", "queries", "keys_values", "projection"


def batch_normed(name: str, module: nn.Module, parent: nn.Module | None) -> list[AttentionSite]:
    """The attention layer of a module with such maps."""
    heads, width = number(module, "num_attention_heads"), number(module, "key_dim")
    maps = {path: found for path in (_ALL, _QUERIES, _OTHERS, _OUTPUT) if (found := _normed(module, name, path)) is not None}
    output = maps.get(_OUTPUT)
    if heads is None or width is None or output is None or not ({_ALL} <= maps.keys() or {_QUERIES, _OTHERS} <= maps.keys()):
        return []
    sides = [[one.split(0, heads, -1) for one in maps[path][1:]] for path in ((_ALL, _ALL) if _ALL in maps else (_QUERIES, _OTHERS))]
    start = width if _ALL in maps else 0
    (query, query_gains), (key, key_gains) = ([one[:, i : i + width] for one in side] for side, i in zip(sides, (0, start), strict=True))
    values = sides[1][0][:, start + width :]
    site = AttentionSite(
        name=name or "attention",
        heads=heads,
        width=width,
        query=(query,),
        key=(key,),
        value=(values,),
        output=(output[0].used().split(0, heads, -1),),
        norm=Norm("a batch norm", (query_gains,), (key_gains,)),
        value_broken="a batch norm and an activation lie between values and output",
    )
    return [site]


def _normed(module: nn.Module, name: str, path: str) -> tuple[LinearMap, Features, Features] | None:
    """A linear map, the features it makes, and the gains of the batch norm behind it."""
    child = getattr(module, path, None)
    norm = getattr(child, "batch_norm", None)
    found = linear_map(getattr(child, "linear", None), join(name, path, "linear"))
    if found is None or not isinstance(norm, nn.BatchNorm1d):
        return None
    gains = gain_of(norm, join(name, path, "batch_norm"))
    return None if gains is None else (found, found.made(), gains)
