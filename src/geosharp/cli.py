"""The command line: a thin layer over the library, light until a command runs.

Exit codes: 0 done, 2 the user's mistake (one line on stderr), 1 a defect of this library (a traceback), 130 interrupted.

>>> main(["mesures"])
2
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from geosharp import __version__
from geosharp.errors import GeosharpError, did_you_mean, one_line
from geosharp.text import cut, progress, table, write

if TYPE_CHECKING:
    from torch import nn

    from geosharp.sources.models import Loaded


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


def _symmetries_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a Hugging Face folder (a model's, or a peft adapter's), or file.py:function")
    parser.add_argument("--complete", action="store_true", help="are these all? the null space of each attention module (small models)")
    parser.add_argument("--symmetries", choices=("all", "published"), default="all", help="which to look for (default: all)")
    parser.add_argument("--random-weights", action="store_true", help="build a folder's model from its config.json alone")
    parser.add_argument("--seed", type=_natural, default=0, help="of the made-up batch and of random weights (default: 0)")
    parser.add_argument("--dtype", choices=("float32", "float64"), help="to compute in (default: the weights' own, at least float32)")


def _symmetries(arguments: argparse.Namespace) -> None:
    from geosharp.sources.models import load
    from geosharp.sources.quiet import quiet

    progress(f"loading {arguments.model}")
    loaded = load(arguments.model, random_weights=arguments.random_weights, seed=arguments.seed, dtype=arguments.dtype)
    progress("")
    for note in loaded.notes:
        write(f"geosharp: {note}", sys.stderr)
    with quiet():  # from here on nothing of other libraries' remarks is about the user's input
        _show_symmetries(loaded, arguments)


def _show_symmetries(loaded: Loaded, arguments: argparse.Namespace) -> None:
    from geosharp.api import symmetries
    from geosharp.symmetry.show import as_dict, shown

    model = loaded.model
    batch, shown_on = _batch(loaded, arguments)
    count = sum(parameter.numel() for parameter in model.parameters())
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    progress("moving each block")
    with _blaming_the_model(model, batch):
        # A model of which nothing is trainable is looked at as a whole.
        params = None if trainable else "*"
        found = symmetries(model, [batch], symmetries=arguments.symmetries, params=params, complete=arguments.complete)
    progress("")
    name = type(model).__name__
    if arguments.json:
        about = {"model": loaded.name, "class": name, "parameters": count, "trainable": trainable, "shown_on": shown_on}
        write(json.dumps({**about, **as_dict(found)}, allow_nan=False))
        return
    some = f" ({trainable:,} trainable)" if trainable < count else ""
    how = f"; shown on {shown_on}" if found.verdicts else ""
    write(f"{name} from {loaded.name}: {count:,} parameters{some}{how}\n\n{shown(found)}")


def _batch(loaded: Loaded, arguments: argparse.Namespace) -> tuple[Any, str]:
    """What the blocks are shown on, and what that is in words."""
    from geosharp.batches import FEW, each_batch
    from geosharp.sources.inputs import example_batch

    if loaded.batches is not None:
        return next(each_batch(loaded.batches)), "the first rows of the first batch that came with it"
    batch = example_batch(loaded.model, FEW, arguments.seed)
    return batch, f"{FEW} random rows made up from its config (seed {arguments.seed})"


@contextlib.contextmanager
def _blaming_the_model(model: nn.Module, batch: Any) -> Iterator[None]:
    """Where the model itself raises on the batch, that is the user's to know, and no defect of this library."""
    try:
        yield
    except GeosharpError:
        raise
    except Exception:
        from geosharp.batches import few
        from geosharp.objective import Objective

        objective = Objective(model, params="*")
        try:
            objective.outputs(objective.values, objective.prepare(few(batch)))
        except Exception as error:
            said = cut(one_line(error), 300)
            raise GeosharpError(f"expected {type(model).__name__} to run on its first batch, got {said}; correct one of them") from error
        raise


def _natural(word: str) -> int:
    if not word.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number, not negative, got {word!r}")
    return int(word)


COMMANDS = {
    "demo": Command("train small transformers, measure them, rewrite one without changing its function", _demo_arguments, _demo),
    "symmetries": Command(
        "list what leaves a model's function unchanged, block by block, as shown on the model itself", _symmetries_arguments, _symmetries
    ),
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
