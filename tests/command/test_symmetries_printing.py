"""What `geosharp symmetries` prints about blocks, used or not, and how the command itself behaves."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import geosharp as gs
from command.running import Run, model_of, refused, saved
from families.table import FAMILIES
from families.tiny import tiny
from geosharp.symmetry.show import as_dict, shown

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
