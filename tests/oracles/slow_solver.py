"""A slow, independent oracle for worst-case geodesic sharpness.

No code of `geosharp` is used: parameters stay in the gauge that the model came in, the projection is SciPy's Sylvester
solver, the loss is the user's own `model(**batch).loss`, the solver is long and starts from several places. Only the two
translations of attention are removed first (key bias, value bias), as `symmetries="all"` does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from oracles.attention_weights import Attention, Family, join_columns, split_columns
from oracles.gl_pairs import GLPairs

MOMENTUM = 0.75
PERIOD = 10
"""Steps between two looks at whether the step size should be halved."""
SUFFICIENT = 1e-4
MEMORY = 10
"""The polishing may go below the best of this many last values for a while (non-monotone line search)."""
RUNGS = (0.05, 0.1, 0.2, 0.4, 0.7)
RUNG_STEPS = 30


class SlowObjective:
    """F(ξ) = L(path(Πξ)) on flat tangent vectors ξ: [G of Q-K, H of Q-K, G of V-O, H of V-O, everything else]."""

    def __init__(self, model: nn.Module, batch: Mapping[str, Tensor], metric: str = "inv") -> None:
        self.model, self.batch, self.family = model.eval(), dict(batch), Family(model)
        values = {name: p.detach().clone() for name, p in model.named_parameters()}
        if any(value.dtype != torch.float64 for value in values.values()):
            raise ValueError("expected a model in float64")
        layers = [self.family.read(values, layer).without_translations() for layer in range(self.family.layers)]
        self.query_key = GLPairs(*_stacked([_query_key(layer, self.family.heads) for layer in layers]), metric)
        self.value_output = GLPairs(*_stacked([_value_output(layer, self.family.heads) for layer in layers]), metric)
        attention = self.family.attention_names()
        self.others = {name: value for name, value in values.items() if name not in attention}
        self.weights = torch.cat([layer.output_bias for layer in layers] + [v.flatten() for v in self.others.values()])
        self.movable = torch.cat([torch.ones(sum(len(x.output_bias) for x in layers)), *self._movable_masks()]) * (self.weights != 0)
        self._shapes = [pair.shape for block in self.blocks for pair in (block.G, block.H)] + [self.weights.shape]
        self.evaluations = 0

    @property
    def blocks(self) -> tuple[GLPairs, GLPairs]:
        """The two stacks of pairs."""
        return self.query_key, self.value_output

    def _movable_masks(self) -> Iterator[Tensor]:
        """0 for the padding row of an embedding, whose gradient autograd masks; 1 elsewhere."""
        padding = {f"{name}.weight": m.padding_idx for name, m in self.model.named_modules() if isinstance(m, nn.Embedding)}
        for name, value in self.others.items():
            mask = torch.ones_like(value)
            if padding.get(name) is not None:
                mask[padding[name]] = 0
            yield mask.flatten()

    def parts(self, xi: Tensor) -> tuple[Tensor, ...]:
        """A flat vector as its five parts."""
        pieces = xi.split([math.prod(shape) for shape in self._shapes])
        return tuple(piece.reshape(shape) for piece, shape in zip(pieces, self._shapes, strict=True))

    @staticmethod
    def flat(*parts: Tensor) -> Tensor:
        """The inverse of `parts`."""
        return torch.cat([part.reshape(-1) for part in parts])

    def project(self, xi: Tensor) -> Tensor:
        """Π: horizontal in every pair, zero where a weight does not move."""
        a, b, c, d, rest = self.parts(xi)
        return self.flat(*self.query_key.project((a, b)), *self.value_output.project((c, d)), rest * self.movable)

    def inner(self, xi: Tensor, zeta: Tensor) -> float:
        """The metric's inner product of two vectors that are zero where a weight does not move."""
        x, y = self.parts(xi), self.parts(zeta)
        total = self.query_key.inner(x[:2], y[:2]) + self.value_output.inner(x[2:4], y[2:4])
        safe = torch.where(self.movable != 0, self.weights, 1.0)
        return float(total + (x[4] * y[4] / safe**2).sum())

    def norm(self, xi: Tensor) -> float:
        """The metric norm."""
        return math.sqrt(self.inner(xi, xi))

    def random(self, generator: torch.Generator) -> Tensor:
        """A horizontal vector, isotropic in the metric."""
        noise = torch.randn(self.weights.shape, generator=generator, dtype=self.weights.dtype)
        pairs = [part for block in self.blocks for part in block.unit_noise(generator)]
        return self.project(self.flat(*pairs, noise * self.weights.abs()))

    def zero(self) -> Tensor:
        """ξ = 0."""
        return self.weights.new_zeros(sum(math.prod(shape) for shape in self._shapes))

    def state_at(self, xi: Tensor) -> dict[str, Tensor]:
        """The model's parameters at the end of the path of a horizontal ξ, differentiable in ξ."""
        a, b, c, d, rest = self.parts(xi)
        query_key, value_output = self.query_key.path((a, b)), self.value_output.path((c, d))
        weights = self.weights + rest
        width, layers, heads = query_key[1].shape[1], self.family.layers, self.family.heads
        biases, rest_of = weights[: layers * width].reshape(layers, width), weights[layers * width :]
        sizes = [value.numel() for value in self.others.values()]
        found = {name: piece.reshape(v.shape) for (name, v), piece in zip(self.others.items(), rest_of.split(sizes), strict=True)}
        for layer in range(layers):
            own = slice(layer * heads, (layer + 1) * heads)
            pairs = [factor[own] for factor in (*query_key, *value_output)]
            found |= self.family.write(layer, _attention(*pairs, biases[layer]))
        return found

    def value(self, xi: Tensor) -> float:
        """F without its gradient."""
        with torch.no_grad():
            return float(self._loss(self.project(xi)))

    def value_and_gradient(self, xi: Tensor) -> tuple[float, Tensor]:
        """F and its Riemannian gradient (in the metric at θ; horizontal).

        Π is self-adjoint in the metric, so the gradient of F∘Π is Π applied to the Riemannian gradient of F at Πξ.
        """
        self.evaluations += 1
        moved = self.project(xi).requires_grad_()
        loss = self._loss(moved)
        (gradient,) = torch.autograd.grad(loss, moved)
        a, b, c, d, rest = self.parts(gradient)
        raised = self.flat(*self.query_key.riemannian((a, b)), *self.value_output.riemannian((c, d)), rest * self.weights**2)
        return float(loss.detach()), self.project(raised)

    def _loss(self, horizontal: Tensor) -> Tensor:
        found: Tensor = torch.func.functional_call(self.model, self.state_at(horizontal), kwargs=self.batch).loss
        return found

    def in_ball(self, xi: Tensor, rho: float) -> Tensor:
        """The nearest point of the ball in the metric."""
        size = self.norm(xi)
        return xi if size <= rho else xi * (rho / size)


def _query_key(layer: Attention, heads: int) -> tuple[Tensor, Tensor]:
    with_bias = torch.cat([layer.query, layer.query_bias.unsqueeze(0)])
    return split_columns(with_bias, heads), split_columns(layer.key, heads)


def _value_output(layer: Attention, heads: int) -> tuple[Tensor, Tensor]:
    return split_columns(layer.value, heads), split_columns(layer.output.T, heads)


def _stacked(pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.cat([G for G, _ in pairs]), torch.cat([H for _, H in pairs])


def _attention(query: Tensor, key: Tensor, value: Tensor, output: Tensor, output_bias: Tensor) -> Attention:
    """One layer from the heads' factors; key and value biases are zero in this representative."""
    with_bias, keys = join_columns(query), join_columns(key)
    zeros = torch.zeros_like(with_bias[-1])
    return Attention(with_bias[:-1], with_bias[-1], keys, zeros, join_columns(value), zeros, join_columns(output).T, output_bias)


@dataclass
class Climb:
    """The best point of one start."""

    xi: Tensor
    value: float
    gradient: Tensor

    def offer(self, xi: Tensor, value: float, gradient: Tensor) -> bool:
        """Keep a better point."""
        if not value > self.value:
            return False
        self.xi, self.value, self.gradient = xi, value, gradient
        return True


def momentum_ascent(F: SlowObjective, rho: float, start: Tensor, steps: int) -> Climb:
    """Unit steps of steepest ascent with momentum; the step is halved, from the best point, when a period brought little."""
    best = Climb(start, *F.value_and_gradient(start))
    point, previous, gradient, step, successes = start, start, best.gradient, rho, 0
    for count in range(1, steps + 1):
        size = F.norm(gradient)
        if size == 0.0:
            break
        target = F.in_ball(point + step / size * gradient, rho)
        moved = F.in_ball(point + MOMENTUM * (target - point) + (1 - MOMENTUM) * (point - previous), rho)
        point, previous = moved, point
        value, gradient = F.value_and_gradient(point)
        successes += best.offer(point, value, gradient)
        if count % PERIOD == 0:
            if successes < 0.75 * PERIOD:
                point, previous, gradient, step = best.xi, best.xi, best.gradient, step / 2
            successes = 0
    return best


def polish(F: SlowObjective, rho: float, start: Climb, steps: int, tolerance: float = 1e-7) -> Climb:
    """Projected gradient ascent with backtracking, spectral step lengths and a non-monotone acceptance rule."""
    point, value, gradient = start.xi, start.value, start.gradient
    best, recent, length = Climb(point, value, gradient), [value], rho / max(F.norm(gradient), 1e-300)
    for _ in range(steps):
        direction = F.in_ball(point + length * gradient, rho) - point
        slope = F.inner(gradient, direction)
        if F.norm(direction) <= tolerance * rho * min(1.0, length) or slope <= 0:
            break
        fraction, least = 1.0, min(recent[-MEMORY:])
        while (new := F.value_and_gradient(point + fraction * direction))[0] < least + SUFFICIENT * fraction * slope:
            fraction /= 2
            if fraction < 1e-10:
                return best
        moved = fraction * direction
        bend = -F.inner(moved, new[1] - gradient)
        point, (value, gradient) = point + moved, new
        length = F.inner(moved, moved) / bend if bend > 0 else 10 * length
        recent.append(value)
        best.offer(point, value, gradient)
    return best


def residual(F: SlowObjective, rho: float, at: Climb) -> float:
    """How far one projected step of length ρ moves the point, relative to ρ: 0 at a first-order stationary point."""
    size = F.norm(at.gradient)
    return 0.0 if size == 0.0 else F.norm(F.in_ball(at.xi + rho / size * at.gradient, rho) - at.xi) / rho


@dataclass(frozen=True)
class SlowResult:
    """The best loss increase over all starts."""

    value: float
    base: float
    xi: Tensor
    by_start: tuple[float, ...]
    """The increase that each start reached, the zero start first."""
    residual: float
    evaluations: int


def ladder(F: SlowObjective, rho: float) -> Tensor:
    """The solution followed from small radii to large ones: a start that does not overshoot the nearest basin."""
    found = F.zero()
    for fraction in RUNGS:
        start = Climb(found, *F.value_and_gradient(found))
        found = polish(F, rho * fraction, start, RUNG_STEPS).xi
    return found


def random_starts(F: SlowObjective, rho: float, count: int, seed: int) -> Iterator[Tensor]:
    """Horizontal starts of norm ρ/2 to ρ."""
    generator = torch.Generator().manual_seed(seed)
    for number in range(count):
        direction = F.random(generator)
        yield direction * (rho * (0.5 + 0.5 * number / max(count - 1, 1)) / F.norm(direction))


def mirrored(F: SlowObjective, xi: Tensor) -> Tensor:
    """The other side of every direction at right angles to the gradient at 0: large curvature raises the loss on both."""
    uphill = F.value_and_gradient(F.zero())[1]
    return uphill * (2 * F.inner(xi, uphill) / F.inner(uphill, uphill)) - xi


def slow_worst_case(
    F: SlowObjective, rho: float, *, extra: Sequence[Tensor] = (), count: int = 4, steps: int = 120, polishing: int = 60,
    final: int = 400, seed: int = 0,
) -> SlowResult:  # fmt: skip
    """The best increase of the loss on the ball from zero, the ladder, one beyond, other radii, random ones, a mirror image."""
    before, base = F.evaluations, F.value(F.zero())
    starts = [F.zero(), ladder(F, rho), F.in_ball(ladder(F, 2 * rho), rho), *(F.in_ball(xi, rho) for xi in extra)]
    starts += random_starts(F, rho, count, seed)
    climbs = [polish(F, rho, momentum_ascent(F, rho, start, steps), polishing) for start in starts]
    climbs.append(polish(F, rho, momentum_ascent(F, rho, mirrored(F, climbs[0].xi), steps), polishing))
    ranked = sorted(climbs, key=lambda climb: climb.value)
    best = max((polish(F, rho, climb, final) for climb in ranked[-2:]), key=lambda climb: climb.value)
    found = tuple(climb.value - base for climb in climbs)
    return SlowResult(best.value - base, base, best.xi, found, residual(F, rho, best), F.evaluations - before)


def slow_sweep(F: SlowObjective, radii: Sequence[float], **options: int) -> list[SlowResult]:
    """Ascending radii, each also started from the smaller one's solution, then back down from the larger ones'."""
    found: list[SlowResult] = []
    for rho in sorted(radii):
        found.append(slow_worst_case(F, rho, extra=[found[-1].xi] if found else [], **options))
    for index in range(len(found) - 2, -1, -1):
        found[index] = _improved(F, sorted(radii)[index], found[index], F.in_ball(found[index + 1].xi, sorted(radii)[index]))
    return found


def _improved(F: SlowObjective, rho: float, known: SlowResult, start: Tensor, steps: int = 150) -> SlowResult:
    """The better of what is known and a climb from one more start."""
    before = F.evaluations
    climb = polish(F, rho, Climb(start, *F.value_and_gradient(start)), steps)
    value = climb.value - known.base
    changes: dict[str, Any] = {"evaluations": known.evaluations + F.evaluations - before, "by_start": (*known.by_start, value)}
    if value > known.value:
        changes |= {"value": value, "xi": climb.xi, "residual": residual(F, rho, climb)}
    return replace(known, **changes)
