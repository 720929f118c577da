"""Which symmetries an attention layer has (math.md 6), whatever family wrote it.

Query and key meet in products of features, value and output in products of features; what stands between (rotary
positions, a norm, a gate) leaves a subgroup of GL(h), or nothing. A constant in the keys or in the values is not seen.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from geosharp.symmetry.block import Block, Factors, Translation
from geosharp.symmetry.features import Features, pairs
from geosharp.symmetry.reading import Dropped, IsCoordinate, Known, Reading
from geosharp.symmetry.site import AttentionSite, Norm, Rotary
from geosharp.symmetry.view import AnyView, View, parameter_of, read, real_views, write

Form = Callable[[Features], tuple[AnyView, ...]]


def reading_of(site: AttentionSite, *, published: bool, is_coordinate: IsCoordinate) -> Reading:
    """The disjoint blocks of one attention layer, what is refused at sight, what is known and not used.

    The soft-max translations are removed: key biases dropped, the value bias moved into the output bias, so that neither
    is in a product block. In the `published` recipe, or where a translation's members are not all coordinates, biases stay
    inside the product blocks.
    """
    if site.broken:
        return Reading((), tuple(Dropped(f"{site.name}.{side}", site.broken) for side in ("query_key", "value_output")))
    shifts = {} if published else {**_key_shifts(site, is_coordinate), **_value_shift(site, is_coordinate)}
    dropped = set(shifts)
    return (
        Reading(tuple(shifts.values()))
        + _query_key(site, dropped, published=published)
        + _value_output(site, dropped, published=published)
        + Reading((), (), () if published else tuple(_joint_shifts(site)))
    )


# Query and key --------------------------------------------------------------------------------------------------------


def _query_key(site: AttentionSite, dropped: set[View], *, published: bool) -> Reading:
    name = f"{site.name}.query_key"
    if site.norm is not None:
        reason = f"{site.norm.name} between the projections and the logits: GL(h) is no symmetry of queries and keys"
        gains = () if published else tuple(_gains(site, site.norm))
        return Reading(gains, (Dropped(name, reason),), _cosine(site) if site.norm.cosine else ())
    if site.only_channels:
        return Reading((_block(name, "query-key channels", site.query, site.key, dropped, Features.scalars),))
    if site.rotary is None:
        return Reading((_block(name, "query-key", site.query, site.key, dropped, Features.matrix),))
    if published:
        return Reading((), (Dropped(name, "rotary positions lie between: GL(h) is no symmetry, and the published recipe has no other"),))
    return Reading(tuple(_rotary_blocks(name, site, site.rotary, dropped)))


def _rotary_blocks(name: str, site: AttentionSite, rotary: Rotary, dropped: set[View]) -> Iterator[Block]:
    """GL(1, ℂ) a frequency pair, and GL on the features that are not rotated."""
    query, key = (tuple(one[:, : rotary.dims] for one in side) for side in (site.query, site.key))
    yield _block(f"{name}_rotary", "rotary query-key", query, key, set(), lambda one: pairs(one, interleaved=rotary.interleaved))
    if rotary.dims < site.width:
        query, key = (tuple(_not_rotated(site, one) for one in side) for side in (site.query, site.key))
        yield _block(name, "query-key", query, key, dropped, Features.matrix)


def _not_rotated(site: AttentionSite, features: Features) -> Features:
    return features if site.rotary is None else features[:, site.rotary.dims :]


def _gains(site: AttentionSite, norm: Norm) -> Iterator[Block]:
    """The gains of norms multiply in the logits: GL(1) a feature, or a real GL(1) a frequency pair."""
    if not norm.query or not norm.key:
        return
    name = f"{site.name}.query_key_gains"
    if site.rotary is None:
        yield _block(name, "query-key gains", norm.query, norm.key, set(), Features.scalars)
        return
    dims, interleaved = site.rotary.dims, site.rotary.interleaved

    def real_pairs(features: Features) -> tuple[AnyView, ...]:
        return real_views(pairs(features[:, :dims], interleaved=interleaved))

    yield _block(name, "query-key gains", norm.query, norm.key, set(), real_pairs)


def _key_shifts(site: AttentionSite, is_coordinate: IsCoordinate) -> dict[View, Translation]:
    """b_k + any vector: a query's logits all move alike, which the soft-max does not see."""
    if site.norm is not None or (site.rotary is not None and site.rotary.dims >= site.width):
        return {}
    query, shifts = _not_rotated(site, site.query[0]), {}
    for number, (whole, free) in enumerate(zip(site.key, site.key_shifts_free, strict=True)):
        key = _not_rotated(site, whole)
        shift = key_shift(f"{site.name}.key_bias" + (f"_{number}" if number else ""), query, key)
        if free and shift is not None and key.bias is not None and is_coordinate(key.bias.parameter):
            shifts[key.bias] = shift
    return shifts


def key_shift(name: str, query: Features, key: Features) -> Translation | None:
    """The shift of a key bias; without a query bias there is nothing that could serve as a control."""
    if key.bias is None or query.bias is None:
        return None
    shifted, control = key.bias[..., None, :], query.bias[..., None, :]
    beside, other = key.weight.mT, query.weight.mT
    return Translation(name, shifted, control=control, beside=beside, control_beside=other, kind="key bias")


# Value and output -----------------------------------------------------------------------------------------------------


def _value_output(site: AttentionSite, dropped: set[View], *, published: bool) -> Reading:
    name = f"{site.name}.value_output"
    if site.value_broken:
        return Reading((), (Dropped(name, site.value_broken),))
    if not site.gated and not site.value_rotary:
        return Reading((_block(name, "value-output", site.value, site.output, dropped, Features.matrix),))
    if published:
        return Reading((), (Dropped(name, "something stands between values and output, and the published recipe has GL(h) only"),))
    if site.gated:
        return Reading((_block(name, "value-output channels", site.value, site.output, dropped, Features.scalars),))
    assert site.rotary is not None
    form = functools.partial(pairs, interleaved=site.rotary.interleaved)
    return Reading((_block(name, "rotary value-output", site.value, site.output, dropped, form),))


def _value_shift(site: AttentionSite, is_coordinate: IsCoordinate) -> dict[View, Translation]:
    """(b_v + c, b_o - W_o c): the rows of the soft-max sum to 1."""
    value, into = site.value[0], site.output_bias
    if site.gated or site.value_rotary or not site.value_shift_is_free or value.bias is None or into is None:
        return {}
    if not (is_coordinate(value.bias.parameter) and is_coordinate(into.parameter)):
        return {}
    through, beside = tuple(one.weight.mT for one in site.output), value.weight.mT
    return {value.bias: Translation(f"{site.name}.value_bias", value.bias[..., None, :], through, into, beside=beside, kind="value bias")}


# Both -----------------------------------------------------------------------------------------------------------------


def _block(name: str, kind: str, left: tuple[Features, ...], right: tuple[Features, ...], dropped: set[View], form: Form) -> Factors:
    """A product block; biases that a translation removes are carried along, not coordinates."""
    sides: list[tuple[AnyView, ...]] = []
    carried: list[tuple[AnyView, ...]] = []
    for features in (left, right):
        gone = [view for one in features if one.bias in dropped for view in form(one)[1:]]
        sides.append(tuple(view for one in features for view in form(one) if view not in gone))
        carried.append(tuple(gone))
    return Factors(name, sides[0], sides[1], kind=kind, left_carried=carried[0], right_carried=carried[1])


# A further key and value of every sequence ----------------------------------------------------------------------------


def _joint_shifts(site: AttentionSite) -> Iterator[Known]:
    """A constant in all keys, or in all values, the extra ones included."""
    if not site.extra_rows or site.output_bias is None:
        return
    for kind, sides, through in (("key shift", site.key, ()), ("value shift", site.value, site.output)):
        if all(one.bias is not None for one in sides[:1]):
            size, reason = site.heads * site.width, "two biases move together, and both are coordinates"
            shift = _JointShift(sides, through, site.output_bias)
            yield Known(f"{site.name}.{kind.replace(' ', '_')}", kind, f"R^{site.width}", size, reason, shift)


@dataclass(frozen=True)
class _JointShift:
    """One vector added to a bias and to the extra row beside it, and what carries it on."""

    sides: tuple[Features, ...]
    through: tuple[Features, ...]
    into: View

    def __call__(self, values: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        bias, row = self.sides[0].bias, self.sides[1].weight
        assert bias is not None
        shape = bias.of(parameter_of(values, bias)).shape
        for unit in torch.eye(shape.numel(), dtype=parameter_of(values, bias).dtype).view(-1, *shape):
            change = {name: torch.zeros_like(values[name]) for name in (bias.parameter, row.parameter)}
            bias.of(change[bias.parameter]).copy_(unit)
            row.of(change[row.parameter])[..., 0].copy_(unit)
            flow = [(one.weight.of(parameter_of(values, one.weight)) * unit[..., None]).sum((0, 1)) for one in self.through]
            if flow:
                change[self.into.parameter] = -torch.stack(flow).sum(0)
            yield change


# Cosine attention -----------------------------------------------------------------------------------------------------


def _cosine(site: AttentionSite) -> tuple[Known, ...]:
    """Lengths divided out leave a scale a head on either side, and rotations of both."""
    reason = "the metrics here are those of products of two matrices"
    groups, h = site.heads // len(site.query), site.width
    rotations = groups * h * (h - 1) // 2
    return (
        Known(f"{site.name}.query_key_scales", "query-key scales", "R+", site.heads + groups, reason, _Scales(site)),
        Known(f"{site.name}.query_key_rotations", "query-key rotations", f"O({h})", rotations, reason, _Rotations(site)),
    )


@dataclass(frozen=True)
class _Scales:
    """Every head's queries, and every head's keys, times a number."""

    site: AttentionSite

    def __call__(self, values: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        for features in (*self.site.query, self.site.key[0]):
            groups, h = read(values, features.weight).shape[0], self.site.width
            for group in range(groups):
                factors = torch.zeros(groups, h, h, dtype=next(iter(values.values())).dtype)
                factors[group] = torch.eye(h)
                yield _changed(values, features, factors)


@dataclass(frozen=True)
class _Rotations:
    """A head's queries and keys turned alike."""

    site: AttentionSite

    def __call__(self, values: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        groups, h = read(values, self.site.key[0].weight).shape[0], self.site.width
        for group, (i, j) in itertools.product(range(groups), itertools.combinations(range(h), 2)):
            turn = torch.zeros(groups, h, h, dtype=next(iter(values.values())).dtype)
            turn[group, i, j], turn[group, j, i] = 1, -1
            yield _sum([_changed(values, one, turn) for one in (*self.site.query, self.site.key[0])])


def _changed(values: Mapping[str, Tensor], features: Features, generator: Tensor) -> dict[str, Tensor]:
    """The features of every head times the generator of a group."""
    change: dict[str, Tensor] = {}
    for view in features.matrix():
        whole = change.setdefault(view.parameter, torch.zeros_like(parameter_of(values, view)))
        write({view.parameter: whole}, view, read(values, view) @ generator)
    return change


def _sum(changes: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    total: dict[str, Tensor] = {}
    for change in changes:
        for name, part in change.items():
            total[name] = total[name] + part if name in total else part
    return total
