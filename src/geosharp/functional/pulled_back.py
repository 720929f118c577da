"""The pulled-back loss F(z) = L(walk(Πz)): an ordinary function on a Euclidean ball (math.md 1)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from geosharp.batches import Batch
from geosharp.errors import GeosharpError
from geosharp.geometry import elementwise
from geosharp.geometry.chart import Chart
from geosharp.objective import Objective


class PulledBack:
    """F on some batches; points are flat vectors of length `size`, of which `dim` dimensions matter.

    Over several batches F is the mean over all examples: batches count by their weights.
    """

    def __init__(self, objective: Objective, chart: Chart, batches: Sequence[Batch], *, buffers: list[Tensor] | None = None) -> None:
        self.objective, self.chart = objective, chart
        pieces = [piece for batch in batches for piece in self._weighted(batch)]
        total = sum(weight for _, weight in pieces)
        self.parts = [(batch, weight / total) for batch, weight in pieces]
        self._buffers = [torch.empty_like(entry.weight) for entry in chart.entries] if buffers is None else buffers
        self.evaluations = 0
        """Loss-and-gradient evaluations so far."""
        self.forward_passes = 0
        """Loss-only evaluations so far."""
        self.products = 0
        """Hessian-vector products so far."""

    def on(self, batches: Sequence[Batch]) -> PulledBack:
        """The same chart on other batches, sharing work memory."""
        return PulledBack(self.objective, self.chart, batches, buffers=self._buffers)

    def base(self) -> tuple[float, Tensor]:
        """F(0) and ∇F(0); a model whose own loss is not finite cannot be measured."""
        value, gradient = self.value_and_grad(self.zero())
        check_base(value)
        if not bool(torch.isfinite(gradient).all()):
            raise GeosharpError("expected a finite gradient at the model itself, got inf or nan; the loss is not differentiable there")
        return value, gradient

    def _weighted(self, batch: Batch) -> list[tuple[Batch, float]]:
        whole = self.objective.weight_of(batch)
        return [(piece, whole * share) for piece, share in self.objective.micro_batches(batch)]

    @property
    def size(self) -> int:
        """The length of a flat point."""
        return self.chart.size

    @property
    def dim(self) -> int:
        """The dimension of range Π."""
        return self.chart.dim

    def zero(self) -> Tensor:
        """The point of the model itself."""
        return self.chart.reference.new_zeros(self.size)

    def value(self, z: Tensor) -> float:
        """F(z)."""
        self.forward_passes += 1
        with torch.no_grad():
            values = self.chart.walk(self.chart.split(z))
            return sum(float(self.objective.loss(values, batch)) * share for batch, share in self.parts)

    def value_and_grad(self, z: Tensor, out: Tensor | None = None) -> tuple[float, Tensor]:
        """F(z) and ∇F(z) from one pass; the gradient is written into `out` where it is given.

        Element-wise coordinates bypass autograd and reuse their buffers: at this size fresh memory costs more than sums.
        """
        self.evaluations += 1
        chart = self.chart
        gradient = torch.empty_like(z) if out is None else out
        count = len(chart.entries)
        pieces, outs = chart.split(z.detach()), chart.split(gradient)
        leaves = self._walk_entries(pieces)
        stack_pieces = [piece.detach().requires_grad_() for piece in pieces[count:]]
        with torch.enable_grad():
            placed = chart.walk_stacks(stack_pieces, leaves)
        values = {**chart.constants, **leaves, **{name: value.detach().requires_grad_() for name, value in placed.items()}}
        names = [name for name, value in values.items() if value.requires_grad]
        total, found = self._loss_and_grad(values, names)
        sources = [*stack_pieces, *(leaves[name] for name in placed if name in leaves)]
        reached = [name for name in placed if name in found]
        back = torch.autograd.grad([placed[name] for name in reached], sources, [found[name] for name in reached]) if reached else ()
        found.update(zip((name for name in placed if name in leaves), back[len(stack_pieces) :], strict=True))
        with torch.no_grad():
            for piece, target in zip(back[: len(stack_pieces)] or [None] * len(stack_pieces), outs[count:], strict=True):
                target.zero_() if piece is None else target.copy_(piece)
            for entry, piece, target in zip(chart.entries, pieces, outs, strict=False):
                if entry.name not in found:
                    target.zero_()
                    continue
                elementwise.pull_back(
                    found[entry.name], entry.weight, entry.scale, piece, chart.elementwise_metric, chart.elementwise_path, target
                )
        return total, gradient

    def _walk_entries(self, pieces: Sequence[Tensor]) -> dict[str, Tensor]:
        with torch.no_grad():
            for entry, piece, buffer in zip(self.chart.entries, pieces, self._buffers, strict=False):
                elementwise.walk(
                    entry.weight, entry.scale, piece, self.chart.elementwise_metric, self.chart.elementwise_path, out=buffer
                )
        return {
            entry.name: buffer.detach().requires_grad_() for entry, buffer in zip(self.chart.entries, self._buffers, strict=True)
        }

    def _loss_and_grad(self, values: dict[str, Tensor], names: list[str]) -> tuple[float, dict[str, Tensor]]:
        """The weighted loss over all parts, and its gradient where there is one."""
        total, gradients = 0.0, {}
        for batch, share in self.parts:
            with torch.enable_grad():
                loss = self.objective.loss(values, batch)
            if not loss.requires_grad:
                raise GeosharpError("expected the loss to depend on the measured parameters, it does not; check params= and loss=")
            found = torch.autograd.grad(loss, [values[name] for name in names], allow_unused=True)
            total += float(loss.detach()) * share
            for name, g in zip(names, found, strict=True):
                if g is None:
                    continue
                if name in gradients:
                    gradients[name].add_(g, alpha=share)
                else:
                    gradients[name] = g if share == 1.0 else g * share
        return total, gradients

    def hvp(self, z: Tensor, v: Tensor) -> Tensor:
        """∇²F(z) v, exactly, by double backward."""
        self.products += 1
        direction = self.chart.split(v)
        total = torch.zeros_like(v)
        for batch, share in self.parts:
            pieces = [piece.detach().requires_grad_() for piece in self.chart.split(z)]
            with torch.enable_grad():
                loss = self.objective.loss(self.chart.walk(pieces), batch, second_order=True)
                first = torch.autograd.grad(loss, pieces, create_graph=True, allow_unused=True)
                inner = sum(((g * d).sum() for g, d in zip(first, direction, strict=True) if g is not None), start=z.new_zeros(()))
            second = torch.autograd.grad(inner, pieces, allow_unused=True) if inner.requires_grad else [None] * len(pieces)
            flat = [torch.zeros_like(p) if g is None else g for p, g in zip(pieces, second, strict=True)]
            total += share * self.chart.join(flat)
        return total

    def lift(self, z: Tensor) -> dict[str, Tensor]:
        """The tangent vector at the canonical form with coordinates z, by parameter name."""
        return self.chart.lift(self.chart.split(z))

    def project(self, z: Tensor) -> Tensor:
        """Π z."""
        return self.chart.join(self.chart.project(self.chart.split(z)))

    def probe(self, generator: torch.Generator) -> Tensor:
        """A standard Gaussian point, projected."""
        return self.chart.join(self.chart.probe(generator))

    def state_at(self, z: Tensor) -> dict[str, Tensor]:
        """The parameters at z in the user's own gauge, under the user's names (tied names repeated)."""
        with torch.no_grad():
            moved = self.chart.to_users_gauge(self.chart.walk(self.chart.split(z)), self.objective.fixed)
        return self.objective.state_dict_with(moved)


def check_base(value: float) -> None:
    """The unperturbed loss must be finite."""
    if not math.isfinite(value):
        raise GeosharpError(f"expected a finite loss of the unperturbed model, got {value}; check the labels, the inputs and the checkpoint")
