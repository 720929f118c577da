"""What is recognized and has no layout: said by name instead of passed over."""

from __future__ import annotations

from torch import nn

from geosharp.symmetry.features import join
from geosharp.symmetry.layouts.latent import latent_attention
from geosharp.symmetry.reading import Dropped, Reading

_BY_NAME = (
    (("kv_a_proj_with_mqa",), "this form of multi-head latent attention has no layout: its maps stay element-wise"),
    (("kv_b_proj",), "this form of multi-head latent attention has no layout: its maps stay element-wise"),
    (("kv_proj", "kv_norm"), "keys and values are one, normalized and rotated: queries, keys, values and output form no products"),
    (("conv_qk_depthwise",), "queries and keys are convolved and averaged with each other before they are normalized, so no products"),
)
"""Children by which a kind of attention is recognized, and why it has no blocks."""

_EXPERTS = ("gate_up_proj", "down_proj")


def recognized(name: str, module: nn.Module, parent: nn.Module | None) -> list[Reading]:
    """Unusual latent attention and others that mix their maps; experts whose weights are stacked in one parameter."""
    for paths, reason in () if latent_attention(name, module, parent) else _BY_NAME:
        if all(hasattr(module, path) for path in paths):
            return [Reading((), (Dropped(join(name, "attention"), reason),))]
    stacked = [getattr(module, path, None) for path in _EXPERTS]
    if all(isinstance(one, nn.Parameter) and one.ndim == 3 for one in stacked):
        return [Reading((), (Dropped(join(name, "experts"), "fused experts have no layout: their weights stay element-wise"),))]
    return []
