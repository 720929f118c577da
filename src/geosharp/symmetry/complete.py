"""Are these all? The null space of a small module's Jacobian has exactly the dimension of all its symmetries.

A module is called on random inputs of the shapes that it really gets, until the rank of the Jacobian of its outputs in its
parameters does not grow any more, in float64 throughout. What the blocks found and the known symmetries span is compared
with the null space: a direction outside it is a false claim, a dimension too many a symmetry that was missed. Inputs are
taken to be free; what only holds for the inputs that a network gives its module (a norm before it) does not count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from geosharp.errors import SymmetryError
from geosharp.nested import tensors
from geosharp.symmetry.block import Block
from geosharp.symmetry.reading import Known
from geosharp.symmetry.scope import Call, Places, Run, visit

MOST_PARAMETERS = 4000
"""A dense Jacobian of more columns takes minutes."""

NULL = 1e-9
"""Singular values below this part of the largest are 0."""

DRAWS = 30
"""At most so many random inputs; the rank settles after a few."""


@dataclass(frozen=True)
class Completeness:
    """The null space of one module against what was found in it."""

    module: str
    parameters: int
    """Entries of the module's parameters that its outputs depend on at all."""
    null: int
    """Dimension of the null space."""
    explained: int
    """Dimension of what the blocks and the known symmetries span."""
    error: float
    """The largest part of a claimed direction that the outputs see, relative to the largest singular value."""
    gap: float
    """The smallest singular value that counts over the largest that does not: how clear the dimension is."""

    @property
    def complete(self) -> bool:
        """Whether every direction that the outputs do not see is explained, and none claimed that they see."""
        return self.null == self.explained and self.error <= NULL


def completeness(
    model: nn.Module, run: Run, values: dict[str, Tensor], modules: Mapping[str, set[str]], claims: Sequence[Block | Known], seed: int = 0
) -> list[Completeness]:
    """For every named module, with the parameters that belong to it (float64), the null space against the claims inside it."""
    found: dict[str, Completeness] = {}

    def judge(scope: str, names: Sequence[str]) -> None:
        def at(call: Call) -> None:
            found[scope] = _at(scope, call, {name: values[name] for name in names}, claims, torch.Generator().manual_seed(seed))

        judges[scope] = (set(names), at)

    judges: dict[str, Any] = {}
    modules = {scope: names for scope, names in modules.items() if scope and names}
    for scope, names in modules.items():
        judge(scope, sorted(names))
    with _WideCasts(), sdpa_kernel(SDPBackend.MATH):
        seen = visit(Places(model), run, values, judges)
    if missing := [scope for scope in modules if scope not in seen]:
        raise SymmetryError(
            f"expected module {missing[0]!r} to be called with its own parameters on this batch; its null space was not found"
        )
    return [found[scope] for scope in modules]


def check_sizes(modules: Mapping[str, set[str]], values: Mapping[str, Tensor]) -> None:
    """One clear line where a dense Jacobian would be too large."""
    for scope, names in modules.items():
        size = sum(values[name].numel() for name in names)
        if size > MOST_PARAMETERS:
            raise SymmetryError(
                f"expected attention modules of at most {MOST_PARAMETERS} parameters for complete=True, got {size} in {scope!r}; "
                "build the model from a small config of its class"
            )


def _at(scope: str, call: Call, values: Mapping[str, Tensor], claims: Sequence[Block | Known], generator: torch.Generator) -> Completeness:
    triangle = _triangle(call, values, generator)
    used = triangle.abs().amax(0) > 0  # entries that no input reaches (a bucket of far positions) are no symmetry
    triangle = triangle[:, used]
    singular = torch.linalg.svdvals(triangle)
    rank = int((singular > NULL * singular[0]).sum())
    below = singular[rank] if rank < len(singular) else torch.tensor(0.0)
    directions = [direction[used] for claim in claims for direction in _flat_tangents(claim, values)]
    error, explained = 0.0, 0
    directions = [direction for direction in directions if bool(direction.any())]
    if directions:
        basis = torch.stack(directions, 1)
        basis = basis / torch.linalg.vector_norm(basis, dim=0)
        error = float(torch.linalg.vector_norm(triangle @ basis, dim=0).max() / singular[0])
        explained = int(torch.linalg.matrix_rank(basis, rtol=1e-9))
    gap = float(singular[rank - 1] / below) if below > 0 else float("inf")
    return Completeness(scope, int(used.sum()), int(used.sum()) - rank, explained, error, gap)


def _flat_tangents(claim: Block | Known, values: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """The directions of a claim that lies inside these parameters, in their order."""
    inside = claim.parameters if not isinstance(claim, Known) else ()
    if any(name not in values for name in inside):
        return
    try:
        for change in claim.tangents(values):
            parts = (change[name] if name in change else torch.zeros_like(value) for name, value in values.items())
            yield torch.cat([part.reshape(-1) for part in parts])
    except SymmetryError:  # a known symmetry of another module
        return


def _triangle(call: Call, values: Mapping[str, Tensor], generator: torch.Generator) -> Tensor:
    """R of a QR decomposition of the Jacobian, over as many random inputs as make its rank grow."""
    triangle: Tensor = _jacobian(call, values, generator)
    rank = -1
    for _ in range(DRAWS):
        rows: Tensor = torch.cat([triangle, _jacobian(call, values, generator)])
        triangle = torch.linalg.qr(rows, mode="r").R
        found = int(torch.linalg.matrix_rank(triangle, rtol=NULL))
        if found == rank:
            return triangle
        rank = found
    raise SymmetryError(f"the rank of the Jacobian still grows after {DRAWS} random inputs; give a batch with more rows")


def _jacobian(call: Call, values: Mapping[str, Tensor], generator: torch.Generator) -> Tensor:
    """The Jacobian of the module's outputs on one random input, (outputs, parameters)."""
    leaves = {name: value.detach().clone().requires_grad_() for name, value in values.items()}
    args, kwargs = _redrawn(call, generator)
    with torch.enable_grad(), call.installed(leaves):
        outputs = _main(call.module(*args, **kwargs))
        # All rows of the Jacobian in one backward pass.
        eye = torch.eye(len(outputs), dtype=outputs.dtype, device=outputs.device)
        parts = torch.autograd.grad(outputs, list(leaves.values()), eye, is_grads_batched=True, allow_unused=True)
    pairs = zip(parts, leaves.values(), strict=True)
    rows = [outputs.new_zeros(len(outputs), leaf.numel()) if part is None else part.flatten(1) for part, leaf in pairs]
    jacobian: Tensor = torch.cat(rows, 1).detach()
    return jacobian


def _main(output: Any) -> Tensor:
    """The first tensor: what comes after it (soft-max rows, a table of position biases) is not what the network computes with."""
    first: Tensor = next(tensors(output))
    return first.reshape(-1)


def _redrawn(call: Call, generator: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call's arguments with sequences of features drawn anew, and masks and the like as they are; one tensor twice stays one."""
    fresh: dict[int, Tensor] = {}

    def other(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.ndim not in (2, 3) or not value.is_floating_point():
            return value
        if bool((value == 0).any()) or not bool(torch.isfinite(value).all()):  # a mask, a slope times a distance
            return value
        if id(value) not in fresh:
            fresh[id(value)] = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value.device)
        return fresh[id(value)]

    return tuple(other(value) for value in call.args), {name: other(value) for name, value in call.kwargs.items()}


class _WideCasts(TorchFunctionMode):
    """Whatever asks for float32 gets float64: many decoders cast norms, rotations and soft-max."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()}
        return func(*args, **kwargs)
