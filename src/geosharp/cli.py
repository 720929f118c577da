"""The command line: a thin layer over the library, light until a command runs.

Exit codes: 0 done, 2 the user's mistake (one line on stderr), 1 a defect of this library (a traceback), 130 interrupted.

>>> main(["mesures"])
2
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from geosharp import __version__
from geosharp.errors import GeosharpError, did_you_mean
from geosharp.text import progress, table, write


@dataclass(frozen=True)
class Command:
    """A name on the command line: one line about it, its arguments, what it does."""

    about: str
    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], None]


def _demo_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0, help="of the data split, the training and the rewriting (default: 0)")
    parser.add_argument("--quick", action="store_true", help=argparse.SUPPRESS)  # for the tests: all of it, in seconds


def _demo(arguments: argparse.Namespace) -> None:
    from geosharp import demo

    told = demo.run(seed=arguments.seed, quick=arguments.quick)
    write(json.dumps(told.to_dict(), allow_nan=False) if arguments.json else told.text())


def _measures(arguments: argparse.Namespace) -> None:
    from geosharp.measures import CATALOGUE

    if arguments.json:
        rows = {name: {"about": measure.about, "needs_radius": measure.run.needs_radius} for name, measure in CATALOGUE.items()}
        write(json.dumps(rows, ensure_ascii=False))
        return
    lines = [(name, "rho" if measure.run.needs_radius else "", measure.about) for name, measure in CATALOGUE.items()]
    write(table(("measure", "needs", "what it is"), lines, "<<<"))


COMMANDS = {
    "demo": Command("train small transformers, measure them, rewrite one without changing its function", _demo_arguments, _demo),
    "measures": Command("list the measures", lambda parser: None, _measures),
}


class _Parser(argparse.ArgumentParser):
    """A mistake is one line, raised like any other mistake."""

    def error(self, message: str) -> NoReturn:
        raise GeosharpError(f"{message} ({self.prog} --help shows what it takes)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="geosharp", description="Sharpness that a rewriting of the parameters does not change.")
    parser.add_argument("--version", action="version", version=f"geosharp {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        one = commands.add_parser(name, help=command.about, description=command.about)
        one.add_argument("--json", action="store_true", help="print JSON instead of text")
        command.arguments(one)
        one.set_defaults(run=command.run)
    return parser


def _run(words: Sequence[str]) -> None:
    first = words[0] if words else ""
    if first not in COMMANDS and not first.startswith("-"):
        got = repr(first) if words else "nothing"
        raise GeosharpError(f"expected a command ({', '.join(COMMANDS)}), got {got}{did_you_mean(first, COMMANDS)}")
    arguments = _parser().parse_args(words)
    arguments.run(arguments)


def main(words: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    try:
        _run(sys.argv[1:] if words is None else words)
    except GeosharpError as error:
        return _ended(f"geosharp: {error}", 2)
    except KeyboardInterrupt:
        return _ended("geosharp: interrupted", 130)
    except BrokenPipeError:
        # The reader left (`geosharp measures | head`). What is still in the buffer must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception:
        progress("")
        traceback.print_exc()
        return _ended("geosharp: this is a defect of geosharp, not of your input; please report it with the lines above", 1)
    return 0


def _ended(line: str, code: int) -> int:
    progress("")
    write(line, sys.stderr)
    return code
