"""The one error type a user's mistake raises: what was expected, what was found, what to do.

Three instances: a head whose weights lost rank, a batch with a label outside the head, a radius given to a measure that
has none. Each is one line. Everything else that is raised is a defect of this library.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class GeosharpError(ValueError):
    """A mistake in the input, said in one line."""


class SymmetryError(GeosharpError):
    """A declared symmetry is not one of this model, or cannot be used."""


class RankError(GeosharpError):
    """A block has lost full column rank, so the quotient is not a manifold there."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A suggestion to append to an error, or nothing.

    >>> did_you_mean("adaptive-12", ["adaptive-l2", "standard-l2"])
    '; did you mean "adaptive-l2"?'
    """
    close = difflib.get_close_matches(word, list(known), n=1)
    return f'; did you mean "{close[0]}"?' if close else ""
