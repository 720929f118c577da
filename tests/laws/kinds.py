"""One small network for every kind of symmetry that is found or declared, in float64, and tools to look at a whole chart.

Three instances: a BERT whose blocks are found (GL per head, two translations), a bottleneck with a declared GL(3), a
rotary attention head with a declared GL(1, ℂ) a frequency pair.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import geosharp as gs
import plain_networks as plain
import zoo
from geosharp.functional.pulled_back import PulledBack
from geosharp.symmetry.block import Block, Factors
from geosharp.symmetry.view import real_views
from oracles.quotient import Quotient

METRICS = ("inv", "mix")
PATHS = ("straight", "second-order", "exact")


@dataclass(frozen=True)
class Kind:
    """A network, a batch, and its symmetries as a user gives them."""

    build: Callable[[], nn.Module]
    batch: Any
    symmetries: Any
    params: str | None = None
    """Fewer coordinates, for what is dense."""
    family: bool = False

    def model(self) -> nn.Module:
        """A fresh network, always the same."""
        return self.build()

    def outputs(self, model: nn.Module) -> Tensor:
        """What the user's own model returns."""
        with torch.no_grad():
            return model(**self.batch).logits if self.family else model(self.batch[0])

    def blocks(self, model: nn.Module) -> dict[str, list[Block]]:
        """The verified blocks by their label in the record."""
        found = gs.verify(model, [self.batch], symmetries=self.symmetries)
        assert all(verdict.verified for verdict in found.verdicts)
        grouped: dict[str, list[Block]] = {}
        for block in found.used:
            grouped.setdefault(block.kind, []).append(block)
        return {found.kinds(blocks)[0]: blocks for blocks in grouped.values()}

    def pull_back(self, metric: str | None = "inv", path: str = "second-order", *, dense: bool = False, **options: Any) -> PulledBack:
        """F of the fresh network; `dense` restricts the coordinates to few."""
        if dense and self.params:
            options["params"] = self.params
        return gs.pull_back(self.model(), [self.batch], metric=metric, path=path, symmetries=self.symmetries, **options)


def _of_family(family: str, params: str) -> Kind:
    build = functools.partial(zoo.make, family, heads=2, width=8, spread=0.6)
    return Kind(build, zoo.batch_of(family, slice(0, 6)), "all", params, family=True)


def _declared(build: Callable[..., nn.Module], batch: Any, block: Factors, *arguments: int) -> Kind:
    return Kind(functools.partial(plain.seeded, build, *arguments), batch, block)


def _attentive_rotary() -> nn.Module:
    """With logits of order 1, so that queries and keys matter."""
    model = plain.seeded(plain.RotaryAttention)
    with torch.no_grad():
        for layer in (model.query, model.key):
            layer.weight.mul_(2.5)
    return model


KINDS = {
    "bert": _of_family("bert", "*attention*"),
    "gpt2": _of_family("gpt2", "*attn*"),
    "vit": _of_family("vit", "*attention*"),
    "product": _declared(plain.Product, plain.batch_of_vectors(), plain.product_block()),
    "neurons": _declared(plain.Perceptron, plain.batch_of_vectors(), plain.neuron_block()),
    "rotary": Kind(_attentive_rotary, plain.batch_of_sequences(), plain.rotary_block()),
    "line": _declared(plain.Product, plain.batch_of_vectors(), plain.product_block("line"), 1),
}
FAMILIES = zoo.FAMILIES
SMALL = ("product", "neurons", "rotary", "line")


def random_point(F: PulledBack, size: float, seed: int = 0) -> Tensor:
    """A Gaussian direction of norm `size`, not projected."""
    z = torch.randn(F.size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return z * (size / z.norm())


def flat(values: Mapping[str, Tensor]) -> Tensor:
    """A dict of parameters or tangents as one vector."""
    return torch.cat([values[name].reshape(-1) for name in sorted(values)])


def factors_of(F: PulledBack) -> list[Factors]:
    """Every product block of a chart."""
    return [block for stack in F.chart.stacks for block in stack.blocks]


class WholeMetric:
    """The metric on all parameters of a chart at its canonical form, from its definition (the dense oracle, block by block)."""

    def __init__(self, F: PulledBack, metric: str) -> None:
        self.metric, self.blocks = metric, factors_of(F)
        self.at = {name: value.detach() for name, value in F.chart.walk(F.chart.split(F.zero())).items()}
        self.outside = {name: torch.ones_like(value, dtype=torch.bool) for name, value in self.at.items()}
        for block in self.blocks:
            for view in real_views((*block.left, *block.right)):
                view.of(self.outside[view.parameter]).fill_(False)
        self.moving = {entry.name: entry.free for entry in F.chart.entries}

    def inner(self, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
        """⟨a, b⟩."""
        quotient, total = Quotient(self.metric), 0.0
        for block in self.blocks:
            points, first, second = block.read(self.at), block.read(a), block.read(b)
            for i in range(points[0].shape[0]):
                at, x, y = ((side[0][i], side[1][i]) for side in (points, first, second))
                total += float(quotient.inner(at, x, y))
        for name, mask in self.outside.items():
            used = mask & (self.at[name] != 0)
            total += float((a[name][used] * b[name][used] / self.at[name][used] ** 2).sum())
        return total

    def vertical(self, seed: int = 0) -> dict[str, Tensor]:
        """A random direction along the orbit of all product blocks, (GΛ, -HΛᴴ) a copy."""
        generator = torch.Generator().manual_seed(seed)
        tangent = {name: torch.zeros_like(value) for name, value in self.at.items()}
        for block in self.blocks:
            G, H = block.read(self.at)
            width = G.shape[2]
            Lambda = torch.randn(G.shape[0], width, width, generator=generator, dtype=G.dtype)
            block.write(tangent, G @ Lambda, -H @ Lambda.mH)
        return tangent


def dense(apply: Callable[[Tensor], Tensor], size: int) -> Tensor:
    """The matrix of a linear map, column by column."""
    return torch.stack([apply(unit) for unit in torch.eye(size, dtype=torch.float64)], 1)


def drift(before: Tensor, after: Tensor) -> float:
    return float((after - before).norm() / before.norm())


def weights_moved(model: nn.Module, twin: nn.Module) -> float:
    first, second = (torch.cat([p.detach().reshape(-1) for p in m.parameters()]) for m in (model, twin))
    return drift(first, second)


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.data for name, p in model.named_parameters()}
