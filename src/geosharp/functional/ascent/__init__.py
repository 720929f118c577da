"""Solvers that climb F on a ball. One algorithm a file; a solver is a function of a `Search`."""

from __future__ import annotations

from collections.abc import Callable

from geosharp.functional.ascent.auto_pgd import auto_pgd
from geosharp.functional.ascent.search import Search
from geosharp.functional.ascent.sphere import explore_and_refine

Solver = Callable[[Search], None]

SOLVERS: dict[str, Solver] = {"default": explore_and_refine, "auto-pgd": auto_pgd}
"""Public name -> solver."""
