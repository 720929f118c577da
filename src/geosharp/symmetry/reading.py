"""What a layout says of one part of a model: claims to verify, what it refuses at sight, what it knows and does not use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from geosharp.symmetry.block import Block

IsCoordinate = Callable[[str], bool]
"""Whether the parameter of this name is measured."""

Tangents = Callable[[Mapping[str, Tensor]], Iterator[dict[str, Tensor]]]
"""Parameter values -> directions along the orbit, as changes of some parameters."""


@dataclass(frozen=True)
class Dropped:
    """A block that is not used, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Known:
    """A symmetry that is there and not quotiented: a value depends on where on its orbit the weights lie."""

    name: str
    kind: str
    group: str
    dimension: int
    reason: str
    tangents: Tangents


@dataclass(frozen=True)
class Reading:
    """One way to read a part of the model."""

    blocks: tuple[Block, ...]
    refused: tuple[Dropped, ...] = ()
    known: tuple[Known, ...] = ()
    if_tied: str = ""
    """The parameter that has to be tied to another for this reading."""

    def __add__(self, other: Reading) -> Reading:
        return Reading(self.blocks + other.blocks, self.refused + other.refused, self.known + other.known)


@dataclass(frozen=True)
class Part:
    """A part of the model (an attention layer, a feed-forward layer) in the readings that its structure allows, likeliest first."""

    name: str
    kind: str
    readings: tuple[Reading, ...]
