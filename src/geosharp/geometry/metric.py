"""The invariant metrics of a product block, in the canonical gauge, and their geodesics.

Three instances: `Inv` (P⁻¹, Q⁻¹: adaptive sharpness is its shadow on 1x1 blocks), `Mix` (Q, P), and either with an ε that
keeps it finite near rank loss. A metric gives the weights of Π, the scale of `lift`, and its paths.

A path from U√s with whitened horizontal velocity z stays in the span of U and z: it is U·N + z·M with small matrices N, M
that depend only on a = Uᴴz and k = zᴴz (math.md 3 and 5). So the paths are written on h x h matrices, and the tall ones
are touched twice: once for (a, k), once for the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from geosharp.geometry.gauge import Frame
from geosharp.geometry.horizontal import correction
from geosharp.geometry.mix_geodesic import integrate

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Inner:
    """The inner products of one side: a = Uᴴz and k = zᴴz, each (B, h, h)."""

    a: Tensor
    k: Tensor

    @classmethod
    def of(cls, basis: Tensor, z: Tensor) -> Inner:
        """The two tall products."""
        return cls(basis.mH @ z, z.mH @ z)

    def moved(self, shift: Tensor) -> Inner:
        """Those of z + U·shift."""
        cross = self.a.mH @ shift
        return Inner(self.a + shift, self.k + cross + cross.mH + shift.mH @ shift)


Coefficients = tuple[Pair, Pair]
"""(N, M) of the left side and of the right side."""


class Metric(Protocol):
    """An invariant metric on pairs (G, H)."""

    name: str

    def weight(self, frame: Frame) -> Tensor:
        """The weights t of Π, (B, 1, h), up to a factor a block: only their ratios matter, and squares of tiny ones vanish."""
        ...

    def scale(self, frame: Frame) -> Tensor:
        """The factor of `lift`, (B, 1, h): ξ = z · scale."""
        ...

    def second_order(self, frame: Frame, left: Inner, right: Inner) -> Coefficients:
        """γ(0) + ξ - ½Γ(ξ, ξ)."""
        ...

    def exact(self, frame: Frame, left: Inner, right: Inner) -> Coefficients:
        """γ(1) of the geodesic with γ(0) the canonical form and velocity lift(z)."""
        ...


def walk(metric: Metric, path: str, frame: Frame, z_left: Tensor, z_right: Tensor) -> Pair:
    """(G, H) at the end of a path with velocity lift(Πz)."""
    left, right = Inner.of(frame.left, z_left), Inner.of(frame.right, z_right)
    weight = metric.weight(frame)
    shift_left, shift_right = correction(left.a, right.a, weight), correction(right.a, left.a, weight)
    left, right = left.moved(shift_left), right.moved(shift_right)
    if path == "exact":
        ends = metric.exact(frame, left, right)
    elif path == "second-order":
        ends = metric.second_order(frame, left, right)
    else:
        straight = (_diagonal(frame.root, left.a), _diagonal(metric.scale(frame), left.a))
        ends = (straight, straight)
    sides = zip((frame.left, frame.right), (z_left, z_right), (shift_left, shift_right), ends, strict=True)
    # Πz = z + U·shift, so U·N + (Πz)·M = U·(N + shift·M) + z·M.
    out = [torch.baddbmm(basis @ (n + shift @ m), z, m) for basis, z, shift, (n, m) in sides]
    return out[0], out[1]


def _diagonal(rows: Tensor, like: Tensor) -> Tensor:
    return torch.diag_embed(rows.squeeze(-2)).to(like)


class Inv:
    """⟨η, ζ⟩ = tr(P⁻¹ η_Gᵀ ζ_G) + tr(Q⁻¹ η_Hᵀ ζ_H). Each side walks on its own."""

    name = "inv"

    def weight(self, frame: Frame) -> Tensor:
        """t = √(s (s + ε))."""
        relative = frame.singular / frame.singular.amax(-1, keepdim=True)
        return (relative * (frame.singular + frame.epsilon) / (frame.singular + frame.epsilon).amax(-1, keepdim=True)).sqrt()

    def scale(self, frame: Frame) -> Tensor:
        """√(s + ε)."""
        return (frame.singular + frame.epsilon).sqrt()

    def second_order(self, frame: Frame, left: Inner, right: Inner) -> Coefficients:
        """[U + z + ½ z (zᴴU + Uᴴz) - ½ U zᴴz] √s at ε = 0."""
        return self._second_order_side(frame, left), self._second_order_side(frame, right)

    def _second_order_side(self, frame: Frame, inner: Inner) -> Pair:
        # With ξ = z·scale, ξ(P+ε)⁻¹ = z/scale and (P+ε)^-½ Gᴴ = shrink·Uᴴ, so that no inverse of s appears.
        scale, root = self.scale(frame), frame.root
        shrink = root / scale
        n = _diagonal(root, inner.a) - 0.5 * shrink.mT * inner.k * scale
        m = _diagonal(scale, inner.a) + 0.5 * (inner.a.mH * root + shrink.mT * inner.a * scale)
        return n, m

    def exact(self, frame: Frame, left: Inner, right: Inner) -> Coefficients:
        """exp(zUᴴ - Uzᴴ) · U · exp(zᴴU) · √s, the closed form."""
        return self._exact_side(frame, left), self._exact_side(frame, right)

    def _exact_side(self, frame: Frame, inner: Inner) -> Pair:
        # exp(ABᴴ)U = U + A φ₁(BᴴA) BᴴU with A = [z, -U], B = [U, z]; φ₁ is the top-right block of a larger exponential.
        a, h = inner.a, inner.a.shape[-1]
        eye = torch.eye(h, dtype=a.dtype, device=a.device).expand_as(a)
        square = torch.cat([torch.cat([a, -eye], -1), torch.cat([inner.k, -a.mH], -1)], -2)
        eye2 = torch.eye(2 * h, dtype=a.dtype, device=a.device).expand_as(square)
        big = torch.cat([torch.cat([square, eye2], -1), torch.zeros_like(square).repeat(1, 1, 2)], -2)
        turn = torch.linalg.matrix_exp(big)[..., : 2 * h, 2 * h :] @ torch.cat([eye, a.mH], -2)
        stretch = torch.linalg.matrix_exp(a.mH) * frame.root
        return (eye - turn[..., h:, :]) @ stretch, turn[..., :h, :] @ stretch


class Mix:
    """⟨η, ζ⟩ = tr(Q η_Gᵀ ζ_G) + tr(P η_Hᵀ ζ_H). Not complete: its geodesics can lose rank (math.md 3)."""

    name = "mix"

    def weight(self, frame: Frame) -> Tensor:
        """t = √(s / (s + ε))."""
        return (frame.singular / (frame.singular + frame.epsilon)).sqrt()

    def scale(self, frame: Frame) -> Tensor:
        """1 / √(s + ε)."""
        return (frame.singular + frame.epsilon).rsqrt()

    def second_order(self, frame: Frame, left: Inner, right: Inner) -> Coefficients:
        """Γ_G = [ξ_G (ξ_Hᴴ H + Hᴴ ξ_H) - G ξ_Hᴴ ξ_H] (Q + ε)⁻¹, and the same with the sides exchanged."""
        return self._second_order_side(frame, right), self._second_order_side(frame, left)

    def _second_order_side(self, frame: Frame, other: Inner) -> Pair:
        scale, root = self.scale(frame), frame.root
        mixed = scale.mT * other.a.mH * root  # ξ_Hᴴ H
        square = scale.mT * other.k * scale  # ξ_Hᴴ ξ_H
        n = _diagonal(root, other.a) + 0.5 * root.mT * square * scale**2
        m = _diagonal(scale, other.a) - 0.5 * scale.mT * (mixed + mixed.mH) * scale**2
        return n, m

    def exact(self, frame: Frame, left: Inner, right: Inner) -> Coefficients:
        """No closed form is known: integrated with error control; raises `LeftManifold` where a block loses rank."""
        root, scale = frame.root, self.scale(frame)
        grams = [_gram(inner, root, scale) for inner in (left, right)]
        ends = integrate(grams[0], grams[1])
        h = root.shape[-1]
        sides = [(root.mT * end[..., :h, :], scale.mT * end[..., h:, :]) for end in ends]
        return sides[0], sides[1]


def _gram(inner: Inner, root: Tensor, scale: Tensor) -> Tensor:
    """The Gram matrix of [U√s, ξ]."""
    cross = root.mT * inner.a * scale
    return torch.cat([torch.cat([_diagonal(root**2, inner.a), cross], -1), torch.cat([cross.mH, scale.mT * inner.k * scale], -1)], -2)


METRICS: dict[str, Metric] = {"inv": Inv(), "mix": Mix()}
"""Public name -> metric."""
