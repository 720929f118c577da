"""Plain PyTorch networks with the blocks that a user declares for them, all parameters noisy, in float64.

Three instances: two linear maps in a row (GL(r)), a ReLU network (positive scalings), attention with rotary positions
written by hand (GL(1, ℂ) a frequency pair).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

import geosharp as gs

INPUTS, CLASSES = 6, 3


def seeded(build: type[nn.Module], *arguments: int, seed: int = 0) -> nn.Module:
    """A network with noise on every parameter, without touching the global random state."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = build(*arguments).double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def batch_of_vectors(rows: int = 12, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, INPUTS, generator=generator, dtype=torch.float64), torch.randint(0, CLASSES, (rows,), generator=generator)


def batch_of_sequences(rows: int = 8, length: int = 5, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows, length, INPUTS, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, CLASSES, (rows,), generator=generator)


class Product(nn.Module):
    """Two linear maps with nothing between them, then a non-linear head: a bottleneck, or an adapter."""

    def __init__(self, rank: int = 3) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(INPUTS, rank), nn.Linear(rank, 5), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(self.first(x))))


class Perceptron(nn.Module):
    """One hidden layer of ReLU neurons."""

    def __init__(self, hidden: int = 4) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(INPUTS, hidden), nn.Linear(hidden, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


class RotaryAttention(nn.Module):
    """One head with rotary positions on pairs (j, j + h/2), as the rotate-half convention has them."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.width = width
        self.query, self.key, self.value = (nn.Linear(INPUTS, width) for _ in range(3))
        self.head = nn.Linear(width, CLASSES)

    def rotated(self, x: Tensor) -> Tensor:
        half = self.width // 2
        frequencies = 0.7 / 3.0 ** torch.arange(half, dtype=x.dtype)
        angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * frequencies
        first, second = x[..., :half], x[..., half:]
        return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.rotated(self.query(x)) @ self.rotated(self.key(x)).mT / math.sqrt(self.width)
        return self.head(torch.tanh(scores.softmax(-1) @ self.value(x)).mean(1))


def product_block(name: str = "bottleneck") -> gs.Factors:
    """GL(r); the first bias is a row of G."""
    return gs.Factors(name, (gs.View("first.weight").T, gs.View("first.bias")), (gs.View("second.weight"),))


def neuron_block(group: str = "positive", name: str = "neurons") -> gs.Factors:
    """One copy a neuron: a column of (W₁ᵀ; b₁) and a column of W₂."""
    left = (gs.View("first.weight")[:, :, None], gs.View("first.bias")[:, None, None])
    return gs.Factors(name, left, (gs.View("second.weight").T[:, :, None],), group=group, kind="neuron")  # type: ignore[arg-type]


def _pairs(layer: str, width: int, *, conjugate: bool = False) -> tuple[gs.ComplexView, gs.ComplexView]:
    half = width // 2
    low, high = slice(0, half), slice(half, width)
    if conjugate:  # exchanging the parts is i times the conjugate
        low, high = high, low
    weight, bias = gs.View(f"{layer}.weight"), gs.View(f"{layer}.bias")
    rows = gs.ComplexView(weight[low, :, None], weight[high, :, None])
    return rows, gs.ComplexView(bias[low, None, None], bias[high, None, None])


def rotary_block(width: int = 4, *, conjugate_key: bool = False, name: str = "rotary") -> gs.Factors:
    """GL(1, ℂ), one copy a frequency pair; with `conjugate_key` the key is read as its conjugate, which is wrong."""
    return gs.Factors(name, _pairs("query", width), _pairs("key", width, conjugate=conjugate_key), kind="rotary query-key")
