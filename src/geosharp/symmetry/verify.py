"""Show a claimed symmetry on the model itself, or refuse it.

All blocks are moved at once by random group elements; the outputs (not the losses) must stay, measured against a control
in which each factor is applied to one side only. On failure the set is bisected until the false claims are alone. Whether
each block can be judged on this batch at all is seen from one gradient: a one-sided move must change the outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from geosharp.symmetry.block import Block

Outputs = Callable[[dict[str, Tensor]], Tensor]
"""The model's outputs on the verification examples, as one tensor, for given parameter values."""

DRIFT_TO_CONTROL = 1e-3
"""A claim passes only if its drift is at most this part of its control (design.md)."""

NO_EFFECT = 1e-7
"""A one-sided move with less than this part of the largest block's effect cannot be told from none."""

BAND = 10.0
"""Blocks are judged together when their effects are within this factor."""

ROUNDING = 100.0
"""Outputs that move by this many units of the last place may have moved by rounding alone."""


@dataclass(frozen=True)
class Verdict:
    """What verification found for one block."""

    block: Block
    status: str
    """"verified", "refused", "undecidable", "degenerate" (a factor is 0), or "unverified" (no batch was given)."""
    drift: float = math.nan
    """Relative change of the outputs under the group element."""
    control: float = math.nan
    """Relative change of the outputs under the one-sided control."""
    reason: str = ""

    @property
    def hidden_by_rounding(self) -> bool:
        """Whether the claim might be shown at a higher precision."""
        return self.status == "undecidable" and self.control > 0

    @property
    def verified(self) -> bool:
        """Whether the claim was shown."""
        return self.status == "verified"


def verify_blocks(outputs: Outputs, values: dict[str, Tensor], blocks: Sequence[Block], *, seed: int = 0) -> tuple[Verdict, ...]:
    """One verdict a block, in order."""
    if not blocks:
        return ()
    trial = _Trial(outputs, values, blocks, seed)
    verdicts: dict[int, Verdict] = {}
    decidable = []
    for index, effect in enumerate(trial.effects):
        if effect > NO_EFFECT * max(trial.effects):
            decidable.append(index)
        else:
            reason = "a one-sided move does not change the outputs on this batch, so nothing was shown"
            verdicts[index] = Verdict(blocks[index], "undecidable", 0.0, 0.0, reason)
    for band in _bands(decidable, trial.effects):
        _bisect(trial, band, verdicts)
    return tuple(verdicts[index] for index in range(len(blocks)))


def _bands(indices: Sequence[int], effects: Sequence[float]) -> list[list[int]]:
    """Blocks of like effect together: a false claim that matters little must not hide behind one that matters much."""
    bands: list[list[int]] = []
    for index in sorted(indices, key=lambda i: -effects[i]):
        if bands and effects[index] > effects[bands[-1][0]] / BAND:
            bands[-1].append(index)
        else:
            bands.append([index])
    return bands


def _bisect(trial: _Trial, indices: list[int], verdicts: dict[int, Verdict]) -> None:
    drift = trial.change(indices, one_sided=False)
    control = trial.change(indices, one_sided=True)
    allowed = DRIFT_TO_CONTROL * control * trial.least_share(indices)
    if drift <= allowed and trial.eps <= allowed:  # a drift below the last place looks like none
        for index in indices:
            verdicts[index] = Verdict(trial.blocks[index], "verified", drift, control)
    elif len(indices) > 1:
        half = len(indices) // 2
        _bisect(trial, indices[:half], verdicts)
        _bisect(trial, indices[half:], verdicts)
    else:
        verdicts[indices[0]] = _alone(trial, indices[0], drift, control)


def _alone(trial: _Trial, index: int, drift: float, control: float) -> Verdict:
    moved = f"outputs drift by {drift:.1e} under the group and {control:.1e} under the one-sided control"
    if drift <= trial.rounding and control * DRIFT_TO_CONTROL <= trial.rounding:
        reason = f"{moved}: the control is too weak on this batch to tell a symmetry from rounding (try dtype=torch.float64)"
        return Verdict(trial.blocks[index], "undecidable", drift, control, reason)
    reason = f"{moved}; a symmetry drifts by at most {DRIFT_TO_CONTROL:g} of the control"
    return Verdict(trial.blocks[index], "refused", drift, control, reason)


class _Trial:
    """The moves of one verification: the same group elements in every subset."""

    def __init__(self, outputs: Outputs, values: dict[str, Tensor], blocks: Sequence[Block], seed: int) -> None:
        self.outputs, self.values, self.blocks = outputs, values, blocks
        generator = torch.Generator().manual_seed(seed)
        self.elements = [block.random_element(values, generator) for block in blocks]
        self.effects, self.reference = self._first_order_effects(generator)
        self.scale = max(float(self.reference.norm()), torch.finfo(self.reference.dtype).tiny)
        self.eps = torch.finfo(self.reference.dtype).eps
        self.rounding = ROUNDING * self.eps

    def least_share(self, indices: Sequence[int]) -> float:
        """The part of a joint control that the least of these blocks has: controls of different blocks add up like √n."""
        effects = [self.effects[index] for index in indices]
        return min(effects) / math.sqrt(math.fsum(effect**2 for effect in effects))

    def _first_order_effects(self, generator: torch.Generator) -> tuple[list[float], Tensor]:
        """|⟨∇⟨r, f⟩, one-sided move⟩| a block, r random: one backward pass judges every control."""
        touched = sorted({name for block in self.blocks for name in self._touched(block)})
        leaves = {name: self.values[name].detach().requires_grad_() for name in touched}
        reference = self.outputs({**self.values, **leaves})
        probe = torch.randn(reference.shape, generator=generator, dtype=torch.float64).to(reference)
        found = torch.autograd.grad((reference * probe).sum(), list(leaves.values()), allow_unused=True)
        gradient = {name: g for name, g in zip(touched, found, strict=True) if g is not None}
        effects = []
        for block, element in zip(self.blocks, self.elements, strict=True):
            moved = self._moved([block], [element], one_sided=True)
            change = 0.0
            for name in set(moved) & set(gradient):
                change += float(((moved[name] - self.values[name]).double() * gradient[name].double()).abs().sum())
            effects.append(change)
        return effects, reference.detach()

    @staticmethod
    def _touched(block: Block) -> set[str]:
        control = getattr(block, "control", None)
        return set(block.parameters) | ({control.parameter} if control is not None else set())

    def _moved(self, blocks: Sequence[Block], elements: Sequence[Tensor], *, one_sided: bool) -> dict[str, Tensor]:
        """Copies of the touched parameters, moved. Translations go first: they read the weights that factors move."""
        moved = {name: self.values[name].detach().clone() for name in set().union(*map(self._touched, blocks))}
        order = sorted(range(len(blocks)), key=lambda i: hasattr(blocks[i], "left"))
        view = {**self.values, **moved}
        with torch.no_grad():
            for i in order:
                blocks[i].act(view, elements[i], one_sided=one_sided)
        return moved

    def change(self, indices: Sequence[int], *, one_sided: bool) -> float:
        """Relative change of the outputs when these blocks move."""
        moved = self._moved([self.blocks[i] for i in indices], [self.elements[i] for i in indices], one_sided=one_sided)
        with torch.no_grad():
            difference = self.outputs({**self.values, **moved}) - self.reference
        size = float(difference.double().norm()) / self.scale
        return size if math.isfinite(size) else math.inf
