"""Tables of position biases that are added to the logits (T5, MPNet, BEiT, Swin): a constant a head is not seen by the soft-max.

The table's entries stay coordinates of their own, so this is known and not quotiented.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from geosharp.symmetry.features import join
from geosharp.symmetry.reading import Known, Reading
from geosharp.symmetry.view import View, parameter_of

_TABLES = ("relative_attention_bias.weight", "relative_position_bias_table", "rel_pos_bias_table")


def position_bias(name: str, module: nn.Module, parent: nn.Module | None) -> list[Reading]:
    """The table of a module that holds one, (positions, heads)."""
    for path in _TABLES:
        owner, _, leaf = path.rpartition(".")
        table = getattr(getattr(module, owner, None) if owner else module, leaf, None)
        if isinstance(table, nn.Parameter) and table.ndim == 2:
            groups = _groups(View(join(name, path)), module, table)
            reason = "its entries are coordinates of their own"
            heads = table.shape[1]
            known = Known(join(name, "position_bias"), "position bias", "R", heads * len(groups), reason, _Shifts(groups))
            return [Reading((), (), (known,))]
    return []


def _groups(table: View, module: nn.Module, parameter: Tensor) -> tuple[tuple[View, ...], ...]:
    """The entries that one query's logits take, together: BEiT's class token has entries of its own as a query."""
    window = getattr(module, "num_relative_distance", None)
    if window is not None and parameter.shape[0] == window:
        # The last three entries: class to token, token to class, class to class.
        return ((table[-3:-2], table[-1:]), (table[:-3], table[-2:-1]))
    return ((table,),)


@dataclass(frozen=True)
class _Shifts:
    """A constant for every head and every group of entries."""

    groups: tuple[tuple[View, ...], ...]

    def __call__(self, values: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        for group in self.groups:
            parameter = parameter_of(values, group[0])
            for head in range(parameter.shape[1]):
                change = torch.zeros_like(parameter)
                for view in group:
                    view.of(change)[:, head] = 1
                yield {group[0].parameter: change}
