"""The exact mix geodesic by error-controlled integration.

γ̈_G = -[γ̇_G (γ̇_Hᴴ H + Hᴴ γ̇_H) - G γ̇_Hᴴ γ̇_H] Q⁻¹ and the same with the sides exchanged. G stays in the span of its start
and its velocity, G(t) = [G₀, ξ] C(t), so the state is C, Ċ (2h x h a side) and the cost does not depend on n or m.

Dormand-Prince 5(4); every operation is differentiable, the steps are not part of the derivative. Energy and horizontality
are conserved by the ODE, which the tests use. Where a block loses rank the solution has a branch point at which the step
size underflows: `LeftManifold`.
"""

from __future__ import annotations

import torch
from torch import Tensor


class LeftManifold(ArithmeticError):
    """The walk would cross a point where a block loses full column rank."""


_A = (
    (),
    (1 / 5,),
    (3 / 40, 9 / 40),
    (44 / 45, -56 / 15, 32 / 9),
    (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
    (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
    (35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84),
)
_ERROR = (71 / 57600, 0.0, -71 / 16695, 71 / 1920, -17253 / 339200, 22 / 525, -1 / 40)
"""Dormand & Prince 1980: stages, and the difference of the two solutions."""

MAX_STEPS = 2000
SMALLEST_STEP = 1e-7

State = tuple[Tensor, Tensor, Tensor, Tensor]


def integrate(gram_left: Tensor, gram_right: Tensor) -> tuple[Tensor, Tensor]:
    """C(1) of both sides, (B, 2h, h): G(1) = [G₀, ξ_G] C. The Gram matrices are those of [G₀, ξ_G] and [H₀, ξ_H]."""
    h = gram_left.shape[-1] // 2
    eye = torch.eye(h, dtype=gram_left.dtype, device=gram_left.device).expand(gram_left.shape[0], h, h)
    top, bottom = torch.cat([eye, torch.zeros_like(eye)], -2), torch.cat([torch.zeros_like(eye), eye], -2)
    return _solve((top, bottom, top, bottom), gram_left, gram_right)


def _velocity(state: State, gram_left: Tensor, gram_right: Tensor) -> State:
    C, dC, E, dE = state
    KC, KE = gram_left @ C, gram_right @ E
    P, Q = C.mH @ KC, E.mH @ KE
    mixed_left, mixed_right = dC.mH @ KC, dE.mH @ KE
    square_left, square_right = dC.mH @ gram_left @ dC, dE.mH @ gram_right @ dE
    bend_left = dC @ (mixed_right + mixed_right.mH) - C @ square_right
    bend_right = dE @ (mixed_left + mixed_left.mH) - E @ square_left
    return dC, -_right_solve(Q, bend_left), dE, -_right_solve(P, bend_right)


def _right_solve(matrix: Tensor, rows: Tensor) -> Tensor:
    """rows · matrix⁻¹; a singular matrix gives non-finite entries, which shrink the step."""
    solution: Tensor
    solution, _ = torch.linalg.solve_ex(matrix, rows, left=False)
    return solution


def _solve(state: State, gram_left: Tensor, gram_right: Tensor) -> tuple[Tensor, Tensor]:
    eps = torch.finfo(state[0].real.dtype).eps
    tolerance = max(100 * eps, 1e-11) if eps < 1e-10 else 10 * eps
    weights = _error_weights(gram_left, gram_right)
    t, step = 0.0, 0.25
    first = _velocity(state, gram_left, gram_right)
    for _ in range(MAX_STEPS):
        step = min(step, 1.0 - t)
        slopes = [first]
        for row in _A[1:]:
            moved = _advance(state, slopes, row, step)
            slopes.append(_velocity(moved, gram_left, gram_right))
        error = _error(slopes, step, weights)
        if error <= tolerance:
            t, state, first = t + step, moved, slopes[-1]
            if t >= 1.0 - 1e-14:
                return state[0], state[2]
        # error is NaN where a stage met a singular Gram matrix: shrink hard.
        factor = 0.9 * (tolerance / error) ** 0.2 if 0 < error < float("inf") else (5.0 if error == 0 else 0.1)
        step *= min(5.0, max(0.1, factor))
        if step < SMALLEST_STEP:
            break
    raise LeftManifold("the mix geodesic loses rank before its end")


def _advance(state: State, slopes: list[State], row: tuple[float, ...], step: float) -> State:
    moved = list(state)
    for weight, slope in zip(row, slopes, strict=True):
        if weight:
            moved = [part + (step * weight) * change for part, change in zip(moved, slope, strict=True)]
    return moved[0], moved[1], moved[2], moved[3]


def _error_weights(gram_left: Tensor, gram_right: Tensor) -> tuple[Tensor, Tensor]:
    """How large each coefficient row is in weight space, relative to the block: √diag(K) / √max diag(K)."""
    sizes = []
    for gram in (gram_left, gram_right):
        diagonal = torch.diagonal(gram.detach(), dim1=-2, dim2=-1).real.clamp_min(0).sqrt()
        sizes.append((diagonal / diagonal.amax(-1, keepdim=True).clamp_min(torch.finfo(diagonal.dtype).tiny)).unsqueeze(-1))
    return sizes[0], sizes[1]


def _error(slopes: list[State], step: float, weights: tuple[Tensor, Tensor]) -> float:
    """The largest error estimate over blocks and entries, in units of the block's size."""
    worst = 0.0
    with torch.no_grad():
        for position in range(4):
            total = sum(step * w * slope[position].detach() for w, slope in zip(_ERROR, slopes, strict=True) if w)
            assert isinstance(total, Tensor)
            value = float((total.abs() * weights[position // 2]).max())
            if value != value:
                return float("nan")
            worst = max(worst, value)
    return worst
