"""What leaves the function unchanged: a group acting on views of named parameters.

Two kinds: `Factors`, two matrices that enter only as a product, and `Translation`, a bias that is not seen. A block is a
claim; `verify` shows it on a model before any measure uses it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from geosharp.symmetry.factors import Factors
from geosharp.symmetry.translation import Translation
from geosharp.symmetry.view import View, parameter_of

Block = Factors | Translation

__all__ = ["Block", "Factors", "Translation", "moved", "overlaps", "taken"]


def taken(block: Block) -> tuple[View, ...]:
    """What leaves the element-wise coordinates; a translation's target (`into`) stays an ordinary coordinate."""
    return block.views if isinstance(block, Factors) else (block.shifted,)


def overlaps(blocks: Sequence[Block], values: Mapping[str, Tensor]) -> dict[int, tuple[int, str]]:
    """Blocks that take entries which an earlier one has, by index: (that one's index, the parameter).

    Group elements of such blocks would not move independently. A block may also meet itself.
    """
    views: dict[str, list[tuple[int, View]]] = {}
    for index, block in enumerate(blocks):
        for view in taken(block):
            views.setdefault(view.parameter, []).append((index, view))
    found: dict[int, tuple[int, str]] = {}
    for name, users in views.items():
        owner = torch.full(parameter_of(values, users[0][1]).shape, -1, dtype=torch.int32)
        for index, view in users:
            there = view.of(owner)
            if index not in found and int(there.max()) >= 0:
                found[index] = (int(there.max()), name)
            there.fill_(index)
    return found


def moved(blocks: Iterable[tuple[Block, Tensor]], values: Mapping[str, Tensor], *, one_sided: bool = False) -> None:
    """Let group elements act, in place. Translations go first: they read the weights that factors move."""
    for block, element in sorted(blocks, key=lambda pair: isinstance(pair[0], Factors)):
        block.act(values, element, one_sided=one_sided)
