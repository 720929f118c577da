"""`geosharp symmetries`, called as a test calls it."""

from __future__ import annotations

import pytest

from command.running import Run, Told
from geosharp import cli


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """`geosharp symmetries` with these words; what it says on both streams, also what other libraries write there."""

    def ran(*words: object) -> Told:
        capfd.readouterr()  # what saving a model wrote
        code = cli.main(["symmetries", *map(str, words)])
        return Told(code, *capfd.readouterr())

    return ran
