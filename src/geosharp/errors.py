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

    @classmethod
    def of(cls, block: str, smallest: float, largest: float, needed: str, *, can_regularize: bool = True) -> RankError:
        """The error of a block whose product has these extreme singular values."""
        if largest == 0:
            remedy = "leave this block out (a zero-initialised adapter has no geometry yet: train it first)"
        else:
            remedy = "set epsilon= (for example 1e-3) or leave this block out" if can_regularize else "leave this block out"
        ratio = smallest / largest if largest else 0.0
        return cls(
            f"expected full column rank in block {block!r}, got s_min = {smallest:.2g}, s_max = {largest:.2g} "
            f"(s_min/s_max = {ratio:.1e}, needed {needed}); {remedy}"
        )


def one_line(error: BaseException) -> str:
    r"""Another library's error in one line.

    >>> one_line(ValueError("first\n  second"))
    'ValueError: first second'
    """
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A suggestion to append to an error, or nothing.

    >>> did_you_mean("adaptive-12", ["adaptive-l2", "standard-l2"])
    '; did you mean "adaptive-l2"?'
    """
    close = difflib.get_close_matches(word, list(known), n=1)
    return f'; did you mean "{close[0]}"?' if close else ""
