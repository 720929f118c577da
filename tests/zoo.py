"""Small real models and real data for the tests: Hugging Face classes with tiny configs, the digits of scikit-learn.

Fresh HF models have zero biases and unit gains, which hide mistakes: every model here gets noise on all parameters.
BERT and GPT-2 read each 8x8 digit as 16 tokens (2x2 sums of intensities, 0 to 64).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    ViTConfig,
    ViTForImageClassification,
)

FAMILIES = ("bert", "gpt2", "vit")
TOKENS = 66
"""Vocabulary: 0 is padding, 1 + sum of four intensities."""


@functools.cache
def digits() -> tuple[Tensor, Tensor]:
    """Images (1797, 1, 8, 8) in [-1, 1] as float64, and labels."""
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images).reshape(-1, 1, 8, 8) / 8 - 1, torch.tensor(labels)


def batch_of(family: str, rows: slice = slice(0, 32), dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """A batch of digits as the family's models take it."""
    images, labels = digits()
    images, labels = images[rows], labels[rows]
    if family == "vit":
        return {"pixel_values": images.to(dtype), "labels": labels}
    sums = ((images + 1) * 8).reshape(-1, 4, 2, 4, 2).sum((2, 4)).reshape(-1, 16)
    batch = {"input_ids": (sums.round().long() + 1), "labels": labels}
    if family == "bert":
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    return batch


def fresh(family: str, *, layers: int = 1, heads: int = 3, width: int = 24, seed: int = 0, spread: float = 0.2) -> nn.Module:
    """An untrained model of a family without noise, on the CPU in float32."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"num_labels": 10, "initializer_range": spread}
    if family == "bert":
        config = BertConfig(
            vocab_size=TOKENS, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=32,
            max_position_embeddings=16, **sizes,
        )  # fmt: skip
        return BertForSequenceClassification(config)
    if family == "gpt2":
        config = GPT2Config(
            vocab_size=TOKENS, n_embd=width, n_layer=layers, n_head=heads, n_positions=16, pad_token_id=0, bos_token_id=0,
            eos_token_id=0, **sizes,
        )  # fmt: skip
        return GPT2ForSequenceClassification(config)
    config = ViTConfig(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=32, image_size=8, patch_size=2,
        num_channels=1, **sizes,
    )  # fmt: skip
    return ViTForImageClassification(config)


def add_noise(model: nn.Module, seed: int = 0, size: float = 0.1) -> nn.Module:
    """Noise on all parameters, in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype))
    return model


def make(family: str, *, layers: int = 1, heads: int = 3, seed: int = 0, dtype: torch.dtype = torch.float64, **sizes: Any) -> nn.Module:
    """A noisy model in eval mode."""
    return add_noise(fresh(family, layers=layers, heads=heads, seed=seed, **sizes), seed).to(dtype).eval()


def train(model: nn.Module, family: str, *, steps: int, rows: int = 512, rate: float = 3e-3, seed: int = 0) -> nn.Module:
    """Adam on the first digits, in place, without touching the global random state."""
    generator = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model.train()
        optimizer = torch.optim.Adam(model.parameters(), lr=rate)
        for _ in range(steps):
            start = int(torch.randint(0, rows - 32, (1,), generator=generator))
            optimizer.zero_grad()
            model(**batch_of(family, slice(start, start + 32), dtype)).loss.backward()
            optimizer.step()
        model.eval()
    return model


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> float:
    """The user's own way to the loss."""
    with torch.no_grad():
        return float(model(**batch).loss)
