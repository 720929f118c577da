"""What the norms of an attention module leave free and no block uses: known, and not quotiented.

Three instances: gains to which 1 is added (Gemma 3, Qwen3-Next), where (1 + w_q) · a and (1 + w_k) / a is no scaling of w; a
layer norm on queries and keys, which takes out the mean of what the projections make (Persimmon); a norm inside the module
before its projections (ESM, Megatron), whose gain, bias and mean the projections can take over.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from geosharp.symmetry.between import gain_offset, norm_names, rotary_of
from geosharp.symmetry.code import sources
from geosharp.symmetry.features import Features, LinearMap, join, linear_map
from geosharp.symmetry.layouts.fused import fused
from geosharp.symmetry.layouts.projections import gain_size
from geosharp.symmetry.layouts.separate import separate
from geosharp.symmetry.reading import Known, Reading
from geosharp.symmetry.site import Rotary
from geosharp.symmetry.view import View, parameter_of

# Gains with 1 added ---------------------------------------------------------------------------------------------------


def offset_gains(name: str, module: nn.Module, parent: nn.Module | None) -> list[Reading]:
    """The gains of queries and keys, feature by feature or frequency pair by pair."""
    names = norm_names(module)
    norms = [getattr(module, path) for path in names or ()]
    if names is None or any(gain_offset(norm) != 1.0 for norm in norms):
        return []
    sizes = [gain_size(norm) for norm in norms]
    if sizes[0] is None or sizes[0] != sizes[1] or names[0] == names[1] or sizes[0] != getattr(module, "head_dim", None):
        return []
    together = _turned_together(sizes[0], rotary_of(module, sizes[0]))
    scales = _OffsetScales((join(name, names[0], "weight"), join(name, names[1], "weight")), together)
    reason = "the norms add 1 to their gains, so this is no product of the gains"
    return [Reading((), (), (Known(join(name, "query_key_gains"), "query-key gains", "R+", len(together), reason, scales),))]


def _turned_together(width: int, rotary: Rotary | None) -> tuple[tuple[int, ...], ...]:
    """Features that a rotation mixes, and the others one by one."""
    dims = 0 if rotary is None else rotary.dims
    half, single = dims // 2, tuple((j,) for j in range(dims, width))
    if rotary is not None and rotary.interleaved:
        return (*((2 * j, 2 * j + 1) for j in range(half)), *single)
    return (*((j, j + half) for j in range(half)), *single)


@dataclass(frozen=True)
class _OffsetScales:
    """(1 + w_q) times a number, (1 + w_k) divided by it."""

    names: tuple[str, str]
    together: Sequence[tuple[int, ...]]

    def __call__(self, values: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        for features in self.together:
            changes = {}
            for name, sign in zip(self.names, (1, -1), strict=True):
                gain = parameter_of(values, View(name))
                mask = torch.zeros_like(gain)
                mask[list(features)] = sign
                changes[name] = mask * (1 + gain)
            yield changes


# Means of queries and keys ---------------------------------------------------------------------------------------------


def norm_means(name: str, module: nn.Module, parent: nn.Module | None) -> list[Reading]:
    """One vector added to all rows of a head's map, where a layer norm follows."""
    names = norm_names(module)
    norms = [getattr(module, path) for path in names or ()]
    if not norms or not all(isinstance(norm, nn.LayerNorm) for norm in norms):
        return []
    sites = separate(name, module, parent) or fused(name, module, parent)
    if not sites or sites[0].norm is None or any(gain_size(norm) != sites[0].width for norm in norms):
        return []
    features = (*sites[0].query, sites[0].key[0])
    means, reason = _Means(features), "the maps in front of the norm stay element-wise"
    parameters = {join(name, path): one for path, one in module.named_parameters()}
    shapes = [view.of(parameters[view.parameter]).shape for one in features for view in (one.weight, one.bias) if view is not None]
    size = sum(shape[0] * (shape[2] if len(shape) > 2 else 1) for shape in shapes)
    return [Reading((), (), (Known(join(name, "query_key_means"), "query-key means", "R", size, reason, means),))]


@dataclass(frozen=True)
class _Means:
    """A constant in all features of a head, as a function of the input."""

    features: tuple[Features, ...]

    def __call__(self, values: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        for one in self.features:
            for view in (one.weight, one.bias):
                shape = view.of(parameter_of(values, view)).shape if view is not None else ()
                for group, column in itertools.product(range(shape[0] if shape else 0), range(shape[2] if len(shape) > 2 else 1)):
                    assert view is not None
                    change = torch.zeros_like(parameter_of(values, view))
                    rows = view.of(change)[group]
                    (rows[:, column] if rows.ndim == 2 else rows).fill_(1)
                    yield {view.parameter: change}


# A norm before the projections ----------------------------------------------------------------------------------------

_INNER = ("self", "attention", "self_attention")


def norm_before(name: str, module: nn.Module, parent: nn.Module | None) -> list[Reading]:
    """A layer norm and the projections of the child that reads its output, in a module that is about this attention alone."""
    weighted = {path for path, child in module.named_children() if any(True for _ in child.parameters())}
    for path in _INNER:
        inner = getattr(module, path, None)
        for before in sources(module).get(path, ()) if isinstance(inner, nn.Module) else ():
            others = weighted - {path, before}
            if len(others) > 1 or any(path not in sources(module).get(other, ()) for other in others):
                continue  # whatever else is there may read the norm too
            norm = getattr(module, before, None)
            maps = _first_maps(join(name, path), inner) if isinstance(inner, nn.Module) else []
            if isinstance(norm, nn.LayerNorm) and norm.weight is not None and maps and all(one.inputs == gain_size(norm) for one in maps):
                free = _NormBefore(join(name, before), norm.bias is not None, tuple(maps))
                reason = "it shares entries with the blocks of queries, keys and values"
                return [Reading((), (), (Known(join(name, before), "norm before", "R", free.dimension, reason, free),))]
    return []


def _first_maps(name: str, module: nn.Module) -> list[LinearMap]:
    """The linear children that read no other's result."""
    maps = {path: one for path, child in module.named_children() if (one := linear_map(child, join(name, path))) is not None}
    return [one for path, one in maps.items() if not sources(module).get(path, frozenset()) & maps.keys()]


@dataclass(frozen=True)
class _NormBefore:
    """A gain taken over by the maps' columns, a bias by their biases; a vector along 1 / gain meets normalized inputs at 0."""

    norm: str
    biased: bool
    maps: tuple[LinearMap, ...]

    @property
    def _all_biased(self) -> bool:
        return all(one.has_bias for one in self.maps)

    @property
    def dimension(self) -> int:
        """The number of directions."""
        size, rows = self.maps[0].inputs, sum(one.outputs for one in self.maps if one.has_bias or not self.biased)
        return size + (size if self.biased and self._all_biased else 0) + rows

    def __call__(self, values: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        gain = parameter_of(values, View(f"{self.norm}.weight"))
        shift = parameter_of(values, View(f"{self.norm}.bias")) if self.biased else torch.zeros_like(gain)
        for unit in torch.eye(len(gain), dtype=gain.dtype):
            yield {**self._of_norm(weight=gain * unit, bias=shift * unit), **self._of_maps(values, -unit, None)}
            if self.biased and self._all_biased:
                yield {**self._of_norm(bias=unit), **self._of_maps(values, None, -unit)}
        for one in self.maps:
            yield from self._along(values, one, 1 / gain, (shift / gain).sum())

    def _of_norm(self, **changes: Tensor) -> dict[str, Tensor]:
        return {f"{self.norm}.{leaf}": change for leaf, change in changes.items() if leaf == "weight" or self.biased}

    def _of_maps(self, values: Mapping[str, Tensor], columns: Tensor | None, through: Tensor | None) -> dict[str, Tensor]:
        """Columns scaled, or a vector sent through each map into its bias."""
        changes = {}
        for one in self.maps:
            made = one.made().weight
            weight = parameter_of(values, made)
            if columns is not None:
                changes[made.parameter] = torch.zeros_like(weight)
                made.of(changes[made.parameter]).copy_(made.of(weight) * columns)
            if through is not None and one.bias is not None:
                changes[one.bias.parameter] = made.of(weight) @ through
        return changes

    def _along(self, values: Mapping[str, Tensor], one: LinearMap, row: Tensor, constant: Tensor) -> Iterator[dict[str, Tensor]]:
        made = one.made()
        if self.biased and made.bias is None:
            return
        for i in range(one.outputs):
            changes = {made.weight.parameter: torch.zeros_like(parameter_of(values, made.weight))}
            made.weight.of(changes[made.weight.parameter])[i] = row
            if made.bias is not None:
                changes[made.bias.parameter] = torch.zeros_like(parameter_of(values, made.bias))
                changes[made.bias.parameter][i] = -constant
            yield changes
