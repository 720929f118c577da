"""Attention with relative positions as in Transformer-XL: what meets the queries besides the keys, and the keys besides the queries.

The logits are (q + u) · k + (q + v) · r (+ (q + s) · segment), with u, v, s learned a head, and r a map of positions: each of
these terms is a product of the same features, so all of them join the stacks. Projections are linear modules, or parameters
(inputs, heads, width) as XLNet writes them; Conformers have `linear_pos`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from geosharp.symmetry.features import Features, join
from geosharp.symmetry.layouts.projections import common, finished, map_at, output_map
from geosharp.symmetry.reading import Known, Reading
from geosharp.symmetry.site import AttentionSite
from geosharp.symmetry.view import View, parameter_of

_PROJECTIONS = (
    ("q_head", "k_head", "v_head"), ("q", "k", "v"), ("linear_q", "linear_k", "linear_v"), ("q_proj", "k_proj", "v_proj"),
)  # fmt: skip
_CONTENT = ("r_w_bias", "pos_bias_u", "bias_u")
_OTHERS = ("r_r_bias", "pos_bias_v", "bias_v", "r_s_bias")
_POSITIONS = ("r_kernel", "r", "linear_pos", "relative_k_proj")
_SEGMENTS = "seg_embed"


def relative(name: str, module: nn.Module, parent: nn.Module | None) -> list[AttentionSite]:
    """The attention layer of a module with a bias of its own for queries that meet keys."""
    content = _head_bias(module, name, _CONTENT)
    position = next((one for path in _POSITIONS if (one := _projection(module, name, path, content)) is not None), None)
    if content is None or position is None:
        return []
    for paths in _PROJECTIONS:
        query, key, value = (_projection(module, name, path, content) for path in paths)
        if query is not None and key is not None and value is not None:
            return _sites(name, module, parent, content, (query, key, value), position)
    return []


def _sites(
    name: str, module: nn.Module, parent: nn.Module | None, content: View, sides: tuple[Features, ...], position: Features
) -> list[AttentionSite]:
    (query, key, value), (count, width) = sides, _shape(module, content, name)
    output = output_map(module, name, parent, count * width)
    whole = _projection(module, name, "o", content)
    if output is None and whole is None:
        return []
    # u takes the place of a query bias; where the map has one as well, they are two rows.
    own = () if query.bias is None else (Features(query.bias[..., None]),)
    others = tuple(Features(one[..., None]) for path in _OTHERS if (one := _head_bias(module, name, (path,))) is not None)
    segments = isinstance(getattr(module, _SEGMENTS, None), nn.Parameter)
    seen = (Features(View(join(name, _SEGMENTS)).permute(1, 2, 0)),) if segments else ()
    site = AttentionSite(
        name=common(query.weight.parameter, output.path if output is not None else join(name, "o")),
        heads=count,
        width=width,
        query=(Features(query.weight, content), *own, *others),
        key=(key, position, *seen),
        value=(value,),
        output=(output.used().split(0, count, -1),) if output is not None else (whole,) if whole is not None else (),
        output_bias=None if output is None else output.bias,
        key_shifts_free=(True, *(False for _ in (position, *seen))),
    )
    return finished(site, module, name)


def _head_bias(module: nn.Module, name: str, paths: tuple[str, ...]) -> View | None:
    """A parameter (heads, width)."""
    found = (path for path in paths if isinstance(one := getattr(module, path, None), nn.Parameter) and one.ndim == 2)
    path = next(found, None)
    return None if path is None else View(join(name, path))


def _shape(module: nn.Module, content: View, name: str) -> tuple[int, int]:
    """Heads and their width."""
    parameter = getattr(module, content.parameter.removeprefix(f"{name}." if name else ""))
    return int(parameter.shape[0]), int(parameter.shape[1])


def _projection(module: nn.Module, name: str, path: str, content: View | None) -> Features | None:
    """A map's outputs as features (heads, width), from a linear module or a parameter (inputs, heads, width)."""
    if content is None:
        return None
    count = _shape(module, content, name)
    own = getattr(module, path, None)
    if isinstance(own, Tensor):
        return Features(View(join(name, path)).permute(1, 2, 0)) if own.ndim == 3 and tuple(own.shape[1:]) == count else None
    found = map_at(module, name, path)
    return None if found is None or found.outputs != count[0] * count[1] else found.made().split(0, count[0], -1)


def whole_output_mean(name: str, module: nn.Module, parent: nn.Module | None) -> list[Reading]:
    """The layer norm behind an output map (outputs, heads, width) takes out the mean over outputs."""
    output, norm = getattr(module, "o", None), getattr(module, "layer_norm", None)
    if not isinstance(output, nn.Parameter) or output.ndim != 3 or not isinstance(norm, nn.LayerNorm):
        return []
    size, path = output[0].numel(), join(name, "o")
    reason = "its entries are coordinates already"
    return [Reading((), (), (Known(join(path, "mean"), "output mean", f"R^{size}", size, reason, _WholeMean(path)),))]


@dataclass(frozen=True)
class _WholeMean:
    """One number added to all outputs of a feature."""

    path: str

    def __call__(self, values: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        parameter = parameter_of(values, View(self.path))
        for head, feature in itertools.product(range(parameter.shape[1]), range(parameter.shape[2])):
            change = torch.zeros_like(parameter)
            change[:, head, feature] = 1
            yield {self.path: change}
