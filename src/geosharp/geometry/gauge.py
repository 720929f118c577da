"""The canonical representative of an orbit and the way back (math.md 5).

G Hᵀ = U diag(s) Vᵀ by two thin QRs and one small SVD in float64, then (G, H) -> (U√s, V√s). The function is unchanged, both
Gram matrices are diag(s), and everything a geometry needs becomes matrix products and element-wise divisions, batched
over all heads of all layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from geosharp.errors import RankError


@dataclass(frozen=True)
class Frame:
    """The canonical gauge of a stack of blocks: U (B, n, h), V (B, m, h), s (B, 1, h), in the compute dtype."""

    left: Tensor
    right: Tensor
    singular: Tensor
    epsilon: Tensor
    """(B, 1, 1), absolute: the relative ε times each block's largest singular value."""
    back_left: Tensor
    """(B, h, h) float64: G = (U√s) · back_left restores the user's gauge."""
    back_right: Tensor
    """(B, h, h) float64: H = (V√s) · back_right."""

    @property
    def root(self) -> Tensor:
        """√s."""
        return self.singular.sqrt()


def canonical_frame(
    left: Tensor, right: Tensor, names: list[str], *, positive: bool, epsilon: float, stored: torch.dtype, compute: torch.dtype
) -> Frame:
    """The frame of a stack of blocks; raises `RankError` naming the first block without full column rank."""
    wide = torch.complex128 if left.is_complex() else torch.float64
    G, H = left.to(wide), right.to(wide)
    _, n, h = G.shape
    m = H.shape[1]
    if h > min(n, m):
        raise RankError(
            f"expected full column rank in block {names[0]!r}, got width {h} with only {min(n, m)} rows: the product has rank "
            f"{min(n, m)}, so the quotient is not a manifold; leave this block out"
        )
    if positive or h == 1:
        s, U, V = _balanced(G, H)
        U, V = (U, V) if positive else _fix_phase(U, V)
    else:
        qG, rG = torch.linalg.qr(G)
        qH, rH = torch.linalg.qr(H)
        A, s, Bh = torch.linalg.svd(rG @ rH.mH)
        U, V = qG @ A, qH @ Bh.mH
        U, V = _fix_phase(U, V)
    _check_rank(G, H, s, names, epsilon, stored)
    root = s.sqrt().unsqueeze(-2)
    safe = torch.where(root > 0, root, torch.ones_like(root))
    back_left = (U.mH @ G) / safe.mT
    back_right = (V.mH @ H) / safe.mT
    kind = _complex_of(compute) if left.is_complex() else compute
    singular = s.unsqueeze(-2)
    return Frame(
        U.to(kind).contiguous(),
        V.to(kind).contiguous(),
        singular.to(compute),
        (epsilon * singular.amax(dim=-1, keepdim=True)).to(compute),
        back_left,
        back_right,
    )


def _balanced(G: Tensor, H: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Balance by positive scalars only: for a ReLU neuron a sign flip changes the function; of one column it is the whole SVD."""
    g, k = torch.linalg.vector_norm(G, dim=1, keepdim=True), torch.linalg.vector_norm(H, dim=1, keepdim=True)
    s = (g * k).squeeze(1).real
    tiny = torch.finfo(torch.float64).tiny
    return s, G / g.clamp_min(tiny), H / k.clamp_min(tiny)


def _fix_phase(U: Tensor, V: Tensor) -> tuple[Tensor, Tensor]:
    """The entry of largest magnitude in each column of U becomes real and positive, with the same phase on V."""
    where = U.abs().argmax(dim=-2, keepdim=True)
    pivot = torch.gather(U, -2, where)
    size = pivot.abs()
    phase = torch.where(size > 0, pivot / size.clamp_min(torch.finfo(torch.float64).tiny), torch.ones_like(pivot))
    return U * phase.conj(), V * phase.conj()


def _check_rank(G: Tensor, H: Tensor, s: Tensor, names: list[str], epsilon: float, stored: torch.dtype) -> None:
    """Full rank of each product, at the resolution of the stored weights."""
    rows = max(G.shape[1], H.shape[1])
    limit = 10 * torch.finfo(stored).eps * math.sqrt(rows)
    largest = s.amax(-1)
    ratio = torch.where(largest > 0, s.amin(-1) / largest.clamp_min(torch.finfo(torch.float64).tiny), torch.zeros_like(largest))
    vanished = (largest == 0) | (ratio < 1e-13)  # nothing left to regularize: the canonical form is not on the orbit
    bad = vanished | ((ratio < limit) & (epsilon == 0))
    if not bool(bad.any()):
        return
    i = int(bad.nonzero()[0])
    needed = f"{limit:.1e} for {str(stored).removeprefix('torch.')} weights"
    raise RankError.of(names[i], float(s[i].amin()), float(largest[i]), needed, can_regularize=not bool(vanished[i]))


def _complex_of(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype == torch.float64 else torch.complex64
