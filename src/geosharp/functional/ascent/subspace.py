"""L-BFGS on a sphere, written on inner products.

At tens of millions of coordinates a step costs what its passes over memory cost, so every direction is kept as
coefficients over a basis (the stored pairs, the point, its tangent gradient) and only inner products are small numbers:
one product of the basis with the new gradient, one combination for the new point, and nothing else touches long vectors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PAIRS = 4
"""Remembered (step, change) pairs."""

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Step:
    """A tangent direction as coefficients, its length and its slope ⟨direction, tangent gradient⟩."""

    coefficients: Numbers
    length: float
    slope: float


class Memory:
    """The first two rows hold the point z and its tangent gradient t, the others steps and changes.

    Only rows that were written are touched: `self.used` of them.
    """

    def __init__(self, like: Tensor, radius: float) -> None:
        self.radius = radius
        self.rows = like.new_empty((2 * PAIRS + 2, like.numel()))
        self.used = 2
        self.order: list[int] = []
        """The first rows of the stored pairs, oldest first."""
        self.Z, self.T = 0, 1
        self.gram: Numbers = np.zeros((len(self.rows), len(self.rows)))
        self.target: Numbers = np.zeros(len(self.rows))
        """The coefficients of the last point that `move` wrote."""
        self.scale = 0.0

    def restart(self, z: Tensor, gradient: Tensor) -> None:
        """Forget all pairs and stand at a point."""
        self.order = []
        self.rows[self.Z].copy_(z)
        along = self._set_tangent(z, gradient)
        self.used = 2
        self.gram[:] = 0.0
        self.gram[self.T] = self.gram[:, self.T] = self._products()
        self.gram[self.Z, self.Z] = self.radius**2
        radius, size = self.radius, float(torch.linalg.vector_norm(gradient))
        self.scale = radius**2 / along if along > 0 else radius / max(size, 1e-300)

    def _set_tangent(self, z: Tensor, gradient: Tensor) -> float:
        along = float(torch.dot(z, gradient))
        torch.add(gradient, z, alpha=-along / self.radius**2, out=self.rows[self.T])
        return along

    def _products(self) -> Numbers:
        """The inner products of every row with the tangent gradient."""
        found = np.zeros(len(self.rows))
        found[: self.used] = torch.mv(self.rows[: self.used], self.rows[self.T]).double().cpu().numpy()
        return found

    def ascent_step(self) -> Step:
        """The quasi-Newton direction, tangent at z; steepest ascent where that does not ascend."""
        step = self._direction(self.order)
        if step.slope <= 0:
            self.order = []
            step = self._direction(self.order)
        return step

    def _direction(self, order: list[int]) -> Step:
        """The two-loop recursion on coefficients."""
        gram = self.gram
        d = np.zeros(len(gram))
        d[self.T] = 1.0
        alphas = []
        for s in reversed(order):
            y = s + 1
            alpha = (gram[s] @ d) / gram[s, y]
            d[y] -= alpha
            alphas.append(alpha)
        d *= self.scale
        for s, alpha in zip(order, reversed(alphas), strict=True):
            y = s + 1
            d[s] += alpha - (gram[y] @ d) / gram[s, y]
        d[self.Z] -= (gram[self.Z] @ d) / gram[self.Z, self.Z]
        return Step(d, math.sqrt(max(float(d @ gram @ d), 0.0)), float(gram[self.T] @ d))

    def move(self, step: Step, share: float, out: Tensor) -> Tensor:
        """The point of the sphere above z + share·direction, written into `out`."""
        self.target = share * step.coefficients
        self.target[self.Z] += 1.0
        self.target *= self.radius / np.hypot(self.radius, share * step.length)
        torch.mv(self.rows[: self.used].T, torch.from_numpy(self.target[: self.used]).to(self.rows), out=out)
        return out.mul_(self.radius / float(torch.linalg.vector_norm(out)))

    def accept(self, z: Tensor, gradient: Tensor) -> float:
        """Make the last point of `move` the current one and remember the pair; returns z·∇F."""
        s = next((row for row in range(2, len(self.rows), 2) if row not in self.order), 0) or self.order.pop(0)
        y = s + 1
        self.used = max(self.used, s + 2)
        torch.sub(z, self.rows[self.Z], out=self.rows[s])
        self.rows[self.Z].copy_(z)
        self.rows[y].copy_(self.rows[self.T])
        along = self._set_tangent(z, gradient)
        self.rows[y].sub_(self.rows[self.T])
        self._update_gram(s, y)
        inner, square = self.gram[s, y], self.gram[y, y]
        if square > 0 and inner > 1e-10 * np.sqrt(max(self.gram[s, s] * square, 0.0)):
            self.order.append(s)
            self.scale = inner / square
        else:
            self.scale = min(2 * self.scale, self.radius / max(float(np.sqrt(max(self.gram[self.T, self.T], 0.0))), 1e-300))
        return along

    def _update_gram(self, s: int, y: int) -> None:
        """Inner products after the rows changed, from one product with the new tangent gradient t.

        New rows are P·(old rows) + β t: the step is target - z, the change is t_old - t, the point is target.
        """
        size = len(self.gram)
        P, beta = np.eye(size), np.zeros(size)
        P[s], P[self.Z] = self.target, self.target
        P[s, self.Z] -= 1.0
        P[y], P[self.T] = np.eye(size)[self.T], 0.0
        beta[y], beta[self.T] = -1.0, 1.0
        with_t = self._products()
        square = with_t[self.T]
        rest = with_t - beta * square
        self.gram = P @ self.gram @ P.T + np.outer(beta, rest) + np.outer(rest, beta) + square * np.outer(beta, beta)
        self.gram[self.Z, self.Z] = self.radius**2
