"""Biases that the function does not see.

Three instances: the key bias of an attention layer (the soft-max takes a constant out of every row), its value bias
together with the output bias (the rows of the soft-max sum to 1), a position term's bias that meets every key alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from geosharp.errors import SymmetryError
from geosharp.symmetry.view import View, parameter_of, read, shape_of, write


@dataclass(frozen=True)
class Translation:
    """A bias the function does not see, alone or together with another: (b + c, into - Σ through · c).

    `control` is something that feels the same shift (for a key bias: the query bias); by default the compensation is
    left out. `beside` and `control_beside` are the weights these biases are added to the products of: they say how large
    a shift has to be to matter, in whatever gauge the weights are written.
    """

    name: str
    shifted: View
    through: View | tuple[View, ...] = ()
    """The maps by which the shift reaches `into`: one, or one for each consumer."""
    into: View | None = None
    control: View | None = None
    beside: View | None = None
    control_beside: View | None = None
    kind: str = "translation"

    def __post_init__(self) -> None:
        if isinstance(self.through, View):
            object.__setattr__(self, "through", (self.through,))
        if bool(self.through) != (self.into is not None):
            raise SymmetryError(f"expected both through= and into= (or neither) in translation {self.name!r}")

    @property
    def views(self) -> tuple[View, ...]:
        """The views that the translation moves."""
        return (self.shifted,) if self.into is None else (self.shifted, self.into)

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the parameters it moves."""
        return tuple(dict.fromkeys(view.parameter for view in self.views))

    def check(self, values: Mapping[str, Tensor]) -> None:
        """One clear line where a view does not fit."""
        others = (self.into, self.control, self.beside, self.control_beside)
        for view in (self.shifted, *self.ways, *(view for view in others if view is not None)):
            shape_of(values, view)

    def random_element(self, values: Mapping[str, Tensor], generator: torch.Generator, spread: float = 2.0) -> Tensor:
        """A random shift, and below it one for the control: what the weights make of a Gaussian input."""
        shifts = [_natural_shift(values, self.shifted, self.beside, generator)]
        if self.control is not None:
            shifts.append(_natural_shift(values, self.control, self.control_beside, generator))
        return torch.cat(shifts, dim=1)

    @property
    def ways(self) -> tuple[View, ...]:
        """`through` as a tuple."""
        return (self.through,) if isinstance(self.through, View) else self.through

    def shift(self, values: Mapping[str, Tensor], element: Tensor, *, compensate: bool = True) -> None:
        """Move the bias by `element`, in place, and what compensates it."""
        self._add(values, self.shifted, element)
        if compensate and self.into is not None:
            target = self.into.of(parameter_of(values, self.into))
            target.copy_((target.double() - self._flow(values, element).reshape(target.shape)).to(target.dtype))

    def _flow(self, values: Mapping[str, Tensor], element: Tensor) -> Tensor:
        """What the shift adds to the outputs: all copies add up in one output bias."""
        # through: (copies, m, h), element: (copies, 1, h)
        return torch.stack([(read(values, way).double() @ element.to(read(values, way).device).mT).sum(0) for way in self.ways]).sum(0)

    @staticmethod
    def _add(values: Mapping[str, Tensor], view: View, element: Tensor) -> None:
        at = read(values, view)
        write(values, view, (at.double() + element.to(at.device)).to(at.dtype))

    def act(self, values: Mapping[str, Tensor], element: Tensor, *, one_sided: bool = False, exactly: bool = True) -> None:
        """The shift in place; the control leaves out the compensation, or shifts what feels it."""
        rows = read(values, self.shifted).shape[1]
        if one_sided and self.control is not None:
            self._add(values, self.control, element[:, rows:])
            return
        self.shift(values, element[:, :rows], compensate=not one_sided)

    def tangents(self, values: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """A basis of the directions along the orbit, as changes of the parameters."""
        shape = read(values, self.shifted).shape
        for unit in torch.eye(shape.numel(), dtype=torch.float64).view(-1, *shape):
            change = {name: torch.zeros_like(values[name]) for name in self.parameters}
            write(change, self.shifted, unit.to(change[self.shifted.parameter].dtype))
            if self.into is not None:
                target = self.into.of(parameter_of(change, self.into))
                target.copy_(-self._flow(values, unit).reshape(target.shape))
            yield change

    def remove(self, values: Mapping[str, Tensor]) -> Tensor:
        """Move to the representative with zero bias, in place; returns the bias that was there."""
        bias = read(values, self.shifted).detach().double().clone()
        self.shift(values, -bias)
        write(values, self.shifted, torch.zeros_like(bias))
        return bias

    def describe(self, values: Mapping[str, Tensor]) -> tuple[str, int, int]:
        """Group name, number of copies, dimension."""
        bias = read(values, self.shifted)
        return f"R^{bias.shape[1] * bias.shape[2]}", bias.shape[0], bias.numel()

    def renamed(self, alias: Mapping[str, str]) -> Translation:
        """The block with tied parameters under the one name that they have as coordinates."""
        names = ("shifted", "into", "control", "beside", "control_beside")
        found = {name: view and view.renamed(alias) for name in names if (view := getattr(self, name))}
        return dataclasses.replace(self, through=tuple(way.renamed(alias) for way in self.ways), **found)


def _natural_shift(values: Mapping[str, Tensor], bias: View, beside: View | None, generator: torch.Generator) -> Tensor:
    """N · weights, N Gaussian, so it changes with the weights' gauge; of the size of the bias where no weights are known."""
    if beside is None:
        size = read(values, bias).detach().abs().double().max().clamp_min(1.0).item()
        return size * torch.randn(read(values, bias).shape, generator=generator, dtype=torch.float64)
    weights = read(values, beside).detach().double().cpu()
    return torch.randn(weights.shape[0], 1, weights.shape[1], generator=generator, dtype=torch.float64) @ weights
