"""MiniLM's real weights on real text, rewritten without changing its function: what moves and what does not.

Each measure has the radius at which its gradient alone raises the loss by 10 %. A cell is the relative change of the value:
"published" leaves the soft-max translations in, as the paper's recipe does; adaptive sharpness knows no such symmetry.
Three ascent steps, or four antithetic pairs, on both sides: the comparison is about invariance, not about the maximum.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from bench.machine import Report
from geosharp.text import table
from real_text import fitted_minilm, text_batch
from rewriting import GEODESIC, INVARIANT, REWRITINGS, Line, lines

OTHERS = ("adaptive-l2", "average-adaptive-l2")


def main(arguments: Sequence[str]) -> int:
    """Print the table; exit status 1 when a measure moves that claims not to."""
    parser = argparse.ArgumentParser(prog="./run bench invariance", description=__doc__)
    parser.add_argument("--save", action="store_true", help="write bench/results/invariance.txt")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(min(2, torch.get_num_threads()))
    batch = text_batch(slice(0, 8), length=24)
    model = fitted_minilm(batch)
    report = Report("invariance", "./run bench invariance")
    runs = [(INVARIANT, "all"), (GEODESIC[:6], "published"), (OTHERS, "")]
    found: list[tuple[str, Line]] = []
    for measures, symmetries in runs:
        found += [(symmetries, line) for line in lines(model, batch, REWRITINGS, measures, symmetries=symmetries or "none")]
    drifts = {line.rewriting: line.drift for _, line in found}
    loss = found[0][1].before.base_loss
    report.say(f"MiniLM in float32, 8 texts of 24 tokens, loss {loss:.4f}; relative change of each value\n")
    rows = [["measure", "symmetries", "rho", "value", *REWRITINGS]]
    rows.append(["largest change of an output", "", "", "", *(f"{drifts[name]:.1e}" for name in REWRITINGS)])
    for symmetries, measure in dict.fromkeys((symmetries, line.measure) for symmetries, line in found):
        cells = {line.rewriting: line for chosen_by, line in found if (chosen_by, line.measure) == (symmetries, measure)}
        first = next(iter(cells.values()))
        rho = "" if first.rho is None else f"{first.rho:.4f}"
        rows.append([measure, symmetries, rho, f"{first.before.value:.5f}", *(f"{cells[name].change:.1e}" for name in REWRITINGS)])
    report.say(table(rows[0], rows[1:], "<" + ">" * (len(rows[0]) - 1)))
    moved = [line for symmetries, line in found if symmetries == "all" and line.change > line.tolerance]
    report.say(f"\n{len(moved)} of {sum(s == 'all' for s, _ in found)} changes above max(1e-4, 10 x the largest change of an output)")
    if chosen.save:
        report.save()
    return 1 if moved else 0
