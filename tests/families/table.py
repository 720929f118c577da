"""Which families the tests of symmetries use, and how many of the library's own families can be built tiny.

`python -m families.table` (from the folder of the tests) prints the second.
"""

from __future__ import annotations

import signal
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto
from transformers.utils import ModelOutput

from families.tiny import MAPPINGS, model_class, tiny

DISENTANGLED = {
    "relative_attention": True,
    "pos_att_type": ["c2p", "p2c"],
    "position_biased_input": False,
    "position_buckets": 8,
    "norm_rel_ebd": "layer_norm",
}
"""What every published DeBERTa-v2 and -v3 sets, and the library's default does not."""

FALCON_RW = {
    "new_decoder_architecture": False,
    "multi_query": False,
    "parallel_attn": False,
    "alibi": True,
    "bias": True,
    "num_kv_heads": 4,
}
"""The first Falcons: as many keys as queries, biases, linear biases of attention instead of rotary positions."""

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    **{
        name: (model_type, "sequence-classification", overrides)
        for name, model_type, overrides in (
            ("BERT", "bert", {}),
            ("RoBERTa", "roberta", {}),
            ("XLM-R", "xlm-roberta", {}),
            ("DistilBERT", "distilbert", {}),
            ("ALBERT", "albert", {"embedding_size": 16}),
            ("ELECTRA", "electra", {"embedding_size": 16}),
            ("DeBERTa-v2", "deberta-v2", {**DISENTANGLED, "share_att_key": False}),
            ("DeBERTa-v2 shared key", "deberta-v2", {**DISENTANGLED, "share_att_key": True}),
            ("MPNet", "mpnet", {}),
            ("ConvBERT", "convbert", {}),
            ("MobileBERT", "mobilebert", {}),
            ("ModernBERT", "modernbert", {}),
            ("RoFormer", "roformer", {"embedding_size": 16}),
        )
    },
    **{
        name: (model_type, "image-classification", overrides)
        for name, model_type, overrides in (
            ("ViT", "vit", {}),
            ("DeiT", "deit", {}),
            ("BEiT", "beit", {"use_relative_position_bias": True}),
            ("DINOv2", "dinov2", {}),
            ("Swin", "swin", {}),
            ("SwinV2", "swinv2", {}),
            ("SigLIP", "siglip", {}),
            ("ViT-MSN", "vit_msn", {}),
        )
    },
    **{
        name: (model_type, "base", {})
        for name, model_type in (
            ("CLIP text", "clip_text_model"),
            ("CLIP vision", "clip_vision_model"),
            ("SigLIP text", "siglip_text_model"),
            ("SigLIP vision", "siglip_vision_model"),
        )
    },
    **{
        name: (model_type, "causal-lm", overrides)
        for name, model_type, overrides in (
            ("GPT-2", "gpt2", {}),
            ("GPT-Neo", "gpt_neo", {}),
            ("GPT-NeoX", "gpt_neox", {}),
            ("GPT-J", "gptj", {}),
            ("OPT", "opt", {}),
            ("BLOOM", "bloom", {}),
            ("Falcon new decoder", "falcon", {"new_decoder_architecture": True}),
            ("Falcon multi-query", "falcon", {"new_decoder_architecture": False, "multi_query": True}),
            ("Falcon alibi", "falcon", FALCON_RW),
            ("MPT", "mpt", {}),
            ("LLaMA", "llama", {}),
            ("Mistral", "mistral", {}),
            ("Qwen2", "qwen2", {}),
            ("Qwen3", "qwen3", {"head_dim": 16}),
            ("Gemma", "gemma", {}),
            ("Gemma2", "gemma2", {}),
            ("Phi", "phi", {}),
            ("Phi3", "phi3", {}),
            ("StableLM", "stablelm", {"use_qkv_bias": True}),
            ("OLMo", "olmo", {}),
            ("OLMo2", "olmo2", {}),
            ("Granite", "granite", {}),
            ("Cohere", "cohere", {}),
            ("Starcoder2", "starcoder2", {"use_bias": True}),
            ("BioGPT", "biogpt", {}),
        )
    },
    **{
        name: (model_type, "seq2seq-lm", overrides)
        for name, model_type, overrides in (
            ("T5", "t5", {"feed_forward_proj": "relu"}),
            ("T5 gated", "t5", {"feed_forward_proj": "gated-gelu"}),
            ("BART", "bart", {}),
            ("Pegasus", "pegasus", {}),
            ("Marian", "marian", {}),
            ("Whisper", "whisper", {}),
        )
    },
}
"""Families of the tests of symmetries, variants on their own: model type, task, and overrides for `tiny`."""

SURVEYED = ("sequence-classification", "image-classification", "causal-lm")


@dataclass(frozen=True)
class Row:
    """What became of one family at one task: an error of one line, empty if the model ran."""

    task: str
    model_type: str
    class_name: str
    error: str
    parameters: int


def survey(seconds: int = 20) -> list[Row]:
    """Every family of the surveyed tasks, tried once each."""
    return [_tried(task, name, seconds) for task in SURVEYED for table in MAPPINGS[task] for name in getattr(modeling_auto, table)]


def _tried(task: str, model_type: str, seconds: int) -> Row:
    """Any failure of a family is a finding here, so nothing is let through."""
    class_name, error, parameters = "", "", 0
    try:
        with at_most(seconds), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            class_name = model_class(model_type, task).__name__
            made = tiny(model_type, task)
            parameters = sum(parameter.numel() for parameter in made.model.parameters())
            error = "" if finite(made.model(**made.batch)) else "outputs are not finite"
    except Exception as problem:
        error = " ".join(f"{type(problem).__name__}: {problem}".split())[:200]
    return Row(task, model_type, class_name, error, parameters)


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """A family that the sizes did not shrink would take minutes."""

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def finite(outputs: ModelOutput) -> bool:
    """Whether the loss and the main output of a model are finite."""
    tensors = [value for value in outputs.to_tuple() if isinstance(value, torch.Tensor)]
    return bool(tensors) and all(bool(torch.isfinite(value).all()) for value in tensors)


def main() -> None:
    """Print the survey and the share of each task that runs."""
    transformers.logging.set_verbosity_error()
    rows = survey()
    for row in rows:
        print(f"{row.task:24} {row.model_type:28} {row.class_name:44} {row.parameters:9}  {row.error or 'ok'}")
    total, ran = Counter(row.task for row in rows), Counter(row.task for row in rows if not row.error)
    for task in SURVEYED:
        print(f"{task}: {ran[task]} of {total[task]} run ({100 * ran[task] / total[task]:.0f} %)")


if __name__ == "__main__":
    main()
