"""Find the linear maps of an attention layer by the roles that their names give them, and divide their features by heads."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from geosharp.symmetry.between import (
    added_maps,
    gain_offset,
    has_gate,
    has_sinks,
    is_clipped,
    is_cosine,
    norm_names,
    number,
    pooled_queries,
    rotary_of,
    value_convolution,
    value_norm,
)
from geosharp.symmetry.code import attends
from geosharp.symmetry.features import Features, LinearMap, join, linear_map
from geosharp.symmetry.site import AttentionSite, Norm
from geosharp.symmetry.view import View

_OUTPUTS = (
    "o_proj", "out_proj", "out_lin", "o", "dense", "fc_out", "proj", "c_proj", "to_out", "Wo", "wo", "out", "output_proj", "linear_out",
    "output", "projection", "projection_layer", "post", "attention_out", "post_proj", "W_o", "w_o", "WO", "W_O", "fc_o", "proj_o",
    "unifyheads", "out_linear", "fc", "to_o",
)  # fmt: skip
_OUTPUTS_ABOVE = ("output.dense", "post_attention.conv1d")
_WIDTHS = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim", "kv_channels", "attention_head_dim", "dim_head")
_HEADS = (
    "num_heads",
    "num_attention_heads",
    "n_heads",
    "n_head",
    "nhead",
    "num_attn_heads",
    "encoder_attention_heads",
    "heads",
    "nheads",
    "nb_heads",
)
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "num_key_value_head", "n_kv_heads", "kv_n_heads", "kv_heads", "num_query_groups")


def map_at(module: nn.Module, prefix: str, path: str) -> LinearMap | None:
    """The linear map at a path below a module, or inside the first place of a sequence there."""
    owner: nn.Module | None = module
    for step in path.split("."):
        owner = None if owner is None else owner._modules.get(step)  # asked for every name at every module, so without getattr
    if isinstance(owner, (nn.Sequential, nn.ModuleList)) and len(owner):
        path, owner = f"{path}.0", owner[0]
    return _linear(owner, join(prefix, path))


def _linear(module: object, path: str) -> LinearMap | None:
    """A linear map by itself, as the only child of a wrapper, as a convolution of width 1, or under a class name of its own."""
    found = linear_map(module, path)
    if found is not None or not isinstance(module, nn.Module):
        return found
    inner = getattr(module, "linear", None)
    if inner is not None and len(list(module.parameters())) == len(list(inner.parameters())) and len(module._modules) == 1:
        return linear_map(inner, join(path, "linear"))
    weight, has_bias = getattr(module, "weight", None), isinstance(getattr(module, "bias", None), Tensor)
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        return None
    if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        sizes, pads = (*module.kernel_size, *module.stride), tuple(module.padding)
        plain = all(size == 1 for size in sizes) and not any(pad != 0 for pad in pads)
        found = PointMap(path, weight.shape[0], weight.shape[1], False, has_bias, kernel=weight.ndim - 2, groups=module.groups)
        return found if plain else None
    outputs, inputs = getattr(module, "out_features", None), getattr(module, "in_features", None)
    if type(module).__name__.endswith("Linear") and tuple(weight.shape) == (outputs, inputs) and not getattr(module, "quant_mode", False):
        return LinearMap(path, weight.shape[0], weight.shape[1], False, has_bias)
    return None


@dataclass(frozen=True)
class PointMap(LinearMap):
    """A convolution with a kernel of width 1: a linear map at each position. In groups its inputs are those of a group."""

    kernel: int = 0
    groups: int = 1

    def made(self) -> Features:
        """Its outputs as features."""
        return Features(View(f"{self.path}.weight")[(..., *(0 for _ in range(self.kernel)))], self.bias)

    def used(self) -> Features:
        """Its inputs as features; `inputs` says that in groups these are not all."""
        return Features(View(f"{self.path}.weight")[(..., *(0 for _ in range(self.kernel)))].T)


def output_map(module: nn.Module, name: str, parent: nn.Module | None, inputs: int) -> LinearMap | None:
    """The map that reads the heads' context: in the attention module itself, or in the one around it."""
    above = name.rpartition(".")[0]
    places: Iterable[tuple[nn.Module | None, str, str]] = (
        *((module, name, path) for path in _OUTPUTS),
        *((parent, above, path) for path in _OUTPUTS_ABOVE),
        *((parent, above, path) for path in _OUTPUTS),
    )
    for owner, prefix, path in places:
        found = map_at(owner, prefix, path) if owner is not None else None
        if found is not None and found.inputs == inputs:  # a convolution in groups has fewer
            return found
    return None


@dataclass(frozen=True)
class Heads:
    """How features divide: `groups` key-value heads, each met by `per_group` query heads of `width` features."""

    groups: int
    per_group: int
    width: int

    @property
    def queries(self) -> int:
        """Query heads."""
        return self.groups * self.per_group

    def of_groups(self, features: Features) -> tuple[Features, ...]:
        """Features (query heads · anything), one (groups, anything) for each query head of a group."""
        divided = features.split(0, self.groups, self.per_group, -1)
        return tuple(divided[:, j] for j in range(self.per_group))


def divided(module: nn.Module, queries: int, keys: int) -> tuple[Heads, bool] | None:
    """The heads that make up so many query and key features, and whether the query map makes a gate for each head too."""
    count, width = head_count(module), number(module, *_WIDTHS)
    doubled = bool(count and width and queries == 2 * count * width)
    if count and not doubled and queries % count == 0:
        width = queries // count
    if not width:
        return None
    heads, groups = queries // width // (2 if doubled else 1), keys // width
    if not groups or keys % width or queries % width or heads % groups:
        return None
    return Heads(groups, heads // groups, width), doubled


def head_count(module: nn.Module) -> int | None:
    """Query heads as the module or its config says them."""
    return number(module, *_HEADS)


def key_heads(module: nn.Module) -> int | None:
    """Key-value heads as the module or its config says them."""
    return number(module, *_KEY_HEADS)


def finished(site: AttentionSite, module: nn.Module, prefix: str) -> list[AttentionSite]:
    """The site with what stands between its maps, in the readings that the module's code leaves open."""
    context = site.heads * site.width
    sinks, (convolution, channels) = has_sinks(module), value_convolution(module)
    rotary = rotary_of(module, site.width)
    site = dataclasses.replace(
        site,
        rotary=rotary,
        value_rotary=rotary is not None and bool(getattr(module, "rotary_value", False)),
        norm=_norm(site, module, prefix),
        # A convolution with a kernel of its own for each feature takes them apart.
        gated=site.gated or has_gate(module, context) or channels > site.heads,
        key_shifts_free=tuple(free and not sinks for free in site.key_shifts_free),
        value_shift_is_free=site.value_shift_is_free and not sinks and not convolution,
        broken=site.broken or _broken(module),
        value_broken=(name := value_norm(module)) and f"{name} normalizes values or context",
    )
    if rotary is None or rotary.known:
        return [site]
    return [site, dataclasses.replace(site, rotary=dataclasses.replace(rotary, interleaved=not rotary.interleaved))]


def _broken(module: nn.Module) -> str:
    """Why neither queries and keys nor values and output are products, or nothing."""
    if not attends(module):
        return "no soft-max in its forward pass: linear attention has no layout"
    if name := added_maps(module):
        return f"{name} adds further maps to the projections"
    return "clip_qkv clamps queries, keys and values" if is_clipped(module) else ""


def _norm(site: AttentionSite, module: nn.Module, prefix: str) -> Norm | None:
    projection = site.query[0].weight.parameter.removeprefix(f"{prefix}." if prefix else "").partition(".")[0]
    names = norm_names(module, projection)
    if names is None:
        pooled = pooled_queries(module)
        return Norm(pooled) if pooled else Norm("a normalization to length 1", cosine=True) if is_cosine(module) else None
    gains = [gain_of(getattr(module, name), join(prefix, name)) for name in names]
    label = " and ".join(dict.fromkeys(names))
    if gains[0] is None or gains[1] is None:
        return Norm(label)
    groups = site.heads // len(site.query)
    sizes = [gain_size(getattr(module, name)) for name in names]
    if sizes == [site.width, site.width]:
        return Norm(label, (gains[0][None],), (gains[1][None],))
    if sizes == [site.heads * site.width, groups * site.width]:
        return Norm(label, Heads(groups, site.heads // groups, site.width).of_groups(gains[0]), (gains[1].split(0, groups, -1),))
    return Norm(label)


def gain_of(norm: nn.Module, path: str) -> Features | None:
    """The gains of a norm as features (size,) with one row, and its biases; nothing where 1 is added to them."""
    if gain_offset(norm) != 0.0:
        return None
    bias = View(f"{path}.bias") if isinstance(getattr(norm, "bias", None), Tensor) else None
    return Features(View(f"{path}.weight")[:, None], bias)


def gain_size(norm: nn.Module) -> int | None:
    """The number of gains of a norm with one a feature."""
    weight = getattr(norm, "weight", None)
    return weight.numel() if isinstance(weight, Tensor) and weight.ndim == 1 else None


def adapted(*maps: LinearMap) -> str:
    """Why the weights alone are not the maps, or nothing."""
    names = [one.path.removesuffix(".base_layer") for one in maps if one.adapted]
    return f"{names[0]} carries an adapter, so its weight alone is no factor; merge the adapter to use this block" if names else ""


def common(first: str, second: str) -> str:
    """The innermost module that holds both paths."""
    shared = []
    for a, b in zip(first.split("."), second.split("."), strict=False):
        if a != b:
            break
        shared.append(a)
    return join(*shared) or "attention"
