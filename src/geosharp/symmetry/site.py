"""An attention layer as the layouts describe it, and the blocks that follow from it.

A layout says where query, key, value and output weights of all heads lie; which symmetries these have is the same for
every family, and is written here once (math.md 6).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from geosharp.symmetry.block import Block, Factors, Translation
from geosharp.symmetry.view import View


@dataclass(frozen=True)
class Projection:
    """Weights of all heads as a stack (heads, in, head width) and biases as (heads, 1, head width)."""

    weight: View
    bias: View | None = None


@dataclass(frozen=True)
class AttentionSite:
    """One soft-max attention layer with as many key-value heads as query heads."""

    name: str
    query: Projection
    key: Projection
    value: Projection
    output: View
    """(heads, out, head width)."""
    output_bias: View | None = None
    query_key_is_free: bool = True
    """False where something between the projections and the logits (rotary positions, a norm) breaks GL(h)."""


def blocks_of_site(site: AttentionSite, *, translations: bool, is_coordinate: Callable[[str], bool]) -> list[Block]:
    """The disjoint blocks of one attention layer.

    With `translations` the soft-max translations are removed: the key bias is dropped and the value bias moved into the
    output bias, so neither is in a product block. Without ("published"), or where a translation's members are not all
    coordinates, biases stay inside the product blocks.
    """
    blocks: list[Block] = []
    drop_key = translations and site.query_key_is_free and site.key.bias is not None and is_coordinate(site.key.bias.parameter)
    drop_value = (
        translations
        and site.value.bias is not None
        and site.output_bias is not None
        and is_coordinate(site.value.bias.parameter)
        and is_coordinate(site.output_bias.parameter)
    )
    if drop_key and site.key.bias is not None:
        control = site.query.bias if site.query.bias is not None else None
        if control is not None:
            beside = {"beside": site.key.weight, "control_beside": site.query.weight}
            blocks.append(Translation(f"{site.name}.key_bias", site.key.bias, control=control, **beside, kind="key bias"))
        else:
            drop_key = False  # nothing that could serve as a control: not provable, so not used
    if drop_value and site.value.bias is not None:
        flow = {"through": site.output, "into": site.output_bias, "beside": site.value.weight}
        blocks.append(Translation(f"{site.name}.value_bias", site.value.bias, **flow, kind="value bias"))
    if site.query_key_is_free:
        blocks.append(_factors(f"{site.name}.query_key", "query-key", site.query, site.key, drop_key))
    value, carried = _sides(site.value, drop_value)
    blocks.append(Factors(f"{site.name}.value_output", value, (site.output,), kind="value-output", left_carried=carried))
    return blocks


def _factors(name: str, kind: str, query: Projection, key: Projection, drop_key: bool) -> Factors:
    left, _ = _sides(query, False)
    right, carried = _sides(key, drop_key)
    return Factors(name, left, right, kind=kind, right_carried=carried)


def _sides(projection: Projection, drop_bias: bool) -> tuple[tuple[View, ...], tuple[View, ...]]:
    """Views that are coordinates, and views that a translation removes."""
    if projection.bias is None:
        return (projection.weight,), ()
    return ((projection.weight,), (projection.bias,)) if drop_bias else ((projection.weight, projection.bias), ())
