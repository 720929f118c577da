"""One model being measured: its objective, its verified symmetries, one chart a geometry, one pulled-back loss a chart."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from geosharp import batches as data
from geosharp.batches import Batch
from geosharp.errors import RankError, SymmetryError
from geosharp.functional.pulled_back import PulledBack
from geosharp.geometry.build import Geometry, build_chart
from geosharp.geometry.chart import Chart
from geosharp.objective import Objective
from geosharp.symmetry.block import Block, Factors, Translation
from geosharp.symmetry.complete import check_sizes, completeness
from geosharp.symmetry.discover import Found, Symmetries, attention_modules, discover
from geosharp.symmetry.scope import Run

_VERIFIED: OrderedDict[str, Found] = OrderedDict()
_REMEMBERED = 16


class Session:
    """The shared state of one call: everything that is computed once a model."""

    def __init__(
        self, objective: Objective, symmetries: Symmetries = "all", *, allow_no_symmetry: bool = False, verify_seed: int = 0
    ) -> None:
        self.objective, self.symmetries = objective, symmetries
        self.allow_no_symmetry, self.verify_seed = allow_no_symmetry, verify_seed
        self._found: Found | None = None
        self._charts: dict[Geometry, PulledBack] = {}

    @functools.cached_property
    def weights_hash(self) -> str:
        """Of the user's weights; of a large model it takes a while."""
        return data.content_hash(self.objective.user_model.state_dict())

    def verify_once(self, batch: Batch) -> Found:
        """The blocks with their verdicts on a few rows of a prepared batch."""
        if self._found is None:
            self._found = self._discover(self.symmetries, data.few(batch))
        return self._found

    def verify_on(self, batch: Batch) -> Found:
        """The same, remembered from earlier calls by architecture, weights and rows."""
        if self._found is None:
            few = data.few(batch)
            key = self._verification_key(few)
            if key not in _VERIFIED:
                _VERIFIED[key] = self._discover(self.symmetries, few)
                while len(_VERIFIED) > _REMEMBERED:
                    _VERIFIED.popitem(last=False)
            self._found = _VERIFIED[key]
        return self._found

    def complete(self, batch: Batch) -> Found:
        """The blocks with their verdicts, and whether they are all of each attention module's symmetries."""
        check_sizes(attention_modules(self.objective.clone, self.structure()), self._all_values())
        found, wide = self.verify_once(batch), self.objective.widened()
        ready = wide.prepare(data.few(batch))
        modules = attention_modules(wide.clone, found)
        claims = [*(verdict.block for verdict in found.verdicts if verdict.verified), *found.known]
        values = {**wide.fixed, **wide.values}
        shown = completeness(wide.clone, lambda moved: wide.outputs(moved, ready), values, modules, claims, self.verify_seed)
        return dataclasses.replace(found, completeness=tuple(shown))

    def structure(self) -> Found:
        """The blocks by structure alone, not verified."""
        return self._discover(self.symmetries, None)

    def _discover(self, symmetries: Symmetries, batch: Batch | None) -> Found:
        objective = self.objective

        def wider() -> tuple[nn.Module, Run, dict[str, Tensor]]:
            wide = objective.widened()
            ready = wide.prepare(batch)
            return wide.clone, lambda values: wide.outputs(values, ready), {**wide.fixed, **wide.values}

        return discover(
            objective.clone,
            {**objective.fixed, **objective.values},
            symmetries,
            None if batch is None else lambda values: objective.outputs(values, batch),
            coordinates=objective.values,
            alias=objective.alias,
            seed=self.verify_seed,
            resolution=objective.resolution,
            wider=wider if objective.dtype != torch.float64 or objective.autocast is not None else None,
        )

    def _verification_key(self, few: Batch) -> str:
        objective = self.objective
        content = (
            repr(objective.user_model), str(getattr(objective.user_model, "config", "")), self.weights_hash, repr(self.symmetries),
            [_behaviour(module) for module in objective.user_model.modules()],
            tuple(objective.values), str(objective.dtype), str(objective.autocast), data.content_hash(few), self.verify_seed,
        )  # fmt: skip
        return hashlib.blake2b(repr(content).encode(), digest_size=20).hexdigest()

    def pulled_back(self, geometry: Geometry, batches: Sequence[Batch]) -> PulledBack:
        """F for a geometry on prepared batches; the chart is built once."""
        if geometry not in self._charts:
            blocks = self._blocks(geometry, batches[0])
            self._charts[geometry] = PulledBack(self.objective, self._chart(geometry, blocks), batches)
        return self._charts[geometry].on(batches)

    def _blocks(self, geometry: Geometry, batch: Batch) -> Sequence[Block]:
        if geometry.metric is None:
            return ()
        found = self.verify_on(batch)
        for verdict in found.verdicts:
            if verdict.status == "degenerate":
                raise RankError(verdict.reason)
        for item in () if self.allow_no_symmetry else found.adapters_refused:
            raise SymmetryError(f"expected adapters that can be measured, got {item.name!r}: {item.reason}")
        if not any(isinstance(block, Factors) for block in found.used) and not self.allow_no_symmetry:
            raise SymmetryError(
                f"expected a usable symmetry block for metric {geometry.metric!r}, found none{_why_none(found)}: this would equal "
                "adaptive-l2; declare blocks with symmetries=, measure adaptive-l2, or set allow_no_symmetry=True"
            )
        return found.used

    def _chart(self, geometry: Geometry, blocks: Sequence[Block]) -> Chart:
        objective = self.objective
        return build_chart(objective.values, blocks, geometry, fixed=objective.fixed, padding=objective.padding, stored=objective.stored)

    def claims(self, geometry: Geometry, batch: Batch | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Symmetries that a value under this geometry respects (verified on this model), and others that were found."""
        found = self._found if self._found is not None or batch is None else None
        if found is None:
            structure = self.structure()
            return (), (*_by_structure(structure, [v.block for v in structure.verdicts]), *structure.known_kinds())
        used = found.used
        if geometry.metric is not None:
            respected = list(used)
        elif geometry.elementwise == "adaptive":
            respected = [b for b in used if isinstance(b, Factors) and b.counted(self._all_values())[1] == 1 and not b.is_complex]
        else:
            respected = []
        names = {block.name for block in respected}
        others = [verdict.block for verdict in found.verdicts if verdict.block.name not in names and verdict.status != "refused"]
        unused = [*found.kinds(others), *found.known_kinds(), *self._not_removed(found)]
        return found.kinds(respected), tuple(unused)

    def _not_removed(self, found: Found) -> list[str]:
        """What "all" would quotient and the symmetries in use do not."""
        if self.symmetries == "all" or found.declared:
            return []
        have = {verdict.block.name for verdict in found.verdicts}
        everything = self._discover("all", None)
        return _by_structure(everything, [v.block for v in everything.verdicts if v.block.name not in have])

    def _all_values(self) -> Mapping[str, Tensor]:
        return {**self.objective.fixed, **self.objective.values}

    def describe(self, geometry: Geometry) -> dict[str, Any]:
        """The geometry for the record: which parameters went where."""
        record: dict[str, Any] = {**dataclasses.asdict(geometry), "symmetries": _symmetries_text(self.symmetries)}
        if geometry in self._charts:
            chart = self._charts[geometry].chart
            record.update(dim=chart.dim, size=chart.size, **chart.counts)
            if chart.stacks:
                record["s_min"] = min(float(stack.frame.singular.min()) for stack in chart.stacks)
                record["s_min_over_s_max"] = min(
                    float((stack.frame.singular.amin(-1) / stack.frame.singular.amax(-1)).min()) for stack in chart.stacks
                )
        if self._found is not None and geometry.metric is not None:
            record["blocks"] = list(self._found.kinds(self._found.used))
            record["refused"] = {v.block.name: v.reason for v in self._found.verdicts if not v.verified}
            record["dropped"] = {item.name: item.reason for item in self._found.dropped}
        record["frozen"] = sum(value.numel() for value in self.objective.fixed.values())
        return record


def _behaviour(module: nn.Module) -> tuple[Any, ...]:
    """What a module does beside its weights: its code, hooks and switches (a head count can change on the same weights)."""
    plain = (bool, int, float, str, type(None), tuple)
    switches = sorted((name, repr(value)) for name, value in vars(module).items() if isinstance(value, plain))
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return id(type(module)), id(type(module).forward), id(vars(module).get("forward")), [id(hook) for hook in hooks], switches


def _by_structure(found: Found, blocks: Sequence[Block]) -> list[str]:
    return [f"{kind} (by structure, not verified)" for kind in found.kinds(blocks)]


def _why_none(found: Found) -> str:
    reasons = [f"{v.block.name}: {v.reason}" for v in found.verdicts if not v.verified]
    reasons += [f"{item.name}: {item.reason}" for item in (*found.refused, *found.dropped)]
    return f" ({len(reasons)} not usable, first {reasons[0]})" if reasons else " (no layout matches this model)"


def _symmetries_text(symmetries: Symmetries) -> str:
    if isinstance(symmetries, str):
        return symmetries
    blocks = [symmetries] if isinstance(symmetries, (Factors, Translation)) else symmetries
    return "declared: " + ", ".join(block.name for block in blocks)


def forget_verifications() -> None:
    """Drop what is remembered of earlier verifications (benchmarks use it)."""
    _VERIFIED.clear()
