"""What one measured evaluation costs, in plain forward-backward passes.

MiniLM's real weights, batch 32 x 64 tokens of real text, the model's own default attention. The whole call (clone,
hashing, verification, chart, noise floor, solver, record) is divided by the gradient evaluations it made, and by the
median time of `model(**batch).loss.backward()` measured before and after each call in the same process.

Default arguments; at the first radius an early stop leaves few evaluations to carry the set-up. Auto-PGD is given no tolerance,
so that it makes all its steps.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch

import geosharp as gs
from bench.machine import Report
from geosharp.session import forget_verifications
from real_text import minilm, text_batch

CASES = (  # measure, radius, options
    ("geodesic-inv", 0.02, {}),
    ("geodesic-inv", 0.5, {}),
    ("geodesic-mix", 0.5, {}),
    ("geodesic-inv-exact", 0.5, {}),
    ("adaptive-l2", 5.0, {}),
    ("geodesic-inv", 0.5, {"solver": "auto-pgd", "tolerance": 0.0}),
)


def seconds(call: Callable[[], object]) -> float:
    """Wall-clock time of a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main(arguments: Sequence[str]) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="./run bench cost", description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--save", action="store_true", help="write bench/results/cost.txt")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    report = Report("cost", "./run bench cost")
    report.say(f"MiniLM, 22.7 M parameters, batch 32 x 64 tokens, float32; medians of {chosen.repeats} repeats\n")
    report.say(f"{'measure':22s} {'rho':>5s} {'options':>34s} {'evals':>6s} {'s/eval':>7s} {'plain':>7s} {'ratio':>6s}  outcome")
    model, batch = minilm(), text_batch()

    def plain() -> None:
        # A model in training has every .grad allocated; so it has here from the second pass on.
        model(**batch).loss.backward()

    for _ in range(3):
        plain()
    for measure, rho, options in CASES:
        spent, base, found = [], [], None
        for _ in range(chosen.repeats):
            around = [seconds(plain) for _ in range(3)]
            forget_verifications()
            started = time.perf_counter()
            found = gs.sharpness(model, [batch], measure, rho=rho, **options)
            spent.append((time.perf_counter() - started) / found.evaluations)
            base.append(statistics.median([*around, *(seconds(plain) for _ in range(3))]))
        assert found is not None
        text = ", ".join(f"{key}={value}" for key, value in options.items()) or "defaults"
        ratio = statistics.median(one / other for one, other in zip(spent, base, strict=True))
        report.say(
            f"{measure:22s} {rho:5.2f} {text:>34s} {found.evaluations:6d} {statistics.median(spent):7.3f} "
            f"{statistics.median(base):7.3f} {ratio:6.3f}  {found.outcome}"
        )
    if chosen.save:
        report.save()
    return 0
