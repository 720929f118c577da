"""Views: which numbers of which named parameters a block acts on, without holding them.

Three instances: the rows of head 0 of `q.weight`, transposed; the third slice of GPT-2's fused `c_attn.weight`; a scalar.

>>> import torch
>>> head = View("q.weight")[0:2].T
>>> head.of(torch.arange(12.0).reshape(4, 3)).shape
torch.Size([3, 2])
>>> View("q.weight").unflatten(0, (2, 2)).mT.of(torch.zeros(4, 3)).shape    # both heads at once
torch.Size([2, 3, 2])
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from geosharp.errors import SymmetryError, did_you_mean


@dataclass(frozen=True)
class View:
    """A chain of view operations on one named parameter; `of` applies it to any tensor of that shape, sharing memory."""

    parameter: str
    steps: tuple[tuple[str, Any], ...] = ()

    def __hash__(self) -> int:
        # Slices have no hash before Python 3.12.
        return hash((self.parameter, repr(self.steps)))

    def _then(self, step: str, argument: Any = None) -> View:
        return View(self.parameter, (*self.steps, (step, argument)))

    def __getitem__(self, index: Any) -> View:
        """Basic indexing: integers, slices, `None`, `...`."""
        return self._then("index", index)

    @property
    def T(self) -> View:  # noqa: N802 - the name that torch uses
        """The transpose of a matrix."""
        return self._then("mT")

    @property
    def mT(self) -> View:  # noqa: N802 - the name that torch uses
        """The transpose of every matrix in a stack."""
        return self._then("mT")

    def unflatten(self, dim: int, sizes: tuple[int, ...]) -> View:
        """Split one dimension into several."""
        return self._then("unflatten", (dim, sizes))

    def permute(self, *dims: int) -> View:
        """Reorder the dimensions."""
        return self._then("permute", dims)

    def renamed(self, alias: Mapping[str, str]) -> View:
        """The same view under the one name that tied parameters have as coordinates."""
        return View(alias.get(self.parameter, self.parameter), self.steps)

    def of(self, tensor: Tensor) -> Tensor:
        """Apply the chain to a tensor of the parameter's shape."""
        for step, argument in self.steps:
            if step == "index":
                tensor = tensor[argument]
            elif step == "mT":
                tensor = tensor.mT
            elif step == "unflatten":
                tensor = tensor.unflatten(*argument)
            else:
                tensor = tensor.permute(*argument)
        return tensor

    def stack_of(self, tensor: Tensor) -> Tensor:
        """The same as a stack of matrices (copies, rows, width); a vector is one row, a scalar one entry.

        Further leading dimensions count as copies; such a stack may be a copy, so writing goes through `write`.
        """
        found = self.of(tensor)
        while found.ndim < 3:
            found = found.unsqueeze(0)
        return found if found.ndim == 3 else found.flatten(0, -3)


@dataclass(frozen=True)
class ComplexView:
    """Two real views read as real and imaginary part."""

    real: View
    imag: View

    def renamed(self, alias: Mapping[str, str]) -> ComplexView:
        """The same view under the one name that tied parameters have as coordinates."""
        return ComplexView(self.real.renamed(alias), self.imag.renamed(alias))


AnyView = View | ComplexView


def real_views(views: tuple[AnyView, ...]) -> tuple[View, ...]:
    """The real views behind some views, in order."""
    parts: list[View] = []
    for view in views:
        parts += [view] if isinstance(view, View) else [view.real, view.imag]
    return tuple(parts)


def parameter_of(values: Mapping[str, Tensor], view: View) -> Tensor:
    """The parameter a view is of, or a clear error."""
    try:
        return values[view.parameter]
    except KeyError:
        hint = did_you_mean(view.parameter, values)
        raise SymmetryError(f"expected a parameter named {view.parameter!r} in the model, found none{hint}") from None


def read(values: Mapping[str, Tensor], view: AnyView) -> Tensor:
    """The stack of matrices that a view shows of these parameters, to be read: `write` is the way back."""
    if isinstance(view, ComplexView):
        return torch.complex(read(values, view.real), read(values, view.imag))
    return _stacked(values, view)


def _stacked(values: Mapping[str, Tensor], view: View, *, meta: bool = False) -> Tensor:
    parameter = parameter_of(values, view)
    try:
        return view.stack_of(torch.empty(parameter.shape, device="meta") if meta else parameter)
    except (IndexError, RuntimeError) as error:
        shape = tuple(values[view.parameter].shape)
        raise SymmetryError(f"a view of {view.parameter!r} does not fit its shape {shape}: {error}") from None


def shape_of(values: Mapping[str, Tensor], view: AnyView) -> torch.Size:
    """The shape that `read` gives, without reading."""
    one = view.real if isinstance(view, ComplexView) else view
    return _stacked(values, one, meta=True).shape


def write(values: Mapping[str, Tensor], view: AnyView, content: Tensor) -> None:
    """Copy a stack of matrices into the parameters, in place."""
    if isinstance(view, ComplexView):
        write(values, view.real, content.real)
        write(values, view.imag, content.imag)
        return
    target = view.of(parameter_of(values, view))
    target.copy_(content.reshape(target.shape))
