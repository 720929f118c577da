"""One line about the machine, and the file of results that is committed."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

import geosharp as gs
from bench import RESULTS


def describe_machine() -> str:
    """Processor, cores, threads, versions."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0] if names else cpu
    threads = f"{os.cpu_count()} cores, {torch.get_num_threads()} used"
    return f"{cpu}, {threads}, Python {platform.python_version()}, torch {torch.__version__}, geosharp {gs.__version__}"


class Report:
    """Lines that are printed as they come and saved together."""

    def __init__(self, name: str, command: str) -> None:
        self.path = RESULTS / f"{name}.txt"
        self.lines: list[str] = []
        self.say(f"{command}\n{describe_machine()}\n")

    def say(self, text: str) -> None:
        """Print and keep."""
        self.lines.append(text)
        print(text, flush=True)

    def save(self) -> None:
        """Write bench/results/NAME.txt."""
        self.path.parent.mkdir(exist_ok=True)
        self.path.write_text("\n".join(self.lines) + "\n")
