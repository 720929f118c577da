"""`geosharp symmetries` on functions in files and on folders with adapters, and one clear line for every way to be wrong."""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from command.running import Hostile, Run, fits, refused, saved

# Files with functions -------------------------------------------------------------------------------------------------

FILE = """
from dataclasses import dataclass

import torch
from torch import nn
from transformers import BertConfig, BertModel

from neighbour import WIDTH


@dataclass
class Sizes:
    width: int = WIDTH


def hugging_face():
    sizes = Sizes()
    torch.manual_seed(0)
    config = BertConfig(vocab_size=30, hidden_size=sizes.width, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    model = BertModel(config)
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return model


def plain():
    return nn.Linear(2, 2)


def with_batches():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    return layers, [(torch.randn(6, 4), torch.zeros(6, dtype=torch.long))]


def generated():
    layers, batches = with_batches()
    return layers, (batch for batch in batches)


def frozen():
    layers, batches = with_batches()
    return layers.requires_grad_(False), batches


def too_wide():
    return with_batches()[0], [(torch.randn(6, 5), torch.zeros(6))]


def one_batch():
    return with_batches()[0], {"input": torch.randn(6, 4)}


def no_batch():
    return with_batches()[0], []


def failing_batches():
    return with_batches()[0], (1 / 0 for _ in range(2))


def raises():
    raise RuntimeError("no disk")


def leaves():
    raise SystemExit("bye")


def needs(size):
    return nn.Linear(size, size)


def number():
    return 3


def pair():
    return 3, []
"""

RAISES = 1 + FILE.splitlines().index('    raise RuntimeError("no disk")')


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "models.py").write_text(FILE)
    (tmp_path / "neighbour.py").write_text("WIDTH = 8\n")
    monkeypatch.chdir(tmp_path)
    return "models.py"


def test_a_function(run: Run, file: str) -> None:
    before = list(sys.path)
    told = run(f"{file}:hugging_face")
    assert (told.code, told.err) == (0, "")
    assert told.summary.startswith("4 blocks in use: key bias R^4 x 2, value bias R^4 x 2, query-key GL(4) x 2, value-output GL(4) x 2")
    assert sys.path == before


@pytest.mark.parametrize("name", ["with_batches", "generated", "frozen"])
def test_a_function_with_batches(run: Run, file: str, name: str) -> None:
    told = run(f"{file}:{name}")
    assert told.code == 0
    assert "batch that came with it" in told.out
    assert told.summary == "1 block in use: ReLU neurons GL+(1) x 5"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (":plain", ("Linear", "no Hugging Face config", "file.py:function", "(model, batches)")),
        (":too_wide", ("Sequential to run on its first batch", "shapes cannot be multiplied")),
        (":one_batch", ("wrap it in a list",)),
        (":no_batch", ("at least one batch",)),
        (":failing_batches", ("ZeroDivisionError", "batches of models.py:failing_batches")),
        (":raises", ("RuntimeError: no disk", f"line {RAISES}", "models.py:raises")),
        (":leaves", ("SystemExit: bye", "models.py:leaves")),
        (":needs", ("no arguments", "size")),
        (":number", ("torch.nn.Module", "int")),
        (":pair", ("torch.nn.Module", "(int, list)")),
        (":hugging_fase", ("hugging_fase", "did you mean", '"hugging_face"')),
        (":", ("expected file.py:function", "models.py:hugging_face")),
        ("", ("expected file.py:function", "models.py:hugging_face")),
    ],
)
def test_a_function_that_gives_no_model(run: Run, file: str, name: str, words: tuple[str, ...]) -> None:
    refused(run(f"{file}{name}"), *words)


def test_a_file_that_does_not_run(run: Run, file: str) -> None:
    Path("broken.py").write_text("x = 1\ny = (\n")
    refused(run("broken.py:make"), "SyntaxError", "line 2", "broken.py")
    Path("broken.py").write_text("import nothing_of_this_name\n")
    refused(run("broken.py:make"), "ModuleNotFoundError", "line 1")
    refused(run("absent.py:make"), "absent.py", "no such file")
    refused(run(f"{file}:plain", "--random-weights"), "expected a folder", "--random-weights")


def test_ctrl_c_inside_a_function(run: Run, file: str) -> None:
    Path("slow.py").write_text("def make():\n    raise KeyboardInterrupt\n")
    told = run("slow.py:make")
    assert (told.code, told.err) == (130, "geosharp: interrupted\n")


# Adapters -------------------------------------------------------------------------------------------------------------

with_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")


def adapter(path: Path, base: Path, named: str) -> Path:
    """A trained adapter's folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's own, about the library it stands on
        import peft

        model = peft.get_peft_model(
            transformers.LlamaForCausalLM.from_pretrained(base), peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"])
        )
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter)
        model.peft_config["default"].base_model_name_or_path = named
        model.save_pretrained(path)
    return path


@with_peft
@pytest.mark.parametrize("named", ["absolute", "relative"])
def test_an_adapter(run: Run, tmp_path: Path, named: str) -> None:
    base = saved("LLaMA", tmp_path / "base")
    told = run(adapter(tmp_path / "adapter", base, str(base) if named == "absolute" else "../base"))
    assert (told.code, told.err) == (0, "")
    assert told.summary.startswith("2 blocks in use: adapter GL(2) x 2")
    assert "(256 trainable)" in told.out
    assert fits(told.out)


@with_peft
def test_an_adapter_whose_base_is_not_here(run: Run, tmp_path: Path) -> None:
    base = saved("LLaMA", tmp_path / "base")
    path = adapter(tmp_path / "adapter", base, "someone/llama")
    refused(run(path), "someone/llama", "nothing is downloaded", "base_model_name_or_path")
    refused(run(path, "--random-weights"), "--random-weights")
    other = adapter(tmp_path / "other", base, str(saved("BERT", tmp_path / "bert")))
    refused(run(other), "its base?")
    (other / "adapter_model.safetensors").unlink()
    refused(run(other), "adapter_model.safetensors")


@with_peft
def test_an_adapter_in_part(run: Run, tmp_path: Path) -> None:
    base = saved("LLaMA", tmp_path / "base")
    path = adapter(tmp_path / "adapter", base, str(base))
    weights = load_file(path / "adapter_model.safetensors")
    save_file(dict(list(weights.items())[1:]), path / "adapter_model.safetensors")
    refused(run(path), "every weight of the adapter", next(iter(weights)).removesuffix(".weight"))


@with_peft
def test_an_adapter_that_wants_to_run_code(run: Run, tmp_path: Path) -> None:
    base = saved("LLaMA", tmp_path / "base")
    path = adapter(tmp_path / "adapter", base, str(base))
    (path / "adapter_model.safetensors").unlink()
    torch.save({"weight": Hostile(tmp_path / "mark")}, path / "adapter_model.bin")
    refused(run(path), f"wants to run {os.system.__module__}.system", "not run")
    assert not (tmp_path / "mark").exists()


def test_peft_is_asked_for_when_it_is_missing(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    (tmp_path / "adapter_config.json").write_text("{}")
    refused(run(tmp_path), "expected peft", "pip install peft")
