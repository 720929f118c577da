"""Metrics, projections and Christoffel terms of pairs (G, H) in the gauge they come in, for the slow oracle only.

Written from the table in math.md section 3, with SciPy's Sylvester solver; batched over pairs of one shape (k, n, h), (k, m, h).
"""

from __future__ import annotations

import numpy as np
import scipy.linalg
import torch
from torch import Tensor


class GLPairs:
    """Pairs (G, H) that enter the network as G Hᵀ, with a metric."""

    def __init__(self, G: Tensor, H: Tensor, metric: str) -> None:
        if metric not in ("inv", "mix"):
            raise ValueError(f"expected inv or mix, got {metric}")
        self.G, self.H, self.metric = G, H, metric
        self.P, self.Q = G.mT @ G, H.mT @ H
        self.P_inverse, self.Q_inverse = torch.linalg.inv(self.P), torch.linalg.inv(self.Q)
        self._sylvester = _sylvester_maps(self.P @ self.Q) if metric == "inv" else None

    @property
    def factor_metrics(self) -> tuple[Tensor, Tensor]:
        """M_G and M_H with ⟨η, ζ⟩ = tr(M_G η_Gᵀ ζ_G) + tr(M_H η_Hᵀ ζ_H)."""
        return (self.P_inverse, self.Q_inverse) if self.metric == "inv" else (self.Q, self.P)

    def inner(self, a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> Tensor:
        """The inner product, summed over pairs."""
        return torch.stack([(M * (x.mT @ y)).sum() for M, x, y in zip(self.factor_metrics, a, b, strict=True)]).sum()

    def riemannian(self, gradient: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The Riemannian gradient of a Euclidean one."""
        right = (self.P, self.Q) if self.metric == "inv" else (self.Q_inverse, self.P_inverse)
        return gradient[0] @ right[0], gradient[1] @ right[1]

    def vertical(self, elements: Tensor) -> tuple[Tensor, Tensor]:
        """The direction along the orbit of Λ (k, h, h)."""
        return self.G @ elements, -self.H @ elements.mT

    def project(self, xi: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The horizontal part."""
        x, y = xi
        if self._sylvester is None:
            elements = 0.5 * (y.mT @ self.H @ self.Q_inverse - self.P_inverse @ self.G.mT @ x)
        else:
            right = self.P @ self.H.mT @ y - x.mT @ self.G @ self.Q
            elements = (self._sylvester @ right.flatten(1).unsqueeze(2)).reshape(right.shape).mT
        up, down = self.vertical(elements)
        return x + up, y + down

    def christoffel(self, xi: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Γ(ξ, ξ)."""
        x, y = xi
        xG, yH = x.mT @ self.G, y.mT @ self.H
        xx, yy = x.mT @ x, y.mT @ y
        if self.metric == "inv":
            G_part = -x @ self.P_inverse @ (xG + xG.mT) + self.G @ self.P_inverse @ xx
            H_part = -y @ self.Q_inverse @ (yH + yH.mT) + self.H @ self.Q_inverse @ yy
            return G_part, H_part
        return (x @ (yH + yH.mT) - self.G @ yy) @ self.Q_inverse, (y @ (xG + xG.mT) - self.H @ xx) @ self.P_inverse

    def path(self, xi: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The second-order path's end: θ + ξ − ½ Γ(ξ, ξ)."""
        curved = self.christoffel(xi)
        return self.G + xi[0] - 0.5 * curved[0], self.H + xi[1] - 0.5 * curved[1]

    def unit_noise(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """A tangent vector with independent standard normal coordinates in this metric."""
        found = []
        for base, M in zip((self.G, self.H), self.factor_metrics, strict=True):
            lower = torch.linalg.cholesky(M)
            noise = torch.randn(base.shape, generator=generator, dtype=base.dtype)
            found.append(noise @ torch.linalg.inv(lower))
        return found[0], found[1]


def _sylvester_maps(A: Tensor) -> Tensor:
    """For each pair the dense map from B to the solution X of A X + X A = B, column by column from SciPy's solver."""
    return torch.stack([torch.from_numpy(_sylvester_map(one.numpy())) for one in A])


def _sylvester_map(A: np.ndarray) -> np.ndarray:
    units = np.eye(A.size).reshape(A.size, *A.shape)
    return np.stack([scipy.linalg.solve_sylvester(A, A, unit).ravel() for unit in units], axis=1)
