"""Law 8: a call leaves the model, the batches and the process as they were, also one that raised or was interrupted.

And it is repeatable: the same seed and the same threads give the same bits, in this process and in another one.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import geosharp as gs
import plain_networks as plain
import zoo
from geosharp.session import forget_verifications
from untouched import Fuse, armed, build, exact, nothing_touched, process_restored

VECTORS = plain.batch_of_vectors(8)


@pytest.fixture(autouse=True)
def _process_restored() -> Iterator[None]:
    with process_restored():
        yield


MODELS = ("bert", "tied gpt2", "vit", "untidy")


# Everything that users call -------------------------------------------------------------------------------------------

SEVERAL = ["geodesic-mix", "standard-linf", "average-geodesic-inv-exact", "average-adaptive-linf", "gradient-norm"]
RADII: dict[str, Any] = {"rho": (0.05, 0.1), "steps": 3}


def every_number(F: Any) -> list[Any]:
    """What a pulled-back loss can be asked for."""
    z = 0.05 * F.probe(torch.Generator().manual_seed(0))
    return [F.value(z), F.value_and_grad(z), F.hvp(z, z), F.lift(z), F.project(z), F.state_at(z)]


Call = Callable[[nn.Module, Any, Any], Any]
WITH_BATCHES: dict[str, Call] = {
    "sharpness": lambda model, batch, blocks: gs.sharpness(model, [batch], rho=0.1, steps=3, symmetries=blocks),
    "measure": lambda model, batch, blocks: gs.measure(
        model, [batch], SEVERAL, samples=4, restarts=1, keep_worst=True, symmetries=blocks, **RADII
    ),
    "measure in parts": lambda model, batch, blocks: gs.measure(
        model, [batch], ["geodesic-inv", "riemannian-gradient-norm-mix"], micro_batch=3, solver="auto-pgd", dtype=torch.float32,
        params="*", logit_normalization="std", symmetries=blocks, **RADII,
    ),
    "compare": lambda model, batch, blocks: gs.compare(
        {"held": model, "loaded": lambda: model}, [batch], ["geodesic-inv", "average-standard-l2"], samples=2, symmetries=blocks, **RADII
    ),
    "symmetries": lambda model, batch, blocks: gs.symmetries(model, [batch], symmetries=blocks),
    "verify": lambda model, batch, blocks: gs.verify(model, [batch], symmetries=blocks),
    "pull_back": lambda model, batch, blocks: every_number(gs.pull_back(model, [batch], metric="mix", symmetries=blocks)),
}  # fmt: skip
CALLS: dict[str, Call] = {
    **WITH_BATCHES,
    "symmetries by structure": lambda model, batch, blocks: gs.symmetries(model, symmetries=blocks),
    "reparametrize": lambda model, batch, blocks: gs.reparametrize(model, symmetries=blocks),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", MODELS)
def test_no_call_touches_the_model_or_the_process_and_each_gives_the_same_bits_again(name: str, call: str) -> None:
    model, batch, blocks = build(name)
    forget_verifications()
    found = []
    for seed in (1, 2):
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


def errors() -> Iterator[BaseException]:
    return itertools.cycle([KeyboardInterrupt(), RuntimeError("out of order"), MemoryError(), ValueError("bad value")])


@pytest.mark.parametrize("call", WITH_BATCHES)
@pytest.mark.parametrize("name", ["bert", "untidy"])
def test_an_error_in_any_forward_pass_reaches_the_caller_and_nothing_is_touched(name: str, call: str) -> None:
    model, batch, blocks, fuse = armed(name)
    forget_verifications()
    expected = exact(CALLS[call](model, batch, blocks))
    moments = sorted({1, 2, fuse.calls // 2, fuse.calls})
    assert len(moments) > 2
    for at, error in zip(moments, errors(), strict=False):
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
    for at, error in zip(range(1, fuse.calls + 1), errors(), strict=False):
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


def started(function: Callable[[], None], **environment: str) -> subprocess.Popen[str]:
    """A function of this file in a process of its own, with as many threads as this one."""
    root, threads = str(Path(__file__).parents[1]), torch.get_num_threads()
    code = f"import torch; torch.set_num_threads({threads}); import laws.test_law_8_nothing_touched as law; law.{function.__name__}()"
    variables = {**os.environ, "PYTHONPATH": root, "HF_HUB_OFFLINE": "1", **environment}
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=variables)


INTERRUPTED = ("geodesic-mix", "average-geodesic-inv-exact", "riemannian-gradient-norm-inv")


def endless_measurements() -> None:
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
    print("OK")


def test_a_signal_in_the_middle_of_a_measurement_touches_nothing() -> None:
    said = []
    with started(endless_measurements) as child:
        threading.Timer(60, child.kill).start()
        for line in child.stdout or ():
            said.append(line.strip())
            if said[-1] == "measuring":
                time.sleep(0.013 * len(said))
                child.send_signal(signal.SIGINT)
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


def print_values() -> None:
    print("\n".join(values()))


def test_the_same_seed_and_threads_give_the_same_bits_in_every_process_and_another_seed_other_averages() -> None:
    here = values()
    assert values() == here
    for hash_seed in ("1", "2"):
        with started(print_values, PYTHONHASHSEED=hash_seed) as child:
            printed, _ = child.communicate(timeout=60)
        assert child.returncode == 0
        assert printed.splitlines() == here
    same = [line for line, other in zip(here, values(seed=4), strict=True) if line == other]
    assert not [line for line in same if "average" in line or line.count(" ") == 1]
    assert [line for line in same if "gradient-norm" in line]


# Wrappers, the caller's modes, and batches ----------------------------------------------------------------------------


class Holder(nn.Module):
    """Not a wrapper: a model that calls its only child `module`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, **batch: Tensor) -> Any:
        return self.module(**batch)


def never(*_: Any) -> None:
    raise AssertionError("compiled")


def lazily_compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend=never)  # type: ignore[return-value]


def compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend=never)
    return model


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "data parallel": nn.DataParallel,
    "compile": lazily_compiled,
    "both": lambda model: lazily_compiled(nn.DataParallel(model)),
    "both the other way": lambda model: nn.DataParallel(lazily_compiled(model)),
    "in place": compiled_in_place,
    "no wrapper": Holder,
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapped_model_has_the_value_of_the_plain_one_and_its_perturbed_state_loads_into_the_wrapper(wrapper: str) -> None:
    model, batch, _ = build("bert")
    plainly = gs.sharpness(model, [batch], "adaptive-l2", rho=0.1, steps=3)
    wrapped = WRAPPERS[wrapper](model)
    with nothing_touched(wrapped, model):
        found = gs.sharpness(wrapped, [batch], "adaptive-l2", rho=0.1, steps=3, keep_worst=True)
    assert found.value == plainly.value
    assert len(gs.symmetries(wrapped, [batch]).used) == (len(gs.symmetries(model).verdicts))
    wrapped.load_state_dict(found.perturbed[0], strict=True)
    assert abs(zoo.loss_of(build("bert")[0].eval(), batch) - found.base_loss) < 1e-12
    model.eval()._compiled_call_impl = None
    assert abs(zoo.loss_of(model, batch) - found.base_loss - found.value) < 1e-12


@contextlib.contextmanager
def switched(switch: Callable[[Any], None], on: Any, off: Any) -> Iterator[None]:
    switch(on)
    yield
    switch(off)


CONTEXTS: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "default dtype": lambda: switched(torch.set_default_dtype, torch.float64, torch.float32),
    "determinism": lambda: switched(torch.use_deterministic_algorithms, True, False),
}


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("call", CALLS)
def test_the_modes_of_the_caller_change_no_bit_and_are_still_there_afterwards(call: str, context: str) -> None:
    model, batch, blocks = build("bert")
    model.float()
    for parameter in model.parameters():
        assert parameter.dtype == torch.float32
    expected = exact(CALLS[call](model, batch, blocks))
    forget_verifications()
    with CONTEXTS[context](), nothing_touched(model):
        assert exact(CALLS[call](model, batch, blocks)) == expected
