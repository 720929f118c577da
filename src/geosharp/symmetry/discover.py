"""Find the blocks of a model, take what a user declares, and say what was left out and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from geosharp.errors import RankError, SymmetryError
from geosharp.symmetry.attention import reading_of
from geosharp.symmetry.block import Block, Factors, Translation, overlaps
from geosharp.symmetry.complete import Completeness
from geosharp.symmetry.layouts import ATTENTION, OTHERS
from geosharp.symmetry.layouts.adapters import low_rank
from geosharp.symmetry.reading import Dropped, IsCoordinate, Known, Part, Reading
from geosharp.symmetry.scope import Places, Run
from geosharp.symmetry.show import as_dict, shown
from geosharp.symmetry.verify import Verdict, verify_parts

Symmetries = str | Block | Sequence[Block]
"""What `symmetries=` takes: "all", "published", "none", or declared blocks."""

MODES = ("all", "published", "none")


@dataclass(frozen=True)
class Found:
    """What leaves one model's function unchanged: claims with their verdicts, what was not even tried, what is not used."""

    verdicts: tuple[Verdict, ...]
    dropped: tuple[Dropped, ...] = ()
    """Blocks with a member that is no coordinate."""
    refused: tuple[Dropped, ...] = ()
    """What the model's structure rules out."""
    known: tuple[Known, ...] = ()
    """Symmetries that are there and not quotiented."""
    declared: bool = False
    sizes: Mapping[str, tuple[str, int, int]] = field(default_factory=dict)
    """Block name -> group, copies, dimension."""
    completeness: tuple[Completeness, ...] = ()
    """For each attention module, where it was asked for, whether these are all of its symmetries."""
    parts: tuple[Part, ...] = ()
    """What the layouts recognized, each part in the reading that was chosen."""

    def __str__(self) -> str:
        return shown(self)

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON-able values."""
        return as_dict(self)

    @property
    def used(self) -> tuple[Block, ...]:
        """The verified blocks; where a translation failed, what it would have removed is a coordinate of its block."""
        failed = [v.block.shifted for v in self.verdicts if isinstance(v.block, Translation) and not v.verified]
        blocks = (verdict.block for verdict in self.verdicts if verdict.verified)
        return tuple(block.with_carried(failed) if isinstance(block, Factors) and failed else block for block in blocks)

    @property
    def adapters_refused(self) -> tuple[Dropped, ...]:
        """Adapters that are no coordinates of their own, or no plain product: a geodesic measure does not go on beside them."""
        return tuple(item for part in self.parts if part.kind == "adapter" for item in part.readings[0].refused)

    def kinds(self, blocks: Iterable[Block]) -> tuple[str, ...]:
        """Blocks in words, equal ones counted: "query-key GL(32) x 72"."""
        counted: dict[str, int] = {}
        for block in blocks:
            group, copies, _ = self.sizes[block.name]
            label = f"{block.kind} {group}"
            counted[label] = counted.get(label, 0) + copies
        return tuple(f"{label} x {count}" for label, count in counted.items())

    def known_kinds(self) -> tuple[str, ...]:
        """What is known and not used, in words, with dimensions added up."""
        counted: dict[str, int] = {}
        for known in self.known:
            counted[known.kind] = counted.get(known.kind, 0) + known.dimension
        return tuple(f"{kind} ({count} dimensions)" for kind, count in counted.items())


# What there may be ----------------------------------------------------------------------------------------------------


def parts_of(model: nn.Module, *, published: bool, is_coordinate: IsCoordinate) -> list[Part]:
    """Every part of a model that some layout recognizes; shared modules once."""
    parts: list[Part] = []
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if not module._modules and module._parameters.keys() <= {"weight", "bias"}:
            continue  # a single map or norm is nothing by itself
        parent = modules.get(name.rpartition(".")[0]) if name else None
        sites = next((found for layout in ATTENTION.values() if (found := layout(name, module, parent))), [])
        if sites:
            readings = [reading_of(site, published=published, is_coordinate=is_coordinate) for site in sites]
            parts.append(Part(sites[0].name, "attention", tuple(readings)))
        if published:
            continue
        others = {kind: layout(name, module, parent) for kind, layout in OTHERS.items()}
        others["adapter"] = low_rank(name, module, is_coordinate)
        parts += [Part(name, kind, tuple(readings)) for kind, readings in others.items() if readings]
    return parts


def candidates(
    model: nn.Module, values: Mapping[str, Tensor], symmetries: Symmetries, coordinates: Collection[str], alias: Mapping[str, str]
) -> tuple[list[Part], list[Dropped], bool]:
    """Parts to verify, blocks dropped because a member is no coordinate, and whether the user declared them."""

    def is_coordinate(name: str) -> bool:
        return alias.get(name, name) in coordinates

    if not isinstance(symmetries, str):
        return *_declared(symmetries, values, is_coordinate, alias), True
    if symmetries not in MODES:
        raise SymmetryError(f"expected symmetries= to be one of {', '.join(MODES)} or declared blocks, got {symmetries!r}")
    parts = [] if symmetries == "none" else parts_of(model, published=symmetries == "published", is_coordinate=is_coordinate)
    kept, dropped = [], []
    tied = {*alias, *alias.values()}
    for part in parts:
        readings: list[Reading] = []
        for index, reading in enumerate(one for one in part.readings if not one.if_tied or one.if_tied in tied):
            blocks, refused = [], list(reading.refused)
            for block in (block.renamed(alias) for block in reading.blocks):
                problem = _misfit(block, values)
                fixed = "" if problem else _not_free(block, is_coordinate)
                if problem:
                    refused.append(Dropped(block.name, problem))
                elif fixed:
                    dropped += [Dropped(block.name, fixed)] if index == 0 else []
                else:
                    blocks.append(block)
            known = tuple(item for item in reading.known if _moves(item, values, is_coordinate))
            readings.append(dataclasses.replace(reading, blocks=tuple(blocks), refused=tuple(refused), known=known))
        kept.append(dataclasses.replace(part, readings=tuple(readings)))
    return kept, dropped, False


def _moves(known: Known, values: Mapping[str, Tensor], is_coordinate: IsCoordinate) -> bool:
    """Whether a known symmetry moves coordinates only."""
    try:
        return all(is_coordinate(name) for name in next(iter(known.tangents(values)), {}))
    except SymmetryError:  # of a module that shares its parameters with an earlier one, which has the same
        return False


def _misfit(block: Block, values: Mapping[str, Tensor]) -> str:
    """Why a found block does not fit the model's parameters, or nothing."""
    try:
        block.check(values)
    except SymmetryError as error:
        return str(error)
    return "both sides are the same numbers, which leaves rotations only" if overlaps([block], values) else ""


def _not_free(block: Block, is_coordinate: IsCoordinate) -> str:
    fixed = [name for name in block.parameters if not is_coordinate(name)]
    return f"{', '.join(fixed)}: not trainable or not selected, so not a coordinate" if fixed else ""


def _declared(
    symmetries: Block | Sequence[Block], values: Mapping[str, Tensor], is_coordinate: IsCoordinate, alias: Mapping[str, str]
) -> tuple[list[Part], list[Dropped]]:
    given = [symmetries] if isinstance(symmetries, (Factors, Translation)) else list(symmetries)
    for item in given:
        if not isinstance(item, (Factors, Translation)):
            raise SymmetryError(f"expected declared symmetries to be Factors or Translation blocks, got {type(item).__name__}")
    names = [block.name for block in given]
    if len(set(names)) < len(names):
        raise SymmetryError(f"expected distinct block names, got {names}")
    kept, dropped = [], []
    for block in (block.renamed(alias) for block in given):
        block.check(values)  # raises one line where a declared view does not fit
        fixed = _not_free(block, is_coordinate)
        if fixed:
            dropped.append(Dropped(block.name, fixed))
        else:
            kept.append(block)
    for index, (other, parameter) in overlaps(kept, values).items():
        raise SymmetryError(
            f"blocks {kept[other].name!r} and {kept[index].name!r} both act on entries of {parameter!r}; declare disjoint blocks"
        )
    return [Part(block.name, "declared", (Reading((block,)),)) for block in kept], dropped


def structure(parts: Sequence[Part], values: Mapping[str, Tensor]) -> tuple[list[Block], list[Known]]:
    """The disjoint blocks of each part's likeliest reading, and those that share entries with one of them."""
    return _disjoint([block for part in parts for block in part.readings[0].blocks], values)


def _disjoint(blocks: Sequence[Block], values: Mapping[str, Tensor]) -> tuple[list[Block], list[Known]]:
    kept, known = list(blocks), []
    while shared := overlaps(kept, values):
        index = min(shared)
        other, parameter = shared[index]
        block = kept.pop(index)
        group, _, dimension = block.describe(values)
        known.append(
            Known(block.name, block.kind, group, dimension, f"shares entries of {parameter} with {kept[other].name}", block.tangents)
        )
    return kept, known


# What is shown --------------------------------------------------------------------------------------------------------


def discover(
    model: nn.Module,
    values: dict[str, Tensor],
    symmetries: Symmetries,
    run: Run | None,
    *,
    coordinates: Collection[str],
    alias: Mapping[str, str],
    seed: int = 0,
    resolution: torch.dtype | None = None,
    wider: Callable[[], tuple[nn.Module, Run, dict[str, Tensor]]] | None = None,
) -> Found:
    """The blocks of a model with their verdicts. A declared block that is refused is an error; a found one is listed.

    `resolution` is the coarsest dtype on the way to the outputs; `wider` gives the model, its outputs and values in a wider
    one, asked for where rounding hides what a control shows.
    """
    parts, dropped, declared = candidates(model, values, symmetries, coordinates, alias)
    if run is None:
        chosen = [0] * len(parts)
        verdicts = [Verdict(block, "unverified", reason="no batch was given") for part in parts for block in part.readings[0].blocks]
    else:
        claims = [[reading.blocks for reading in part.readings] for part in parts]
        within = ["" if declared else part.name for part in parts]
        judged = verify_parts(model, run, values, claims, seed=seed, within=within, resolution=resolution)
        if wider is not None and any(verdict.hidden_by_rounding for one in judged for verdict in one.verdicts):
            wide_model, wide_run, wide_values = wider()
            judged = verify_parts(wide_model, wide_run, wide_values, claims, seed=seed, within=within)
        chosen = [one.reading for one in judged]
        verdicts = [_or_degenerate(verdict, values) for one in judged for verdict in one.verdicts]
    if declared:
        for verdict in verdicts:
            _insist(verdict)
    readings = [part.readings[index] for part, index in zip(parts, chosen, strict=True)]
    claimed = [verdict.block for verdict in verdicts if verdict.verified or verdict.status == "unverified"]
    _, overlapping = _disjoint(claimed, values)
    gone = {known.name for known in overlapping}
    return Found(
        verdicts=tuple(verdict for verdict in verdicts if verdict.block.name not in gone),
        dropped=tuple(dropped),
        refused=tuple(item for reading in readings for item in reading.refused),
        known=(*(item for reading in readings for item in reading.known), *overlapping),
        declared=declared,
        sizes={verdict.block.name: verdict.block.describe(values) for verdict in verdicts},
        parts=tuple(dataclasses.replace(part, readings=(reading,)) for part, reading in zip(parts, readings, strict=True)),
    )


def attention_modules(model: nn.Module, found: Found) -> dict[str, set[str]]:
    """The attention modules of a model with the parameters that belong to them, without those of parts nested inside."""
    places = Places(model)
    scopes: dict[str, set[str]] = {}
    nested: set[str] = set()
    for part in found.parts:
        blocks = part.readings[0].blocks
        names = {name for block in blocks for name in block.parameters}
        if part.kind in WITHIN_ATTENTION and names:
            scopes.setdefault(places.scope(names, part.name), set())
        elif part.kind != "position bias":
            nested |= names
    for scope in scopes:
        inside = [name for name, _ in model.named_parameters() if name.startswith(f"{scope}.") and name not in nested]
        scopes[scope] = set(inside)
    return scopes


WITHIN_ATTENTION = ("attention", "span convolution", "global attention", "context norm", "pooled queries", "latent positions")
"""Kinds of parts that make up an attention module."""


def _insist(verdict: Verdict) -> None:
    """A declared block must be shown."""
    if verdict.status == "refused":
        raise SymmetryError(f"declared block {verdict.block.name!r} is not a symmetry of this model: {verdict.reason}")
    if verdict.status == "undecidable":
        raise SymmetryError(
            f"declared block {verdict.block.name!r} is undecidable on this batch: {verdict.reason}; give a batch that uses it"
        )


def _or_degenerate(verdict: Verdict, values: Mapping[str, Tensor]) -> Verdict:
    """A product that is 0 moves nothing, whatever its factors do: not a false claim, but no geometry either."""
    block = verdict.block
    gone = block.vanished(values) if isinstance(block, Factors) else ""
    if not gone:
        return verdict
    return dataclasses.replace(verdict, status="degenerate", reason=str(RankError.of(gone, 0.0, 0.0, "s_min > 0")))
