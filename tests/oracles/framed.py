"""One pair as the only block of a chart of `geosharp`, its maps in the notation of the dense oracle."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from geosharp.geometry.build import Geometry, build_chart
from geosharp.geometry.chart import Chart
from geosharp.geometry.gauge import Frame, canonical_frame
from geosharp.symmetry.block import Factors
from geosharp.symmetry.view import ComplexView, View
from oracles.quotient import Pair, flat, unflat


def frame_of(
    pair: Pair, *, positive: bool = False, epsilon: float = 0.0, dtype: torch.dtype = torch.float64, name: str = "the block"
) -> Frame:
    """The canonical frame of one pair."""
    return canonical_frame(pair[0][None], pair[1][None], [name], positive=positive, epsilon=epsilon, stored=dtype, compute=dtype)


def _values(pair: Pair) -> tuple[dict[str, Tensor], Factors]:
    """The pair as parameters; a complex one as real and imaginary parts."""
    if not pair[0].is_complex():
        return {"G": pair[0], "H": pair[1]}, Factors("pair", (View("G"),), (View("H"),))
    values = {name: part for side, x in zip("GH", pair, strict=True) for name, part in ((f"{side}.real", x.real), (f"{side}.imag", x.imag))}
    left, right = (ComplexView(View(f"{side}.real"), View(f"{side}.imag")) for side in "GH")
    return values, Factors("pair", (left,), (right,))


@dataclass(frozen=True)
class Framed:
    """One pair with a metric: points, whitened coordinates and tangent vectors are pairs."""

    pair: Pair
    metric: str
    positive: bool = False
    epsilon: float = 0.0
    """Relative."""

    @functools.cache  # noqa: B019 - lives as long as one test
    def chart(self, path: str = "second-order") -> Chart:
        """The chart with a path."""
        values, block = _values(self.pair)
        if self.positive:
            block = Factors("pair", block.left, block.right, group="positive")
        stored = {name: value.dtype for name, value in values.items()}
        return build_chart(values, [block], Geometry(self.metric, path, epsilon=self.epsilon), fixed={}, padding={}, stored=stored)

    def __hash__(self) -> int:
        return id(self)

    @property
    def frame(self) -> Frame:
        """U, V, s."""
        return self.chart().stacks[0].frame

    @property
    def singular(self) -> Tensor:
        """s as a vector."""
        return self.frame.singular[0, 0]

    @property
    def absolute_epsilon(self) -> float:
        """ε times the largest singular value."""
        return float(self.frame.epsilon)

    @property
    def canonical(self) -> Pair:
        """(U√s, V√s)."""
        return (self.frame.left * self.frame.root)[0], (self.frame.right * self.frame.root)[0]

    # Between the chart's real pieces and pairs ---------------------------------------------------------------------

    def _pair(self, point: list[Tensor]) -> Pair:
        left, right = self.chart().stacks[0].matrices(*point)
        return left[0], right[0]

    def _point(self, z: Pair) -> list[Tensor]:
        return list(self.chart().stacks[0].pieces(z[0][None], z[1][None]))

    def _read(self, values: dict[str, Tensor]) -> Pair:
        left, right = self.chart().stacks[0].blocks[0].read(values)
        return left[0], right[0]

    # Maps ------------------------------------------------------------------------------------------------------------

    def project(self, z: Pair) -> Pair:
        """Π z."""
        return self._pair(self.chart().project(self._point(z)))

    def projector(self) -> Tensor:
        """Π as a matrix over real coordinates."""
        units = torch.eye(flat(self.pair).numel(), dtype=torch.float64)
        return torch.stack([flat(self.project(unflat(unit, self.pair))) for unit in units], 1)

    def scaled(self, z: Pair) -> Pair:
        """ξ = z · scale, without Π."""
        scale = self.chart().stacks[0].scale[0]
        return z[0] * scale, z[1] * scale

    def lift(self, z: Pair) -> Pair:
        """The tangent vector of Πz."""
        return self._read(self.chart().lift(self._point(z)))

    def coordinates(self, xi: Pair) -> Pair:
        """The whitened coordinates of the horizontal part of ξ."""
        names = _values(xi)[0]
        return self._pair(self.chart().coordinates(names))

    def path(self, kind: str, z: Pair) -> Pair:
        """Where a path ends."""
        return self._read(self.chart(kind).walk(self._point(z)))

    def users(self, canonical: Pair) -> Pair:
        """From the canonical gauge to the user's (points and tangent vectors alike)."""
        kind = canonical[0].dtype
        return canonical[0] @ self.frame.back_left[0].to(kind), canonical[1] @ self.frame.back_right[0].to(kind)

    def from_users(self, pair: Pair) -> Pair:
        """The inverse of `users`."""
        return pair[0] @ torch.linalg.inv(self.frame.back_left[0]), pair[1] @ torch.linalg.inv(self.frame.back_right[0])

    def horizontal(self, seed: int = 0, size: float = 1.0) -> Pair:
        """A random horizontal point of whitened norm `size`."""
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(flat(self.pair).shape, generator=generator, dtype=torch.float64)
        z = self.project(unflat(noise.to(flat(self.pair)), self.pair))
        return scaled(z, size / float(flat(z).norm()))


def scaled(pair: Pair, by: float | Tensor) -> Pair:
    """A multiple of a pair."""
    return pair[0] * by, pair[1] * by
