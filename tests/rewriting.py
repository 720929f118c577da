"""One model rewritten in several ways without changing its function, and every measure before and after.

Three instances of a rewriting: A = G/100 for every head, G Gaussian; A = 100 G; a shift of every key bias.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import geosharp as gs
from geosharp.symmetry.block import Block, Factors, Translation

Batch = Mapping[str, Tensor]
Rewriting = Callable[[nn.Module], nn.Module]

FIRST_ORDER_RISE = 0.1
"""The radius of each measure is where its gradient alone raises the loss by this part of the loss."""


def _moved(model: nn.Module, blocks: Sequence[Block], element_of: Callable[[Block, dict[str, Tensor]], Tensor]) -> nn.Module:
    twin = copy.deepcopy(model)
    values = {name: parameter.data for name, parameter in twin.named_parameters()}
    for block in blocks:
        block.act(values, element_of(block, values))
    return twin


def _blocks(model: nn.Module) -> list[Block]:
    return [verdict.block for verdict in gs.symmetries(model).verdicts]


def gaussian(scale: float, seed: int = 0) -> Rewriting:
    """(G, H) -> (G A⁻¹, H Aᵀ) for every head, A = scale times a Gaussian matrix."""

    def rewrite(model: nn.Module) -> nn.Module:
        generator = torch.Generator().manual_seed(seed)

        def element(block: Block, values: dict[str, Tensor]) -> Tensor:
            assert isinstance(block, Factors)
            left, _ = block.read(values)
            return scale * torch.randn(left.shape[0], left.shape[2], left.shape[2], generator=generator, dtype=torch.float64)

        return _moved(model, [block for block in _blocks(model) if isinstance(block, Factors)], element)

    return rewrite


def shifted(kind: str, seed: int = 0) -> Rewriting:
    """Every key bias shifted, or every value bias with its output bias, by numbers of the size of 1."""

    def rewrite(model: nn.Module) -> nn.Module:
        generator = torch.Generator().manual_seed(seed)
        blocks = [block for block in _blocks(model) if isinstance(block, Translation) and block.kind == kind]
        return _moved(model, blocks, lambda block, values: block.random_element(values, generator))

    return rewrite


@dataclass(frozen=True)
class Line:
    """One measure before and after one rewriting."""

    rewriting: str
    measure: str
    rho: float | None
    before: gs.Measurement
    after: gs.Measurement
    drift: float
    """Largest change of an output over the largest output."""

    @property
    def change(self) -> float:
        """Relative change of the value."""
        return abs(self.after.value / self.before.value - 1)

    @property
    def tolerance(self) -> float:
        """What rounding in float32 explains (law 2)."""
        return max(1e-4, 10 * self.drift)


def radius_of(model: nn.Module, batch: Batch, measure: str) -> float:
    """Where the gradient alone raises the loss by `FIRST_ORDER_RISE` of it."""
    metric = next((metric for metric in ("inv", "mix") if f"-{metric}" in measure), None)
    F = gs.pull_back(model, [batch], metric=metric)
    value, gradient = F.value_and_grad(F.zero())
    return FIRST_ORDER_RISE * value / float(torch.linalg.vector_norm(gradient))


def lines(
    model: nn.Module, batch: Batch, rewritings: Mapping[str, Rewriting], measures: Sequence[str], *, symmetries: str = "all"
) -> Iterator[Line]:
    """Every measure at its radius, before and after every rewriting; few steps and samples, the same on both sides."""

    def measured(one: nn.Module, radii: Mapping[str, float | None]) -> dict[str, gs.Measurement]:
        return {measure: gs.sharpness(one, [batch], measure, **_options(measure, rho, symmetries)) for measure, rho in radii.items()}

    radii = {measure: None if "gradient-norm" in measure else radius_of(model, batch, measure) for measure in measures}
    before, outputs = measured(model, radii), _outputs(model, batch)
    for name, rewrite in rewritings.items():
        twin = rewrite(model)
        drift = float((_outputs(twin, batch) - outputs).abs().max() / outputs.abs().max())
        after = measured(twin, radii)
        for measure in measures:
            yield Line(name, measure, radii[measure], before[measure], after[measure], drift)


def _options(measure: str, rho: float | None, symmetries: str) -> dict[str, Any]:
    options: dict[str, Any] = {} if rho is None else {"rho": rho, **({"samples": 4} if "average" in measure else {"steps": 3})}
    return options if measure.startswith("adaptive") else {**options, "symmetries": symmetries}


def _outputs(model: nn.Module, batch: Batch) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(**batch).logits
    return logits


GEODESIC = tuple(
    f"{case}geodesic-{metric}{path}" for case in ("", "average-") for metric in ("inv", "mix") for path in ("", "-exact", "-first-order")
)
INVARIANT = (*GEODESIC, "riemannian-gradient-norm-inv", "riemannian-gradient-norm-mix")
"""Measures that claim every symmetry found."""
GAUSSIAN = {f"A = {scale:g} G": gaussian(scale) for scale in (0.01, 1.0, 100.0)}
SHIFTS = {"b_k shifted": shifted("key bias"), "b_v, b_o shifted": shifted("value bias")}
REWRITINGS = {**GAUSSIAN, **SHIFTS}
