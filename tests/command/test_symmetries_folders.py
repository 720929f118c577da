"""`geosharp symmetries` on folders: which blocks it finds, in text and as JSON, and what its options change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import geosharp as gs
from command.running import Run, fits, refused, saved
from families.table import FAMILIES
from families.tiny import tiny
from geosharp.sources.inputs import example_batch
from geosharp.sources.models import load
from geosharp.symmetry.show import as_dict, shown
from real_text import minilm_path


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
