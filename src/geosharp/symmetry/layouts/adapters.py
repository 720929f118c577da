"""Low-rank adapters as peft writes them: LoRA, rsLoRA, DoRA, one or several, on linear maps, `Conv1D` and embeddings.

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
from geosharp.symmetry.view import View, parameter_of, real_views

_PAIRS = (("lora_A", "lora_B", "weight"), ("lora_embedding_A", "lora_embedding_B", ""))


def low_rank(name: str, module: nn.Module, is_coordinate: IsCoordinate) -> list[Reading]:
    """The active adapters of one module."""
    blocks = list(_blocks(name, module))
    if not blocks:
        return []
    base = getattr(module, "base_layer", None)
    measured = [path for path, _ in base.named_parameters()] if isinstance(base, nn.Module) else []
    free = [path for path in measured if path.startswith("weight") and is_coordinate(join(name, "base_layer", path))]
    if free:
        reason = f"its base {join(name, 'base_layer', free[0])} is measured too, and takes back what the adapter adds: merge the adapter first"
        return [Reading((), tuple(Dropped(block.name, reason) for block in blocks))]
    return [Reading(tuple(blocks), (), tuple(_exchanges(module, blocks)))]


def _blocks(name: str, module: nn.Module) -> Iterator[Factors]:
    merged = bool(getattr(module, "merged", False)) or bool(getattr(module, "disable_adapters", False))
    active = [] if merged else getattr(module, "active_adapters", ())
    for first, second, leaf in _PAIRS:
        left, right = getattr(module, first, None), getattr(module, second, None)
        if not isinstance(left, (nn.ModuleDict, nn.ParameterDict)) or not isinstance(right, (nn.ModuleDict, nn.ParameterDict)):
            continue
        for adapter in active:
            weights = [_weight(side[adapter]) for side in (left, right) if adapter in side]
            if len(weights) == 2 and all(weight is not None and weight.ndim == 2 for weight in weights):
                down, up = (View(join(name, part, adapter, leaf)) for part in (first, second))
                yield Factors(join(name, adapter), (down.T,), (up,), kind="adapter")


def _weight(side: object) -> Tensor | None:
    found = side if isinstance(side, Tensor) else getattr(side, "weight", None)
    return found if isinstance(found, Tensor) else None


@dataclass(frozen=True)
class _Exchange:
    """A row of one adapter's first factor added to the other's, and taken back in the one's second factor."""

    one: Factors
    other: Factors
    scales: tuple[float, float]

    def __call__(self, values: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        down, up = (parameter_of(values, real_views(side)[0]) for side in (self.one.left, self.other.right))
        into_name, back_name = (real_views(side)[0].parameter for side in (self.other.left, self.one.right))
        for i, j in itertools.product(range(down.shape[0]), range(up.shape[1])):
            into, back = torch.zeros_like(values[into_name]), torch.zeros_like(values[back_name])
            into[j] = self.scales[0] * down[i]
            back[:, i] = -self.scales[1] * up[:, j]
            yield {into_name: into, back_name: back}


def _exchanges(module: nn.Module, blocks: list[Factors]) -> Iterator[Known]:
    """Two active adapters add up to one of the joint rank, and GL(r₁ + r₂) is more than GL(r₁) x GL(r₂)."""
    scaling = getattr(module, "scaling", {})
    for one, other in itertools.permutations(blocks, 2):
        scales = tuple(float(scaling.get(block.name.rpartition(".")[2], 1.0)) for block in (one, other))
        ranks = [getattr(module, "r", {}).get(block.name.rpartition(".")[2], 0) for block in (one, other)]
        name = f"{one.name}+{other.name.rpartition('.')[2]}"
        reason = "each adapter is a block of its own"
        yield Known(name, "adapter exchange", "R", ranks[0] * ranks[1], reason, _Exchange(one, other, (scales[0], scales[1])))
