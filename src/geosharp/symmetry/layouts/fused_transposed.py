"""GPT-2's attention: one `Conv1D` (weights transposed: in x out) holding query, key and value side by side."""

from __future__ import annotations

from torch import Tensor, nn

from geosharp.symmetry.layouts.separate import head_count
from geosharp.symmetry.site import AttentionSite, Projection
from geosharp.symmetry.view import View


def _is_transposed_linear(module: object) -> bool:
    return type(module).__name__ == "Conv1D" and isinstance(getattr(module, "weight", None), Tensor) and hasattr(module, "nf")


def fused_transposed(name: str, module: nn.Module) -> AttentionSite | None:
    """The attention layer of a module with transposed fused `c_attn` and `c_proj`."""
    fused, output = getattr(module, "c_attn", None), getattr(module, "c_proj", None)
    heads = head_count(module)
    if heads is None or not (_is_transposed_linear(fused) and _is_transposed_linear(output)):
        return None
    assert isinstance(fused, nn.Module)
    assert isinstance(fused.weight, Tensor)
    embed, columns = fused.weight.shape
    if columns != 3 * embed or embed % heads:
        return None
    width = embed // heads

    def projection(position: int) -> Projection:
        span = slice(position * embed, (position + 1) * embed)
        weight = View(f"{name}.c_attn.weight")[:, span].unflatten(1, (heads, width)).permute(1, 0, 2)
        return Projection(weight, View(f"{name}.c_attn.bias")[span].unflatten(0, (heads, 1, width)))

    return AttentionSite(
        name=name,
        query=projection(0),
        key=projection(1),
        value=projection(2),
        output=View(f"{name}.c_proj.weight").unflatten(0, (heads, width)).mT,
        output_bias=View(f"{name}.c_proj.bias"),
    )
