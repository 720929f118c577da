"""Run one benchmark by name; what follows the name is its own."""

from __future__ import annotations

import importlib
import sys

BENCHMARKS = {
    "accuracy": ("worst_case_accuracy", "the default worst-case solver against a slow independent one (15 minutes of one core)"),
    "discovery": ("discovery", "finding and verifying the symmetries of large models, in forward passes (5 minutes, 12 GiB)"),
    "cost": ("cost", "one measured evaluation in plain forward-backward passes (10 minutes)"),
    "invariance": ("invariance", "MiniLM rewritten in five ways, every geodesic measure before and after (5 minutes)"),
    "solvers": ("solvers", "Auto-PGD and the default solver at equal budgets (5 minutes)"),
}
"""Name -> module and what it shows."""


def main() -> int:
    """The command line."""
    name, rest = (sys.argv[1] if len(sys.argv) > 1 else ""), sys.argv[2:]
    if name in BENCHMARKS:
        code: int = importlib.import_module(f"bench.{BENCHMARKS[name][0]}").main(rest)
        return code
    print("usage: ./run bench NAME [--save] [--help]", *(f"  {key:<11} {about}" for key, (_, about) in BENCHMARKS.items()), sep="\n")
    if name in ("", "-h", "--help"):
        return 0
    print(f"bench: expected one of {', '.join(BENCHMARKS)}, got {name!r}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
