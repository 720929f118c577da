"""The maximum of a quadratic on a ball."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy.optimize import brentq

Array = np.ndarray[Any, np.dtype[np.float64]]


def trust_region(g: Array, A: Array, radius: float) -> tuple[float, str]:
    """The maximum of g·b + ½bᵀAb on a ball by the eigenvectors of A, and which of the three cases it is."""
    d, Q = np.linalg.eigh(A)
    c = Q.T @ g
    c[np.abs(c) <= 1e-12 * np.abs(c).max()] = 0.0

    def point(multiplier: float) -> Array:
        return np.divide(c, multiplier - d, out=np.zeros_like(c), where=c != 0)

    least = max(0.0, d[-1])
    if d[-1] < 0 and np.linalg.norm(point(0.0)) <= radius:
        b, case = point(0.0), "inactive"
    elif c[-1] == 0 and np.linalg.norm(point(least)) < radius:
        b, case = point(least), "hard"
        b[-1] = math.sqrt(radius**2 - b @ b)
    else:
        low, high = least + 1e-14 * max(1.0, least), least + 2 * float(np.linalg.norm(c)) / radius
        b, case = point(brentq(lambda m: np.linalg.norm(point(m)) - radius, low, high, xtol=1e-15, rtol=1e-15)), "easy"
    return float(c @ b + 0.5 * b @ (d * b)), case
