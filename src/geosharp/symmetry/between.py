"""What stands between projections and logits, read off a module's code and config: rotary positions, norms, gates, clipping."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from geosharp.symmetry.code import happens, names_of, names_used, sources
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
            try:
                value = getattr(holder, name, None)
            except Exception:  # a config may refuse what differs from layer to layer
                continue
            if value is not None:
                yield value


def number(module: nn.Module, *names: str) -> int | None:
    """The first positive integer that a module or its config has under some names."""
    return next((value for value in facts(module, *names) if isinstance(value, int) and value > 0), None)


# In front of the soft-max ---------------------------------------------------------------------------------------------


def norm_names(module: nn.Module, projection: str = "") -> tuple[str, str] | None:
    """The children by which an attention layer normalizes queries and keys, unless it does so before this projection."""
    for names in _NORMS:
        found = [getattr(module, name, None) for name in names]
        if all(isinstance(child, nn.Module) and not isinstance(child, nn.Identity) for child in found):
            before = names[0] in sources(module).get(projection, ())
            return names if happens(module, set(names)) and not before else None
    return None


def gain_offset(norm: nn.Module) -> float | None:
    """What a norm adds to its gains before it multiplies with them, 0 or 1, seen by calling it; nothing where it is neither."""
    weight = getattr(norm, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 1 or not weight.is_floating_point():
        return None
    probe = torch.linspace(-1, 2, weight.numel() + 1, dtype=weight.dtype, device=weight.device)[1:]
    if isinstance(norm, (nn.LayerNorm, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d)):
        return 0.0
    still = {name: torch.zeros_like(bias) for name, bias in norm.named_parameters() if name == "bias"}
    for offset in (0.0, 1.0):
        try:
            with torch.no_grad():
                made = torch.func.functional_call(norm, {**still, "weight": torch.full_like(weight, -offset)}, (probe[None, None],))
        except Exception:  # whatever else it needs, it is not a plain norm
            return None
        if isinstance(made, Tensor) and not bool(made.any()):
            return offset
    return None


def pooled_queries(module: nn.Module) -> str:
    """What takes maxima over queries, or nothing."""
    return next((f"a maximum over {value} queries" for value in facts(module, "query_stride") if isinstance(value, int) and value > 1), "")


def is_cosine(module: nn.Module) -> bool:
    """Whether the forward pass normalizes something by a function."""
    return "normalize" in names_used(module)


def is_clipped(module: nn.Module) -> bool:
    """Whether queries, keys and values are clamped."""
    return any(value for value in facts(module, "clip_qkv"))


# Rotary positions -----------------------------------------------------------------------------------------------------


def rotary_of(module: nn.Module, width: int) -> Rotary | None:
    """The rotary positions of an attention layer with heads of this width."""
    used = {name for name in names_used(module) if "rotary" in name or "rope" in name or name.startswith("rotate_")}
    switches = [value for value in facts(module, "use_rope", "use_rotary", "rotary") if isinstance(value, bool)]
    used = {name for name in used if happens(module, {name})}
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
    """The factors of a config's own table, which may have one for each kind of layer."""
    kinds = [*facts(module, "layer_type", "attention_type"), *_kind_of_layer(module)]
    for parameters in facts(module, "rope_parameters", "rope_scaling"):
        if isinstance(parameters, dict):
            tables = [parameters, *(parameters[kind] for kind in kinds if isinstance(kind, str) and kind in parameters)]
            for table in tables:
                # A proportional table keeps all pairs where they are and gives the last ones the frequency 0.
                if isinstance(table, dict) and table.get("rope_type") != "proportional":
                    yield table.get("partial_rotary_factor")


def _kind_of_layer(module: nn.Module) -> Iterator[Any]:
    index = getattr(module, "layer_idx", None)
    for kinds in facts(module, "layer_types"):
        if isinstance(kinds, (list, tuple)) and isinstance(index, int) and index < len(kinds):
            yield kinds[index]


def _interleaved(module: nn.Module, used: set[str]) -> bool | None:
    """Which features turn together, seen by calling the model's own `rotate_…` on a probe; None where there is none."""
    space = vars(sys.modules.get(type(module).__module__, object))
    functions = [space[name] for name in used if callable(space.get(name))]
    for function in functions:
        partner = _partner_by_call(function)
        if partner is not None:
            return partner == 1
    for function in functions:
        names = names_of(function)
        if "view_as_complex" in names:
            return True
        for name in (*names, getattr(function, "__name__", "")):
            if name.startswith("rotate_") and callable(space.get(name)):
                return _partner_of_first(space[name]) == 1
    return True if "apply_rotary_position_embeddings" in used else None


def _partner_by_call(function: Any) -> int | None:
    """Which feature of 8 the model's own rotation of queries and keys mixes with the first; some put pairs in another order first."""
    probe, ones = torch.eye(8)[None, None], torch.ones(1, 8, 8)
    try:
        if list(inspect.signature(function).parameters)[:4] != ["q", "k", "cos", "sin"]:
            return None
        rows = function(probe, probe, ones, ones)[0].reshape(8, 8).abs() > 1e-6
    except Exception:  # whatever else it needs, it cannot be asked
        return None
    return next((j for j in range(1, 8) if torch.equal(rows[j], rows[0])), None)


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


_VALUE_CONVOLUTIONS = ("conv", "v_sconv", "v_conv", "value_conv", "v_conv1d", "get_v", "lepe", "dwconv")


def value_convolution(module: nn.Module) -> tuple[str, int]:
    """The child that convolves values over positions, and into how many groups it divides their features."""
    for name in _VALUE_CONVOLUTIONS:
        child = getattr(module, name, None)
        for one in child.modules() if isinstance(child, nn.Module) else ():
            if isinstance(one, (nn.Conv1d, nn.Conv2d)):
                return name, one.groups
    return "", 0


def added_maps(module: nn.Module) -> str:
    """The child that adds further maps to the projections, chosen by what is not the module's own, or nothing."""
    lists = (name for name, child in module.named_children() if "adapter" in name and isinstance(child, (nn.ModuleList, nn.ModuleDict)))
    return next((name for name in lists if any(True for _ in getattr(module, name).parameters())), "")


def neuron_norm(module: nn.Module) -> str:
    """The child that normalizes what some linear maps of the same module made and others read, or nothing."""
    maps = {name for name, child in module.named_children() if isinstance(child, nn.Linear)}
    # A norm behind all maps is the layer's own; one that stands in front or behind by a switch is not between either.
    between = (name for name, before in sources(module).items() if "norm" in name.lower() and before & maps and not maps <= before)
    return next((name for name in between if isinstance(getattr(module, name, None), nn.Module) and _is_read(module, name, maps)), "")


def _is_read(module: nn.Module, name: str, maps: set[str]) -> bool:
    return any(name in before for path, before in sources(module).items() if path in maps)


def map_of_values(module: nn.Module, features: int) -> str:
    """A further child that reads all values (to mask keys by them), or nothing."""
    child = getattr(module, "dt_proj", None)
    return "dt_proj" if isinstance(child, nn.Linear) and child.in_features == features else ""
