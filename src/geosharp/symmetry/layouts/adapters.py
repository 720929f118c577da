"""Low-rank adapters as peft writes them: LoRA, rsLoRA, DoRA, one or several, on linear maps, `Conv1D`, convolutions, embeddings.

What they add is a product of two matrices, so GL(r) acts, whatever the scale; DoRA's magnitudes stay outside. On a frozen
base this is all there is. On a base that is measured too, a change of the base can take back a change of the product, so
the adapter is no set of coordinates of its own: refused, with the advice to merge.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from geosharp.symmetry.block import Factors
from geosharp.symmetry.features import join
from geosharp.symmetry.reading import Dropped, IsCoordinate, Known, Reading
from geosharp.symmetry.view import View, parameter_of

PENALIZED = "the loss of AdaLoRA has a penalty on its factors, which only rotations and signs would leave alone"

TWICE = "peft adds it to torch.nn.MultiheadAttention twice, of which autograd sees one: merge the adapter first"

PRODUCTS = ("LoRA", "Dora", "ALora", "MiCA", "Monteclora", "Velora")
"""Variants, by the names of peft's classes, that read the product alone in eval mode."""


def low_rank(name: str, module: nn.Module, is_coordinate: IsCoordinate) -> list[Reading]:
    """The active adapters of one module; of nested wrappers the outermost speaks for all."""
    if hasattr(module, "parameter_name") and name.endswith(".base_layer"):
        return []
    readings = [_reading(path, wrapper, is_coordinate) for path, wrapper in _wrappers(name, module)]
    found = sum(readings, Reading(()))
    return [found] if found.blocks or found.refused else []


def _wrappers(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """What adds adapters at a place: one wrapper, or one for each adapted parameter of a module (experts), inside each other."""
    while isinstance(base := getattr(module, "base_layer", None), nn.Module):
        yield name, module
        if not hasattr(module, "parameter_name"):
            return
        name, module = join(name, "base_layer"), base


def _reading(name: str, module: nn.Module, is_coordinate: IsCoordinate) -> Reading:
    pairs = list(_pairs(name, module))
    taken = _taken_back(name, module, is_coordinate)
    reasons = {pair: taken or _more(module, pair) for pair in pairs}
    refused = tuple(Dropped(pair.name, reason) for pair, reason in reasons.items() if reason)
    products = [pair for pair, reason in reasons.items() if not reason]
    return Reading(tuple(pair.block() for pair in products), refused, tuple(_exchanges(products)))


def _more(module: nn.Module, pair: _Pair) -> str:
    """What else is done with the factors, or nothing."""
    if hasattr(module, "lora_E"):
        return PENALIZED
    if type(getattr(module, "base_layer", None)).__name__ == "NonDynamicallyQuantizableLinear":
        return TWICE
    return "" if pair.variant.startswith(PRODUCTS) else f"{pair.variant} does more with the two factors than multiply them"


def _taken_back(name: str, module: nn.Module, is_coordinate: IsCoordinate) -> str:
    """Why the product is no set of coordinates of its own, or nothing."""
    path, base = _base(name, module)
    only = getattr(module, "parameter_name", None)
    matrices = [leaf for leaf, value in base.named_parameters(recurse=False) if (leaf == only if only else value.ndim > 1)]
    measured = [join(path, leaf) for leaf in matrices if is_coordinate(join(path, leaf))]
    return f"its base {measured[0]} is measured too, and takes back what the adapter adds: merge the adapter first" if measured else ""


# One adapter ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Pair:
    """The two factors of one adapter: (rank, inputs, kernel…) and (outputs, rank, 1…)."""

    name: str
    down: str
    up: str
    kernel: tuple[int, ...] = ()
    groups: int = 1
    """Outputs of a grouped convolution: each group reads its own part of the rank."""
    experts: int = 0
    padding: int | None = None
    """The column of an embedding's first factor that autograd masks."""
    rank: int = 0
    scale: float = 1.0
    variant: str = "LoRA"
    is_sum: bool = True
    """Whether what it adds is one matrix, a constant times the product."""

    def block(self) -> Factors:
        """The product as a block."""
        down, up = View(self.down), View(self.up)
        if self.experts:  # peft writes (experts · rank, inputs) and (outputs, rank · experts)
            inputs, outputs = down.unflatten(0, (self.experts, -1)).mT, up.unflatten(1, (-1, self.experts)).permute(2, 0, 1)
            return Factors(self.name, (inputs,), (outputs,), kind="adapter")
        if self.kernel:  # a row for each input at each place of the kernel
            down, up = down.unflatten(0, (self.groups, -1)), up.unflatten(0, (self.groups, -1))
            places = itertools.product(*(range(size) for size in self.kernel))
            reads = tuple(down[(..., *place)].mT for place in places)
            return Factors(self.name, reads, (up[(..., *(0 for _ in self.kernel))],), kind="adapter")
        rows, pad = _without(down.T, self.padding)
        return Factors(self.name, rows, (up,), kind="adapter", left_carried=pad)


def _without(rows: View, pad: int | None) -> tuple[tuple[View, ...], tuple[View, ...]]:
    """The rows that are coordinates, and the padding row, which only follows."""
    if pad is None:
        return (rows,), ()
    return ((rows[:pad],) if pad else ()) + (rows[pad + 1 :],), (rows[pad : pad + 1],)


def _pairs(name: str, module: nn.Module) -> Iterator[_Pair]:
    """The adapters that are added to a module's outputs now: neither merged into the base nor switched off."""
    if getattr(module, "merged", False) or getattr(module, "disable_adapters", False):
        return
    for first, second in (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B")):
        left, right = getattr(module, first, None), getattr(module, second, None)
        if not isinstance(left, (nn.ModuleDict, nn.ParameterDict)) or not isinstance(right, (nn.ModuleDict, nn.ParameterDict)):
            continue
        for adapter in getattr(module, "active_adapters", ()):
            if adapter in left and adapter in right:
                yield _pair(name, module, adapter, (first, second), (left[adapter], right[adapter]))


def _pair(name: str, module: nn.Module, adapter: str, parts: tuple[str, str], sides: tuple[object, object]) -> _Pair:
    embeds = isinstance(sides[0], Tensor)
    down, up = (join(name, part, adapter, "" if embeds else "weight") for part in parts)
    groups, experts = getattr(sides[1], "groups", 1), getattr(module, "num_experts", 0)
    variant = getattr(module, "lora_variant", {}).get(adapter)
    return _Pair(
        join(name, adapter),
        down,
        up,
        kernel=tuple(getattr(sides[0], "kernel_size", ())),
        groups=groups,
        experts=experts,
        padding=getattr(_base(name, module)[1], "padding_idx", None) if embeds else None,
        rank=getattr(module, "r", {}).get(adapter, 0),
        scale=float(getattr(module, "scaling", {}).get(adapter, 1.0)),
        variant="LoRA" if variant is None else type(variant).__name__,
        is_sum=variant is None and groups == 1 and experts < 2 and "forward" not in vars(module),
    )


def _base(name: str, module: nn.Module) -> tuple[str, nn.Module]:
    """What the adapters of a module add to; wrappers of single parameters are nested."""
    while isinstance(base := getattr(module, "base_layer", None), nn.Module):
        name, module = join(name, "base_layer"), base
    return name, module


# Two adapters ---------------------------------------------------------------------------------------------------------


def _exchanges(pairs: list[_Pair]) -> Iterator[Known]:
    """Two active adapters add up to one of the joint rank, and GL(r₁ + r₂) is more than GL(r₁) x GL(r₂)."""
    for one, other in itertools.permutations(pairs, 2):
        if one.is_sum and other.is_sum:
            name, reason = f"{one.name}+{other.name.rpartition('.')[2]}", "each adapter is a block of its own"
            yield Known(name, "adapter exchange", "R", one.rank * other.rank, reason, _Exchange(one, other))


@dataclass(frozen=True)
class _Exchange:
    """A row of one adapter's first factor added to the other's, and taken back in the one's second factor."""

    one: _Pair
    other: _Pair

    def __call__(self, values: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        down, up = (parameter_of(values, View(name)) for name in (self.one.down, self.other.up))
        for i, j in itertools.product(range(self.one.rank), range(self.other.rank)):
            into, back = torch.zeros_like(values[self.other.down]), torch.zeros_like(values[self.one.up])
            into[j] = self.one.scale * down[i]
            back[:, i] = -self.other.scale * up[:, j]
            yield {self.other.down: into, self.one.up: back}
