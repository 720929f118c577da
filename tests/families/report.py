"""What is found in every family, as the table of docs/families.md: `python -m families.report` (from the tests) writes it."""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn

import geosharp as gs
from families.table import FAMILIES
from families.tiny import Tiny, tiny
from geosharp.symmetry.discover import Found

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
START, END = "<!-- table -->", "<!-- end of table -->"

NARROW: dict[str, dict[str, object]] = {
    "Swin": {"embed_dim": 8},
    "SwinV2": {"embed_dim": 8},
    "Qwen3": {"head_dim": 8},
    "GPT-J": {"rotary_dim": 2},
    "ALBERT": {"embedding_size": 8},
    "ELECTRA": {"embedding_size": 8},
    "RoFormer": {"embedding_size": 8},
    "MobileBERT": {"embedding_size": 8},
}
"""Overrides that keep the attention modules of a family small enough for a dense Jacobian, and parts of a head apart."""


@functools.cache
def narrow(name: str) -> Tiny:
    """The family's model with heads of width 4, noise on all parameters, and its batch."""
    model_type, task, overrides = FAMILIES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the families' own
        return tiny(model_type, task, narrow=True, **{**overrides, **NARROW.get(name, {})})


@functools.cache
def found_in(name: str) -> Found:
    """Blocks, verdicts and the null space of every attention module."""
    made = narrow(name)
    return gs.symmetries(made.model, [made.batch], complete=True)


def outputs(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """What the model itself returns: every floating output but the loss."""
    with torch.no_grad():
        result = model(**batch)
    parts = [value for key, value in result.items() if key != "loss" and isinstance(value, Tensor) and value.is_floating_point()]
    return torch.cat([part.reshape(-1).double() for part in parts])


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    family: str
    model: str
    used: str
    dimension: int
    refused: str
    known: str
    null: str
    tolerance: str

    def cells(self) -> tuple[str, ...]:
        """The columns as text."""
        return (self.family, f"`{self.model}`", self.used, str(self.dimension), self.refused, self.known, self.null, self.tolerance)


HEADER = ("family", "class", "blocks in use", "dimension", "refused", "known and not used", "null space of attention", "drift")


def row_of(name: str) -> Row:
    """What the library finds in one family."""
    found = found_in(name)
    refused = [item.name.rpartition(".")[2].replace("_", "-") for item in found.refused]
    refused += [verdict.block.kind for verdict in found.verdicts if not verdict.verified]
    null = dict.fromkeys(f"{one.null} = {one.explained}" if one.complete else f"{one.null} ≠ {one.explained}" for one in found.completeness)
    drift = max(verdict.drift for verdict in found.verdicts if verdict.verified)
    return Row(
        family=name,
        model=type(narrow(name).model).__name__,
        used=", ".join(found.kinds(found.used)),
        dimension=sum(found.sizes[block.name][2] for block in found.used),
        refused=", ".join(f"{kind} x {refused.count(kind)}" for kind in dict.fromkeys(refused)) or "",
        known=", ".join(found.known_kinds()),
        null=", ".join(null),
        tolerance="1e-13" if drift < 1e-13 else "1e-6",
    )


def line(row: Row) -> str:
    """One line of Markdown."""
    return f"| {' | '.join(row.cells())} |"


def main() -> None:
    """Write the table into the page."""
    transformers.logging.set_verbosity_error()
    lines = [f"| {' | '.join(HEADER)} |", "|---" * len(HEADER) + "|", *(line(row_of(name)) for name in FAMILIES)]
    before, rest = PAGE.read_text().split(START)
    after = rest.split(END)[1]
    PAGE.write_text(f"{before}{START}\n{chr(10).join(lines)}\n{END}{after}")


if __name__ == "__main__":
    main()
