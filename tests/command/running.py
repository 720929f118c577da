"""One run of the command line and what it said, and folders with models as users have them."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from families.table import FAMILIES
from families.tiny import tiny
from geosharp.text import WIDTH


@dataclass(frozen=True)
class Told:
    """What one run of the command line said."""

    code: int
    out: str
    err: str

    @property
    def summary(self) -> str:
        return self.out.splitlines()[-1]


Run = Callable[..., Told]


def refused(told: Told, *words: str) -> None:
    """The user's mistake: exit code 2, one line that holds all these words, and nothing else."""
    lines = told.err.splitlines()
    assert told.code == 2, told
    assert told.out == "", told
    assert len(lines) == 1, told.err
    assert len(lines[0]) <= 500
    missing = [word for word in words if word not in lines[0]]
    assert not missing, f"{missing} not in: {lines[0]}"


@functools.cache
def model_of(family: str, **overrides: Any) -> nn.Module:
    model_type, task, more = FAMILIES[family]
    return tiny(model_type, task, **more, **overrides).model.float()


def saved(family: str, path: Path, **overrides: Any) -> Path:
    """A folder as users have it."""
    model_of(family, **overrides).save_pretrained(path)
    return path


def edited(path: Path, **changes: Any) -> Path:
    """The folder with changes in its config; a value of None takes the entry out."""
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    return path


def fits(text: str) -> bool:
    """All lines but the first, which holds the path, and the last, which is the summary."""
    return all(len(line) <= WIDTH for line in text.splitlines()[1:-1])


class Hostile:
    """Unpickling it would leave a file behind."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)
