"""One pair (G, H) up to (G A⁻¹, H Aᴴ), densely: tangent vectors as long real vectors, metrics as matrices.

Real or complex, any gauge, ε >= 0. Nothing here is shared with `geosharp`: the metric is written from its definition, the
horizontal space by least squares, Christoffel symbols by differentiating the metric tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from scipy.integrate import solve_ivp
from torch import Tensor

Pair = tuple[Tensor, Tensor]


def random_pair(n: int, m: int, h: int, *, seed: int = 0, complex_: bool = False) -> Pair:
    """A well-conditioned pair that is not in the canonical gauge."""
    generator = torch.Generator().manual_seed(seed)
    kind = torch.complex128 if complex_ else torch.float64
    G, H = (torch.randn(rows, h, generator=generator, dtype=kind) for rows in (n, m))
    stretch = torch.eye(h, dtype=kind) + 0.3 * torch.randn(h, h, generator=generator, dtype=kind)
    return G @ stretch, H


def random_like(pair: Pair, generator: torch.Generator) -> Pair:
    """A Gaussian tangent vector (metric ignored)."""
    first, second = (torch.randn(part.shape, generator=generator, dtype=part.dtype) for part in pair)
    return first, second


def moved(pair: Pair, element: Tensor) -> Pair:
    """(G A⁻¹, H Aᴴ); the action is linear, so this also transports tangent vectors."""
    return pair[0] @ torch.linalg.inv(element), pair[1] @ element.mH


def random_element(h: int, *, seed: int = 0, complex_: bool = False, positive: bool = False) -> Tensor:
    """A group element of moderate condition."""
    generator = torch.Generator().manual_seed(seed)
    kind = torch.complex128 if complex_ else torch.float64
    A = torch.randn(h, h, generator=generator, dtype=kind) + 1.5 * torch.eye(h, dtype=kind)
    return 3 * (A.abs() + 0.5) if positive else A


def flat(pair: Pair) -> Tensor:
    """A pair as one real vector."""
    parts = [torch.view_as_real(part) if part.is_complex() else part for part in pair]
    return torch.cat([part.reshape(-1) for part in parts])


def unflat(vector: Tensor, like: Pair) -> Pair:
    """The inverse of `flat`."""
    factor = 2 if like[0].is_complex() else 1
    parts = vector.split([factor * part.numel() for part in like])
    if factor == 2:
        first, second = (torch.view_as_complex(v.reshape(*part.shape, 2)) for v, part in zip(parts, like, strict=True))
    else:
        first, second = (v.reshape(part.shape) for v, part in zip(parts, like, strict=True))
    return first, second


@dataclass(frozen=True)
class Quotient:
    """The geometry of one kind of pair: metric "inv" or "mix", `epsilon` absolute."""

    metric: str
    epsilon: float = 0.0

    def matrices(self, at: Pair) -> Pair:
        """M_G, M_H with ⟨η, ζ⟩ = Re tr(M_G η_Gᴴ ζ_G) + Re tr(M_H η_Hᴴ ζ_H)."""
        G, H = at
        eye = self.epsilon * torch.eye(G.shape[1], dtype=G.dtype)
        P, Q = G.mH @ G + eye, H.mH @ H + eye
        return (torch.linalg.inv(P), torch.linalg.inv(Q)) if self.metric == "inv" else (Q, P)

    def inner(self, at: Pair, a: Pair, b: Pair) -> Tensor:
        """⟨a, b⟩ at a point."""
        return sum(torch.trace(M @ x.mH @ y).real for M, x, y in zip(self.matrices(at), a, b, strict=True))

    def norm(self, at: Pair, a: Pair) -> float:
        """√⟨a, a⟩."""
        return float(self.inner(at, a, a).sqrt())

    def tensor(self, at: Pair) -> Tensor:
        """The metric as a D x D matrix over the real coordinates of `flat`; differentiable in `at`."""
        units = torch.eye(flat(at).numel(), dtype=torch.float64)
        return torch.stack([self._row(at, unit) for unit in units])

    def _row(self, at: Pair, unit: Tensor) -> Tensor:
        M_G, M_H = self.matrices(at)
        x, y = unflat(unit, at)
        return flat((x @ M_G.mH, y @ M_H.mH))

    def vertical(self, at: Pair) -> Tensor:
        """A basis of the vertical space (GΛ, -HΛᴴ), one column a real direction of Λ."""
        G, H = at
        h = G.shape[1]
        units = list(torch.eye(h * h, dtype=G.dtype).reshape(-1, h, h))
        if G.is_complex():
            units += [1j * unit for unit in units]
        return torch.stack([flat((G @ unit, -H @ unit.mH)) for unit in units], 1)

    def horizontal(self, at: Pair) -> Tensor:
        """The orthogonal projector onto the horizontal space as a D x D matrix, by least squares."""
        V, M = self.vertical(at), self.tensor(at)
        return torch.eye(len(M), dtype=torch.float64) - V @ torch.linalg.solve(V.T @ M @ V, V.T @ M)

    def unit_horizontal(self, at: Pair, seed: int = 0) -> Pair:
        """A random horizontal vector of metric norm 1."""
        xi = unflat(self.horizontal(at) @ flat(random_like(at, torch.Generator().manual_seed(seed))), at)
        size = self.norm(at, xi)
        return xi[0] / size, xi[1] / size

    def christoffel(self, at: Pair, xi: Pair) -> Pair:
        """Γ(ξ, ξ): the table of math.md section 3, with conjugate transposes."""
        G, H = at
        x, y = xi
        eye = self.epsilon * torch.eye(G.shape[1], dtype=G.dtype)
        Pi, Qi = torch.linalg.inv(G.mH @ G + eye), torch.linalg.inv(H.mH @ H + eye)
        if self.metric == "inv":
            return (
                -x @ Pi @ (x.mH @ G + G.mH @ x) + G @ Pi @ x.mH @ x,
                -y @ Qi @ (y.mH @ H + H.mH @ y) + H @ Qi @ y.mH @ y,
            )
        return (x @ (y.mH @ H + H.mH @ y) - G @ y.mH @ y) @ Qi, (y @ (x.mH @ G + G.mH @ x) - H @ x.mH @ x) @ Pi

    def christoffel_by_autograd(self, at: Pair) -> Tensor:
        """Γ^k_ij = ½ g^kl (∂_i g_lj + ∂_j g_li - ∂_l g_ij) from the metric tensor alone."""
        point = flat(at)
        slope = torch.autograd.functional.jacobian(lambda v: self.tensor(unflat(v, at)), point)  # [l, j, i] = ∂_i g_lj
        lowered = slope.permute(0, 2, 1) + slope - slope.permute(2, 0, 1)
        return 0.5 * torch.einsum("kl,lij->kij", torch.linalg.inv(self.tensor(at)), lowered)

    def geodesic(self, at: Pair, xi: Pair, *, time: float = 1.0) -> tuple[Pair, Pair]:
        """(γ(1), γ̇(1)) by integrating γ̈ = -Γ(γ̇, γ̇) with SciPy's DOP853."""

        def slope(_: float, state: np.ndarray) -> np.ndarray:
            place, speed = (unflat(part, at) for part in torch.from_numpy(state).chunk(2))
            return torch.cat([flat(speed), -flat(self.christoffel(place, speed))]).numpy()

        start = torch.cat([flat(at), flat(xi)]).numpy()
        found = solve_ivp(slope, (0.0, time), start, method="DOP853", rtol=1e-12, atol=1e-13)
        if not found.success:
            raise ArithmeticError(found.message)
        place, speed = (unflat(part, at) for part in torch.from_numpy(found.y[:, -1].copy()).chunk(2))
        return place, speed


def velocity(path: Callable[[Tensor], Pair], time: float) -> Pair:
    """The derivative of a path in its time, by autograd."""
    at = torch.tensor(time, dtype=torch.float64)
    _, slope = torch.autograd.functional.jvp(lambda t: flat(path(t)), at, torch.ones_like(at))
    return unflat(slope, path(at))


def distance(a: Pair, b: Pair) -> float:
    """‖a - b‖ / ‖b‖."""
    return float((flat(a) - flat(b)).norm() / flat(b).norm())
