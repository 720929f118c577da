"""Attention with separate query, key and value maps, as BERT, ViT, OPT, LLaMA, T5 and most others write it."""

from __future__ import annotations

from torch import nn

from geosharp.symmetry.between import map_of_values
from geosharp.symmetry.features import Features, LinearMap
from geosharp.symmetry.layouts.global_attention import global_values
from geosharp.symmetry.layouts.projections import Heads, adapted, common, divided, finished, map_at, output_map
from geosharp.symmetry.site import AttentionSite

_NAMES = (
    ("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("q_lin", "k_lin", "v_lin"), ("q", "k", "v"),
    ("query_proj", "key_proj", "value_proj"), ("to_q", "to_k", "to_v"), ("wq", "wk", "wv"), ("Wq", "Wk", "Wv"),
    ("linear_q", "linear_k", "linear_v"), ("project_q", "project_k", "project_v"), ("q_head", "k_head", "v_head"),
    ("W_q", "W_k", "W_v"), ("w_q", "w_k", "w_v"), ("W_Q", "W_K", "W_V"), ("WQ", "WK", "WV"), ("w_qs", "w_ks", "w_vs"),
    ("queries", "keys", "values"), ("toqueries", "tokeys", "tovalues"), ("to_queries", "to_keys", "to_values"), ("fc_q", "fc_k", "fc_v"),
    ("proj_q", "proj_k", "proj_v"), ("query_linear", "key_linear", "value_linear"), ("q_linear", "k_linear", "v_linear"),
    ("projection_query", "projection_key", "projection_value"),
)  # fmt: skip
_KEYS_WITH_VALUES = (
    ("to_q", "to_kv"), ("q", "kv"), ("q_proj", "kv_proj"), ("query", "key_value"), ("Wq", "Wkv"), ("wq", "wkv"), ("q_attn", "c_attn"),
)  # fmt: skip
"""Names of a map to queries, and of one to all keys and then all values."""


def separate(name: str, module: nn.Module, parent: nn.Module | None) -> list[AttentionSite]:
    """The attention layer of a module with three linear projections, grouped queries included."""
    for names in _NAMES:
        query, key, value = (map_at(module, name, path) for path in names)
        if query is not None and key is not None and value is not None:
            return _sites(name, module, parent, query, (key, key.made()), (value, value.made()))
    for pair in _KEYS_WITH_VALUES:
        query, both = (map_at(module, name, path) for path in pair)
        if query is not None and both is not None and both.outputs % 2 == 0:
            made, half = both.made(), both.outputs // 2
            sites = _sites(name, module, parent, query, (both, made[:half]), (both, made[half:]), half)
            if sites:
                return sites
    return []


Side = tuple[LinearMap, Features]
"""A map and those of its outputs that are meant."""


def _sites(
    name: str, module: nn.Module, parent: nn.Module | None, query: LinearMap, key: Side, value: Side, half: int = 0
) -> list[AttentionSite]:
    """The layer with these projections, of which keys and values are `half` of the outputs of theirs."""
    keys, values = half or key[0].outputs, half or value[0].outputs
    found = divided(module, query.outputs, keys)
    if found is None or values % found[0].groups:
        return []
    heads, doubled = found
    output = output_map(module, name, parent, heads.queries * values // heads.groups)
    if output is None:
        return []
    queries = heads.of_groups(query.made())
    if doubled:  # of every head first the queries, then the gate
        queries = tuple(one[:, : heads.width] for one in queries)
    position_queries, position_keys = (_positions(name, module, heads, path) for path in ("pos_query_proj", "pos_key_proj"))
    readers = _readers_of_values(name, module, heads, values)
    other_values = global_values(name, module, heads)
    site = AttentionSite(
        name=common(query.path, output.path),
        heads=heads.queries,
        width=heads.width,
        query=(*queries, *position_queries),
        key=(key[1].split(0, heads.groups, -1), *position_keys),
        value=(value[1].split(0, heads.groups, -1), *other_values),
        output=(*heads.of_groups(output.used()), *readers),
        output_bias=output.bias,
        gated=doubled,
        key_shifts_free=(not _positions_meet_keys(module), *(True for _ in position_keys)),
        value_shift_is_free=not readers and not other_values,
        broken=adapted(query, key[0], value[0], output),
    )
    return finished(site, module, name)


def _readers_of_values(name: str, module: nn.Module, heads: Heads, values: int) -> tuple[Features, ...]:
    """What else reads the values joins the output map's stack."""
    path = map_of_values(module, values)
    reader = map_at(module, name, path) if path else None
    return () if reader is None else (reader.used().split(0, heads.groups, -1),)


def _positions(name: str, module: nn.Module, heads: Heads, path: str) -> tuple[Features, ...]:
    """DeBERTa's own projections of positions: queries meet position keys and keys meet position queries, so both join the stacks."""
    extra = map_at(module, name, path)
    return () if extra is None else (extra.made().split(0, heads.groups, -1),)


def _positions_meet_keys(module: nn.Module) -> bool:
    return bool(getattr(module, "relative_attention", False)) and "p2c" in (getattr(module, "pos_att_type", None) or ())
