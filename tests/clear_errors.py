"""A user's mistake is one clear line that names what, where and the remedy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from geosharp.errors import GeosharpError

LONGEST = 500


@contextlib.contextmanager
def one_clear_line(*words: str, kind: type[GeosharpError] = GeosharpError) -> Iterator[None]:
    """The body raises this kind of error, in one line that holds all these words."""
    with pytest.raises(GeosharpError) as info:
        yield
    text = str(info.value)
    assert isinstance(info.value, kind), f"expected {kind.__name__}, got {type(info.value).__name__}: {text}"
    assert "\n" not in text
    assert len(text) <= LONGEST
    missing = [word for word in words if word not in text]
    assert not missing, f"{missing} not in: {text}"
