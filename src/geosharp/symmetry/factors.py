"""Two matrices that the network sees only as a product.

Three instances: query and key of one head (one GL(h) a head), a frequency pair under rotary positions (GL(1, ℂ)), a ReLU
neuron (`group="positive"`: only positive scalings commute with the non-linearity). A `Factors` block enters the network
only through left · rightᵀ (rightᴴ over ℂ), so (G, H) -> (G A⁻¹, H Aᴴ) is free (math.md 2).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from geosharp.errors import SymmetryError
from geosharp.symmetry.view import AnyView, ComplexView, View, parameter_of, read, real_views, shape_of, write

Group = Literal["linear", "positive"]


@dataclass(frozen=True)
class Factors:
    """A stack of pairs (G, H) of equal shapes, each free up to its own group element."""

    name: str
    left: tuple[AnyView, ...]
    right: tuple[AnyView, ...]
    group: Group = "linear"
    kind: str = "product"
    left_carried: tuple[AnyView, ...] = ()
    right_carried: tuple[AnyView, ...] = ()
    """Rows that the group moves too but that are no coordinates of the block, because a translation removes them (b_k, b_v)."""

    def __post_init__(self) -> None:
        for side in (self.left, self.right):
            if not side:
                raise SymmetryError(f"expected views on both sides of block {self.name!r}, got none on one side")
        flavours = {isinstance(view, ComplexView) for view in (*self.left, *self.right)}
        if len(flavours) > 1:
            raise SymmetryError(f"expected the views of block {self.name!r} to be all real or all complex, got a mixture")

    @property
    def is_complex(self) -> bool:
        """Whether the block is one over ℂ."""
        return isinstance(self.left[0], ComplexView)

    @property
    def views(self) -> tuple[View, ...]:
        """Every real view of the block's coordinates."""
        return real_views((*self.left, *self.right))

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the parameters it touches."""
        every = (*self.views, *real_views((*self.left_carried, *self.right_carried)))
        return tuple(dict.fromkeys(view.parameter for view in every))

    def vanished(self, values: Mapping[str, Tensor]) -> str:
        """The first copy with a side that is exactly 0, by name, or nothing: such a product has no geometry."""
        sizes = [torch.stack([_largest(values, view) for view in side]).amax(0) for side in (self.left, self.right)]
        gone = torch.minimum(*sizes) == 0
        if not bool(gone.any()):
            return ""
        return self.name if len(gone) == 1 else f"{self.name}[{int(gone.nonzero()[0])}]"

    def with_carried(self, only: Iterable[View] | None = None) -> Factors:
        """The block with its carried rows (or only these) among its coordinates."""
        chosen = None if only is None else set(only)

        def parted(side: tuple[AnyView, ...], carried: tuple[AnyView, ...]) -> tuple[tuple[AnyView, ...], tuple[AnyView, ...]]:
            taken = tuple(view for view in carried if chosen is None or view in chosen)
            return (*side, *taken), tuple(view for view in carried if view not in taken)

        left, left_carried = parted(self.left, self.left_carried)
        right, right_carried = parted(self.right, self.right_carried)
        return dataclasses.replace(self, left=left, right=right, left_carried=left_carried, right_carried=right_carried)

    def read(self, values: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The stacks G (copies, n, h) and H (copies, m, h)."""
        sides = [[read(values, view) for view in side] for side in (self.left, self.right)]
        if len({(part.shape[0], part.shape[2]) for side in sides for part in side}) > 1:
            self.check(values)
        left, right = (side[0] if len(side) == 1 else torch.cat(side, dim=1) for side in sides)
        return left, right

    def check(self, values: Mapping[str, Tensor]) -> None:
        """One clear line where the views do not fit together."""
        shapes = [[shape_of(values, view) for view in side] for side in (self.left, self.right)]
        for side in shapes:
            if len({(shape[0], shape[2]) for shape in side}) > 1:
                given = [tuple(shape) for shape in side]
                raise SymmetryError(f"expected the views of one side of block {self.name!r} to agree in copies and width, got {given}")
        (copies, _, width), (other_copies, _, other_width) = shapes[0][0], shapes[1][0]
        if (copies, width) != (other_copies, other_width):
            raise SymmetryError(
                f"expected both sides of block {self.name!r} to have the same number of copies and the same width, "
                f"got {tuple(shapes[0][0])} and {tuple(shapes[1][0])}"
            )

    def write(self, values: Mapping[str, Tensor], left: Tensor, right: Tensor | None) -> None:
        """Copy stacks back into the parameters, in place; a side that is None stays."""
        for side, content in ((self.left, left), (self.right, right)):
            if content is None:
                continue
            sizes = [shape_of(values, view)[1] for view in side]
            for view, part in zip(side, content.split(sizes, dim=1), strict=True):
                write(values, view, part)

    def counted(self, values: Mapping[str, Tensor]) -> tuple[int, int]:
        """The number of copies and the width."""
        shape = shape_of(values, self.left[0])
        return shape[0], shape[2]

    def rows(self, values: Mapping[str, Tensor]) -> tuple[int, int]:
        """The number of rows of the two sides."""
        left, right = (sum(shape_of(values, view)[1] for view in side) for side in (self.left, self.right))
        return left, right

    def random_element(self, values: Mapping[str, Tensor], generator: torch.Generator, spread: float = 2.0) -> Tensor:
        """One group element a copy, singular values log-uniform in [1/spread, spread]: neither orthogonal nor diagonal.

        GL(h) has two components over the reals, and a claim is about both: copies take turns, from det < 0 on.
        """
        return random_matrices(*self.counted(values), self.group, self.is_complex, generator, spread)

    def act(self, values: Mapping[str, Tensor], element: Tensor, *, one_sided: bool = False, exactly: bool = True) -> None:
        """(G, H) -> (G A⁻¹, H Aᴴ) in place, carried rows included; the control applies the factor to G only.

        Products are formed in float64, or (not `exactly`) in the weights' own dtype, which is as good for small A.
        """
        whole = self.with_carried()
        if element.shape[-1] == 1 and not self.is_complex:
            whole._scale(values, element, one_sided=one_sided)
            return
        left, right = whole.read(values)
        element = element.to(left.device)
        wide = element.dtype if exactly else left.dtype
        # The inverse of a small, well-conditioned matrix and one product are many times faster than solving for all rows.
        moved_left = (left.to(wide) @ torch.linalg.inv(element).to(wide)).to(left.dtype)
        whole.write(values, moved_left, None if one_sided else (right.to(wide) @ element.mH.to(wide)).to(right.dtype))

    def _scale(self, values: Mapping[str, Tensor], element: Tensor, *, one_sided: bool) -> None:
        """Scalars act in place, one multiplication an entry: there may be very many (the neurons of a large model)."""
        for side, factors in ((self.left, 1 / element), (() if one_sided else self.right, element)):
            for view in real_views(side):
                target = view.of(parameter_of(values, view))
                leading = target.shape[:-2] if target.ndim > 2 else ()  # fewer dimensions are one copy
                target.mul_(factors.to(target).reshape(*leading, *(1,) * min(target.ndim, 2)))

    def tangents(self, values: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """A basis of the directions along the orbit, (GΛ, -HΛᴴ) a copy, as changes of the parameters."""
        whole = self.with_carried()
        left, right = whole.read(values)
        copies, width = left.shape[0], left.shape[2]
        units = torch.tensor([1, 1j] if self.is_complex else [1.0], dtype=left.dtype)
        pairs = [(i, i) for i in range(width)] if self.group == "positive" else list(itertools.product(range(width), repeat=2))
        for copy, (i, j), unit in itertools.product(range(copies), pairs, units.unbind()):
            Lambda = torch.zeros(copies, width, width, dtype=left.dtype, device=left.device)
            Lambda[copy, i, j] = unit
            change = {name: torch.zeros_like(values[name]) for name in whole.parameters}
            whole.write(change, left @ Lambda, -right @ Lambda.mH)
            yield change

    def describe(self, values: Mapping[str, Tensor]) -> tuple[str, int, int]:
        """Group name, number of copies, dimension of the whole group over the reals."""
        copies, width = self.counted(values)
        if self.group == "positive":
            return "GL+(1)", copies, copies
        field = ", C" if self.is_complex else ""
        return f"GL({width}{field})", copies, copies * width * width * (2 if self.is_complex else 1)

    def renamed(self, alias: Mapping[str, str]) -> Factors:
        """The block with tied parameters under the one name that they have as coordinates."""
        sides = (self.left, self.right, self.left_carried, self.right_carried)
        left, right, left_carried, right_carried = (tuple(view.renamed(alias) for view in side) for side in sides)
        return dataclasses.replace(self, left=left, right=right, left_carried=left_carried, right_carried=right_carried)


def _largest(values: Mapping[str, Tensor], view: AnyView) -> Tensor:
    """The largest entry of each copy in a view."""
    return torch.stack([torch.linalg.vector_norm(read(values, one), float("inf"), dim=(1, 2)) for one in real_views((view,))]).amax(0)


def random_matrices(copies: int, width: int, group: Group, is_complex: bool, generator: torch.Generator, spread: float) -> Tensor:
    """Random elements of a group, (copies, width, width)."""
    log_singular = (2 * torch.rand(copies, width, generator=generator, dtype=torch.float64) - 1) * math.log(spread)
    if group == "positive":
        return torch.diag_embed(log_singular.exp())
    turns = (-1.0) ** (1 + torch.arange(copies))
    if width == 1:
        return log_singular.exp().unsqueeze(-1) * _units(turns, is_complex, generator)
    kind = torch.complex128 if is_complex else torch.float64
    first, second = (torch.linalg.qr(torch.randn(copies, width, width, generator=generator, dtype=kind))[0] for _ in range(2))
    if not is_complex:
        first = first.clone()
        first[:, :, 0] *= (turns * torch.linalg.det(first).sign() * torch.linalg.det(second).sign()).unsqueeze(-1)
    element: Tensor = first @ (log_singular.exp().unsqueeze(-1) * second)
    return element


def _units(turns: Tensor, is_complex: bool, generator: torch.Generator) -> Tensor:
    """Scalars of modulus 1: signs, or phases."""
    if not is_complex:
        return turns.view(-1, 1, 1)
    angles = 2 * math.pi * torch.rand(len(turns), 1, 1, generator=generator, dtype=torch.float64)
    return torch.polar(torch.ones_like(angles), angles)
