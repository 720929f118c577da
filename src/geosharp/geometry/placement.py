"""From stacks of matrices back to whole parameters, as one differentiable linear map.

Views scatter each block's entries into its parameters; the adjoint gathers them. Written as one autograd function because
a chain of in-place slices would clone the whole parameter once a slice on the way back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from geosharp.symmetry.view import AnyView, read, write


@dataclass(frozen=True)
class Placement:
    """Which views fill which parameters. `views` are in the order of the pieces given to `place`."""

    views: tuple[AnyView, ...]
    shapes: Mapping[str, torch.Size]
    covered: Mapping[str, Tensor]
    """Parameters with some entries outside every block: mask of the entries that blocks cover."""

    def place(self, pieces: list[Tensor], templates: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The parameters: templates (needed where a parameter is not covered entirely) overwritten by the pieces."""
        given = [templates[name] for name in self.covered]
        out = _Place.apply(self, *pieces, *given)  # type: ignore[no-untyped-call]  # torch leaves `apply` without types
        return dict(zip(self.shapes, out, strict=True))

    def gather(self, values: Mapping[str, Tensor]) -> list[Tensor]:
        """The adjoint on the pieces."""
        return [read(values, view) for view in self.views]


class _Place(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: Placement, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.plan = plan
        pieces, templates = inputs[: len(plan.views)], inputs[len(plan.views) :]
        like = pieces[0].real if pieces[0].is_complex() else pieces[0]
        given = dict(zip(plan.covered, templates, strict=True))
        values = {name: given[name].clone() if name in given else like.new_empty(shape) for name, shape in plan.shapes.items()}
        for view, piece in zip(plan.views, pieces, strict=True):
            write(values, view, piece)
        return tuple(values.values())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        plan: Placement = ctx.plan
        values = dict(zip(plan.shapes, grads, strict=True))
        rest = [values[name] * ~mask for name, mask in plan.covered.items()]
        return (None, *plan.gather(values), *rest)
