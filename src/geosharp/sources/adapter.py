"""A low-rank adapter as peft saves it, on its base model from another folder."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from geosharp.errors import GeosharpError
from geosharp.sources.folder import check_weights, config_of, from_weights, loaded, transformers_itself, why_not
from geosharp.sources.quiet import quiet
from geosharp.text import cut

if TYPE_CHECKING:
    from torch import nn

TASKS = {
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
}
"""An adapter for a task brings a head that the base's own class may not have."""

WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")


def with_adapter(path: Path) -> tuple[nn.Module, list[str]]:
    """The base with the adapter on it, trainable as in training, and notes."""
    try:
        import peft
    except ImportError as error:
        missing = str(error).splitlines()[0]
        raise GeosharpError(f"expected peft for the adapter in {path}, got: {missing}; run: pip install peft") from error
    config = config_of(path, "adapter_config.json")
    if not any((path / name).is_file() for name in WEIGHTS):  # peft would ask the hub for a model of that name
        raise GeosharpError(f"expected {' or '.join(WEIGHTS)} in {path}, got neither; save the adapter again")
    folder = _base_folder(path, config.get("base_model_name_or_path"))
    base, notes = _base(folder, str(config.get("task_type")))
    with quiet(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            model: nn.Module = peft.PeftModel.from_pretrained(base, str(path), is_trainable=True)
        except Exception as error:  # peft and what it reads with raise errors of any kind
            raise GeosharpError(why_not(path, error, f"is {folder} its base?")) from error
    for warning in said:
        if "missing adapter keys" in str(warning.message):
            raise GeosharpError(f"expected every weight of the adapter in {path}, got {cut(str(warning.message), 300)}; save it again")
    # A head that was saved with the adapter is not one newly made.
    return model.eval(), [] if config.get("modules_to_save") else notes


def _base_folder(path: Path, named: Any) -> Path:
    """The base's folder, from the current one or from the adapter's."""
    for folder in (Path(str(named)), path / str(named)):
        if named and (folder / "config.json").is_file():
            return folder
    raise GeosharpError(
        f"expected the base of the adapter in {path} to be a folder here, got {named!r}; "
        "nothing is downloaded: set base_model_name_or_path in adapter_config.json to its path"
    )


def _base(folder: Path, task: str) -> tuple[nn.Module, list[str]]:
    if task not in TASKS:
        return from_weights(folder)
    config_of(folder)  # refused where it names code on a hub
    check_weights(folder)
    return loaded(getattr(transformers_itself(), TASKS[task]), folder)
