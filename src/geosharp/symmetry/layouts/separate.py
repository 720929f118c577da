"""Separate query, key, value and output `nn.Linear`s, as BERT, RoBERTa, ViT and many others write them.

Two spellings, by structure: an attention module with `q_proj, k_proj, v_proj` and `o_proj` or `out_proj`; and a pair of
siblings, one with `query, key, value`, the other with the output `dense`.
"""

from __future__ import annotations

from torch import nn

from geosharp.symmetry.site import AttentionSite, Projection
from geosharp.symmetry.view import View

_HEAD_COUNTS = ("num_attention_heads", "num_heads", "n_heads", "n_head")


def separate(name: str, module: nn.Module) -> AttentionSite | None:
    """The attention layer of a module with separate linear projections."""
    found = _one_module(module) or _siblings(module)
    if found is None:
        return None
    (owner, query, key, value), output = found
    linears = dict(module.named_modules())
    heads = head_count(linears[owner] if owner else module)
    if heads is None or any(linears[path].weight.shape != linears[query].weight.shape for path in (key, value)):
        return None  # grouped queries are another layout
    if linears[query].out_features % heads or linears[output].in_features != linears[value].out_features:
        return None
    width = linears[query].out_features // heads

    def projection(path: str) -> Projection:
        weight = View(f"{name}.{path}.weight".lstrip(".")).unflatten(0, (heads, width)).mT
        bias = View(f"{name}.{path}.bias".lstrip(".")).unflatten(0, (heads, 1, width))
        return Projection(weight, bias if linears[path].bias is not None else None)

    dense = f"{name}.{output}".lstrip(".")
    return AttentionSite(
        name=name or "attention",
        query=projection(query),
        key=projection(key),
        value=projection(value),
        output=View(f"{dense}.weight").unflatten(1, (heads, width)).permute(1, 0, 2),
        output_bias=View(f"{dense}.bias") if linears[output].bias is not None else None,
    )


Paths = tuple[tuple[str, str, str, str], str]


def _one_module(module: nn.Module) -> Paths | None:
    for output in ("o_proj", "out_proj"):
        names = ("q_proj", "k_proj", "v_proj", output)
        if all(isinstance(getattr(module, child, None), nn.Linear) for child in names):
            return ("", *names[:3]), output
    return None


def _siblings(module: nn.Module) -> Paths | None:
    names = ("query", "key", "value")
    for owner, child in module.named_children():
        if all(isinstance(getattr(child, part, None), nn.Linear) for part in names):
            output = getattr(module, "output", None)
            if isinstance(getattr(output, "dense", None), nn.Linear):
                return (owner, *(f"{owner}.{part}" for part in names)), "output.dense"  # type: ignore[return-value]
    return None


def head_count(module: nn.Module) -> int | None:
    """The number of heads as the module or its config says it."""
    for holder in (module, getattr(module, "config", None)):
        for attribute in _HEAD_COUNTS:
            count = getattr(holder, attribute, None)
            if isinstance(count, int) and count > 0:
                return count
    return None
