"""How many of the models that transformers ships are covered: the shares on the page are those that are counted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from families.report import PAGE

TESTS = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_shares_on_the_page_are_those_that_are_counted() -> None:
    run = subprocess.run([sys.executable, "-m", "families.coverage"], capture_output=True, text=True, check=True, cwd=TESTS)
    shown = PAGE.read_text().split("<!-- shares -->")[1].split("<!-- end of shares -->")[0]
    assert run.stdout.strip().splitlines()[-3:] == shown.strip().splitlines()
