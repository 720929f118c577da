"""A model by its name on the command line.

Three instances: a folder as Hugging Face models are saved; a folder with a low-rank adapter, whose base lies in another
one; `file.py:function`, for everything else. Nothing is downloaded, and no code that comes with weights is run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from geosharp.errors import GeosharpError

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Loaded:
    """A model, and what came with it."""

    model: nn.Module
    batches: Iterable[Any] | None
    """What the user's function gave; a folder has none."""
    name: str
    notes: tuple[str, ...] = ()
    """What the user should know about how it was loaded, a line each."""


def load(spec: str, *, random_weights: bool = False, seed: int = 0, dtype: str | None = None) -> Loaded:
    """The model that a name stands for, in a dtype ("float64") or its own; `random_weights` builds it from its config alone."""
    loaded = _from_folder(spec, random_weights, seed) if Path(spec).is_dir() else _from_function(spec, random_weights)
    if dtype is not None:
        import torch

        loaded.model.to(getattr(torch, dtype))
    return loaded


def _from_function(spec: str, random_weights: bool) -> Loaded:
    file, colon, function = spec.rpartition(":")
    if not colon and spec.endswith(".py"):
        file, function = spec, ""
    if not file.endswith(".py"):
        raise GeosharpError(_not_a_model(spec))
    if random_weights:
        raise GeosharpError(f"expected a folder with --random-weights, got {spec}; let the function itself make the weights")
    from geosharp.sources.function import called

    model, batches = called(Path(file), function)
    return Loaded(model, batches, spec)


def _from_folder(spec: str, random_weights: bool, seed: int) -> Loaded:
    """What weights do not hold (a new head, all of them with `random_weights`) depends on the seed and on nothing else."""
    import torch

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model, notes = _model_and_notes(Path(spec), random_weights)
    return Loaded(model, None, spec, tuple(notes))


def _model_and_notes(path: Path, random_weights: bool) -> tuple[nn.Module, list[str]]:
    if (path / "adapter_config.json").is_file():
        if random_weights:
            raise GeosharpError(f"expected a model's folder with --random-weights, got an adapter's, {path}; leave the option out")
        from geosharp.sources.adapter import with_adapter

        return with_adapter(path)
    if not (path / "config.json").is_file():
        raise GeosharpError(
            f"expected a folder with config.json or adapter_config.json, got {path} without either; "
            "give the folder that save_pretrained wrote, or file.py:function"
        )
    from geosharp.sources.folder import from_config, from_weights

    return (from_config(path), [f"{path}: random weights"]) if random_weights else from_weights(path)


def _not_a_model(spec: str) -> str:
    if Path(spec).exists():
        return f"expected a Hugging Face folder or file.py:function, got the file {spec}; give its folder, or a function that loads it"
    return (
        f"expected a Hugging Face folder or file.py:function, got {spec!r}, which is no path here; "
        "nothing is downloaded: give the path of a folder"
    )
