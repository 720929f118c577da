"""`geosharp symmetries` on folders: which weights and which class it loads, and one clear line where it does not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from command.running import Hostile, Run, edited, model_of, refused, saved
from geosharp.sources.models import load

# Weights --------------------------------------------------------------------------------------------------------------


def test_a_config_alone(run: Run, tmp_path: Path) -> None:
    path = saved("BERT", tmp_path)
    (path / "model.safetensors").unlink()
    refused(run(path), "config.json alone", "--random-weights")
    told = run(path, "--random-weights")
    assert told.err == f"geosharp: {path}: random weights\n"
    assert told.summary.startswith("8 blocks in use")


def test_random_weights_depend_on_the_seed_only(tmp_path: Path) -> None:
    path = str(saved("BERT", tmp_path))
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first, again, other = (load(path, random_weights=True, seed=seed).model for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    name = "bert.encoder.layer.0.attention.self.query.bias"
    assert first.get_parameter(name).abs().min() > 0
    assert torch.equal(first.get_parameter(name), again.get_parameter(name))
    assert not torch.equal(first.get_parameter(name), other.get_parameter(name))


def test_a_pickle_of_tensors(run: Run, tmp_path: Path) -> None:
    path = saved("BERT", tmp_path)
    (path / "model.safetensors").unlink()
    torch.save(model_of("BERT").state_dict(), path / "pytorch_model.bin")
    told = run(path)
    assert (told.code, told.err) == (0, "")
    assert told.summary.startswith("8 blocks in use")


def test_a_pickle_that_wants_to_run_code(run: Run, tmp_path: Path) -> None:
    path = saved("BERT", tmp_path / "model")
    (path / "model.safetensors").unlink()
    torch.save({"weight": Hostile(tmp_path / "mark")}, path / "pytorch_model.bin")
    refused(run(path), f"wants to run {os.system.__module__}.system", "not run", "safetensors")
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"\x00" * 4, ("cut off or broken",)), (b"version https://git-lfs.github.com/spec/v1\n", ("Git LFS", "git lfs pull"))],
)
def test_safetensors_that_are_none(run: Run, tmp_path: Path, content: bytes, words: tuple[str, ...]) -> None:
    path = saved("BERT", tmp_path)
    (path / "model.safetensors").write_bytes(content)
    refused(run(path), *words)


def test_weights_of_another_library(run: Run, tmp_path: Path) -> None:
    path = saved("BERT", tmp_path)
    (path / "model.safetensors").rename(path / "tf_model.h5")
    refused(run(path), "tf_model.h5", "convert it to safetensors")


def test_a_new_head_is_a_note(run: Run, tmp_path: Path) -> None:
    model_of("BERT").bert.save_pretrained(tmp_path)
    told = run(edited(tmp_path, architectures=["BertForSequenceClassification"]))
    assert told.code == 0
    assert told.err == f"geosharp: {tmp_path}: not in the weights, so newly made: classifier.bias, classifier.weight\n"


def test_an_old_head_is_a_note(run: Run, tmp_path: Path) -> None:
    told = run(edited(saved("BERT", tmp_path), architectures=["BertModel"]))
    assert told.code == 0
    assert told.err == f"geosharp: {tmp_path}: BertModel has no place for, so left out: classifier.bias, classifier.weight\n"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 3}, ("16 missing", "bert.encoder.layer.2.attention", "and 12 more")),
        ({"num_hidden_layers": 1}, ("16 unexpected", "bert.encoder.layer.1.attention")),
        ({"intermediate_size": 24}, ("6 of another shape", "(20,) for (24,)")),
    ],
)
def test_a_config_of_another_model(run: Run, tmp_path: Path, changes: dict[str, Any], words: tuple[str, ...]) -> None:
    refused(run(edited(saved("BERT", tmp_path), **changes)), "BertForSequenceClassification", *words)


# Which class ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["BertForSequenceClasification"]}, ("did you mean", "BertForSequenceClassification")),
        ({"architectures": ["Trainer"]}, ("transformers", "Trainer", "file.py:function")),
        ({"architectures": ["Own"], "auto_map": {"AutoModel": "own.Own"}}, ("Own", "trust_remote_code", "not run")),
        ({"architectures": None}, ("architectures", "add it")),
    ],
)
def test_a_class_that_is_not_known(run: Run, tmp_path: Path, changes: dict[str, Any], words: tuple[str, ...]) -> None:
    refused(run(edited(saved("BERT", tmp_path), **changes)), *words)


def test_code_in_a_folder_is_not_run(run: Run, tmp_path: Path) -> None:
    path = edited(saved("BERT", tmp_path), auto_map={"AutoModel": "own.Own", "AutoConfig": "own.OwnConfig"})
    (path / "own.py").write_text("raise SystemExit('this ran')")
    assert run(path).code == 0  # transformers knows the class itself


@pytest.mark.parametrize("inside", [False, True])
def test_a_config_that_names_code_on_a_hub(run: Run, tmp_path: Path, inside: bool) -> None:
    entry = {"_attn_implementation": "someone/kernel"}
    path = edited(saved("BERT", tmp_path), **({"text_config": entry} if inside else entry))
    refused(run(path), "someone/kernel", "nothing is downloaded")


def test_a_folder_that_is_no_model(run: Run, tmp_path: Path) -> None:
    refused(run(tmp_path), "config.json", str(tmp_path), "file.py:function")


def test_a_broken_config(run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    refused(run(tmp_path), "config.json to be JSON")


def test_no_such_path(run: Run, tmp_path: Path) -> None:
    refused(run("bert-base-uncased"), "bert-base-uncased", "no path here", "nothing is downloaded")
    (tmp_path / "model.safetensors").touch()
    refused(run(tmp_path / "model.safetensors"), "folder", "got the file")
