"""The invariant metrics of a product block, in the canonical gauge, and their geodesics.

Three instances: `Inv` (P⁻¹, Q⁻¹: adaptive sharpness is its shadow on 1x1 blocks), `Mix` (Q, P), and either with an ε that
keeps it finite near rank loss. A metric gives the weights of Π, the scale of `lift`, and the second-order and exact paths;
z is whitened, and horizontal wherever a path is walked (math.md 3 and 5).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from geosharp.geometry.gauge import Frame
from geosharp.geometry.mix_geodesic import integrate

Pair = tuple[Tensor, Tensor]


class Metric(Protocol):
    """An invariant metric on pairs (G, H)."""

    name: str

    def weight(self, frame: Frame) -> Tensor:
        """The weights t of Π, (B, 1, h)."""
        ...

    def scale(self, frame: Frame) -> Tensor:
        """The factor of `lift`, (B, 1, h): ξ = z · scale."""
        ...

    def second_order(self, frame: Frame, z_left: Tensor, z_right: Tensor) -> Pair:
        """γ(0) + ξ - ½Γ(ξ, ξ)."""
        ...

    def exact(self, frame: Frame, z_left: Tensor, z_right: Tensor) -> Pair:
        """γ(1) of the geodesic with γ(0) the canonical form and velocity lift(z)."""
        ...


class Inv:
    """⟨η, ζ⟩ = tr(P⁻¹ η_Gᵀ ζ_G) + tr(Q⁻¹ η_Hᵀ ζ_H)."""

    name = "inv"

    def weight(self, frame: Frame) -> Tensor:
        """t = √(s (s + ε))."""
        return (frame.singular * (frame.singular + frame.epsilon)).sqrt()

    def scale(self, frame: Frame) -> Tensor:
        """√(s + ε)."""
        return (frame.singular + frame.epsilon).sqrt()

    def second_order(self, frame: Frame, z_left: Tensor, z_right: Tensor) -> Pair:
        """Each side on its own: [U + z + ½ z (zᴴU + Uᴴz) - ½ U zᴴz] √s at ε = 0."""
        return self._one_side(frame, frame.left, z_left), self._one_side(frame, frame.right, z_right)

    def _one_side(self, frame: Frame, basis: Tensor, z: Tensor) -> Tensor:
        # With ξ = z·scale, ξ(P+ε)⁻¹ = z/scale and (P+ε)^-½ Gᴴ = shrink·Uᴴ, so that no inverse of s appears.
        scale = self.scale(frame)
        root = frame.root
        shrink = root / scale
        a = basis.mH @ z
        bend = z @ (a.mH * root + shrink.mT * a * scale) - (basis * shrink) @ (z.mH @ z) * scale
        return basis * root + z * scale + 0.5 * bend

    def exact(self, frame: Frame, z_left: Tensor, z_right: Tensor) -> Pair:
        """exp(zUᴴ - Uzᴴ) · U · exp(zᴴU) · √s, the closed form."""
        return self._exact_side(frame, frame.left, z_left), self._exact_side(frame, frame.right, z_right)

    def _exact_side(self, frame: Frame, basis: Tensor, z: Tensor) -> Tensor:
        # exp(ABᴴ)U = U + A φ₁(BᴴA) BᴴU with A = [z, -U], B = [U, z]; φ₁ is the top-right block of a larger exponential.
        h = basis.shape[-1]
        a = basis.mH @ z
        eye = torch.eye(h, dtype=z.dtype, device=z.device).expand_as(a)
        square = torch.cat([torch.cat([a, -eye], -1), torch.cat([z.mH @ z, -a.mH], -1)], -2)
        eye2 = torch.eye(2 * h, dtype=z.dtype, device=z.device).expand_as(square)
        zero = torch.zeros_like(square)
        big = torch.cat([torch.cat([square, eye2], -1), torch.cat([zero, zero], -1)], -2)
        phi = torch.linalg.matrix_exp(big)[..., : 2 * h, 2 * h :]
        turn = phi @ torch.cat([eye, a.mH], -2)
        moved = basis + z @ turn[..., :h, :] - basis @ turn[..., h:, :]
        return moved @ torch.linalg.matrix_exp(a.mH) * frame.root


class Mix:
    """⟨η, ζ⟩ = tr(Q η_Gᵀ ζ_G) + tr(P η_Hᵀ ζ_H). Not complete: its geodesics can lose rank (math.md 3)."""

    name = "mix"

    def weight(self, frame: Frame) -> Tensor:
        """t = √(s / (s + ε))."""
        return (frame.singular / (frame.singular + frame.epsilon)).sqrt()

    def scale(self, frame: Frame) -> Tensor:
        """1 / √(s + ε)."""
        return (frame.singular + frame.epsilon).rsqrt()

    def second_order(self, frame: Frame, z_left: Tensor, z_right: Tensor) -> Pair:
        """Γ_G = [ξ_G (ξ_Hᴴ H + Hᴴ ξ_H) - G ξ_Hᴴ ξ_H] (Q + ε)⁻¹, and the same with the sides exchanged."""
        root, scale = frame.root, self.scale(frame)
        G, H = frame.left * root, frame.right * root
        xi_left, xi_right = z_left * scale, z_right * scale
        return (
            G + xi_left - 0.5 * _mix_bend(G, H, xi_left, xi_right) * scale * scale,
            H + xi_right - 0.5 * _mix_bend(H, G, xi_right, xi_left) * scale * scale,
        )

    def exact(self, frame: Frame, z_left: Tensor, z_right: Tensor) -> Pair:
        """No closed form is known: integrated with error control; raises `LeftManifold` where a block loses rank."""
        return integrate(frame, z_left * self.scale(frame), z_right * self.scale(frame))


def _mix_bend(G: Tensor, H: Tensor, xi_G: Tensor, xi_H: Tensor) -> Tensor:
    mixed = xi_H.mH @ H
    return xi_G @ (mixed + mixed.mH) - G @ (xi_H.mH @ xi_H)


METRICS: dict[str, Metric] = {"inv": Inv(), "mix": Mix()}
"""Public name -> metric."""
