"""How close the default worst-case solver comes to a slow, independent one, on small real models in float64.

The oracle (tests/oracles/slow_solver.py) shares no code with the package. Every library value is a separate call with default
arguments. Exit status 1 when a check fails.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

import geosharp as gs
import zoo
from bench import ROOT
from bench.machine import Report
from geosharp.functional.ascent import SOLVERS
from geosharp.functional.ascent.auto_pgd import auto_pgd
from geosharp.functional.ascent.search import Search, SearchEnded
from oracles.slow_solver import SlowObjective, slow_sweep

RADII = {"inv": (0.05, 0.1, 0.2, 0.5, 1.0, 2.0), "mix": (0.1, 0.5)}
QUICK_RADII = (0.1, 0.5)
LEAST = {0.5: 0.99, 2.0: 0.90}
"""Up to this radius the library's value must be at least this share of the slow solver's."""
STATIONARY = 0.99
"""A run that calls itself stationary must be at least this share of its own continuation."""
MOST_EVALUATIONS = 40
CONTINUED = 200
STARTS = {"count": 4}


@dataclass(frozen=True)
class Case:
    """A model of the table."""

    family: str
    layers: int
    heads: int
    trained: int = 0

    @property
    def name(self) -> str:
        """As the table shows it."""
        return f"{self.family} {self.layers}x{self.heads} " + (f"trained {self.trained}" if self.trained else "untrained")

    @cached_property
    def model(self) -> torch.nn.Module:
        """The model in float64."""
        model = zoo.make(self.family, layers=self.layers, heads=self.heads)
        return zoo.train(model, self.family, steps=self.trained) if self.trained else model

    @cached_property
    def batch(self) -> dict[str, torch.Tensor]:
        """32 training digits."""
        return zoo.batch_of(self.family)


CASES = [Case(f, *sizes) for f in zoo.FAMILIES for sizes in ((1, 2), (2, 3), (1, 3, 150), (2, 2, 300))]
QUICK = [Case("bert", 1, 2), Case("gpt2", 1, 3, 150), Case("vit", 2, 2, 300)]


@dataclass(frozen=True)
class Entry:
    """One line of the table."""

    model: str
    metric: str
    rho: float
    base: float
    value: float
    evaluations: int
    outcome: str
    residual: float
    slow: float
    slow_by_start: tuple[float, ...]
    slow_residual: float
    slow_evaluations: int
    longer: float = float("nan")
    """The library's own value with 200 more steps from the same start, tolerance 0."""
    restarted: float = float("nan")
    """The best value of 200 Auto-PGD steps that start at the returned point."""
    state_error: float = 0.0
    """How far the user's model, loaded with the returned worst parameters, is from the value."""
    seconds: float = 0.0

    @property
    def ratio(self) -> float:
        """Library over oracle."""
        return self.value / self.slow

    @property
    def continued(self) -> float:
        """The best of the two continuations."""
        return max(self.longer, self.restarted)


# Measuring --------------------------------------------------------------------------------------------------------


def entries_of(case: Case, metric: str, radii: Sequence[float], cache: dict[str, Any], continuations: bool = True) -> Iterator[Entry]:
    """The lines of one model and metric."""
    slow = _slow_values(case, metric, radii, cache)
    for rho, oracle in zip(sorted(radii), slow, strict=True):
        started = time.perf_counter()
        row = gs.measure(case.model, [case.batch], f"geodesic-{metric}", rho=rho)[0].rows[0]
        entry = Entry(
            case.name, metric, rho, row.base_loss, row.value, row.evaluations, row.outcome, row.residual,
            seconds=time.perf_counter() - started, **oracle,
        )  # fmt: skip
        yield _with_continuations(entry, case) if continuations else entry


def _slow_values(case: Case, metric: str, radii: Sequence[float], cache: dict[str, Any]) -> list[dict[str, Any]]:
    """The oracle's results as plain data, from the cache where neither the oracle nor the model has changed."""
    key = _fingerprint(case, metric, radii)
    if key not in cache:
        found = slow_sweep(SlowObjective(case.model, case.batch, metric), radii, **STARTS)
        cache[key] = [
            {"slow": x.value, "slow_by_start": x.by_start, "slow_residual": x.residual, "slow_evaluations": x.evaluations} for x in found
        ]
    return list(cache[key])


def _fingerprint(case: Case, metric: str, radii: Sequence[float]) -> str:
    """What determines the oracle's results."""
    content = hashlib.sha256(repr((case.name, metric, sorted(radii), STARTS, torch.__version__)).encode())
    for source in sorted((ROOT / "tests" / "oracles").glob("[!t]*.py")):
        content.update(source.read_bytes())
    for tensor in (*case.model.state_dict().values(), *case.batch.values()):
        content.update(tensor.contiguous().numpy().tobytes())
    return content.hexdigest()


def _with_continuations(entry: Entry, case: Case) -> Entry:
    """Is the returned point as high as the search would have come with 200 more steps?"""
    measure = f"geodesic-{entry.metric}"
    longer = gs.measure(case.model, [case.batch], measure, rho=entry.rho, steps=39 + CONTINUED, tolerance=0.0)[0].value
    with _caught_searches() as searches:
        again = gs.measure(case.model, [case.batch], measure, rho=entry.rho, keep_worst=True)[0]
    if abs(again.value - entry.value) > 1e-9 * abs(entry.value):
        raise AssertionError(f"{entry.model} {entry.metric} {entry.rho}: the same call gave {entry.value} and {again.value}")
    (ended,) = searches
    search = Search(ended.F, ended.ball, ended.best, ended.uphill, CONTINUED, 0.0)
    with contextlib.suppress(SearchEnded):
        auto_pgd(search)
    with torch.no_grad():
        loss = torch.func.functional_call(case.model, dict(again.perturbed[0]), kwargs=case.batch).loss
    error = abs(float(loss) - entry.base - entry.value)
    return replace(entry, longer=longer, restarted=search.best.value - entry.base, state_error=error)


@contextlib.contextmanager
def _caught_searches() -> Iterator[list[Search]]:
    """The searches that the default solver is called with: they hold F and the best point."""
    caught: list[Search] = []
    usual = SOLVERS["default"]

    def catching(search: Search) -> None:
        caught.append(search)
        usual(search)

    SOLVERS["default"] = catching
    try:
        yield caught
    finally:
        SOLVERS["default"] = usual


# Reporting --------------------------------------------------------------------------------------------------------

HEADER = (
    f"{'model':<21} {'metric':<6} {'rho':>5} {'base':>8} {'library':>10} {'evals':>5} {'outcome':<16} {'residual':>8} {'slow best':>10}"
    f" {'ratio':>7} {'/longer':>8} {'/restart':>8} {'slow res':>8} {'spread':>7}"
)


def line(entry: Entry) -> str:
    """One line; `spread` is the lowest of the oracle's starts over its best: 1 when the ball holds one maximum in its view."""
    spread = min(entry.slow_by_start) / entry.slow
    return (
        f"{entry.model:<21} {entry.metric:<6} {entry.rho:>5g} {entry.base:>8.4f} {entry.value:>10.6f} {entry.evaluations:>5}"
        f" {entry.outcome:<16} {entry.residual:>8.1e} {entry.slow:>10.6f} {entry.ratio:>7.4f} {entry.value / entry.longer:>8.4f}"
        f" {entry.value / entry.restarted:>8.4f} {entry.slow_residual:>8.1e} {spread:>7.3f}"
    )


def minima(entries: Sequence[Entry]) -> list[str]:
    """The least ratio of each metric and radius."""
    lines = []
    for metric, rho in sorted({(entry.metric, entry.rho) for entry in entries}):
        ratios = [entry.ratio for entry in entries if (entry.metric, entry.rho) == (metric, rho)]
        low = sum(ratio < wanted(rho) for ratio in ratios)
        lines.append(f"{metric} rho {rho:<5g} least ratio {min(ratios):.4f}  wanted {wanted(rho)}  below it {low} of {len(ratios)}")
    return lines


def wanted(rho: float) -> float:
    """The share that the library must reach at a radius."""
    return next((share for largest, share in LEAST.items() if rho <= largest), 0.0)


def violations(entries: Sequence[Entry]) -> list[str]:
    """Every failed check, in words."""
    found = []
    for entry in entries:
        name = f"{entry.model} {entry.metric} rho {entry.rho:g}"
        if not entry.ratio >= wanted(entry.rho):
            found.append(f"accuracy: {name}: {entry.ratio:.4f} of the oracle, wanted {wanted(entry.rho)} ({entry.outcome})")
        if entry.outcome == "stationary" and entry.value < STATIONARY * entry.longer:
            found.append(f"stationary: {name}: {entry.value / entry.longer:.4f} of the same search with {CONTINUED} more steps")
        if entry.outcome == "stationary" and entry.value < STATIONARY * entry.restarted:
            found.append(f"stationary: {name}: {entry.value / entry.restarted:.4f} of {CONTINUED} Auto-PGD steps from its own point")
        if entry.evaluations > MOST_EVALUATIONS:
            found.append(f"cost: {name}: {entry.evaluations} evaluations, wanted at most {MOST_EVALUATIONS}")
        if entry.state_error > 1e-8 * (1 + abs(entry.base + entry.value)):
            found.append(f"state: {name}: the worst parameters give another loss, by {entry.state_error:.1e}")
        if max(entry.value, entry.continued) > 1.01 * entry.slow:
            found.append(f"oracle: {name}: beaten by the library, {max(entry.value, entry.continued):.6f} against {entry.slow:.6f}")
    return found


def solver_hash() -> str:
    """Which solver the numbers were made with."""
    sources = sorted((Path(gs.__file__).parent / "functional").rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]


def main(arguments: Sequence[str]) -> int:
    """Print the table and the checks."""
    parser = argparse.ArgumentParser(prog="./run bench accuracy", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="three models, two radii")
    parser.add_argument("--models", default="", help="only models whose name contains this text")
    parser.add_argument("--json", type=Path, help="write all entries as JSON")
    parser.add_argument("--cache", type=Path, help="keep the slow solver's values in this file (they do not depend on geosharp)")
    parser.add_argument("--save", action="store_true", help="write bench/results/worst_case_accuracy.txt")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    started, entries = time.process_time(), []
    cache = json.loads(chosen.cache.read_text()) if chosen.cache and chosen.cache.exists() else {}
    report = Report("worst_case_accuracy", "./run bench accuracy")
    report.say(f"float64, default arguments; hash of src/geosharp/functional {solver_hash()}\n\n{HEADER}")
    for case in [case for case in (QUICK if chosen.quick else CASES) if chosen.models in case.name]:
        for metric in RADII:
            for entry in entries_of(case, metric, QUICK_RADII if chosen.quick else RADII[metric], cache):
                entries.append(entry)
                report.say(line(entry))
            if chosen.cache:
                chosen.cache.write_text(json.dumps(cache))
    problems = violations(entries)
    report.say("\n" + "\n".join(minima(entries)) + f"\n\n{len(problems)} failed checks" + "".join(f"\n  {text}" for text in problems))
    report.say(f"{time.process_time() - started:.0f} s of one core")
    if chosen.json:
        chosen.json.write_text(json.dumps([asdict(entry) | {"ratio": entry.ratio} for entry in entries], indent=1))
    if chosen.save:
        report.save()
    return 1 if problems else 0
