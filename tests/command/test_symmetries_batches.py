"""Batches that `geosharp symmetries` makes up from configs: they show every block and leave the model as it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

import geosharp as gs
from command.running import Run, model_of, refused
from families.table import FAMILIES
from families.tiny import tiny
from geosharp.sources.inputs import example_batch
from geosharp.symmetry.show import as_dict

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
