"""Shared set-up: deterministic tests, quiet third parties."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture
def process_restored() -> Iterator[None]:
    """Whatever the test does to random states and torch's switches is undone."""
    import untouched

    with untouched.process_restored():
        yield
