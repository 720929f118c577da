"""Plain text for terminals of any kind: aligned tables, and writing that no encoding can make fail.

>>> print(table(("measure", "value"), [("adaptive-l2", "0.5"), ("trace", "12.25")], "<>"))
measure      value
------------------
adaptive-l2    0.5
trace        12.25
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TextIO

GAP = "  "
_PLAIN = str.maketrans({"±": "+-", "×": "x", "²": "^2", "ρ": "rho", "ℂ": "C", "⁻": "-", "¹": "1", "→": "->", "…": "..."})


def table(header: Sequence[str], rows: Sequence[Sequence[str]], align: str) -> str:
    """Columns under a header; `align` has one of < and > a column."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [GAP.join(f"{cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=True)) for row in (header, *rows)]
    lines.insert(1, "-" * (sum(widths) + len(GAP) * (len(widths) - 1)))
    return "\n".join(line.rstrip() for line in lines)


def listing(words: Sequence[str]) -> str:
    """Words as one phrase.

    >>> listing(["trace"]), listing(["inv", "mix"]), listing(["a", "b", "c"])
    ('trace', 'inv and mix', 'a, b and c')
    """
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1]))) if words else "none"


def write(text: str, stream: TextIO | None = None) -> None:
    """Write a line; a terminal without ± gets +-, and what nothing stands for becomes a question mark."""
    stream = stream or sys.stdout
    encoding = stream.encoding or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.translate(_PLAIN).encode(encoding, "replace").decode(encoding)
    stream.write(text + "\n")
    stream.flush()


def progress(text: str) -> None:
    """One line on stderr that the next one replaces; nothing where nobody watches. An empty text clears the line."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()
