"""The pulled-back loss F(z) = L(walk(Πz)): an ordinary function on a Euclidean ball (math.md 1)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from geosharp.batches import Batch, ordinary
from geosharp.errors import GeosharpError
from geosharp.geometry import elementwise
from geosharp.geometry.chart import Chart, Entry
from geosharp.isolation import undisturbed
from geosharp.nested import tensors
from geosharp.objective import Objective


class PulledBack:
    """F on some batches; points are flat vectors of length `size`, of which `dim` dimensions matter.

    Its methods depend on none of the caller's modes (autocast, inference, no-grad) and leave no random state behind.
    Over several batches F is the mean over all examples: batches count by their weights.
    """

    def __init__(self, objective: Objective, chart: Chart, batches: Sequence[Batch], *, buffers: list[Tensor] | None = None) -> None:
        self.objective, self.chart = objective, chart
        pieces = [piece for batch in batches for piece in self._weighted(batch)]
        total = sum(weight for _, weight in pieces)
        self.parts = [(batch, weight / total) for batch, weight in pieces]
        self._buffers = [_buffer(entry) for entry in chart.entries] if buffers is None else buffers
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

    def start(self) -> tuple[PulledBack, float, Tensor]:
        """F without the embedding rows that these batches never look up, F(0) and ∇F(0), from one pass.

        Those rows cannot change the loss. Left out only where the indices are a tensor of the batch itself (so that they
        do not depend on parameters), the embedding has one name, and the gradient at 0 vanishes on every other row (so
        that nothing else reads it).
        """
        with self.objective.watched_lookups() as seen:
            value, gradient = self.base()
        pieces = self.chart.split(gradient)
        rows = {}
        for position, entry in enumerate(self.chart.entries):
            used = self._rows_in_use(seen.get(entry.name, []))
            if used is None or entry.rows is not None or 2 * used.numel() > entry.weight.shape[0]:
                continue
            others = torch.ones(entry.weight.shape[0], dtype=torch.bool, device=used.device)
            others[used] = False
            if not bool(pieces[position].any(1)[others].any()):
                rows[entry.name] = used
                pieces[position] = pieces[position].index_select(0, used)
        if not rows:
            return self, value, gradient
        smaller = PulledBack(self.objective, self.chart.restricted(rows), [batch for batch, _ in self.parts])
        smaller.evaluations = self.evaluations
        return smaller, value, smaller.chart.join(pieces)

    def _rows_in_use(self, lookups: Sequence[Tensor]) -> Tensor | None:
        given = {tensor.data_ptr() for batch, _ in self.parts for tensor in tensors(batch) if not tensor.is_floating_point()}
        if not lookups or any(indices.data_ptr() not in given for indices in lookups):
            return None
        used: Tensor = torch.cat([indices.reshape(-1) for indices in lookups]).unique()
        return used

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

    @undisturbed()
    def zero(self) -> Tensor:
        """The point of the model itself."""
        return self.chart.reference.new_zeros(self.size)

    @undisturbed()
    def value(self, z: Tensor) -> float:
        """F(z)."""
        self.forward_passes += 1
        with torch.no_grad():
            pieces = self.chart.split(z)
            leaves = self._walk_entries(pieces)
            values = {**self.chart.constants, **leaves, **self.chart.walk_stacks(pieces[len(self.chart.entries) :], leaves)}
            return sum(float(self.objective.loss(values, batch)) * share for batch, share in self.parts)

    @undisturbed()
    def value_and_grad(self, z: Tensor, out: Tensor | None = None) -> tuple[float, Tensor]:
        """F(z) and ∇F(z) from one pass; the gradient is written into `out` where it is given.

        Element-wise coordinates bypass autograd and reuse their buffers: at this size fresh memory costs more than sums.
        """
        self.evaluations += 1
        chart = self.chart
        gradient = torch.empty_like(z) if out is None else out
        count = len(chart.entries)
        pieces, outs = chart.split(ordinary(z).detach()), chart.split(gradient)
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
                    entry.part(found[entry.name]),
                    entry.weight,
                    entry.scale,
                    piece,
                    chart.elementwise_metric,
                    chart.elementwise_path,
                    target,
                )
        return total, gradient

    def _walk_entries(self, pieces: Sequence[Tensor]) -> dict[str, Tensor]:
        """The element-wise parameters, on work memory, as leaves."""
        chart = self.chart
        leaves = {}
        with torch.no_grad():
            for entry, piece, buffer in zip(chart.entries, pieces, self._buffers, strict=False):
                target = buffer if entry.rows is None else None
                moved = elementwise.walk(entry.weight, entry.scale, piece, chart.elementwise_metric, chart.elementwise_path, out=target)
                if entry.rows is not None:
                    buffer.index_copy_(0, entry.rows, moved)
                leaves[entry.name] = buffer.detach().requires_grad_()
        return leaves

    def _loss_and_grad(self, values: dict[str, Tensor], names: list[str]) -> tuple[float, dict[str, Tensor]]:
        """The weighted loss over all parts, and its gradient where there is one."""
        total = 0.0
        gradients: dict[str, Tensor] = {}
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

    @undisturbed()
    def hvp(self, z: Tensor, v: Tensor) -> Tensor:
        """∇²F(z) v, exactly, by double backward."""
        self.products += 1
        z, direction = ordinary(z), self.chart.split(ordinary(v))
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

    @undisturbed()
    def lift(self, z: Tensor) -> dict[str, Tensor]:
        """The tangent vector at the canonical form with coordinates z, by parameter name."""
        return self.chart.lift(self.chart.split(z))

    @undisturbed()
    def project(self, z: Tensor) -> Tensor:
        """Π z."""
        return self.chart.join(self.chart.project(self.chart.split(z)))

    @undisturbed()
    def probe(self, generator: torch.Generator) -> Tensor:
        """A standard Gaussian point, projected."""
        return self.chart.join(self.chart.probe(generator))

    @undisturbed()
    def cheap_probe(self, seed: int) -> Tensor:
        """A random point in the element-wise coordinates alone, the same all over an orbit; in all where there are no such."""
        generator = torch.Generator().manual_seed(seed)
        count = sum(self.chart.sizes[: len(self.chart.entries)])
        if count == 0:
            return self.probe(generator)
        z = self.zero()
        z[:count] = torch.rand(count, generator=generator, dtype=z.dtype).sub_(0.5).to(z)
        return z

    @undisturbed()
    def state_at(self, z: Tensor) -> dict[str, Tensor]:
        """The parameters at z in the user's own gauge, under the user's names (tied names repeated)."""
        with torch.no_grad():
            moved = self.chart.to_users_gauge(self.chart.walk(self.chart.split(z)), self.objective.fixed)
        return self.objective.state_dict_with(moved)


def check_base(value: float) -> None:
    """The unperturbed loss must be finite."""
    if not math.isfinite(value):
        raise GeosharpError(f"expected a finite loss of the unperturbed model, got {value}; check labels, inputs and checkpoint")


def _buffer(entry: Entry) -> Tensor:
    """Work memory of the parameter's shape; rows that do not move are filled once."""
    return torch.empty_like(entry.weight) if entry.whole is None else entry.whole.clone()
