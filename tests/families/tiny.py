"""A tiny, noisy model of any family that Hugging Face transformers knows, with a batch that it reads.

Configs name their sizes in a few dozen ways, so one table by attribute name shrinks most of them. Families that need more have
a line in `CORRECTIONS`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto import modeling_auto

from families.sizes import (
    CORRECTIONS,
    FILLED,
    FIRST_WORD,
    GROUPED,
    HEAD,
    HEADS,
    IMAGE,
    LABELS,
    RANGES,
    ROWS,
    SIZES,
    SPECIAL,
    TOKENS,
    VOCABULARY,
    WIDTH,
)

MAPPINGS = {
    "sequence-classification": ("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",),
    "image-classification": ("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",),
    "causal-lm": ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",),
    "base": ("MODEL_MAPPING_NAMES",),
    "seq2seq-lm": ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES"),
}
"""The library's own tables that name the class of a task."""

UNLISTED = {("siglip_text_model", "base"): "SiglipTextModel"}
"""Classes that no table names, and no table of configs in every version."""


@dataclass(frozen=True)
class Tiny:
    """A model in eval mode and float64, and keyword arguments for it."""

    model: nn.Module
    batch: dict[str, Tensor]


def tiny(model_type: str, task: str, *, seed: int = 0, narrow: bool = False, **overrides: Any) -> Tiny:
    """The family's model for a task, small and with noise on every parameter, and its batch; `narrow` halves heads and widths."""
    cls, config = model_class(model_type, task), tiny_config(model_type, narrow=narrow, **overrides)
    if not isinstance(config, cls.config_class or object):  # a language model whose family nests its config
        config = config.get_text_config(decoder=True)
    if task == "causal-lm" and hasattr(config, "is_decoder"):
        config.is_decoder = True
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = cls(config)
    model = _add_noise(model.double().eval(), seed)
    return Tiny(model, _batch(model, task, torch.Generator().manual_seed(seed + 1)))


def model_class(model_type: str, task: str) -> type[PreTrainedModel]:
    """The class that the library's own tables give; of several, the first."""
    names = UNLISTED.get((model_type, task))
    for table in MAPPINGS[task]:
        names = names or getattr(modeling_auto, table, {}).get(model_type)
    if names:
        return getattr(transformers, names if isinstance(names, str) else names[0])
    raise KeyError(f"transformers {transformers.__version__} has no {task} model of type {model_type}")


def tiny_config(model_type: str, *, narrow: bool = False, **overrides: Any) -> Any:
    """The family's config, shrunk; overrides win, and go into nested configs as dicts."""
    cls = CONFIG_MAPPING[model_type] if model_type in CONFIG_MAPPING else model_class(model_type, "base").config_class
    shrunk = _shrunk(cls())
    config = cls(**_merged(_halved(shrunk) if narrow else shrunk, {"num_labels": LABELS, **overrides}))
    config._experts_implementation = "eager"  # the default one multiplies no float64
    return config


def _merged(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Dicts inside dicts are merged, except where the old value is none."""
    nested = {k: _merged(base[k], v) for k, v in over.items() if isinstance(v, dict) and isinstance(base.get(k), dict)}
    return {**base, **over, **nested}


def _shrunk(config: Any) -> dict[str, Any]:
    """Keyword arguments that make a config like this one tiny."""
    values = config.to_dict()
    layers = next((values[name] for name in ("num_hidden_layers", "num_layers", "n_layer") if isinstance(values.get(name), int)), 0)
    lists = {name: list(value) for name, value in values.items() if isinstance(value, (list, tuple))}
    stages = len(lists.get("depths", lists.get("depth", ())))
    keywords = {name: size for name, size in SIZES.items() if type(values.get(name)) is int or (name in values and name in FILLED)}
    keywords |= {name: 0.2 for name in RANGES if name in values}
    keywords |= {name: _two_layers(v) for name, v in lists.items() if len(v) == layers > 2}
    keywords |= {name: _two_stages(name, v) for name, v in lists.items() if len(v) == stages > 0}
    keywords |= _heads(config.model_type, values) | _special_tokens(values)
    if "use_cache" in values:
        keywords["use_cache"] = False
    for name in (name for name, value in values.items() if isinstance(value, dict)):
        inner = getattr(config, name, None)
        if hasattr(inner, "to_dict"):
            keywords[name] = {"model_type": inner.model_type, **_shrunk(inner)}
    return _merged(keywords, CORRECTIONS.get(config.model_type, {}))


def _halved(keywords: dict[str, Any]) -> dict[str, Any]:
    """Half of every width and head width, in nested configs too."""
    halves = {WIDTH: WIDTH // 2, HEAD: HEAD // 2}
    inner = {name: _halved(value) for name, value in keywords.items() if isinstance(value, dict)}
    sizes = {name: halves[value] for name, value in keywords.items() if SIZES.get(name) in halves and value == SIZES[name]}
    return {**keywords, **sizes, **inner}


def _two_layers(kinds: list[Any]) -> list[Any]:
    """One layer of the first kind and one of another, where there is another."""
    return [kinds[0], next((kind for kind in kinds if kind != kinds[0]), kinds[1])]


def _two_stages(name: str, values: list[Any]) -> list[Any]:
    """Lists with an entry per stage: sizes by what they count, ratios and kernels as they are."""
    if name in ("depths", "depth"):
        return [1, 2]
    if name in ("hidden_sizes", "embed_dims", "embed_dim"):
        return [16, 32]
    return [2, 4] if name in ("num_heads", "num_attention_heads") else values[:2]


def _heads(model_type: str, values: dict[str, Any]) -> dict[str, int]:
    """Two heads of keys for four of queries where the family groups them."""
    keys, queries = values.get("num_key_value_heads"), values.get("num_attention_heads")
    if "num_key_value_heads" not in values or "kv_lora_rank" in values:
        return {"num_key_value_heads": HEADS} if keys else {}
    fewer = isinstance(keys, int) and isinstance(queries, int) and keys < queries
    return {"num_key_value_heads": 2 if fewer or model_type in GROUPED else HEADS}


def _special_tokens(values: dict[str, Any]) -> dict[str, int]:
    """Ids below `FIRST_WORD` for all special tokens, another for each."""
    ids, others = {"pad_token_id": SPECIAL["pad"]}, iter(range(3, FIRST_WORD))
    for name, value in values.items():
        stem = name.removesuffix("_token_id").removesuffix("_token_index")
        if stem != name and stem != "pad" and value is not None:
            ids[name] = SPECIAL[stem] if stem in SPECIAL else next(others)
    return ids


def _add_noise(model: PreTrainedModel, seed: int, size: float = 0.1) -> PreTrainedModel:
    """Noise on all parameters, in place: fresh models have zero biases and unit gains, which hide mistakes."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return model


def _batch(model: PreTrainedModel, task: str, generator: torch.Generator) -> dict[str, Tensor]:
    """What the model's forward takes for this task."""
    accepted = inspect.signature(model.forward).parameters
    images = "pixel_values" in accepted and (task == "image-classification" or model.main_input_name == "pixel_values")
    batch = _images(model.config, generator) if images else _sequences(model, generator)
    if model.config.model_type == "git":
        batch |= _images(model.config, generator)
    if "bbox" in accepted:
        corners = torch.randint(0, 15, (ROWS, TOKENS, 2), generator=generator)
        batch["bbox"] = torch.cat([corners, corners + 5], -1)
    return {name: value for name, value in (batch | _targets(batch, task, generator)).items() if name in accepted}


def _targets(batch: dict[str, Tensor], task: str, generator: torch.Generator) -> dict[str, Tensor]:
    """The labels of a task, and what the decoder reads."""
    if task == "seq2seq-lm":
        return {"decoder_input_ids": _words(generator), "labels": _words(generator)}
    if task == "causal-lm":
        return {"labels": batch["input_ids"]}
    return {"labels": torch.arange(ROWS) % LABELS} if task.endswith("classification") else {}


def _sequences(model: PreTrainedModel, generator: torch.Generator) -> dict[str, Tensor]:
    """Spectrograms or words, by the model's own name of its main input."""
    config, name = model.config, model.main_input_name
    if name == "input_features":
        return {name: torch.randn(ROWS, config.num_mel_bins, 2 * config.max_source_positions, generator=generator, dtype=torch.float64)}
    words = _words(generator)
    return {"input_ids": words, "attention_mask": torch.ones_like(words)}


def _images(config: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """Images of the size that the config asks for, which some families keep in a nested config."""
    vision = getattr(config, "vision_config", config)
    channels, size = getattr(vision, "num_channels", 3), getattr(vision, "image_size", None) or 2 * IMAGE
    if hasattr(vision, "num_patches"):
        return _patches(channels * vision.patch_size**2, generator)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return {"pixel_values": torch.randn(ROWS, channels, height, width, generator=generator, dtype=torch.float64)}


def _patches(values: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Images as SigLIP 2 takes them: 4 by 4 patches, flattened."""
    pixels = torch.randn(ROWS, 16, values, generator=generator, dtype=torch.float64)
    return {
        "pixel_values": pixels,
        "pixel_attention_mask": torch.ones(ROWS, 16, dtype=torch.long),
        "spatial_shapes": torch.full((ROWS, 2), 4),
    }


def _words(generator: torch.Generator) -> Tensor:
    """Rows of words with the end token last, which some families pool at."""
    words = torch.randint(FIRST_WORD, VOCABULARY, (ROWS, TOKENS), generator=generator)
    words[:, -1] = SPECIAL["eos"]
    return words
