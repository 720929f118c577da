"""Auto-PGD as published against the default solver, at equal numbers of gradient evaluations.

On the models of the accuracy benchmark; a value counts as its share of the best that any run of that model and radius found
(both solvers with 240 evaluations are among them).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

import torch

import geosharp as gs
from bench.machine import Report
from bench.worst_case_accuracy import CASES, Case
from geosharp.text import table

SOLVERS = ("auto-pgd", "default")
RADII = (0.1, 0.5, 1.0, 2.0)
BUDGETS = (10, 20, 40, 240)
"""Gradient evaluations, the one at the model itself included."""


def shares(case: Case, rho: float) -> dict[tuple[str, int], float]:
    """(solver, evaluations) -> share of the best."""
    values = {
        (solver, budget): gs.sharpness(
            case.model, [case.batch], "geodesic-inv", rho=rho, steps=budget - 1, solver=solver, tolerance=0.0
        ).value
        for solver in SOLVERS
        for budget in BUDGETS
    }
    best = max(values.values())
    return {key: value / best for key, value in values.items()}


def main(arguments: Sequence[str]) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="./run bench solvers", description=__doc__)
    parser.add_argument("--save", action="store_true", help="write bench/results/solvers.txt")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    report = Report("solvers", "./run bench solvers")
    report.say(f"geodesic-inv on {len(CASES)} models in float64: least and median share of the best value found\n")
    rows = [["rho", "solver", *(f"{budget} evals" for budget in BUDGETS)]]
    for rho in RADII:
        found = [shares(case, rho) for case in CASES]
        for solver in SOLVERS:
            cells = [[one[solver, budget] for one in found] for budget in BUDGETS]
            rows.append([f"{rho:g}", solver, *(f"{min(cell):.3f} {statistics.median(cell):.4f}" for cell in cells)])
    report.say(table(rows[0], rows[1:], "<" + ">" * (len(rows[0]) - 1)))
    if chosen.save:
        report.save()
    return 0
