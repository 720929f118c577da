"""Law 8: a call leaves the model, the batches and the process as they were, also one that raised or was interrupted.

And it is repeatable: the same seed and the same threads give the same bits, in this process and in another one.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import geosharp as gs
import plain_networks as plain
from geosharp.session import forget_verifications
from untouched import CALLS, RADII, SEVERAL, WITH_BATCHES, Fuse, armed, build, every_number, exact, nothing_touched, started

VECTORS = plain.batch_of_vectors(8)
MODELS = ("bert", "tied gpt2", "vit", "untidy")


pytestmark = pytest.mark.usefixtures("process_restored")


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", MODELS)
def test_no_call_touches_the_model_or_the_process_and_each_gives_the_same_bits_again(name: str, call: str) -> None:
    model, batch, blocks = build(name)
    found = []
    for seed in (1, 2):
        forget_verifications()
        torch.manual_seed(seed)  # no matter to what is found
        with nothing_touched(model):
            found.append(exact(CALLS[call](model, batch, blocks)))
    assert found[0] == found[1]


PLANTED: dict[str, Callable[[Any], object]] = {
    "weights: head.weight": lambda model: model.head.weight.data[0, 0].mul_(1 + 1e-15),
    "weights: again.weight": lambda model: setattr(model.again, "weight", nn.Parameter(model.mixer.weight.detach().clone())),
    "versions: head.weight": lambda model: model.head.weight.detach().mul_(1),
    "requires_grad: first.bias": lambda model: model.first.bias.requires_grad_(False),
    "gradients: first.weight": lambda model: model.first.weight.grad.neg_(),
    "gradients: second.weight": lambda model: model.zero_grad(),
    "buffers: norm.running_var, buffers: recent": lambda model: model(VECTORS[0]),
    "buffers: new": lambda model: model.register_buffer("new", torch.zeros(1)),
    "modes: norm": lambda model: model.norm.eval(),
    "attributes: drop": lambda model: model.drop.register_forward_hook(print),
    "python": lambda _: random.random(),
    "numpy": lambda _: np.random.rand(),
    "torch": lambda _: torch.rand(1),
    "default dtype": lambda _: torch.set_default_dtype(torch.float64),
    "determinism": lambda _: torch.use_deterministic_algorithms(True),
}


@pytest.mark.parametrize("expected", PLANTED)
def test_a_planted_change_is_seen(expected: str) -> None:
    model, _, _ = build("untidy")
    with pytest.raises(AssertionError, match=expected), nothing_touched(model):
        PLANTED[expected](model)


def test_results_share_no_memory_with_the_model_nor_with_what_is_measured_next() -> None:
    model, batch, blocks = build("untidy")
    F = gs.pull_back(model, [batch], symmetries=blocks)
    expected = exact(every_number(F))
    _, (_, gradient), product, lifted, projected, state = every_number(F)
    found = gs.sharpness(model, [batch], rho=0.1, steps=3, keep_worst=True, symmetries=blocks)
    twin = gs.reparametrize(model, symmetries=blocks)
    states = [lifted, state, *found.perturbed, twin.state_dict()]
    with nothing_touched(model), torch.no_grad():
        for tensor in (gradient, product, projected, *(tensor for each in states for tensor in each.values())):
            tensor.zero_()
    assert exact(every_number(F)) == expected


# Calls that raise -----------------------------------------------------------------------------------------------------


ERRORS = (KeyboardInterrupt(), RuntimeError("out of order"), MemoryError(), ValueError("bad value")) * 3


@pytest.mark.parametrize("call", WITH_BATCHES)
@pytest.mark.parametrize("name", ["bert", "untidy"])
def test_an_error_in_any_forward_pass_reaches_the_caller_and_nothing_is_touched(name: str, call: str) -> None:
    model, batch, blocks, fuse = armed(name)
    forget_verifications()
    expected = exact(CALLS[call](model, batch, blocks))
    moments = sorted({1, min(2, fuse.calls), max(1, fuse.calls // 2), fuse.calls})
    for at, error in zip(moments, ERRORS, strict=False):
        fuse.set(at, error)
        forget_verifications()
        with nothing_touched(model), pytest.raises(type(error)) as caught:
            CALLS[call](model, batch, blocks)
        assert caught.value is error
        assert fuse.calls == at
    assert exact(CALLS[call](model, batch, blocks)) == expected


def test_a_pulled_back_loss_goes_on_after_an_error_in_any_of_its_passes() -> None:
    model, batch, blocks, fuse = armed("bert")
    F = gs.pull_back(model, [batch], metric="mix", symmetries=blocks)
    fuse.set(0)
    expected = exact(every_number(F))
    for at, error in zip(range(1, fuse.calls + 1), ERRORS, strict=False):
        fuse.set(at, error)
        with nothing_touched(model), pytest.raises(type(error)):
            every_number(F)
        fuse.set(0)
        assert exact(every_number(F)) == expected


@pytest.mark.parametrize("at", [1, 2, 7])
def test_an_error_in_the_loss_or_in_the_batches_reaches_the_caller(at: int) -> None:
    model, batch, blocks = build("untidy")
    fuse = Fuse()

    def loss(outputs: Tensor, pair: Any) -> Tensor:
        fuse()
        return cross_entropy(outputs, pair[1])

    interrupt, mistake = KeyboardInterrupt(), gs.SymmetryError("not mine")
    fuse.set(at, interrupt)
    with nothing_touched(model), pytest.raises(KeyboardInterrupt) as caught:
        gs.measure(model, [batch], SEVERAL, loss=loss, symmetries=blocks, **RADII)
    assert caught.value is interrupt
    fuse.set(at, mistake)
    with nothing_touched(model), pytest.raises(gs.SymmetryError, match="batch 0: not mine") as said:
        gs.measure(model, [batch], SEVERAL, loss=loss, symmetries=blocks, **RADII)
    assert said.value.__cause__ is mistake
    fuse.set(at, interrupt)
    with nothing_touched(model), pytest.raises(KeyboardInterrupt):
        gs.measure(model, (batch for _ in iter(fuse, 1)), SEVERAL, symmetries=blocks, **RADII)


# An interruption from outside, and another process --------------------------------------------------------------------


INTERRUPTED = ("geodesic-mix", "average-geodesic-inv-exact", "riemannian-gradient-norm-inv")


def endless_measurements() -> list[str]:
    """Measure without end until interrupted, once for every measure of two models."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent may have switched it off
    for name, measure in itertools.product(("bert", "untidy"), INTERRUPTED):
        model, batch, blocks = build(name)
        expected = exact(CALLS["sharpness"](model, batch, blocks))
        batches = (print("measuring", flush=True) or batch if index == 2 else batch for index in itertools.count())
        radius = {} if "norm" in measure else {"rho": 0.1}
        try:
            with nothing_touched(model):
                gs.measure(model, batches, measure, symmetries=blocks, **radius)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        forget_verifications()
        assert exact(CALLS["sharpness"](model, batch, blocks)) == expected
    return ["OK"]


def test_a_signal_in_the_middle_of_a_measurement_touches_nothing() -> None:
    said = []
    with started(endless_measurements) as child:
        timer = threading.Timer(60, child.kill)
        timer.start()
        for line in child.stdout or ():
            said.append(line.strip())
            if said[-1] == "measuring":
                time.sleep(0.013 * len(said))
                child.send_signal(signal.SIGINT)
        timer.cancel()
    assert said == ["measuring", "interrupted"] * 2 * len(INTERRUPTED) + ["OK"]
    assert child.returncode == 0


def values(seed: int = 3) -> list[str]:
    """Every value in hexadecimal, and a hash of all results with their traces and perturbed states."""
    lines = []
    for name in ("bert", "untidy"):
        model, batch, blocks = build(name)
        options = {"restarts": 2, "samples": 6, "keep_worst": True, "seed": seed, **RADII}
        found = gs.measure(model, [batch, batch], SEVERAL, symmetries=blocks, **options)
        lines += [f"{name} {m.measure} {m.rho} {m.value.hex()}" for m in found]
        lines.append(f"{name} {hashlib.sha256(repr(exact(found)).encode()).hexdigest()}")
    return lines


def test_the_same_seed_and_threads_give_the_same_bits_in_every_process_and_another_seed_other_averages() -> None:
    here = values()
    assert values() == here
    with started(values, PYTHONHASHSEED="1") as child:  # another order of sets than here
        printed, _ = child.communicate(timeout=60)
    assert child.returncode == 0
    assert printed.splitlines() == here
    same = [line for line, other in zip(here, values(seed=4), strict=True) if line == other]
    assert not [line for line in same if "average" in line or line.count(" ") == 1]
    assert [line for line in same if "gradient-norm" in line]
