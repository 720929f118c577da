"""An attention layer as the layouts describe it: which features lie where, and what stands between them.

A layout fills in an `AttentionSite`; which symmetries follow is the same for every family and is written once, in
`attention.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from geosharp.symmetry.features import Features
from geosharp.symmetry.view import View


@dataclass(frozen=True)
class Rotary:
    """Queries and keys are rotated, in the first `dims` features of a head, by angles that depend on the position."""

    dims: int
    interleaved: bool
    """Pairs (2j, 2j + 1) instead of (j, j + dims / 2)."""
    known: bool = True
    """Whether the order of the pairs was read off the model's code; else the other order is tried too."""


@dataclass(frozen=True)
class Norm:
    """Queries and keys are normalized between the projections and the logits, with gains (and biases) as features."""

    name: str
    query: tuple[Features, ...] = ()
    """Gains as (key-value heads or 1, width), for each query head of a group."""
    key: tuple[Features, ...] = ()
    cosine: bool = False
    """Whether a head's queries and keys are divided by their length and nothing else."""


@dataclass(frozen=True)
class AttentionSite:
    """One soft-max attention layer. Features of heads are (key-value heads, width); several where a group of heads shares them."""

    name: str
    heads: int
    """Query heads."""
    width: int
    """Features of a query head."""
    query: tuple[Features, ...]
    key: tuple[Features, ...]
    """The keys, and what else meets the queries in the logits (query-dependent positions)."""
    value: tuple[Features, ...]
    output: tuple[Features, ...]
    """The inputs of the output map, one for each query head of a group."""
    output_bias: View | None = None
    rotary: Rotary | None = None
    value_rotary: bool = False
    norm: Norm | None = None
    gated: bool = False
    """Whether each feature of the context is multiplied by a gate before the output map."""
    only_channels: bool = False
    """Whether queries are also used feature by feature: `key[1:]` are then what they meet there (ConvBERT)."""
    key_shifts_free: tuple[bool, ...] = (True,)
    """For each of `key`, whether a constant added to it adds a constant to each query's logits: then the soft-max takes it out.
    False where it meets something else than the queries, or the soft-max has another term in its sum."""
    value_shift_is_free: bool = True
    extra_rows: bool = False
    """Whether `key[1]` and `value[1]` are a further key and value of every sequence: shifts are free together with theirs only."""
    broken: str = ""
    """A reason why neither product is one (values clipped in between, adapters on top)."""
    value_broken: str = ""
    """A reason why values and output are no product."""
