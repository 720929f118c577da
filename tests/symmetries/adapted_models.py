"""Models with adapters as peft writes them, one for every kind of product, and what tests ask of them."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn

import geosharp as gs
import zoo
from families.tiny import tiny

QUIET = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*Merging is not supported.*"),
]
"""The marks of every file that adapts models: what peft warns of is not looked at here."""

Model, Batch = nn.Module, Any
OPTIONS: dict[str, Any] = {"rho": 0.1, "steps": 3}
QUERY_VALUE = ["query", "value"]


class Packed(nn.Linear):
    """As quantized layers are: whole numbers for weights, and a scale."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features)
        self.scale = float(linear.weight.detach().abs().max()) / 127
        self.weight = nn.Parameter((linear.weight.detach() / self.scale).round().to(torch.int8), requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


class Convolutions(nn.Module):
    """A grouped one, and one over sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.grouped, self.sequence, self.head = nn.Conv2d(4, 8, (3, 2), groups=2), nn.Conv1d(4, 8, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.grouped(x)).mean((2, 3)) + torch.tanh(self.sequence(x[:, :, 0])).mean(2))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x + self.attention(x, x, x, need_weights=False)[0]).mean(1))


def base(family: str) -> tuple[Model, Batch]:
    generator = torch.Generator().manual_seed(0)
    if family in ("llama", "mixtral"):
        made = tiny(family, "causal-lm", narrow=True)
        return made.model, made.batch
    if family in ("convolutions", "attention"):
        shape = (6, 4, 5, 5) if family == "convolutions" else (6, 5, 8)
        model = Convolutions() if family == "convolutions" else Attention()
        return zoo.add_noise(model.double()), (torch.randn(shape, generator=generator, dtype=torch.float64), torch.arange(6) % 3)
    model, batch = (
        zoo.make("bert" if family == "packed" else family, layers=2, heads=2, width=12),
        zoo.batch_of("bert" if family == "packed" else family, slice(0, 6)),
    )
    if family == "packed":
        for layer in model.bert.encoder.layer:
            layer.attention.self.query = Packed(layer.attention.self.query)
    return model, batch


def stirred(model: Model, size: float = 0.3) -> Model:
    """Noise on all that is trained, as after training: peft begins with products that are 0."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad or "lora_" in name:
                parameter.add_(size * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return model.eval()


def adapted(family: str, *, fresh: bool = False, config: Any = None, **options: Any) -> tuple[PeftModel, Batch]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, batch = base(family)
        model = get_peft_model(model, config or LoraConfig(**{"r": 2, "lora_alpha": 4, **options}), autocast_adapter_dtype=False)
    model = model.double()  # beside packed weights peft keeps float32
    return (model.eval() if fresh else stirred(model)), batch


KINDS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "BERT": ("bert", {"target_modules": QUERY_VALUE}, ("GL(2) x 4",)),
    "LLaMA": ("llama", {"target_modules": ["q_proj", "v_proj"]}, ("GL(2) x 4",)),
    "Conv1D": ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True}, ("GL(2) x 2",)),
    "all linear": ("vit", {"target_modules": "all-linear"}, ("GL(2) x 13",)),
    "embedding": ("bert", {"target_modules": ["word_embeddings"]}, ("GL(2) x 1",)),
    "patches": ("vit", {"target_modules": ["projection"]}, ("GL(2) x 1",)),
    "convolutions": ("convolutions", {"target_modules": ["grouped", "sequence"], "r": 4}, ("GL(2) x 2", "GL(4) x 1")),
    "ranks": ("bert", {"target_modules": QUERY_VALUE, "rank_pattern": {"layer.1.*": 3}}, ("GL(2) x 2", "GL(3) x 2")),
    "rsLoRA": ("bert", {"target_modules": QUERY_VALUE, "use_rslora": True, "r": 3}, ("GL(3) x 4",)),
    "biases": ("bert", {"target_modules": QUERY_VALUE, "lora_bias": True}, ("GL(2) x 4",)),
    "DoRA": ("bert", {"target_modules": QUERY_VALUE, "use_dora": True}, ("GL(2) x 4",)),
    "DoRA Conv1D": ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True, "use_dora": True}, ("GL(2) x 2",)),
    "DoRA embedding": ("bert", {"target_modules": ["word_embeddings"], "use_dora": True}, ("GL(2) x 1",)),
    "DoRA patches": ("vit", {"target_modules": ["projection"], "use_dora": True}, ("GL(2) x 1",)),
    "saved classifier": ("bert", {"target_modules": QUERY_VALUE, "modules_to_save": ["classifier"]}, ("GL(2) x 4",)),
    "experts": ("mixtral", {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}, ("GL(2) x 8",)),
    "packed base": ("packed", {"target_modules": QUERY_VALUE}, ("GL(2) x 4",)),
}
FLOAT32 = ("LLaMA", "experts")
"""Families that cast to float32 inside."""


@functools.cache
def _built(kind: str) -> tuple[PeftModel, Batch]:
    family, options, _ = KINDS[kind]
    return adapted(family, **options)


def built(kind: str) -> tuple[PeftModel, Batch]:
    model, batch = _built(kind)
    return copy.deepcopy(model), batch


def two_adapters(active: list[str]) -> tuple[PeftModel, Batch]:
    model, batch = adapted("bert", target_modules=QUERY_VALUE)
    model.add_adapter("other", LoraConfig(r=3, lora_alpha=7, target_modules=["query"]), autocast_adapter_dtype=False)
    model.base_model.set_adapter(active)
    return stirred(model), batch


def outputs(model: Model, batch: Batch) -> Tensor:
    with torch.no_grad():
        return model(**batch).logits if isinstance(batch, dict) else model(batch[0])


def drift(model: Model, twin: Model, batch: Batch) -> float:
    before = outputs(model, batch)
    return float((outputs(twin, batch) - before).norm() / before.norm())


def parameters(model: Model) -> dict[str, Tensor]:
    return {name: parameter.data for name, parameter in model.named_parameters()}


def values(model: Model, batch: Batch, *measures: str) -> list[float]:
    return [gs.sharpness(model, [batch], measure, **OPTIONS).value for measure in measures]
