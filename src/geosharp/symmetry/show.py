"""What was found in a model, for people (`shown`) and for programs (`as_dict`)."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from geosharp.text import GAP, WIDTH, cut, folded, pattern, table

if TYPE_CHECKING:  # `Found` itself prints by this module
    from geosharp.symmetry.block import Block
    from geosharp.symmetry.complete import Completeness
    from geosharp.symmetry.discover import Found
    from geosharp.symmetry.reading import Known
    from geosharp.symmetry.verify import Verdict

Item = TypeVar("Item")

NARROWEST = 16
"""The column of parameters is cut to keep lines short, but not below this."""

STATES = {"refused": "refused on this batch", "undecidable": "undecidable on this batch", "degenerate": "degenerate"}
"""What keeps a block that was tried out of use, and the title it is listed under."""


# For programs ---------------------------------------------------------------------------------------------------------


def as_dict(found: Found) -> dict[str, Any]:
    """Everything that was found, as JSON takes it: numbers as numbers, and null for one that is not finite or not known."""
    return {
        "blocks": [_block(found, verdict) for verdict in found.verdicts],
        "in_use": list(found.kinds(found.used)),
        "refused": [{"name": item.name, "reason": item.reason} for item in found.refused],
        "dropped": [{"name": item.name, "reason": item.reason} for item in found.dropped],
        "known": [_known(item) for item in found.known],
        "completeness": [_completeness(item) for item in found.completeness],
        "declared": found.declared,
    }


def _block(found: Found, verdict: Verdict) -> dict[str, Any]:
    group, copies, dimension = found.sizes[verdict.block.name]
    return {
        "name": verdict.block.name,
        "kind": verdict.block.kind,
        "group": group,
        "copies": copies,
        "dimension": dimension,
        "parameters": list(verdict.block.parameters),
        "status": verdict.status,
        "drift": _finite(verdict.drift),
        "control": _finite(verdict.control),
        "reason": verdict.reason,
    }


def _known(item: Known) -> dict[str, Any]:
    return {"name": item.name, "kind": item.kind, "group": item.group, "dimension": item.dimension, "reason": item.reason}


def _completeness(item: Completeness) -> dict[str, Any]:
    return {
        "module": item.module,
        "parameters": item.parameters,
        "null": item.null,
        "explained": item.explained,
        "error": _finite(item.error),
        "gap": _finite(item.gap),
        "complete": item.complete,
    }


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


# For people -----------------------------------------------------------------------------------------------------------


def shown(found: Found) -> str:
    """Block by block, then what is not in use and why, and a summary in the last line."""
    parts = [_blocks(found), _legend(found), *_not_in_use(found), _all_of_them(found.completeness), summary(found)]
    return "\n\n".join(part for part in parts if part)


def summary(found: Found) -> str:
    """One line: how many blocks of which kinds, and how much is left out."""
    states = Counter(verdict.status for verdict in found.verdicts)
    tried = [f"{states[state]} {state}" for state in STATES if states[state]]
    if states["unverified"]:
        blocks = [verdict.block for verdict in found.verdicts]
        first = f"{len(blocks)} blocks by structure, none verified (no batch was given): {', '.join(found.kinds(blocks))}"
    elif found.used:
        count = len(found.used)
        first = f"{count} block{'s' * (count != 1)} in use: {', '.join(found.kinds(found.used))}"
    else:
        anything = found.verdicts or found.refused or found.dropped or found.known
        first = "no block in use" if anything else "no block in use: no layout matches this model"
    rest = [
        *tried,
        f"{len(found.refused)} refused by structure" if found.refused else "",
        f"{len(found.dropped)} dropped" if found.dropped else "",
        f"{len(found.known)} known and not used ({_dimensions(sum(item.dimension for item in found.known))})" if found.known else "",
        _how_complete(found.completeness),
    ]
    return "; ".join([first, *filter(None, rest)])


def _blocks(found: Found) -> str:
    if not found.verdicts:
        return ""
    short = [_short(verdict.block) for verdict in found.verdicts]
    rows = [_row(found, verdict) for verdict in found.verdicts]
    header = ("block", "kind", "group", "dim", "status", "drift", "control")
    if _width([header, *rows]) + max(map(len, short)) > WIDTH:
        inside, rows = _without_common_prefix(rows)
        header = (f"block in {inside}" if inside else "block", *header[1:])
    room = max(NARROWEST, WIDTH - _width([header, *rows]))
    lines = [(*row, cut(parameters, room)) for row, parameters in zip(rows, short, strict=True)]
    return table((*header, "parameters"), lines, "<<<><>><")


def _width(rows: Sequence[Sequence[str]]) -> int:
    """Of the columns, each with the gap behind it."""
    return sum(max(map(len, column)) + len(GAP) for column in zip(*rows, strict=True))


def _without_common_prefix(rows: Sequence[tuple[str, ...]]) -> tuple[str, list[tuple[str, ...]]]:
    """The module that holds all blocks, and the rows with their names inside it."""
    names = [row[0].split(".")[:-1] for row in rows]
    common = [parts[0] for parts in itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*names, strict=False))]
    start = sum(len(part) + 1 for part in common)
    return ".".join(common), [(row[0][start:], *row[1:]) for row in rows]


def _legend(found: Found) -> str:
    tried = any(verdict.status != "unverified" for verdict in found.verdicts)
    return (
        "drift: how far the outputs around a block move when its group acts on it; control: when it acts on one side only" if tried else ""
    )


def _row(found: Found, verdict: Verdict) -> tuple[str, ...]:
    group, copies, dimension = found.sizes[verdict.block.name]
    block = verdict.block
    return block.name, block.kind, f"{group} x {copies}", f"{dimension:,}", verdict.status, _tiny(verdict.drift), _tiny(verdict.control)


def _tiny(value: float) -> str:
    """Two digits, as everything is that was measured with one random group element."""
    if math.isnan(value):
        return "-"
    return f"{value:.1e}" if 0 < value < 1e-2 or value >= 1e4 else f"{value:.2g}"


def _short(block: Block) -> str:
    """The parameters of a block by their last names, a weight by that of its module: "query+bias, key+bias"."""
    found: dict[str, list[str]] = {}
    for name in block.parameters:
        owner, _, leaf = name.rpartition(".")
        found.setdefault(owner, []).append(leaf)
    lasts = Counter(owner.rpartition(".")[2] for owner in found)
    return ", ".join(_leaves(_last(owner, lasts), leaves) for owner, leaves in found.items())


def _last(owner: str, lasts: Counter[str]) -> str:
    """The last name of a module, or more of it where that is a number or another's name too."""
    parts = owner.split(".")
    plain = not parts[-1].isdigit() and lasts[parts[-1]] == 1
    return parts[-1] if plain else ".".join(parts[-2:])


def _leaves(owner: str, leaves: Sequence[str]) -> str:
    if not owner:
        return ", ".join(leaves)
    if "weight" not in leaves:
        return ", ".join(f"{owner}.{leaf}" for leaf in leaves)
    return "+".join([owner, *(leaf for leaf in leaves if leaf != "weight")])


def _not_in_use(found: Found) -> Iterator[str]:
    for state, title in STATES.items():
        tried = [verdict for verdict in found.verdicts if verdict.status == state]
        yield _section(title, tried, lambda item: item.block.name, lambda item: item.reason)
    yield _section("refused by structure", found.refused, lambda item: item.name, lambda item: item.reason)
    yield _section("dropped, not coordinates", found.dropped, lambda item: item.name, lambda item: item.reason)
    yield _section("known and not used", found.known, lambda item: item.name, lambda item: item.reason, _size)


def _size(items: Sequence[Known]) -> str:
    """Group and dimension of like symmetries, added up."""
    first, each = items[0], " each" if len(items) > 1 else ""
    return f"{first.kind}, {first.group}{each}, {_dimensions(sum(item.dimension for item in items))}"


def _dimensions(count: int) -> str:
    return f"{count:,} dimension{'s' * (count != 1)}"


def _section(
    title: str,
    items: Sequence[Item],
    name: Callable[[Item], str],
    reason: Callable[[Item], str],
    about: Callable[[Sequence[Item]], str] = lambda items: "",
) -> str:
    """A title and what belongs under it; like entries of several layers are one, with their number."""
    if not items:
        return ""
    lines = [f"{title}:"]
    for like in _alike(items, lambda item: (pattern(name(item)), pattern(reason(item)), getattr(item, "group", ""))):
        count = f" x {len(like)}" if len(like) > 1 else ""
        size = about(like)
        lines.append(f"  {folded([name(item) for item in like])}{count}{f': {size}' if size else ''}")
        lines.append(_indented(folded([reason(item) for item in like])))
    return "\n".join(lines)


def _indented(text: str) -> str:
    """A reason under a name, in as many lines as it needs."""
    indent = 6 * " "
    return textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _alike(items: Iterable[Item], key: Callable[[Item], Any]) -> Iterable[list[Item]]:
    """Items of equal keys together, in order of appearance."""
    groups: dict[Any, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups.values()


# Whether these are all ------------------------------------------------------------------------------------------------


def _all_of_them(items: Sequence[Completeness]) -> str:
    if not items:
        return ""
    header = ("attention module", "parameters", "null space", "explained", "error", "gap", "")
    rows = [
        (item.module, f"{item.parameters:,}", f"{item.null:,}", f"{item.explained:,}", _tiny(item.error), _tiny(item.gap), _judged(item))
        for item in items
    ]
    return table(header, rows, "<>>>>><")


def _judged(item: Completeness) -> str:
    if item.complete:
        return "complete"
    missed = item.null - item.explained
    return f"{_dimensions(missed)} not explained" if missed > 0 else "a direction is claimed that the outputs see"


def _how_complete(items: Sequence[Completeness]) -> str:
    complete = sum(item.complete for item in items)
    return f"complete in {complete} of {len(items)} attention modules" if items else ""
