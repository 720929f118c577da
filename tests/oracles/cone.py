"""Mix geodesics that are known in closed form.

The quotient metric of mix on products M = G Hᴴ is that of a cone: |M|² grows like a parabola. For width 1 the base of the cone
is a product of spheres: M = s p qᴴ with metric ½ ds² + s²(|dp|² + |dq|²), so p and q run along great circles with conserved
angular momentum. For square blocks the cone is flat, and M runs straight.
"""

from __future__ import annotations

import math

from oracles.framed import Framed
from oracles.quotient import Pair, flat


def squared_size(framed: Framed, z: Pair) -> float:
    """|G Hᴴ|² at the end of the geodesic: |M|² + 2 Re⟨M, Ṁ⟩ + 2 ‖z‖²."""
    (G, H), (x, y) = framed.canonical, framed.lift(z)
    M, change = G @ H.mH, x @ H.mH + G @ y.mH
    return float(M.abs().square().sum() + 2 * (M.conj() * change).real.sum() + 2 * flat(z).square().sum())


def end_of_line(framed: Framed, z: Pair) -> Pair:
    """The end of the geodesic of a block of width 1 from horizontal z."""
    s, w = float(framed.singular), squared_size(framed, z)
    radial = float((framed.frame.left[0].mH @ z[0]).real)
    sideways = [(basis[0], part - basis[0] * radial) for basis, part in zip((framed.frame.left, framed.frame.right), z, strict=True)]
    spin = math.sqrt(2 * sum(float(y.abs().square().sum()) for _, y in sideways)) * s
    half = s * s + 2 * s * radial
    clock = math.atan2(spin, half) / spin if spin else 1 / half  # ∫ dt / s(t)²
    root = w**0.25
    ends = []
    for basis, y in sideways:
        size = float(flat((y, y[:0])).norm())
        angle = size * s * clock
        ends.append(root * (basis * math.cos(angle) + (y * (math.sin(angle) / size) if size else 0 * y)))
    return ends[0], ends[1]
