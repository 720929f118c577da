"""One line about the machine, for results that are committed."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch


def describe_machine() -> str:
    """Processor, cores, Python and torch."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0] if names else cpu
    return f"{cpu}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}"
