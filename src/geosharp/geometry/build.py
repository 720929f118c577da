"""Build a chart: translations out, blocks into the canonical gauge, the rest element-wise. Done once, outside autograd."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from geosharp.errors import GeosharpError
from geosharp.geometry.chart import Chart, Entry, Stack
from geosharp.geometry.elementwise import ElementwiseMetric, ElementwisePath, scale_of
from geosharp.geometry.gauge import canonical_frame
from geosharp.geometry.metric import METRICS
from geosharp.geometry.placement import Placement
from geosharp.symmetry.block import Block, Factors, Translation
from geosharp.symmetry.view import read, real_views, write

PATHS = ("straight", "second-order", "exact")


@dataclass(frozen=True)
class Geometry:
    """What distinguishes one chart from another on the same model.

    `metric` None means no blocks: everything is element-wise.
    """

    metric: str | None = None
    path: str = "straight"
    elementwise: ElementwiseMetric = "adaptive"
    elementwise_path: ElementwisePath = "straight"
    epsilon: float = 0.0

    def __post_init__(self) -> None:
        if self.metric is not None and self.metric not in METRICS:
            raise GeosharpError(f"expected metric to be one of {', '.join(METRICS)} or None, got {self.metric!r}")
        for label, path in (("path", self.path), ("elementwise_path", self.elementwise_path)):
            if path not in PATHS:
                raise GeosharpError(f"expected {label} to be one of {', '.join(PATHS)}, got {path!r}")
        if not (self.epsilon >= 0 and self.epsilon < float("inf")):
            raise GeosharpError(f"expected epsilon to be a finite number >= 0, got {self.epsilon}")
        if self.epsilon > 0 and self.path == "exact":
            raise GeosharpError("an exact path has no epsilon: its closed form is that of epsilon = 0; use the second-order path")


def build_chart(
    values: Mapping[str, Tensor],
    blocks: Sequence[Block],
    geometry: Geometry,
    *,
    fixed: Mapping[str, Tensor],
    padding: Mapping[str, Any],
    stored: Mapping[str, torch.dtype],
) -> Chart:
    """The chart around `values` (the coordinates' parameters, in the compute dtype).

    `fixed` are parameters that are no coordinates, `padding` maps embeddings to the index that autograd masks, `stored` are
    the dtypes in which the user's weights were stored.
    """
    blocks = list(blocks) if geometry.metric is not None else []
    like = next(iter(values.values()))
    touched = {name for block in blocks for name in block.parameters}
    # Canonicalization is done in float64 on copies of what the blocks touch, and of nothing else.
    wide = {name: value.detach().to(torch.float64, copy=True) if name in touched else value.detach() for name, value in values.items()}
    view = {**fixed, **wide}
    removed = tuple((block, block.remove(view)) for block in blocks if isinstance(block, Translation))
    factors = [block for block in blocks if isinstance(block, Factors)]
    stacks = tuple(_stack(group, wide, geometry, stored, like.dtype) for group in _groups(factors, wide))
    for stack in stacks:
        _carry(stack, wide)
    canonical = {name: value.to(like.dtype) for name, value in wide.items()}
    masks = _coverage(factors, [translation for translation, _ in removed], canonical)
    entries, constants, counts = _elementwise(canonical, masks, geometry, padding)
    counts["removed_by_translation"] = sum(bias.numel() for _, bias in removed)
    counts["block_entries"] = sum(sum(stack.sizes) for stack in stacks)
    counts["vertical_dimensions"] = sum(stack.group_dim for stack in stacks)
    return Chart(
        entries=entries,
        stacks=stacks,
        placement=_placement(stacks, canonical, masks) if stacks else None,
        constants=constants,
        elementwise_metric=geometry.elementwise,
        elementwise_path=geometry.elementwise_path,
        path=geometry.path,
        removed=removed,
        counts=counts,
    )


def _groups(factors: Sequence[Factors], values: Mapping[str, Tensor]) -> list[list[Factors]]:
    groups: dict[tuple[object, ...], list[Factors]] = {}
    for block in factors:
        signature = (*block.rows(values), block.counted(values)[1], block.group, block.is_complex)
        groups.setdefault(signature, []).append(block)
    return list(groups.values())


def _stack(
    blocks: list[Factors], values: Mapping[str, Tensor], geometry: Geometry, stored: Mapping[str, torch.dtype], compute: torch.dtype
) -> Stack:
    assert geometry.metric is not None
    sides = [block.read(values) for block in blocks]
    copies = tuple(left.shape[0] for left, _ in sides)
    names = [block.name if count == 1 else f"{block.name}[{i}]" for block, count in zip(blocks, copies, strict=True) for i in range(count)]
    coarsest = max((stored[name] for block in blocks for name in block.parameters), key=lambda dtype: torch.finfo(dtype).eps)
    frame = canonical_frame(
        torch.cat([left for left, _ in sides]),
        torch.cat([right for _, right in sides]),
        names,
        positive=blocks[0].group == "positive",
        epsilon=geometry.epsilon,
        stored=coarsest,
        compute=compute,
    )
    metric = METRICS[geometry.metric]
    rows = tuple(([read(values, v).shape[1] for v in block.left], [read(values, v).shape[1] for v in block.right]) for block in blocks)
    return Stack(tuple(blocks), copies, rows, frame, metric, metric.weight(frame), metric.scale(frame))


def _carry(stack: Stack, values: Mapping[str, Tensor]) -> None:
    """Rows that a group moves too and that are no coordinates follow into the canonical gauge (a padding row; removed biases are 0)."""
    backs = zip(stack.frame.back_left.split(stack.copies), stack.frame.back_right.split(stack.copies), strict=True)
    for block, sides in zip(stack.blocks, backs, strict=True):
        for views, back in zip((block.left_carried, block.right_carried), sides, strict=True):
            for view in views:
                write(values, view, torch.linalg.solve(back, read(values, view).to(back.dtype), left=False))


def _coverage(
    factors: Sequence[Factors], translations: Sequence[Translation], values: Mapping[str, Tensor]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Parameter -> (entries in a product block, entries removed by a translation)."""
    masks: dict[str, tuple[Tensor, Tensor]] = {}

    def mask(name: str, which: int) -> Tensor:
        if name not in masks:
            empty = torch.zeros(values[name].shape, dtype=torch.bool, device=values[name].device)
            masks[name] = (empty, empty.clone())
        return masks[name][which]

    for block in factors:
        for view in real_views((*block.left, *block.right)):
            view.of(mask(view.parameter, 0)).fill_(True)
    for translation in translations:
        translation.shifted.of(mask(translation.shifted.parameter, 1)).fill_(True)
    return masks


def _elementwise(
    values: Mapping[str, Tensor], masks: Mapping[str, tuple[Tensor, Tensor]], geometry: Geometry, padding: Mapping[str, Any]
) -> tuple[tuple[Entry, ...], dict[str, Tensor], dict[str, int]]:
    entries, constants = [], {}
    counts = {"elementwise_entries": 0, "zero_weights": 0, "padding_entries": 0}
    for name, value in values.items():
        free = ~(masks[name][0] | masks[name][1]) if name in masks else None
        if name in padding:
            free = torch.ones_like(value, dtype=torch.bool) if free is None else free
            counts["padding_entries"] += int(free[padding[name]].sum())
            free[padding[name]] = False
        if geometry.elementwise == "adaptive":
            still = value == 0
            zeros = int((still if free is None else still & free).sum())
            counts["zero_weights"] += zeros
            if zeros:
                free = ~still if free is None else free & ~still
        if free is not None and not bool(free.any()):
            if name not in masks or not bool(masks[name][0].all()):
                constants[name] = value
            continue
        counts["elementwise_entries"] += value.numel() if free is None else int(free.sum())
        entries.append(Entry(name, value, scale_of(value, geometry.elementwise, free), free))
    return tuple(entries), constants, counts


def _placement(stacks: Sequence[Stack], values: Mapping[str, Tensor], masks: Mapping[str, tuple[Tensor, Tensor]]) -> Placement:
    views = tuple(view for stack in stacks for block in stack.blocks for view in (*block.left, *block.right))
    touched = dict.fromkeys(view.parameter for view in real_views(views))
    covered = {name: masks[name][0] for name in touched if not bool(masks[name][0].all())}
    return Placement(views, {name: values[name].shape for name in touched}, covered)
