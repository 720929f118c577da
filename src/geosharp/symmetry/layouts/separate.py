"""Attention with separate query, key and value maps, as BERT, ViT, OPT, LLaMA, T5 and most others write it."""

from __future__ import annotations

from torch import nn

from geosharp.symmetry.features import Features, LinearMap
from geosharp.symmetry.layouts.projections import Heads, adapted, common, divided, finished, map_at, output_map
from geosharp.symmetry.site import AttentionSite

_NAMES = (
    ("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("q_lin", "k_lin", "v_lin"), ("q", "k", "v"),
    ("query_proj", "key_proj", "value_proj"), ("to_q", "to_k", "to_v"), ("wq", "wk", "wv"), ("Wq", "Wk", "Wv"),
    ("linear_q", "linear_k", "linear_v"), ("project_q", "project_k", "project_v"), ("q_head", "k_head", "v_head"),
    ("q_linear", "k_linear", "v_linear"),
)  # fmt: skip


def separate(name: str, module: nn.Module, parent: nn.Module | None) -> list[AttentionSite]:
    """The attention layer of a module with three linear projections, grouped queries included."""
    for names in _NAMES:
        query, key, value = (map_at(module, name, path) for path in names)
        if query is not None and key is not None and value is not None:
            return _sites(name, module, parent, query, key, value)
    return []


def _sites(name: str, module: nn.Module, parent: nn.Module | None, query: LinearMap, key: LinearMap, value: LinearMap) -> list[AttentionSite]:
    found = divided(module, query.outputs, key.outputs)
    if found is None or value.outputs % found[0].groups:
        return []
    heads, doubled = found
    output = output_map(module, name, parent, heads.queries * value.outputs // heads.groups)
    if output is None:
        return []
    queries = heads.of_groups(query.made())
    if doubled:  # of every head first the queries, then the gate
        queries = tuple(one[:, : heads.width] for one in queries)
    position_queries, position_keys = (_positions(name, module, heads, path) for path in ("pos_query_proj", "pos_key_proj"))
    site = AttentionSite(
        name=common(query.path, output.path),
        heads=heads.queries,
        width=heads.width,
        query=(*queries, *position_queries),
        key=(key.made().split(0, heads.groups, -1), *position_keys),
        value=(value.made().split(0, heads.groups, -1),),
        output=heads.of_groups(output.used()),
        output_bias=output.bias,
        gated=doubled,
        key_shifts_free=(not _positions_meet_keys(module), *(True for _ in position_keys)),
        broken=adapted(query, key, value, output),
    )
    return finished(site, module, name)


def _positions(name: str, module: nn.Module, heads: Heads, path: str) -> tuple[Features, ...]:
    """DeBERTa's own projections of positions: queries meet position keys and keys meet position queries, so both join the stacks."""
    extra = map_at(module, name, path)
    return () if extra is None else (extra.made().split(0, heads.groups, -1),)


def _positions_meet_keys(module: nn.Module) -> bool:
    return bool(getattr(module, "relative_attention", False)) and "p2c" in (getattr(module, "pos_att_type", None) or ())
