"""Find the blocks of a model, take what a user declares, and say what was left out and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from geosharp.errors import RankError, SymmetryError
from geosharp.symmetry.block import Block, Factors, Translation, check_disjoint, rename
from geosharp.symmetry.layouts import LAYOUTS
from geosharp.symmetry.site import AttentionSite, blocks_of_site
from geosharp.symmetry.verify import Outputs, Verdict, verify_blocks

Symmetries = str | Block | Sequence[Block]
"""What `symmetries=` takes: "all", "published", "none", or declared blocks."""

MODES = ("all", "published", "none")


@dataclass(frozen=True)
class Dropped:
    """A block that is not used, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Found:
    """The blocks of one model: candidates with their verdicts, and those not even tried."""

    verdicts: tuple[Verdict, ...]
    dropped: tuple[Dropped, ...] = ()
    declared: bool = False
    sizes: Mapping[str, tuple[str, int, int]] = field(default_factory=dict)
    """Block name -> group, copies, dimension."""

    @property
    def used(self) -> tuple[Block, ...]:
        """The verified blocks; where a translation failed, what it would have removed is a coordinate of its block."""
        failed = [v.block.shifted for v in self.verdicts if isinstance(v.block, Translation) and not v.verified]
        blocks = (verdict.block for verdict in self.verdicts if verdict.verified)
        return tuple(block.with_carried(failed) if isinstance(block, Factors) and failed else block for block in blocks)

    def kinds(self, blocks: Iterable[Block]) -> tuple[str, ...]:
        """Blocks in words, equal ones counted: "query-key GL(32) x 72"."""
        counted: dict[str, int] = {}
        for block in blocks:
            group, copies, _ = self.sizes[block.name]
            label = f"{block.kind} {group}"
            counted[label] = counted.get(label, 0) + copies
        return tuple(f"{label} x {count}" for label, count in counted.items())


def attention_sites(model: nn.Module) -> list[AttentionSite]:
    """Every attention layer that some layout recognizes; shared layers once."""
    sites: list[AttentionSite] = []
    claimed: set[int] = set()
    rotary = any("rotary" in type(module).__name__.lower() for module in model.modules())
    for name, module in model.named_modules():
        for layout in LAYOUTS.values():
            site = layout(name, module)
            if site is None or id(module) in claimed:
                continue
            claimed.update(id(child) for child in module.modules())
            between = any(hasattr(module, attribute) for attribute in _BETWEEN)
            sites.append(dataclasses.replace(site, query_key_is_free=not (rotary or between)))
            break
    return sites


_BETWEEN = ("q_norm", "k_norm", "query_norm", "key_norm", "q_layernorm", "k_layernorm", "rotary_emb")
"""Children by which an attention layer normalizes or rotates queries and keys: GL(h) would be a false claim there."""


def candidate_blocks(
    model: nn.Module, values: Mapping[str, Tensor], symmetries: Symmetries, coordinates: Collection[str], alias: Mapping[str, str]
) -> tuple[list[Block], list[Dropped], bool]:
    """Blocks to verify, blocks dropped because a member is no coordinate, and whether the user declared them."""
    declared = not isinstance(symmetries, str)
    if isinstance(symmetries, str):
        if symmetries not in MODES:
            raise SymmetryError(f"expected symmetries= to be one of {', '.join(MODES)} or declared blocks, got {symmetries!r}")
        blocks: list[Block] = []
        for site in attention_sites(model) if symmetries != "none" else []:
            blocks += blocks_of_site(
                site, translations=symmetries == "all", is_coordinate=lambda name: alias.get(name, name) in coordinates
            )
    else:
        blocks = _declared(symmetries)
    kept, dropped = [], []
    for block in (rename(block, alias) for block in blocks):
        block.describe(values)  # raises one line where a declared view does not fit
        if isinstance(block, Factors):
            block.read(values)
        fixed = [name for name in block.parameters if name not in coordinates]
        if fixed:
            dropped.append(Dropped(block.name, f"{', '.join(fixed)}: not trainable or not selected, so not a coordinate"))
        else:
            kept.append(block)
    check_disjoint(kept, values)
    return kept, dropped, declared


def _declared(symmetries: Block | Sequence[Block]) -> list[Block]:
    given = [symmetries] if isinstance(symmetries, (Factors, Translation)) else list(symmetries)
    for item in given:
        if not isinstance(item, (Factors, Translation)):
            raise SymmetryError(f"expected declared symmetries to be Factors or Translation blocks, got {type(item).__name__}")
    names = [block.name for block in given]
    if len(set(names)) < len(names):
        raise SymmetryError(f"expected distinct block names, got {names}")
    return given


def discover(
    model: nn.Module,
    values: dict[str, Tensor],
    symmetries: Symmetries,
    outputs: Outputs | None,
    *,
    coordinates: Collection[str],
    alias: Mapping[str, str],
    seed: int = 0,
    wider: Callable[[], tuple[Outputs, dict[str, Tensor]]] | None = None,
) -> Found:
    """The blocks of a model with their verdicts. A declared block that is refused is an error; a found one is listed.

    `wider` gives the same outputs and values in a wider dtype, asked for where rounding hides what a control shows.
    """
    blocks, dropped, declared = candidate_blocks(model, values, symmetries, coordinates, alias)
    sizes = {block.name: block.describe(values) for block in blocks}
    if outputs is None:
        verdicts = tuple(Verdict(block, "unverified", reason="no batch was given") for block in blocks)
        return Found(verdicts, tuple(dropped), declared, sizes)
    found = verify_blocks(outputs, values, blocks, seed=seed)
    if wider is not None and any(verdict.hidden_by_rounding for verdict in found):
        found = verify_blocks(*wider(), blocks, seed=seed)
    verdicts = tuple(_or_degenerate(verdict, values) for verdict in found)
    if declared:
        for verdict in verdicts:
            if verdict.status == "refused":
                raise SymmetryError(f"declared block {verdict.block.name!r} is not a symmetry of this model: {verdict.reason}")
            if verdict.status == "undecidable":
                raise SymmetryError(
                    f"declared block {verdict.block.name!r} is undecidable on this batch: {verdict.reason}; give a batch that uses it"
                )
    return Found(verdicts, tuple(dropped), declared, sizes)


def _or_degenerate(verdict: Verdict, values: Mapping[str, Tensor]) -> Verdict:
    """A product that is 0 moves nothing, whatever its factors do: not a false claim, but no geometry either."""
    block = verdict.block
    gone = block.vanished(values) if isinstance(block, Factors) else ""
    if not gone:
        return verdict
    return dataclasses.replace(verdict, status="degenerate", reason=str(RankError.of(gone, 0.0, 0.0, "s_min > 0")))
