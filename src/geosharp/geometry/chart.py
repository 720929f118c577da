"""The chart: a frozen map from whitened coordinates around a model to parameters.

`walk(z)` reaches parameters, `lift(z)` is its derivative at 0 and an isometry from range Π onto the horizontal space,
`project` is Π, `pull_back` is the adjoint of `lift`, `coordinates` its inverse on horizontal vectors (math.md 1). A point z
is a list of pieces, one tensor per element-wise parameter and two per group of equal blocks; `split` and `join` go between
that and one flat vector.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from geosharp.geometry import elementwise, horizontal
from geosharp.geometry.elementwise import ElementwiseMetric, ElementwisePath
from geosharp.geometry.gauge import Frame
from geosharp.geometry.metric import Metric, walk
from geosharp.geometry.placement import Placement
from geosharp.symmetry.block import Factors, Translation

Point = list[Tensor]


@dataclass(frozen=True)
class Entry:
    """One parameter with element-wise coordinates, or some of its rows (then `whole` is the parameter)."""

    name: str
    weight: Tensor
    scale: Tensor | None
    """The factor of `lift`; None means 1."""
    free: Tensor | None
    """Mask of the entries that move; None means all."""
    rows: Tensor | None = None
    whole: Tensor | None = None

    def restricted(self, rows: Tensor) -> Entry:
        """The entry on some rows of its parameter; the others stay."""
        parts = (None if part is None else part.index_select(0, rows) for part in (self.weight, self.scale, self.free))
        weight, scale, free = parts
        assert weight is not None
        return Entry(self.name, weight, scale, free, rows, self.weight)

    def full(self, moved: Tensor) -> Tensor:
        """The whole parameter, given what the coordinates reach."""
        return moved if self.rows is None or self.whole is None else self.whole.index_copy(0, self.rows, moved)

    def part(self, values: Tensor) -> Tensor:
        """The rows of a tensor of the parameter's shape that are coordinates."""
        return values if self.rows is None else values.index_select(0, self.rows)


@dataclass(frozen=True)
class Stack:
    """All blocks of one shape and kind, as one batch."""

    blocks: tuple[Factors, ...]
    copies: tuple[int, ...]
    rows: tuple[tuple[list[int], list[int]], ...]
    """For each block, how its left and right rows divide among its views."""
    frame: Frame
    metric: Metric
    weight: Tensor
    scale: Tensor

    @property
    def sizes(self) -> tuple[int, int]:
        """Real coordinates of the two sides."""
        factor = 2 if self.frame.left.is_complex() else 1
        return factor * self.frame.left.numel(), factor * self.frame.right.numel()

    @property
    def group_dim(self) -> int:
        """Real dimension of the vertical space of all copies together."""
        count, _, h = self.frame.left.shape
        return count * h * h * (2 if self.frame.left.is_complex() else 1)

    def matrices(self, z_left: Tensor, z_right: Tensor) -> tuple[Tensor, Tensor]:
        """Real pieces as (complex) stacks: real parts, then imaginary parts, so that a piece may lie anywhere in a flat vector."""
        if self.frame.left.is_complex():
            left, right = (torch.complex(*piece.chunk(2, -1)) for piece in (z_left, z_right))
            return left, right
        return z_left, z_right

    def pieces(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """The inverse of `matrices`."""
        if left.is_complex():
            return torch.cat([left.real, left.imag], -1), torch.cat([right.real, right.imag], -1)
        return left, right

    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of the two real pieces."""
        factor = 2 if self.frame.left.is_complex() else 1
        (b, n, h), m = self.frame.left.shape, self.frame.right.shape[1]
        return (b, n, factor * h), (b, m, factor * h)


@dataclass(frozen=True)
class Chart:
    """The frozen geometry around one model. Built by `geosharp.geometry.build.build_chart`."""

    entries: tuple[Entry, ...]
    stacks: tuple[Stack, ...]
    placement: Placement | None
    constants: Mapping[str, Tensor]
    """Coordinates' parameters that do not move at all (a dropped key bias is 0 here)."""
    elementwise_metric: ElementwiseMetric
    elementwise_path: ElementwisePath
    path: str
    removed: tuple[tuple[Translation, Tensor], ...] = ()
    """Translations taken out, with the biases that were there (float64)."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Numbers for the record: what is where, and what does not move."""

    # Sizes --------------------------------------------------------------------------------------------------

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shape of each piece of a point."""
        found = [tuple(entry.weight.shape) for entry in self.entries]
        for stack in self.stacks:
            found += stack.shapes()
        return found

    @property
    def sizes(self) -> list[int]:
        """The number of coordinates in each piece."""
        return [torch.Size(shape).numel() for shape in self.shapes]

    @property
    def size(self) -> int:
        """The length of a flat point."""
        return sum(self.sizes)

    @property
    def dim(self) -> int:
        """The dimension of range Π: what moves, minus the vertical directions."""
        moving = sum(entry.weight.numel() if entry.free is None else int(entry.free.sum()) for entry in self.entries)
        return moving + sum(sum(stack.sizes) - stack.group_dim for stack in self.stacks)

    @property
    def reference(self) -> Tensor:
        """A tensor with the chart's dtype and device."""
        if self.entries:
            return self.entries[0].weight
        return self.stacks[0].frame.singular

    def split(self, flat: Tensor) -> Point:
        """A flat vector as pieces (views)."""
        parts = flat.split(self.sizes)
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def join(self, point: Point) -> Tensor:
        """Pieces as one flat vector."""
        return torch.cat([piece.reshape(-1) for piece in point])

    # Maps ---------------------------------------------------------------------------------------------------

    def project(self, point: Point) -> Point:
        """Π: idempotent and self-adjoint."""
        out = [piece if entry.free is None else piece * entry.free for entry, piece in zip(self.entries, point, strict=False)]
        for stack, left, right in self._stack_pieces(point[len(self.entries) :]):
            out += stack.pieces(*horizontal.project(stack.frame.left, stack.frame.right, left, right, stack.weight))
        return out

    def walk(self, point: Point) -> dict[str, Tensor]:
        """The parameters at Πz along the chart's path; `walk(0)` is the canonical form."""
        values = {
            entry.name: entry.full(elementwise.walk(entry.weight, entry.scale, piece, self.elementwise_metric, self.elementwise_path))
            for entry, piece in zip(self.entries, point, strict=False)
        }
        return {**self.constants, **values, **self.walk_stacks(point[len(self.entries) :], values)}

    def walk_stacks(self, pieces: Point, templates: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The parameters that blocks act on; `templates` are the element-wise ones, for parameters that are both."""
        moved = []
        for stack, left, right in self._stack_pieces(pieces):
            moved.append(walk(stack.metric, self.path, stack.frame, left, right))
        return self._placed(moved, {**self.constants, **templates})

    def lift(self, point: Point) -> dict[str, Tensor]:
        """The tangent vector with these coordinates: the derivative of `walk` at 0."""
        values = {}
        for entry, piece in zip(self.entries, point, strict=False):
            moved = piece if entry.scale is None else piece * entry.scale
            whole = moved if entry.rows is None else torch.zeros_like(self._whole(entry)).index_copy(0, entry.rows, moved)
            values[entry.name] = whole
        tangents = []
        for stack, left, right in self._stack_pieces(point[len(self.entries) :]):
            left, right = horizontal.project(stack.frame.left, stack.frame.right, left, right, stack.weight)
            tangents.append((left * stack.scale, right * stack.scale))
        constants = {name: torch.zeros_like(value) for name, value in self.constants.items()}
        return {**constants, **values, **self._placed(tangents, {**constants, **values})}

    def pull_back(self, gradient: Mapping[str, Tensor]) -> Point:
        """The adjoint of `lift`: Π · scale · gradient."""
        return self.project(self._dual(gradient, inverse=False))

    def coordinates(self, tangent: Mapping[str, Tensor]) -> Point:
        """The whitened coordinates of (the horizontal part of) a tangent vector: Π · scale⁻¹ · tangent."""
        return self.project(self._dual(tangent, inverse=True))

    def probe(self, generator: torch.Generator) -> Point:
        """A standard Gaussian point, projected; equal in distribution and, on an orbit, up to Π's own equivariance.

        With fixed Gaussian N₁, N₂ of G Hᵀ's two shapes, z_G = N₁V and z_H = N₂ᵀU do not depend on how singular vectors
        of coinciding singular values were chosen (math.md 5).
        """
        like = self.reference

        def gaussian(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(like)

        point: Point = [gaussian(*entry.weight.shape) for entry in self.entries]
        for stack in self.stacks:
            U, V = stack.frame.left, stack.frame.right
            b, n, m = U.shape[0], U.shape[1], V.shape[1]
            first, second = gaussian(b, n, m), gaussian(b, n, m)
            if U.is_complex():
                # Real and imaginary part of each coordinate are standard normal: a complex N has variance 2 a entry.
                first, second = torch.complex(first, gaussian(b, n, m)), torch.complex(second, gaussian(b, n, m))
            point += stack.pieces(first @ V, second.mH @ U)
        return self.project(point)

    # The way back ---------------------------------------------------------------------------------------------

    def to_users_gauge(self, values: Mapping[str, Tensor], fixed: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Parameters near the canonical form, moved along the orbit to where the user's model is.

        `fixed` are the parameters that are no coordinates (a translation may flow through one).
        """
        moved = {name: value.detach().clone() for name, value in values.items()}
        for stack in self.stacks:
            backs = zip(stack.frame.back_left.split(stack.copies), stack.frame.back_right.split(stack.copies), strict=True)
            for block, (back_left, back_right) in zip(stack.blocks, backs, strict=True):
                whole = block.with_carried()
                left, right = whole.read(moved)
                wide = back_left.dtype
                whole.write(moved, (left.to(wide) @ back_left).to(left.dtype), (right.to(wide) @ back_right).to(right.dtype))
        view = {**fixed, **moved}
        for translation, bias in self.removed:
            translation.shift(view, bias)
        return moved

    def restricted(self, rows: Mapping[str, Tensor]) -> Chart:
        """The chart in which only some rows of some element-wise parameters move."""
        entries = tuple(entry.restricted(rows[entry.name]) if entry.name in rows else entry for entry in self.entries)
        return dataclasses.replace(self, entries=entries)

    # Pieces ---------------------------------------------------------------------------------------------------

    def _stack_pieces(self, pieces: Point) -> list[tuple[Stack, Tensor, Tensor]]:
        return [(stack, *stack.matrices(pieces[2 * i], pieces[2 * i + 1])) for i, stack in enumerate(self.stacks)]

    @staticmethod
    def _whole(entry: Entry) -> Tensor:
        return entry.weight if entry.whole is None else entry.whole

    def _placed(self, moved: list[tuple[Tensor, Tensor]], templates: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if self.placement is None:
            return {}
        pieces: list[Tensor] = []
        for stack, (left, right) in zip(self.stacks, moved, strict=True):
            for (rows_left, rows_right), one_left, one_right in zip(
                stack.rows, left.split(stack.copies), right.split(stack.copies), strict=True
            ):
                pieces += one_left.split(rows_left, dim=1)
                pieces += one_right.split(rows_right, dim=1)
        return self.placement.place(pieces, templates)

    def _dual(self, values: Mapping[str, Tensor], *, inverse: bool) -> Point:
        point: Point = []
        for entry in self.entries:
            value = entry.part(values[entry.name])
            if entry.scale is None:
                point.append(value)
            elif inverse:
                point.append(torch.where(entry.scale != 0, value / entry.scale, torch.zeros_like(value)))
            else:
                point.append(value * entry.scale)
        for stack in self.stacks:
            sides = [block.read(values) for block in stack.blocks]
            left, right = torch.cat([side[0] for side in sides]), torch.cat([side[1] for side in sides])
            scale = 1 / stack.scale if inverse else stack.scale
            point += stack.pieces(left * scale, right * scale)
        return point
