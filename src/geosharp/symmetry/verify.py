"""Show a claimed symmetry on the model itself, or refuse it.

The claims about one module are moved together by random group elements; the outputs (not the losses) must stay, measured
against a control for each claim, in which its factor is applied to one side only. Where they do not stay, each is moved
alone. A claim that several readings of a module compete for is decided by what can be shown.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from geosharp.symmetry.block import Block, moved
from geosharp.symmetry.factors import Factors, Group, random_matrices
from geosharp.symmetry.scope import Evaluate, Places, Run, visit

DRIFT_TO_CONTROL = 1e-3
"""A claim passes only if its drift is at most this part of its control (design.md)."""

ROUNDING = 100.0
"""Outputs that move by this many units of the last place may have moved by rounding alone."""

MASKED = 1e30
"""Outputs beyond are masks that a module hands on (the lowest number of a dtype, or infinity), and take no part."""


@dataclass(frozen=True)
class Verdict:
    """What verification found for one block."""

    block: Block
    status: str
    """"verified", "refused", "undecidable", "degenerate" (a factor is 0), or "unverified" (no batch was given)."""
    drift: float = math.nan
    """Relative change, under the group element, of the outputs of the module around the block."""
    control: float = math.nan
    """Relative change of the same outputs under the one-sided control."""
    reason: str = ""

    @property
    def hidden_by_rounding(self) -> bool:
        """Whether the claim might be shown at a higher precision."""
        return self.status == "undecidable" and self.control > 0

    @property
    def verified(self) -> bool:
        """Whether the claim was shown."""
        return self.status == "verified"


Readings = Sequence[Sequence[Block]]
"""The blocks of one part of a model, in one or several readings, likeliest first."""


def verify_parts(
    model: nn.Module,
    run: Run,
    values: dict[str, Tensor],
    parts: Sequence[Readings],
    *,
    seed: int = 0,
    resolution: torch.dtype | None = None,
    within: Sequence[str] = (),
) -> list[Judged]:
    """For each part the reading that verification chose, and its verdicts.

    `within` has the module that each part is about: where a claim is judged, if its parameters lie deeper. `resolution` is
    the coarsest dtype on the way to the outputs, where that is not theirs.
    """
    places = Places(model)
    found: dict[int, Judged] = {}
    with torch.no_grad():
        scopes: dict[str, list[int]] = {}
        for index, readings in enumerate(parts):
            names = {name for blocks in readings for name in _touched_by(blocks)}
            scopes.setdefault(places.scope(names, within[index] if within else ""), []).append(index)

        def judge_all(indices: Sequence[int], evaluate: Evaluate, reference: Tensor) -> None:
            for index in indices:
                found[index] = _choose(Scene(evaluate, reference, values, seed, resolution), parts[index])

        judges = {
            scope: (
                {name for index in indices for blocks in parts[index] for name in _touched_by(blocks)},
                lambda call, indices=indices: judge_all(indices, call.evaluate, call.output),
            )
            for scope, indices in scopes.items()
            if scope
        }
        judged = visit(places, run, values, judges) if judges else set()
        rest = [index for scope, indices in scopes.items() if scope not in judged for index in indices]
        if any(any(parts[index]) for index in rest):
            judge_all(rest, lambda changed: run({**values, **changed}), run(values))
    return [found.get(index, Judged(0, ())) for index in range(len(parts))]


@dataclass(frozen=True)
class Judged:
    """Which reading of a part was chosen, and what was found for its blocks."""

    reading: int
    verdicts: tuple[Verdict, ...]


def verify_blocks(run: Run, values: dict[str, Tensor], blocks: Sequence[Block], *, seed: int = 0) -> tuple[Verdict, ...]:
    """One verdict a block, in order, judged on the outputs of the whole model."""
    with torch.no_grad():
        return _judge(Scene(lambda changed: run({**values, **changed}), run(values), values, seed), blocks)


@dataclass(frozen=True)
class Scene:
    """Where claims are judged: a way to evaluate a module, its outputs as they are, the parameters as they are."""

    evaluate: Evaluate
    reference: Tensor
    values: dict[str, Tensor]
    seed: int
    resolution: torch.dtype | None = None

    @property
    def eps(self) -> float:
        """What rounding makes of the outputs, relative to them."""
        return max(torch.finfo(dtype).eps for dtype in (self.reference.dtype, self.resolution or self.reference.dtype))


def _choose(scene: Scene, readings: Readings) -> Judged:
    best: tuple[int, Judged] | None = None
    for index, blocks in enumerate(readings):
        verdicts = _judge(scene, blocks)
        if all(verdict.verified for verdict in verdicts):
            return Judged(index, verdicts)
        shown = sum(verdict.block.describe(scene.values)[2] for verdict in verdicts if verdict.verified)
        if best is None or shown > best[0]:
            best = (shown, Judged(index, verdicts))
    return best[1] if best is not None else Judged(0, ())


def _judge(scene: Scene, blocks: Sequence[Block]) -> tuple[Verdict, ...]:
    if not blocks:
        return ()
    trial = _Trial(scene, blocks)
    controls = [trial.change([index], one_sided=True) for index in range(len(blocks))]
    together = trial.change(range(len(blocks)), one_sided=False)
    if trial.shows(together, min(controls)):
        return tuple(Verdict(block, "verified", together, control) for block, control in zip(blocks, controls, strict=True))
    return tuple(trial.verdict(index, control) for index, control in enumerate(controls))


class _Trial:
    """The moves of one verification: the same group elements in every subset."""

    def __init__(self, scene: Scene, blocks: Sequence[Block]) -> None:
        self.evaluate, self.values, self.blocks, self.eps = scene.evaluate, scene.values, blocks, scene.eps
        reference = scene.reference
        self.elements = [_element(block, scene.values, scene.seed + index) for index, block in enumerate(blocks)]
        self.finite = reference.abs() < MASKED
        self.reference = torch.where(self.finite, reference, 0)
        self.scale = max(float(torch.linalg.vector_norm(self.reference, dtype=torch.float64)), torch.finfo(reference.dtype).tiny)

    def change(self, indices: Sequence[int], *, one_sided: bool) -> float:
        """Relative change of the outputs when these blocks move."""
        names = {name for index in indices for name in _touched(self.blocks[index])}
        copies = {name: self.values[name].detach().clone() for name in names}
        moved(((self.blocks[i], self.elements[i]) for i in indices), {**self.values, **copies}, one_sided=one_sided, exactly=False)
        difference = torch.where(self.finite, self.evaluate(copies), 0) - self.reference
        size = float(torch.linalg.vector_norm(difference, dtype=torch.float64)) / self.scale
        return size if math.isfinite(size) else math.inf

    def shows(self, drift: float, control: float) -> bool:
        """Whether these numbers show a symmetry: little drift, and a control that the outputs' precision can tell from it."""
        return drift <= DRIFT_TO_CONTROL * control and control * DRIFT_TO_CONTROL > self.eps

    def verdict(self, index: int, control: float) -> Verdict:
        """One block on its own."""
        block = self.blocks[index]
        if control <= self.eps:
            reason = "a one-sided move does not change the outputs on this batch, so nothing was shown"
            return Verdict(block, "undecidable", 0.0, 0.0, reason)
        drift = self.change([index], one_sided=False)
        if self.shows(drift, control):
            return Verdict(block, "verified", drift, control)
        said = f"outputs drift by {drift:.1e} under the group and {control:.1e} under the one-sided control"
        if drift <= ROUNDING * self.eps and control * DRIFT_TO_CONTROL <= ROUNDING * self.eps:
            reason = f"{said}: the control is too weak on this batch to tell a symmetry from rounding (try dtype=torch.float64)"
            return Verdict(block, "undecidable", drift, control, reason)
        return Verdict(block, "refused", drift, control, f"{said}; a symmetry drifts by at most {DRIFT_TO_CONTROL:g} of the control")


SPREAD = 2.0
"""Group elements have singular values between 1/2 and 2."""


def _element(block: Block, values: dict[str, Tensor], seed: int) -> Tensor:
    if isinstance(block, Factors):
        return _matrices(*block.counted(values), block.group, block.is_complex, seed)
    return block.random_element(values, torch.Generator().manual_seed(seed), SPREAD)


@functools.lru_cache(maxsize=16)
def _matrices(copies: int, width: int, group: Group, is_complex: bool, seed: int) -> Tensor:
    """The layers of a model are judged with the same elements, so these are drawn once."""
    return random_matrices(copies, width, group, is_complex, torch.Generator().manual_seed(seed), SPREAD)


def _touched(block: Block) -> Iterator[str]:
    yield from block.parameters
    control = getattr(block, "control", None)
    if control is not None:
        yield control.parameter


def _touched_by(blocks: Sequence[Block]) -> Iterator[str]:
    for block in blocks:
        yield from _touched(block)
