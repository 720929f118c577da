"""What one measured evaluation costs, in plain forward-backward passes.

MiniLM's real weights, batch 32 x 64 tokens of real text, the model's own default attention. The whole call (clone,
hashing, verification, chart, noise floor, solver, record) is divided by the gradient evaluations it made, and by the
median time of `model(**batch).loss.backward()` measured before and after each call in the same process.

Two ways: the default arguments, where an early stop may leave few evaluations to carry the set-up; and all default steps
(tolerance=0 switches the early stop off).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
sys.path.insert(0, str(ROOT / "bench"))

from machine import describe_machine  # noqa: E402

import geosharp as gs  # noqa: E402
from geosharp.session import forget_verifications  # noqa: E402
from real_text import minilm, text_batch  # noqa: E402

CASES = (  # measure, radius, options
    ("geodesic-inv", 0.1, {}),
    ("geodesic-inv", 0.5, {}),
    ("geodesic-inv", 0.1, {"tolerance": 0.0}),
    ("geodesic-inv", 0.5, {"tolerance": 0.0}),
    ("geodesic-mix", 0.5, {"tolerance": 0.0}),
    ("geodesic-inv-exact", 0.5, {"tolerance": 0.0}),
    ("adaptive-l2", 0.5, {"tolerance": 0.0}),
    ("geodesic-inv", 0.5, {"tolerance": 0.0, "solver": "auto-pgd"}),
)


def seconds(call: Callable[[], object]) -> float:
    """Wall-clock time of a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    """Print the table, and save it with --save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    lines = [describe_machine(), f"threads {arguments.threads}, repeats {arguments.repeats}, MiniLM 22.7 M parameters, batch 32 x 64", ""]
    lines.append(f"{'measure':22s} {'rho':>5s} {'options':>34s} {'evals':>6s} {'s/eval':>7s} {'plain':>7s} {'ratio':>6s}  outcome")
    model, batch = minilm(), text_batch()
    # A trained model has every .grad allocated once; so has the plain pass here.
    plain = lambda: model(**batch).loss.backward()  # noqa: E731
    for _ in range(3):
        plain()
    for measure, rho, options in CASES:
        ratios, per_evaluation, reference = [], [], []
        for _ in range(arguments.repeats):
            before = [seconds(plain) for _ in range(3)]
            forget_verifications()
            started = time.perf_counter()
            found = gs.sharpness(model, [batch], measure, rho=rho, **options)
            spent = (time.perf_counter() - started) / found.evaluations
            base = statistics.median([*before, *(seconds(plain) for _ in range(3))])
            ratios.append(spent / base)
            per_evaluation.append(spent)
            reference.append(base)
        text = ", ".join(f"{key}={value}" for key, value in options.items()) or "defaults"
        lines.append(
            f"{measure:22s} {rho:5.2f} {text:>34s} {found.evaluations:6d} {statistics.median(per_evaluation):7.3f} "
            f"{statistics.median(reference):7.3f} {statistics.median(ratios):6.3f}  {found.outcome}"
        )
        print(lines[-1], flush=True)
    if arguments.save:
        (ROOT / "bench" / "results").mkdir(exist_ok=True)
        (ROOT / "bench" / "results" / "cost.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
