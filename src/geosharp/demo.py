"""The demonstration: a few small transformers trained on digits, measured, and one of them rewritten and measured again.

Three instances of what it trains: slowly and cleanly; fast with weight decay; fast on labels of which a fifth are random.
Everything said at the end is computed from what was measured.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from geosharp.digits import Recipe, digits, train, with_noise
from geosharp.text import listing, progress, table

if TYPE_CHECKING:
    from torch import Tensor, nn

    from geosharp.measurement import Measurement, Measurements

RHO = 0.1
SCALE = 10.0
"""Group elements of the rewriting have singular values in [1/SCALE, SCALE]."""
MEASURES = ("standard-l2", "adaptive-l2", "geodesic-inv", "geodesic-mix")
SAME = 1e-4
"""A relative change up to this, or ten times that of the function, counts as rounding in float32."""


RECIPES = tuple(Recipe(rate, **extra) for rate in (1e-3, 4e-3) for extra in ({}, {"weight_decay": 0.3}, {"label_noise": 0.2}))


@dataclass(frozen=True)
class Size:
    """How much is done."""

    recipes: tuple[Recipe, ...] = RECIPES
    training: int = 500
    steps: int = 800
    batches: int = 4
    batch_size: int = 64


QUICK = Size(RECIPES[:2], steps=20, batches=2, batch_size=16)


@dataclass(frozen=True)
class Trained:
    """A model, the points it is measured on, and what was found."""

    name: str
    model: nn.Module
    batches: list[dict[str, Tensor]]
    train_error: float
    test_error: float
    found: Measurements


@dataclass(frozen=True)
class Rewriting:
    """One model before and after its parameters were rewritten."""

    name: str
    before: Measurements
    after: Measurements
    drift: float
    """The largest change of a logit on the test images."""
    largest: float
    """The largest logit."""
    changed: int
    """Test images that are classified differently."""

    @property
    def allowance(self) -> float:
        """The relative change of a value that is no more than rounding."""
        return max(SAME, 10 * self.drift / self.largest)


@dataclass(frozen=True)
class Told:
    """All that the demonstration found."""

    trained: tuple[Trained, ...]
    rewriting: Rewriting

    def text(self) -> str:
        """Two tables and what they say."""
        marks = _marks([m for model in self.trained for m in model.found] + list(self.rewriting.after))
        parts = (
            f"Worst-case sharpness at rho = {RHO:g} on training points: mean over batches ± its standard error.",
            _models(self.trained, marks),
            f'The model "{self.rewriting.name}", its parameters rewritten by geosharp.reparametrize(model, scale={SCALE:g}):',
            _moves(self.rewriting, marks),
            "\n".join(f"{mark or 'no mark'} = {outcome}: {advice}" for outcome, (mark, advice) in marks.items()),
            "\n".join(conclusions(self.rewriting)),
        )
        return "\n\n".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON-ready data."""
        models = [
            {"name": m.name, "train_error": m.train_error, "test_error": m.test_error, "measurements": json.loads(m.found.to_json())}
            for m in self.trained
        ]
        moved = self.rewriting
        return {
            "models": models,
            "rewriting": {
                "name": moved.name, "scale": SCALE, "logit_drift": moved.drift, "largest_logit": moved.largest,
                "predictions_changed": moved.changed, "after": json.loads(moved.after.to_json()),
            },
        }  # fmt: skip


def run(seed: int = 0, quick: bool = False) -> Told:
    """Train, measure, rewrite, measure again. The same seed tells the same."""
    with _one_thread():
        return _run(QUICK if quick else Size(), seed)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Models this small gain nothing from threads, and on a busy machine wait long for each other's."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _run(size: Size, seed: int) -> Told:
    images, labels = digits(seed)
    test = images[size.training :], labels[size.training :]
    trained = []
    for number, recipe in enumerate(size.recipes, 1):
        step = f"model {number} of {len(size.recipes)} ({recipe.name})"
        progress(f"training {step}")
        noisy = with_noise(labels[: size.training], recipe.label_noise, seed)
        model = train(recipe, images[: size.training], noisy, size.steps, seed)
        progress(f"measuring {step}")
        trained.append(_measured(recipe.name, model, (images[: size.training], noisy), test, size))
    progress("rewriting one model and measuring it again")
    rewriting = _rewritten(min(trained, key=lambda one: one.test_error), test[0], seed)
    progress("")
    return Told(tuple(trained), rewriting)


# Measuring -------------------------------------------------------------------------------------------------------


def _measured(name: str, model: nn.Module, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], size: Size) -> Trained:
    from geosharp.api import measure

    images, labels = train
    starts = range(0, size.batches * size.batch_size, size.batch_size)
    batches = [{"pixel_values": images[i : i + size.batch_size], "labels": labels[i : i + size.batch_size]} for i in starts]
    found = measure(model, batches, MEASURES, rho=RHO)
    return Trained(name, model, batches, _error(model, *train), _error(model, *test), found)


def _logits(model: nn.Module, images: Tensor) -> Tensor:
    import torch

    with torch.no_grad():
        logits: Tensor = model(pixel_values=images).logits
    return logits


def _error(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    return float((_logits(model, images).argmax(-1) != labels).float().mean())


def _rewritten(one: Trained, images: Tensor, seed: int) -> Rewriting:
    from geosharp.api import measure, reparametrize

    twin = reparametrize(one.model, scale=SCALE, seed=seed)
    before, after = _logits(one.model, images), _logits(twin, images)
    return Rewriting(
        one.name,
        one.found,
        measure(twin, one.batches, MEASURES, rho=RHO),
        drift=float((after - before).abs().max()),
        largest=float(before.abs().max()),
        changed=int((after.argmax(-1) != before.argmax(-1)).sum()),
    )


# Telling ---------------------------------------------------------------------------------------------------------


def _marks(found: Sequence[Measurement]) -> dict[str, tuple[str, str]]:
    """Outcome -> a mark and what it means, for the outcomes that occurred; the best of them goes without a mark."""
    severity = ("stationary", "budget", "below-resolution", "left-manifold", "diverged")
    marks = dict(zip(severity, ("", "*", "~", "!", "!!"), strict=True))
    advice = {m.outcome: m.advice for m in found}
    return {outcome: (marks[outcome], advice[outcome]) for outcome in severity if outcome in advice}


def _value(m: Measurement, marks: dict[str, tuple[str, str]]) -> str:
    error = "" if m.batch_stderr is None else f" ±{m.batch_stderr:.1g}"
    return f"{m.value:.4g}{error}{marks[m.outcome][0]}"


def _models(trained: Sequence[Trained], marks: dict[str, tuple[str, str]]) -> str:
    rows = [
        (m.name, f"{m.train_error:.1%}", f"{m.test_error:.1%}", f"{m.test_error - m.train_error:.1%}", *(_value(v, marks) for v in m.found))
        for m in trained
    ]
    return table(("model", "train error", "test error", "gap", *MEASURES), rows, "<>>>" + ">" * len(MEASURES))


def _moves(moved: Rewriting, marks: dict[str, tuple[str, str]]) -> str:
    rows = [
        (before.measure, _value(before, marks), _value(after, marks), f"{after.value / before.value:.6g}", listing(before.invariant_to))
        for before, after in zip(moved.before, moved.after, strict=True)
    ]
    return table(("measure", "before", "after", "after/before", "invariant to"), rows, "<>>><")


def conclusions(moved: Rewriting) -> list[str]:
    """What the numbers say, and no more."""
    change = {a.measure: abs(a.value / b.value - 1) for b, a in zip(moved.before, moved.after, strict=True)}
    claims = {m.measure: listing(m.invariant_to) for m in moved.before if m.invariant_to}
    kept = [name for name in claims if change[name] <= moved.allowance]
    broken = [name for name in claims if name not in kept]
    free = [name for name in change if name not in claims]
    said = [
        f"The function: no logit moved by more than {moved.drift:.1g} (the largest is {moved.largest:.3g}); "
        f"{moved.changed or 'no'} test image{'s' * (moved.changed != 1)} changed class."
    ]
    if kept:
        most = max(change[name] for name in kept)
        said.append(f"Did not move by more than {most:.1g} of the value: {listing(kept)}, invariant to {listing(_distinct(claims, kept))}.")
    for name in broken:
        outcome = moved.after.get(name).outcome
        said.append(f"{name} claims invariance to {claims[name]} but moved by {change[name]:.1%}; its search ended as {outcome!r}.")
    if free:
        factors = [f"{name} by a factor {moved.after.get(name).value / moved.before.get(name).value:.3g}" for name in free]
        said.append(f"Moved: {listing(factors)}. Nothing in the function did.")
    return said


def _distinct(claims: dict[str, str], names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(claims[name] for name in names))
