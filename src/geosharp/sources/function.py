"""A model that a user's function makes: `file.py:function`."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from geosharp.errors import GeosharpError, did_you_mean, one_line
from geosharp.text import cut

if TYPE_CHECKING:
    from torch import nn


def called(file: Path, name: str) -> tuple[nn.Module, Iterable[Any] | None]:
    """What the function of this name returns: a model, alone or with batches."""
    if not file.is_file():
        raise GeosharpError(f"expected the Python file {file}, got no such file; give its path from the current folder")
    with _as_if_run(file):
        module = _module(file)
        function = _function(module, file, name)
        with _blamed_on(f"{file}:{name}", file):
            made = function()
    return _model_and_batches(made, f"{file}:{name}", file)


def _module(file: Path) -> ModuleType:
    name = f"_geosharp_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles look their module up there
    with _blamed_on(str(file), file):
        spec.loader.exec_module(module)
    return module


def _function(module: ModuleType, file: Path, name: str) -> Any:
    own = [key for key, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__]
    has = f"; it has {', '.join(own)}" if own else "; it has no functions"
    if not name:
        raise GeosharpError(f"expected file.py:function, got {file}{has}: write {file}:{own[0] if own else 'function'}")
    found = getattr(module, name, None)
    if not callable(found):
        raise GeosharpError(f"expected a function {name!r} in {file}, got none of that name{has}{did_you_mean(name, own)}")
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        raise GeosharpError(f"expected {file}:{name} to need no arguments, got: {error}; wrap it in a function that has none") from error
    except ValueError:  # a built-in whose signature cannot be seen
        pass
    return found


@contextlib.contextmanager
def _as_if_run(file: Path) -> Iterator[None]:
    """The file can import its neighbours, as when Python runs it."""
    before = list(sys.path)
    sys.path.insert(0, str(file.resolve().parent))
    try:
        yield
    finally:
        sys.path[:] = before


@contextlib.contextmanager
def _blamed_on(what: str, file: Path) -> Iterator[None]:
    """Whatever a user's own code raises is said in one line with its place, also an attempt to exit."""
    try:
        yield
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).resolve() == file.resolve()]
        if isinstance(error, SyntaxError):
            lines = [error.lineno]
        place = f" (line {lines[-1]})" if lines and lines[-1] else ""
        raise GeosharpError(f"expected {what} to run, got {cut(one_line(error), 300)}{place}; try it on its own in Python") from error


def _model_and_batches(made: Any, what: str, file: Path) -> tuple[nn.Module, Iterable[Any] | None]:
    from torch import Tensor, nn

    model, batches = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        got = f"({', '.join(type(part).__name__ for part in made)})" if isinstance(made, tuple) else type(made).__name__
        raise GeosharpError(f"expected {what} to return a torch.nn.Module or (model, batches), got {got}; return the model itself")
    # What holds its items already raises nothing on the way, and is checked as it is.
    if not isinstance(batches, Iterable) or isinstance(batches, (Sequence, Mapping, Tensor)):
        return model, batches
    return model, _each(batches, f"the batches of {what}", file)


def _each(batches: Iterable[Any], what: str, file: Path) -> Iterator[Any]:
    """The batches of a generator or a data loader; what it raises is its own."""
    with _blamed_on(what, file):
        yield from batches
