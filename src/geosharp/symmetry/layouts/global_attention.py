"""Layers with further projections for tokens that attend to everything (Longformer): `query_global` and its siblings.

Global queries meet global keys only, a product of its own. Values of both kinds are read by the one output map, so they join
one stack (in `separate`), and a constant in the values is free only when it is in both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from geosharp.symmetry.attention import key_shift
from geosharp.symmetry.block import Block, Factors
from geosharp.symmetry.features import Features, LinearMap
from geosharp.symmetry.layouts.projections import Heads, adapted, common, divided, map_at, output_map
from geosharp.symmetry.reading import Dropped, Known, Reading
from geosharp.symmetry.view import View, parameter_of

_MAPS = ("query_global", "key_global", "value", "value_global")


def global_values(name: str, module: nn.Module, heads: Heads) -> tuple[Features, ...]:
    """The values of the tokens that attend to everything."""
    found = map_at(module, name, "value_global")
    return () if found is None else (found.made().split(0, heads.groups, -1),)


def global_attention(name: str, module: nn.Module, parent: nn.Module | None) -> list[Reading]:
    """Global queries and keys, and what is known of both kinds of values."""
    query, key, value, other = (map_at(module, name, path) for path in _MAPS)
    if query is None or key is None or value is None or other is None:
        return []
    found = divided(module, query.outputs, key.outputs)
    output = output_map(module, name, parent, value.outputs)
    if found is None or output is None:
        return []
    heads, label = found[0], common(query.path, output.path)
    if reason := adapted(query, key, value, other, output):
        return [Reading((), (Dropped(f"{label}.global_query_key", reason),))]
    made = [one.made().split(0, heads.groups, -1) for one in (query, key)]
    return [Reading(tuple(_blocks(label, *made)), (), tuple(_joint(label, heads, (value, other), output)))]


def _blocks(label: str, query: Features, key: Features) -> Iterator[Block]:
    weights, *bias = key.matrix()
    shift = key_shift(f"{label}.global_key_bias", query, key)
    right, carried = ((weights,), tuple(bias)) if shift is not None else ((weights, *bias), ())
    yield Factors(f"{label}.global_query_key", query.matrix(), right, kind="query-key", right_carried=carried)
    if shift is not None:
        yield shift


def _joint(label: str, heads: Heads, values: tuple[LinearMap, LinearMap], output: LinearMap) -> Iterator[Known]:
    biases = [one.bias for one in values]
    if biases[0] is not None and biases[1] is not None and output.bias is not None:
        shift = _Shift((biases[0], biases[1]), output.used().weight, output.bias)
        size, reason = values[0].outputs, "two biases move together, and both are coordinates"
        yield Known(f"{label}.value_shift", "value shift", f"R^{heads.width}", size, reason, shift)


@dataclass(frozen=True)
class _Shift:
    """One vector added to two biases, and taken out of the output's."""

    biases: tuple[View, View]
    output: View
    into: View

    def __call__(self, values: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        used = self.output.of(parameter_of(values, self.output))
        for i, flow in enumerate(used):
            change = {view.parameter: torch.zeros_like(parameter_of(values, view)) for view in self.biases}
            for view in self.biases:
                change[view.parameter][i] = 1
            yield {**change, self.into.parameter: -flow}
