"""A model from a folder as `save_pretrained` writes it. Weights are data: a file that wants to run code is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from geosharp.errors import GeosharpError, did_you_mean, one_line
from geosharp.sources.quiet import quiet
from geosharp.text import cut

if TYPE_CHECKING:
    from torch import nn

READABLE = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
FOREIGN = ("*.gguf", "*.h5", "*.msgpack", "*.ckpt", "*.onnx", "*.pt", "*.pth", "*.bin", "*.safetensors")
NOISE = 0.02
"""On random weights: fresh models have zero biases and unit gains, which hide false claims."""

_LOCAL = {"local_files_only": True, "trust_remote_code": False}


def from_weights(path: Path) -> tuple[nn.Module, list[str]]:
    """The model with its weights, and notes."""
    cls = class_of(path, config_of(path))
    check_weights(path)
    return loaded(cls, path)


def from_config(path: Path) -> nn.Module:
    """The model with random weights."""
    import torch

    cls = class_of(path, config_of(path))
    with quiet():
        try:
            model: nn.Module = cls(cls.config_class.from_pretrained(path, **_LOCAL))
        except Exception as error:  # a config can be wrong in as many ways as there are classes
            raise GeosharpError(
                f"expected {path}/config.json to make a {cls.__name__}, got {cut(one_line(error), 300)}; correct it"
            ) from error
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    parameter.add_(NOISE * torch.randn_like(parameter))
    return model.eval()


# Which class ----------------------------------------------------------------------------------------------------------


def config_of(path: Path, name: str = "config.json") -> Mapping[str, Any]:
    """A config as it is written."""
    try:
        config = json.loads((path / name).read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise GeosharpError(f"expected {path / name} to be JSON, got {one_line(error)}; save the model again") from error
    if not isinstance(config, dict):
        raise GeosharpError(f"expected {path / name} to be a JSON object, got {type(config).__name__}; save the model again")
    for key, value in _entries(config):
        if key.endswith("_implementation") and "/" in str(value):
            raise GeosharpError(
                f"expected {path / name} to name no code from a hub, got {key} = {value!r}; nothing is downloaded: take that entry out"
            )
    return config


def _entries(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every entry of a config and of those inside it."""
    for key, value in config.items():
        yield key, value
        if isinstance(value, Mapping):
            yield from _entries(value)


def class_of(path: Path, config: Mapping[str, Any]) -> Any:
    """The class of transformers that the config names."""
    transformers = transformers_itself()
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        raise GeosharpError(
            f'expected {path}/config.json to name its class under "architectures", got {names!r}; add it, as in ["BertForMaskedLM"]'
        )
    for name in names:
        found = _attribute(transformers, str(name))
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
    if config.get("auto_map"):
        raise GeosharpError(
            f"expected a class of transformers, got {names[0]} in {path}, which brings its own code (trust_remote_code); "
            "code from a model's folder is not run: load it in a file.py:function of your own"
        )
    known = did_you_mean(str(names[0]), (name for name in dir(transformers) if "For" in name or name.endswith("Model")))
    raise GeosharpError(
        f"expected a class that transformers {transformers.__version__} knows, got {names[0]} in {path}/config.json; "
        f"load it in a file.py:function{known}"
    )


def transformers_itself() -> Any:
    """The library, or one line that says what to install."""
    try:
        import transformers
    except ImportError as error:
        missing = str(error).splitlines()[0]
        raise GeosharpError(f"expected transformers for a folder, got: {missing}; run: pip install 'geosharp[hf]'") from error
    return transformers


def _attribute(module: Any, name: str) -> Any:
    """A class by name, or nothing, also where a package that it needs is not installed."""
    try:
        return getattr(module, name, None)
    except ImportError:
        return None


# Which weights --------------------------------------------------------------------------------------------------------


def check_weights(path: Path) -> None:
    """One clear line where there are none, or only the name of a file that lies elsewhere."""
    files = [path / name for name in READABLE if (path / name).is_file()]
    if not files:
        others = sorted({file.name for pattern in FOREIGN for file in path.glob(pattern)})
        if others:
            raise GeosharpError(f"expected model.safetensors or pytorch_model.bin in {path}, got {others[0]}; convert it to safetensors")
        raise GeosharpError(
            f"expected weights in {path}, got config.json alone; add model.safetensors, or give --random-weights for random ones"
        )
    with files[0].open("rb") as file:
        if file.read(24).startswith(b"version https://git-lfs"):
            raise GeosharpError(f"expected weights in {files[0]}, got a pointer of Git LFS; run git lfs pull in that folder")


def loaded(cls: Any, path: Path) -> tuple[nn.Module, list[str]]:
    """The class with the folder's weights, every one in its place but for heads; notes say which."""
    with quiet():
        try:
            model, told = cls.from_pretrained(
                path, output_loading_info=True, ignore_mismatched_sizes=True, weights_only=True, **_LOCAL
            )  # fmt: skip
        except Exception as error:  # transformers and what it reads with raise errors of any kind
            raise GeosharpError(why_not(path, error)) from error
    return model.eval(), _notes(model, path, told)


def why_not(path: Path, error: Exception, otherwise: str = "see whether from_pretrained loads it") -> str:
    """What kept weights from loading, in one line."""
    said = one_line(error)
    if "Weights only load failed" in said:
        wants = re.search(r"GLOBAL:? (\S+)", said)
        what = f"wants to run {wants[1]}" if wants else "holds more than tensors"
        return f"expected plain tensors in the weights of {path}, got a pickle that {what}; it was not run: convert it to safetensors"
    if "SafetensorError" in said:
        return f"expected whole safetensors files in {path}, got {said}; the file is cut off or broken: copy it again"
    return f"expected the folder {path} to load, got {cut(said, 300)}; {otherwise}"


def _notes(model: Any, path: Path, told: Mapping[str, Any]) -> list[str]:
    """Notes about heads; an error where weights have no place, or a place that is no head's no weights."""
    name = type(model).__name__
    buffers = {key for key, _ in model.named_buffers()}
    missing = sorted(told["missing_keys"])
    unexpected = sorted(key for key in told["unexpected_keys"] if key not in buffers)
    shapes = [f"{key} {tuple(stored)} for {tuple(own)}" for key, stored, own in sorted(told["mismatched_keys"])]
    lost = [key for key in missing if not _of_a_head(model, key)]
    spare = [key for key in unexpected if not _of_a_head(model, key)]
    problems = [
        f"{len(keys)} {what} ({_first(keys)})"
        for keys, what in ((lost, "missing"), (spare, "unexpected"), (shapes, "of another shape"))
        if keys
    ]
    if problems or told["error_msgs"]:
        said = "; ".join([*problems, *map(str, told["error_msgs"])])
        raise GeosharpError(f"expected the weights in {path} to be those of {name}, got {said}; correct config.json or the weights")
    notes = [f"{path}: not in the weights, so newly made: {_first(missing)}"] if missing else []
    return notes + ([f"{path}: {name} has no place for, so left out: {_first(unexpected)}"] if unexpected else [])


def _of_a_head(model: Any, key: str) -> bool:
    """Whether a weight belongs to what tasks put on top (or a pooler), not to the model under it."""
    prefix = f"{model.base_model_prefix}."
    if model.base_model is not model:
        return not key.startswith(prefix) or key.startswith(f"{prefix}pooler.")
    own = key.removeprefix(prefix)
    return own.startswith("pooler.") or own.partition(".")[0] not in dict(model.named_children())


def _first(keys: Sequence[str], most: int = 4) -> str:
    more = f" and {len(keys) - most} more" if len(keys) > most else ""
    return ", ".join(keys[:most]) + more
