"""`geosharp symmetries`: models from folders and files, what is printed, and one clear line for every way to be wrong."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import geosharp as gs
from families.table import FAMILIES
from families.tiny import tiny
from geosharp import cli
from geosharp.sources.inputs import example_batch
from geosharp.sources.models import load
from geosharp.symmetry.show import as_dict, shown
from geosharp.text import WIDTH
from real_text import minilm_path


@dataclass(frozen=True)
class Told:
    """What one run of the command line said."""

    code: int
    out: str
    err: str

    @property
    def summary(self) -> str:
        return self.out.splitlines()[-1]


Run = Callable[..., Told]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """`geosharp symmetries` with these words; what it says on both streams, also what other libraries write there."""

    def ran(*words: object) -> Told:
        capfd.readouterr()  # what saving a model wrote
        code = cli.main(["symmetries", *map(str, words)])
        return Told(code, *capfd.readouterr())

    return ran


def refused(told: Told, *words: str) -> None:
    """The user's mistake: exit code 2, one line that holds all these words, and nothing else."""
    lines = told.err.splitlines()
    assert told.code == 2
    assert told.out == ""
    assert len(lines) == 1, told.err
    assert len(lines[0]) <= 500
    missing = [word for word in words if word not in lines[0]]
    assert not missing, f"{missing} not in: {lines[0]}"


@functools.cache
def model_of(family: str, **overrides: Any) -> nn.Module:
    model_type, task, more = FAMILIES[family]
    return tiny(model_type, task, **more, **overrides).model.float()


def saved(family: str, path: Path, **overrides: Any) -> Path:
    """A folder as users have it."""
    model_of(family, **overrides).save_pretrained(path)
    return path


def edited(path: Path, **changes: Any) -> Path:
    """The folder with changes in its config; a value of None takes the entry out."""
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    return path


def fits(text: str) -> bool:
    """All lines but the first, which holds the path, and the last, which is the summary."""
    return all(len(line) <= WIDTH for line in text.splitlines()[1:-1])


# Folders --------------------------------------------------------------------------------------------------------------


def test_bert(run: Run, tmp_path: Path) -> None:
    told = run(saved("BERT", tmp_path))
    assert (told.code, told.err) == (0, "")
    assert "BertForSequenceClassification" in told.out.splitlines()[0]
    assert told.out.count("  verified  ") == 8
    assert told.summary.startswith("8 blocks in use: key bias R^8 x 8, value bias R^8 x 8, query-key GL(8) x 8, value-output GL(8) x 8")
    assert told.summary.endswith("4 known and not used (108 dimensions)")
    assert "bert.encoder.layer.0-1.attention.output.mean x 2: output mean, R^33 each, 66 dimensions" in told.out
    assert fits(told.out)


@pytest.mark.parametrize(
    ("family", "summary"),
    [
        ("LLaMA", "6 blocks in use: rotary query-key GL(1, C) x 16, value-output GL(8) x 4, GLU neurons GL(1) x 40"),
        ("ViT", "8 blocks in use: key bias R^8 x 8, value bias R^8 x 8, query-key GL(8) x 8, value-output GL(8) x 8"),
        ("T5", "16 blocks in use: query-key GL(8) x 24, value-output GL(8) x 24, ReLU neurons GL+(1) x 80; 2 known and not used (8 dim"),
        ("Qwen3", "6 blocks in use: query-key gains GL(1) x 16, value-output GL(16) x 4, GLU neurons GL(1) x 40; 2 refused by structure"),
        ("Whisper", "18 blocks in use: value bias R^8 x 24, query-key GL(8) x 24, value-output GL(8) x 24"),
    ],
)
def test_other_families(run: Run, tmp_path: Path, family: str, summary: str) -> None:
    told = run(saved(family, tmp_path))
    assert (told.code, told.err) == (0, "")
    assert told.summary.startswith(summary)
    assert fits(told.out)


def test_structural_refusals_are_folded_with_their_reason(run: Run, tmp_path: Path) -> None:
    lines = run(saved("Qwen3", tmp_path)).out.splitlines()
    at = lines.index("refused by structure:")
    assert lines[at + 1] == "  model.layers.0-1.self_attn.query_key x 2"
    assert "q_norm and k_norm" in lines[at + 2]


def test_minilm(run: Run) -> None:
    told = run(minilm_path())
    assert (told.code, told.err) == (0, "")
    assert told.summary.startswith("24 blocks in use: key bias R^32 x 72, value bias R^32 x 72, query-key GL(32) x 72")


def test_weights_in_bfloat16(run: Run, tmp_path: Path) -> None:
    tiny(*FAMILIES["BERT"][:2]).model.to(torch.bfloat16).save_pretrained(tmp_path)
    assert run(tmp_path).summary.startswith("8 blocks in use")


def test_float64_drifts_less(run: Run, tmp_path: Path) -> None:
    path = saved("BERT", tmp_path)
    single, double = (json.loads(run(path, "--json", "--dtype", dtype).out) for dtype in ("float32", "float64"))
    assert max(block["drift"] for block in double["blocks"]) < 1e-12 < min(block["drift"] for block in single["blocks"])


def test_json_has_the_numbers_of_the_text(run: Run, tmp_path: Path) -> None:
    path = saved("BERT", tmp_path)
    told, text = json.loads(run(path, "--json").out), run(path).out
    found = gs.symmetries(load(str(path)).model, [example_batch(load(str(path)).model)])
    assert told["class"] == "BertForSequenceClassification"
    assert told["parameters"] == told["trainable"] == 15275
    assert {key: told[key] for key in as_dict(found)} == as_dict(found)
    assert text.endswith(f"\n\n{shown(found)}\n")
    block = told["blocks"][2]
    assert (block["kind"], block["group"], block["copies"], block["dimension"]) == ("query-key", "GL(8)", 4, 256)
    assert block["parameters"] == [f"bert.encoder.layer.0.attention.self.{name}" for name in QUERY_KEY]
    assert block["drift"] < 1e-5 < block["control"]


QUERY_KEY = ("query.weight", "query.bias", "key.weight", "key.bias")


def test_published_symmetries(run: Run, tmp_path: Path) -> None:
    told = run(saved("BERT", tmp_path), "--symmetries", "published")
    assert told.summary == "4 blocks in use: query-key GL(8) x 8, value-output GL(8) x 8"


def test_the_seed_decides_the_batch(run: Run, tmp_path: Path) -> None:
    path = saved("BERT", tmp_path)
    first, again, other = (run(path, "--json", "--seed", seed).out for seed in (0, 0, 1))
    assert first == again
    assert json.loads(other)["blocks"] != json.loads(first)["blocks"]


def test_complete_on_a_small_model(run: Run, tmp_path: Path) -> None:
    path = saved("BERT", tmp_path, narrow=True)
    told = run(path, "--complete")
    assert told.summary.endswith("complete in 2 of 2 attention modules")
    modules = json.loads(run(path, "--complete", "--json").out)["completeness"]
    assert [module["complete"] for module in modules] == [True, True]
    assert all(module["null"] == module["explained"] > 0 for module in modules)


def test_complete_on_a_large_model(run: Run) -> None:
    refused(run(minilm_path(), "--complete"), "at most 4000 parameters", "592128", "small config")


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


class Hostile:
    """Unpickling it would leave a file behind."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


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


# Batches made up from configs -----------------------------------------------------------------------------------------

NORMED = ("Qwen3", "OLMo2", "SwinV2")
"""Families with norms between queries, keys and logits: their query-key blocks are refused by structure."""


@pytest.mark.parametrize("family", FAMILIES)
def test_a_made_up_batch_shows_every_block(family: str) -> None:
    model_type, task, overrides = FAMILIES[family]
    given = tiny(model_type, task, **overrides)
    batch = example_batch(given.model)
    found, expected = (gs.symmetries(given.model, [one]) for one in (batch, given.batch))
    assert found.used
    assert all(verdict.verified for verdict in found.verdicts)
    assert bool(found.refused) == (family in NORMED)
    assert found.kinds(found.used) == expected.kinds(expected.used)
    json.dumps(as_dict(found), allow_nan=False)


def test_words_are_no_special_tokens() -> None:
    model = model_of("BERT")
    words = example_batch(model, rows=50)["input_ids"]
    special = {value for name, value in model.config.to_dict().items() if name.endswith("_token_id") and isinstance(value, int)}
    assert special
    assert special.isdisjoint(words[:, :-1].unique().tolist())
    assert int(words.max()) < model.config.vocab_size


@pytest.mark.parametrize("family", ["BERT", "RoBERTa", "GPT-2"])
def test_few_positions(family: str) -> None:
    model_type, task, overrides = FAMILIES[family]
    name = "n_positions" if family == "GPT-2" else "max_position_embeddings"
    batch = example_batch(tiny(model_type, task, **overrides, **{name: 6}).model)
    assert 4 <= batch["input_ids"].shape[1] <= 6


def test_words_and_images_together() -> None:
    text = {"vocab_size": 30, "max_position_embeddings": 8, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
    vision = {"image_size": 16, "patch_size": 4}
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    torch.manual_seed(0)
    model = transformers.CLIPModel(transformers.CLIPConfig(text_config=text | sizes, vision_config=vision | sizes, projection_dim=8))
    batch = example_batch(model.eval())
    assert {name: tuple(value.shape[1:]) for name, value in batch.items()} == {
        "pixel_values": (3, 16, 16),
        "input_ids": (7,),
        "attention_mask": (7,),
    }


def test_one_row_where_a_head_takes_no_more() -> None:
    """GPT-2 has no padding token, and its classifier then takes no batches."""
    config = transformers.GPT2Config(n_embd=16, n_head=2, n_layer=1, vocab_size=40, n_positions=16, eos_token_id=3, bos_token_id=3)
    batch = example_batch(transformers.GPT2ForSequenceClassification(config))
    assert batch["input_ids"].shape == (1, 12)


def test_a_model_is_as_before_its_batch_was_made() -> None:
    model = transformers.BertModel(transformers.BertConfig(vocab_size=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=2))
    model.train()
    model.pooler.eval()
    before = torch.get_rng_state()
    example_batch(model)
    assert [name for name, module in model.named_modules() if not module.training] == ["pooler", "pooler.dense", "pooler.activation"]
    assert torch.equal(torch.get_rng_state(), before)


def test_inputs_that_cannot_be_guessed(run: Run, tmp_path: Path) -> None:
    config = transformers.TimeSeriesTransformerConfig(
        prediction_length=4, context_length=8, d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2
    )
    transformers.TimeSeriesTransformerForPrediction(config).save_pretrained(tmp_path)
    refused(run(tmp_path), "TimeSeriesTransformerForPrediction", "(model, batches)", "file.py:function")


# What is printed ------------------------------------------------------------------------------------------------------


def test_without_batches_nothing_is_verified() -> None:
    found = gs.symmetries(model_of("BERT"))
    assert {(block["status"], block["drift"], block["control"]) for block in as_dict(found)["blocks"]} == {("unverified", None, None)}
    assert shown(found).splitlines()[-1].startswith("8 blocks by structure, none verified (no batch was given): key bias R^8 x 8")
    assert "drift:" not in shown(found)


def test_no_symmetry_at_all() -> None:
    assert shown(gs.symmetries(nn.Linear(2, 2))) == "no block in use: no layout matches this model"


def test_a_block_that_was_not_shown_says_why() -> None:
    """Neurons that never fire change nothing, whatever is done to them."""
    layers = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    nn.init.constant_(layers[0].bias, -100.0)
    text = shown(gs.symmetries(layers, [(torch.randn(4, 3), torch.zeros(4))]))
    assert "undecidable on this batch:\n  2.inputs\n      a one-sided move does not change the outputs" in text
    assert text.splitlines()[-1] == "no block in use; 1 undecidable"


def test_frozen_blocks_are_listed_once() -> None:
    model = tiny(*FAMILIES["LLaMA"][:2]).model
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("mlp" in name)
    text = shown(gs.symmetries(model))
    assert "dropped, not coordinates:\n  model.layers.0-1.self_attn.query_key_rotary x 2\n" in text
    assert text.splitlines()[-1].endswith("; 4 dropped")


def test_long_names_leave_out_what_they_share() -> None:
    model_type, task, overrides = FAMILIES["SwinV2"]
    given = tiny(model_type, task, **overrides)
    lines = shown(gs.symmetries(given.model, [given.batch])).splitlines()
    assert lines[0].startswith("block in swinv2.encoder.layers ")
    assert lines[2].startswith("0.blocks.0.attention.value_bias ")


# The command itself ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--seed", "-1"), "--seed"),
        (("--seed", "x"), "whole number"),
        (("--dtype", "float16"), "float64"),
        (("--symmetries", "some"), "published"),
        ((), "MODEL"),
    ],
)
def test_words_that_are_wrong(run: Run, words: tuple[str, ...], said: str) -> None:
    refused(run(*words), said)


def test_help_is_light() -> None:
    code = "import sys\nfrom geosharp import cli\ncli.main(['measures'][:0] or ['mesures'])\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_process_of_its_own(tmp_path: Path) -> None:
    """As users call it: nothing on stderr but what is the user's."""
    path = saved("BERT", tmp_path / "bert")
    shutil.copytree(path, tmp_path / "copy")
    ran = subprocess.run([sys.executable, "-m", "geosharp", "symmetries", tmp_path / "copy"], capture_output=True, text=True, check=True)
    assert ran.stderr == ""
    assert ran.stdout.splitlines()[-1].startswith("8 blocks in use")
