"""What leaves the function unchanged: a group acting on views of named parameters.

Three instances:
- query-key of one attention layer: `Factors("attn.query_key", left=(Wq, bq), right=(Wk,))`, one GL(h) a head;
- a ReLU neuron: the same with `group="positive"`: only positive scalings commute with the non-linearity;
- the key bias: `Translation("attn.key_bias", shifted=bk, control=bq)`: the soft-max does not see it.

A `Factors` block enters the network only through left · rightᵀ (rightᴴ over ℂ), so (G, H) -> (G A⁻¹, H Aᴴ) is free
(math.md 2). A block is a claim; `verify` shows it on a model before any measure uses it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from geosharp.errors import SymmetryError
from geosharp.symmetry.view import AnyView, ComplexView, View, parameter_of, read, real_views, write

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
        left, right = self.read(values)
        gone = ~(left.flatten(1).any(1) & right.flatten(1).any(1))
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
        sides = []
        for side in (self.left, self.right):
            parts = [read(values, view) for view in side]
            if len({(part.shape[0], part.shape[2]) for part in parts}) > 1:
                shapes = [tuple(part.shape) for part in parts]
                raise SymmetryError(f"expected the views of one side of block {self.name!r} to agree in copies and width, got {shapes}")
            sides.append(torch.cat(parts, dim=1))
        left, right = sides
        if (left.shape[0], left.shape[2]) != (right.shape[0], right.shape[2]):
            raise SymmetryError(
                f"expected both sides of block {self.name!r} to have the same number of copies and the same width, "
                f"got {tuple(left.shape)} and {tuple(right.shape)}"
            )
        return left, right

    def write(self, values: Mapping[str, Tensor], left: Tensor, right: Tensor) -> None:
        """Copy stacks back into the parameters, in place."""
        for side, content in ((self.left, left), (self.right, right)):
            sizes = [read(values, view).shape[1] for view in side]
            for view, part in zip(side, content.split(sizes, dim=1), strict=True):
                write(values, view, part)

    def random_element(self, values: Mapping[str, Tensor], generator: torch.Generator, spread: float = 2.0) -> Tensor:
        """One group element a copy, singular values log-uniform in [1/spread, spread]: neither orthogonal nor diagonal."""
        left, _ = self.read(values)
        copies, _, width = left.shape
        kind = torch.complex128 if self.is_complex else torch.float64
        log_singular = (2 * torch.rand(copies, width, generator=generator, dtype=torch.float64) - 1) * math.log(spread)
        if self.group == "positive":
            return torch.diag_embed(log_singular.exp())
        first, second = (torch.linalg.qr(torch.randn(copies, width, width, generator=generator, dtype=kind))[0] for _ in range(2))
        if not self.is_complex:
            # GL(h) has two components over the reals, and a claim is about both: copies take turns, from det < 0 on.
            first = first.clone()
            wanted = 1.0 - 2.0 * (torch.arange(copies) % 2 == 0)
            first[:, :, 0] *= (wanted * torch.linalg.det(first).sign() * torch.linalg.det(second).sign()).unsqueeze(-1)
        element: Tensor = first @ (log_singular.exp().unsqueeze(-1) * second)
        return element

    def act(self, values: Mapping[str, Tensor], element: Tensor, *, one_sided: bool = False) -> None:
        """(G, H) -> (G A⁻¹, H Aᴴ) in place, carried rows included; the control applies the factor to G only."""
        whole = self.with_carried()
        left, right = whole.read(values)
        wide = torch.complex128 if self.is_complex else torch.float64
        element = element.to(left.device)
        moved_left = torch.linalg.solve(element, left.to(wide), left=False)
        moved_right = right.to(wide) if one_sided else right.to(wide) @ element.mH
        whole.write(values, moved_left.to(left.dtype), moved_right.to(right.dtype))

    def describe(self, values: Mapping[str, Tensor]) -> tuple[str, int, int]:
        """Group name, number of copies, dimension of the whole group over the reals."""
        left, _ = self.read(values)
        copies, width = left.shape[0], left.shape[2]
        if self.group == "positive":
            return "GL+(1)", copies, copies
        field = ", C" if self.is_complex else ""
        return f"GL({width}{field})", copies, copies * width * width * (2 if self.is_complex else 1)


@dataclass(frozen=True)
class Translation:
    """A bias the function does not see, alone or together with another: (b + c, into - through · c).

    `control` is something that feels the same shift (for a key bias: the query bias); by default the compensation is
    left out. `beside` and `control_beside` are the weights these biases are added to the products of: they say how large
    a shift has to be to matter, in whatever gauge the weights are written.
    """

    name: str
    shifted: View
    through: View | None = None
    into: View | None = None
    control: View | None = None
    beside: View | None = None
    control_beside: View | None = None
    kind: str = "translation"

    def __post_init__(self) -> None:
        if (self.through is None) != (self.into is None):
            raise SymmetryError(f"expected both through= and into= (or neither) in translation {self.name!r}")

    @property
    def views(self) -> tuple[View, ...]:
        """The views that the translation moves."""
        return (self.shifted,) if self.into is None else (self.shifted, self.into)

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the parameters it moves."""
        return tuple(dict.fromkeys(view.parameter for view in self.views))

    def random_element(self, values: Mapping[str, Tensor], generator: torch.Generator, spread: float = 2.0) -> Tensor:
        """A random shift, and below it one for the control: what the weights make of a Gaussian input."""
        shifts = [_natural_shift(values, self.shifted, self.beside, generator)]
        if self.control is not None:
            shifts.append(_natural_shift(values, self.control, self.control_beside, generator))
        return torch.cat(shifts, dim=1)

    def shift(self, values: Mapping[str, Tensor], element: Tensor, *, compensate: bool = True) -> None:
        """Move the bias by `element`, in place, and what compensates it."""
        bias = read(values, self.shifted)
        element = element.to(bias.device)
        bias.copy_((bias.double() + element).to(bias.dtype))
        if compensate and self.through is not None and self.into is not None:
            # through: (copies, m, h), element: (copies, 1, h); all copies add up in one output bias.
            flow = (read(values, self.through).double() @ element.mT).sum(0)
            target = self.into.of(parameter_of(values, self.into))
            target.copy_((target.double() - flow.reshape(target.shape)).to(target.dtype))

    def act(self, values: Mapping[str, Tensor], element: Tensor, *, one_sided: bool = False) -> None:
        """The shift in place; the control leaves out the compensation, or shifts what feels it."""
        rows = read(values, self.shifted).shape[1]
        if one_sided and self.control is not None:
            felt = read(values, self.control)
            felt.copy_((felt.double() + element[:, rows:].to(felt.device)).to(felt.dtype))
            return
        self.shift(values, element[:, :rows], compensate=not one_sided)

    def remove(self, values: Mapping[str, Tensor]) -> Tensor:
        """Move to the representative with zero bias, in place; returns the bias that was there."""
        bias = read(values, self.shifted).detach().double().clone()
        self.shift(values, -bias)
        read(values, self.shifted).zero_()
        return bias

    def describe(self, values: Mapping[str, Tensor]) -> tuple[str, int, int]:
        """Group name, number of copies, dimension."""
        bias = read(values, self.shifted)
        return f"R^{bias.shape[1] * bias.shape[2]}", bias.shape[0], bias.numel()


def _natural_shift(values: Mapping[str, Tensor], bias: View, beside: View | None, generator: torch.Generator) -> Tensor:
    """N · weights, N Gaussian, so it changes with the weights' gauge; of the size of the bias where no weights are known."""
    if beside is None:
        size = read(values, bias).detach().abs().double().max().clamp_min(1.0).item()
        return size * torch.randn(read(values, bias).shape, generator=generator, dtype=torch.float64)
    weights = read(values, beside).detach().double().cpu()
    return torch.randn(weights.shape[0], 1, weights.shape[1], generator=generator, dtype=torch.float64) @ weights


Block = Factors | Translation


def rename(block: Block, alias: Mapping[str, str]) -> Block:
    """The block with tied parameters under the one name that they have as coordinates."""
    if not alias:
        return block
    if isinstance(block, Factors):
        left, right, left_carried, right_carried = (
            tuple(view.renamed(alias) for view in side) for side in (block.left, block.right, block.left_carried, block.right_carried)
        )
        return dataclasses.replace(block, left=left, right=right, left_carried=left_carried, right_carried=right_carried)
    names = ("shifted", "through", "into", "control", "beside", "control_beside")
    return dataclasses.replace(block, **{name: view and view.renamed(alias) for name in names if (view := getattr(block, name))})


def check_disjoint(blocks: Iterable[Block], values: Mapping[str, Tensor]) -> None:
    """Refuse blocks whose coordinates overlap: their group elements would not move independently.

    A translation's target (`into`) stays an ordinary coordinate, so only what leaves the element-wise coordinates counts.
    """
    owner: dict[str, tuple[Tensor, list[str]]] = {}
    for block in blocks:
        for view in block.views if isinstance(block, Factors) else (block.shifted,):
            parameter = parameter_of(values, view)
            count, names = owner.setdefault(view.parameter, (torch.zeros(parameter.shape, dtype=torch.uint8), []))
            view.of(count).add_(1)
            if int(count.max()) > 1:
                others = [name for name in names if name != block.name] or [block.name]
                raise SymmetryError(
                    f"blocks {others[0]!r} and {block.name!r} both act on entries of {view.parameter!r}; declare disjoint blocks"
                )
            names.append(block.name)
