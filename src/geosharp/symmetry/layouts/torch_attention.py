"""`torch.nn.MultiheadAttention`: fused, unfused, cross; and other modules that hold its fused parameters themselves."""

from __future__ import annotations

from torch import Tensor, nn

from geosharp.symmetry.between import number
from geosharp.symmetry.features import Features, adds, join
from geosharp.symmetry.layouts.projections import Heads, finished, map_at
from geosharp.symmetry.site import AttentionSite
from geosharp.symmetry.view import View


def torch_attention(name: str, module: nn.Module, parent: nn.Module | None) -> list[AttentionSite]:
    """The attention layer of a module with `in_proj_weight`, or with `q_proj_weight` and its siblings."""
    if isinstance(getattr(module, "base_layer", None), nn.Module):  # an adapter that shows the weights of its base as its own
        return []
    sides = _sides(name, module)
    count = number(module, "num_heads", "n_heads")
    output = map_at(module, name, "out_proj")
    if sides is None or count is None or output is None or output.inputs % count:
        return []
    heads = Heads(count, 1, output.inputs // count)
    query, key, value = (one.split(0, count, -1) for one in sides)
    extra = [_row(module, name, path, heads) for path in ("bias_k", "bias_v")]
    whole = extra[0] is None and not getattr(module, "add_zero_attn", False)
    site = AttentionSite(
        name=name or "attention",
        heads=count,
        width=heads.width,
        query=(query,),
        key=(key, *(() if extra[0] is None else (extra[0],))),
        value=(value, *(() if extra[1] is None else (extra[1],))),
        output=(output.used().split(0, count, -1),),
        output_bias=output.bias,
        key_shifts_free=(whole, *(() if extra[0] is None else (False,))),
        value_shift_is_free=whole,
        broken=_adapted(name, module, parent),
        extra_rows=extra[0] is not None and not getattr(module, "add_zero_attn", False),
    )
    return finished(site, module, name)


def _adapted(name: str, module: nn.Module, parent: nn.Module | None) -> str:
    if getattr(parent, "base_layer", None) is not module or not adds(parent):
        return ""
    return f"{name.removesuffix('.base_layer')} carries an adapter, so its weights are no factors; merge the adapter to use this block"


def _sides(name: str, module: nn.Module) -> list[Features] | None:
    """Queries, keys and values as features (embedding, inputs)."""
    bias = join(name, "in_proj_bias") if isinstance(getattr(module, "in_proj_bias", None), Tensor) else None
    fused, size = getattr(module, "in_proj_weight", None), 0
    names = [join(name, f"{side}_proj_weight") for side in "qkv"]
    if isinstance(fused, Tensor):
        size = fused.shape[0] // 3
        weights = [View(join(name, "in_proj_weight"))[start : start + size] for start in (0, size, 2 * size)]
    elif all(isinstance(getattr(module, f"{side}_proj_weight", None), Tensor) for side in "qkv"):
        size = getattr(module, "q_proj_weight").shape[0]  # noqa: B009 - of this layout only
        weights = [View(path) for path in names]
    else:
        return None
    return [Features(weight, bias and View(bias)[i * size : (i + 1) * size]) for i, weight in enumerate(weights)]  # type: ignore[arg-type]


def _row(module: nn.Module, name: str, path: str, heads: Heads) -> Features | None:
    """An extra key or value of every sequence, (1, 1, embedding), as features with one row."""
    if not isinstance(getattr(module, path, None), Tensor):
        return None
    return Features(View(join(name, path))[0].permute(1, 0)).split(0, heads.groups, -1)
