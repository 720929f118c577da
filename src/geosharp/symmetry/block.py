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
        if len(users) == 1:
            continue
        shape = parameter_of(values, users[0][1]).shape
        parts = [view.of(torch.empty(shape, device="meta")).numel() for _, view in users]
        if int(_covered([view for _, view in users], shape).sum()) == sum(parts):
            continue
        seen = torch.zeros(shape, dtype=torch.bool)
        for position, (index, view) in enumerate(users):
            there = view.of(seen)
            if index not in found and bool(there.any()):
                found[index] = (_first_on(users[:position], view, shape), name)
            there.fill_(True)
    return found


def _first_on(users: Sequence[tuple[int, View]], view: View, shape: torch.Size) -> int:
    """The first of some views' owners that shares an entry with this view."""
    mask = _covered([view], shape)
    return next(index for index, other in users if bool(other.of(mask).any()))


def _covered(views: Iterable[View], shape: torch.Size) -> Tensor:
    mask = torch.zeros(shape, dtype=torch.bool)
    for view in views:
        view.of(mask).fill_(True)
    return mask


def moved(blocks: Iterable[tuple[Block, Tensor]], values: Mapping[str, Tensor], *, one_sided: bool = False, exactly: bool = True) -> None:
    """Let group elements act, in place. Translations go first: they read the weights that factors move."""
    for block, element in sorted(blocks, key=lambda pair: isinstance(pair[0], Factors)):
        block.act(values, element, one_sided=one_sided, exactly=exactly)
