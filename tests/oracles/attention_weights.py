"""The attention weights of three Hugging Face families in one notation, for the slow oracle only.

Row-vector convention: a layer computes X @ query + query_bias, ..., and the heads' outputs @ output + output_bias.
Nothing here is shared with `geosharp`: two readings of the same model that agree are worth more than one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Attention:
    """One layer's weights as (in, out) matrices, and its biases."""

    query: Tensor
    query_bias: Tensor
    key: Tensor
    key_bias: Tensor
    value: Tensor
    value_bias: Tensor
    output: Tensor
    output_bias: Tensor

    def without_translations(self) -> Attention:
        """The same function with zero key and value biases.

        The soft-max does not see the key bias; its rows sum to 1, so the value bias passes straight to the output bias.
        """
        return replace(
            self,
            key_bias=torch.zeros_like(self.key_bias),
            value_bias=torch.zeros_like(self.value_bias),
            output_bias=self.output_bias + self.value_bias @ self.output,
        )


_SEPARATE = {
    "bert": ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"),
    "vit": ("attention.q_proj", "attention.k_proj", "attention.v_proj", "attention.o_proj"),
}
_LAYER = {"bert": "bert.encoder.layer", "vit": "vit.layers", "gpt2": "transformer.h"}


class Family:
    """How to read and write the attention layers of a model; parameters are a dict of its own names."""

    def __init__(self, model: nn.Module) -> None:
        self.name = str(model.config.model_type)
        if self.name not in _LAYER:
            raise ValueError(f"expected bert, gpt2 or vit, got {self.name}")
        self.heads = int(model.config.num_attention_heads)
        self.layers = int(model.config.num_hidden_layers)

    def attention_names(self) -> set[str]:
        """Names of all attention parameters, output biases included."""
        modules = [name for layer in range(self.layers) for name in self._modules(layer)]
        return {f"{module}.{kind}" for module in modules for kind in ("weight", "bias")}

    def _modules(self, layer: int) -> tuple[str, ...]:
        prefix = f"{_LAYER[self.name]}.{layer}"
        if self.name == "gpt2":
            return (f"{prefix}.attn.c_attn", f"{prefix}.attn.c_proj")
        return tuple(f"{prefix}.{module}" for module in _SEPARATE[self.name])

    def read(self, values: Mapping[str, Tensor], layer: int) -> Attention:
        """One layer's weights."""
        modules = self._modules(layer)
        if self.name == "gpt2":  # Conv1D stores (in, out), and the three projections side by side
            query, key, value = values[f"{modules[0]}.weight"].chunk(3, 1)
            biases = values[f"{modules[0]}.bias"].chunk(3)
            output, output_bias = values[f"{modules[1]}.weight"], values[f"{modules[1]}.bias"]
        else:  # nn.Linear stores (out, in)
            query, key, value, output = (values[f"{module}.weight"].T for module in modules)
            *biases, output_bias = (values[f"{module}.bias"] for module in modules)
        return Attention(query, biases[0], key, biases[1], value, biases[2], output, output_bias)

    def write(self, layer: int, weights: Attention) -> dict[str, Tensor]:
        """The inverse of `read`: parameters under the model's names."""
        modules = self._modules(layer)
        matrices = (weights.query, weights.key, weights.value)
        biases = (weights.query_bias, weights.key_bias, weights.value_bias)
        if self.name == "gpt2":
            return {
                f"{modules[0]}.weight": torch.cat(matrices, 1),
                f"{modules[0]}.bias": torch.cat(biases),
                f"{modules[1]}.weight": weights.output,
                f"{modules[1]}.bias": weights.output_bias,
            }
        found = {f"{module}.weight": matrix.T for module, matrix in zip(modules, (*matrices, weights.output), strict=True)}
        return found | {f"{module}.bias": bias for module, bias in zip(modules, (*biases, weights.output_bias), strict=True)}


def split_columns(matrix: Tensor, heads: int) -> Tensor:
    """(d, heads·h) -> (heads, d, h): the columns of each head."""
    return matrix.reshape(matrix.shape[0], heads, -1).transpose(0, 1)


def join_columns(parts: Tensor) -> Tensor:
    """The inverse of `split_columns`."""
    return parts.transpose(0, 1).reshape(parts.shape[1], -1)
