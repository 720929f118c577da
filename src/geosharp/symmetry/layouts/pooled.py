"""Attention whose queries are maxima over neighbouring positions (Hiera): only positive factors, feature by feature, pass a maximum.

A constant in the keys is still not seen by the soft-max.
"""

from __future__ import annotations

from torch import nn

from geosharp.symmetry.attention import key_shift
from geosharp.symmetry.between import pooled_queries
from geosharp.symmetry.block import Factors
from geosharp.symmetry.layouts.fused import fused
from geosharp.symmetry.layouts.separate import separate
from geosharp.symmetry.reading import Reading


def pooled(name: str, module: nn.Module, parent: nn.Module | None) -> list[Reading]:
    """Queries and keys of such a layer, in the orders of features that its structure leaves open."""
    if not pooled_queries(module):
        return []
    readings = []
    for site in separate(name, module, parent) or fused(name, module, parent):
        if site.broken or site.rotary is not None:
            continue
        key, left = site.key[0], tuple(view for one in site.query for view in one.scalars())
        weights, *biases = key.scalars()
        shift = key_shift(f"{site.name}.key_bias", site.query[0], key) if site.key_shifts_free[0] else None
        right, carried = ((weights,), tuple(biases)) if shift is not None else ((weights, *biases), ())
        block = Factors(f"{site.name}.query_key_channels", left, right, "positive", "query-key channels", (), carried)
        readings.append(Reading((block,) if shift is None else (block, shift)))
    return readings
