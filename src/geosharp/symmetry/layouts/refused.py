"""What is recognized and has no layout: said by name instead of passed over."""

from __future__ import annotations

from torch import nn

from geosharp.symmetry.features import join
from geosharp.symmetry.reading import Dropped, Reading

_LATENT = ("kv_a_proj_with_mqa", "kv_b_proj")
_EXPERTS = ("gate_up_proj", "down_proj")


def recognized(name: str, module: nn.Module, parent: nn.Module | None) -> list[Reading]:
    """Multi-head latent attention; experts whose weights are stacked in one parameter."""
    if any(hasattr(module, path) for path in _LATENT):
        return [Reading((), (Dropped(join(name, "attention"), "multi-head latent attention has no layout: its maps stay element-wise"),))]
    stacked = [getattr(module, path, None) for path in _EXPERTS]
    if all(isinstance(one, nn.Parameter) and one.ndim == 3 for one in stacked):
        return [Reading((), (Dropped(join(name, "experts"), "fused experts have no layout: their weights stay element-wise"),))]
    return []
