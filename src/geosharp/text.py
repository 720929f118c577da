"""Plain text for terminals of any kind: aligned tables, and writing that no encoding can make fail.

>>> print(table(("measure", "value"), [("adaptive-l2", "0.5"), ("trace", "12.25")], "<>"))
measure      value
------------------
adaptive-l2    0.5
trace        12.25
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import TextIO

GAP = "  "
WIDTH = 140
"""Of long tables; a name is never cut to keep to it."""
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


def cut(text: str, width: int) -> str:
    """Text of at most so many characters; what is left out leaves a mark.

    >>> cut("query, key, value", 12)
    'query, ke...'
    """
    return text if len(text) <= width else f"{text[: max(0, width - 3)]}..."


_NUMBER = re.compile(r"(?<=[A-Za-z_]\.)\d+(?![\w-]|\.\d)")
"""The number of a layer in a name with dots: not a decimal, not a range."""


def pattern(text: str) -> str:
    """The text without the numbers of layers in its names: equal for those that `folded` writes as one.

    >>> pattern("encoder.layer.3.attention drifts by 0.5")
    'encoder.layer.#.attention drifts by 0.5'
    """
    return _NUMBER.sub("#", text)


def folded(texts: Sequence[str]) -> str:
    """Texts of one pattern as one, ranges for the numbers that differ.

    >>> folded(["layer.0.mlp", "layer.1.mlp", "layer.2.mlp"]), folded(["layer.0.mlp.2", "layer.4.mlp.2"])
    ('layer.0-2.mlp', 'layer.0,4.mlp.2')
    """
    columns = iter(list(zip(*(map(int, _NUMBER.findall(text)) for text in texts), strict=True)))
    return _NUMBER.sub(lambda _: _range(sorted(set(next(columns)))), texts[0])


def _range(numbers: Sequence[int]) -> str:
    first, last = numbers[0], numbers[-1]
    if len(numbers) > 1 and len(numbers) == last - first + 1:
        return f"{first}-{last}"
    return ",".join(map(str, numbers))


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
