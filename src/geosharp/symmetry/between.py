"""What stands between projections and logits, read off a module's code and config: rotary positions, norms, gates, clipping."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from geosharp.symmetry.site import Rotary

_NORMS = (
    ("q_norm", "k_norm"), ("query_norm", "key_norm"), ("q_layernorm", "k_layernorm"), ("query_layernorm", "key_layernorm"),
    ("q_ln", "k_ln"), ("ln_q", "ln_k"), ("norm_q", "norm_k"), ("layer_norm_q", "layer_norm_k"), ("qk_norm", "qk_norm"),
)  # fmt: skip
_PARTIAL = ("partial_rotary_factor", "rotary_pct", "rotary_percent")
_DIMS = ("rotary_ndims", "rotary_dim", "rotary_dims")


def facts(module: nn.Module, *names: str) -> Iterator[Any]:
    """The values that a module or its config has under some names, the module's first."""
    for holder in (module, getattr(module, "config", None)):
        for name in names:
            value = getattr(holder, name, None)
            if value is not None:
                yield value


def number(module: nn.Module, *names: str) -> int | None:
    """The first positive integer that a module or its config has under some names."""
    return next((value for value in facts(module, *names) if isinstance(value, int) and value > 0), None)


def norm_names(module: nn.Module) -> tuple[str, str] | None:
    """The children by which an attention layer normalizes queries and keys."""
    for names in _NORMS:
        found = [getattr(module, name, None) for name in names]
        if all(isinstance(child, nn.Module) and not isinstance(child, nn.Identity) for child in found):
            return names
    return None


def is_cosine(module: nn.Module) -> bool:
    """Whether the forward pass normalizes something by a function."""
    return "normalize" in names_used(module)


def is_clipped(module: nn.Module) -> bool:
    """Whether queries, keys and values are clamped."""
    return any(value for value in facts(module, "clip_qkv"))


def names_used(module: nn.Module) -> set[str]:
    """Every global and attribute name in a module's forward pass."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return set(_names(code)) if isinstance(code, CodeType) else set()


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


# Rotary positions -----------------------------------------------------------------------------------------------------


def rotary_of(module: nn.Module, width: int) -> Rotary | None:
    """The rotary positions of an attention layer with heads of this width."""
    used = {name for name in names_used(module) if "rotary" in name or "rope" in name or name.startswith("rotate_")}
    switches = [value for value in facts(module, "use_rope", "use_rotary", "rotary") if isinstance(value, bool)]
    if not used or not all(switches) or any(value is True for value in facts(module, "alibi")):
        return None
    if any(value not in ("rotary", "rope") for value in facts(module, "position_embedding_type", "position_embeddings_type")):
        return None
    dims = _rotated_dims(module, width)
    interleaved = _interleaved(module, used)
    return Rotary(dims, bool(interleaved), known=interleaved is not None) if dims else None


def _rotated_dims(module: nn.Module, width: int) -> int:
    dims = number(module, *_DIMS)
    if dims is not None:
        return min(dims, width)
    for factor in (*facts(module, *_PARTIAL), *_rope_parameters(module)):
        if isinstance(factor, float) and 0 < factor < 1:
            return int(width * factor)
    return width


def _rope_parameters(module: nn.Module) -> Iterator[Any]:
    for parameters in facts(module, "rope_parameters", "rope_scaling"):
        if isinstance(parameters, dict):
            yield parameters.get("partial_rotary_factor")


def _interleaved(module: nn.Module, used: set[str]) -> bool | None:
    """Which features turn together, seen by calling the model's own `rotate_…` on a probe; None where there is none."""
    space = vars(sys.modules.get(type(module).__module__, object))
    functions = [space[name] for name in used if callable(space.get(name))]
    for function in functions:
        code = getattr(inspect.unwrap(function), "__code__", None)
        names = set(_names(code)) if isinstance(code, CodeType) else set()
        if "view_as_complex" in names:
            return True
        for name in (*names, getattr(function, "__name__", "")):
            if name.startswith("rotate_") and callable(space.get(name)):
                return _partner_of_first(space[name]) == 1
    return True if "apply_rotary_position_embeddings" in used else None


def _partner_of_first(rotate: Any) -> int:
    """Which feature of 8 takes the place of the first, or gives way to it."""
    probe = torch.zeros(1, 1, 1, 8)
    probe[..., 0] = 1
    turned = rotate(probe)
    return int(turned.abs().reshape(-1).argmax()) if isinstance(turned, Tensor) else 0


# After the soft-max, and in it ----------------------------------------------------------------------------------------

_GATES = ("gate_proj", "g_proj", "attn_gate", "attention_gate", "output_gate", "linear_g", "out_gate", "sigmoid_gate", "gate")
_VALUE_NORMS = ("v_norm", "value_norm", "attn_sub_norm", "inner_attn_ln", "groupnorm", "sub_norm", "o_norm", "attn_ln")
_SINKS = ("sinks", "sink", "attention_sinks", "sink_proj", "attention_sink_bias")


def has_gate(module: nn.Module, features: int) -> bool:
    """Whether a map as wide as the context stands beside the projections: a gate a feature."""
    gates = (getattr(module, name, None) for name in _GATES)
    return any(getattr(gate, "out_features", None) == features for gate in gates)


def value_norm(module: nn.Module) -> str:
    """The child that normalizes values or context, or nothing."""
    found = (name for name in _VALUE_NORMS if isinstance(getattr(module, name, None), nn.Module))
    return next((name for name in found if not isinstance(getattr(module, name), nn.Identity)), "")


def has_sinks(module: nn.Module) -> bool:
    """Whether the soft-max has a term beside the keys, so that its rows do not sum to 1."""
    return any(getattr(module, name, None) is not None for name in _SINKS)
