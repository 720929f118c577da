"""Law 8, continued: wrappers, the modes of the caller, and batches change no value and stay what they were."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import geosharp as gs
import plain_networks as plain
import untouched
import zoo
from geosharp.session import forget_verifications
from untouched import CALLS, RADII, SEVERAL, WITH_BATCHES, build, exact, nothing_touched

VECTORS = plain.batch_of_vectors(8)
MODELS = ("bert", "tied gpt2", "vit", "untidy")


pytestmark = pytest.mark.usefixtures("process_restored")


@pytest.mark.parametrize("wrapper", untouched.WRAPPERS)
def test_a_wrapped_model_has_the_value_of_the_plain_one_and_its_perturbed_state_loads_into_the_wrapper(wrapper: str) -> None:
    model, batch, _ = build("bert")
    plainly = gs.sharpness(model, [batch], "adaptive-l2", rho=0.1, steps=3)
    wrapped = untouched.WRAPPERS[wrapper](model)
    with nothing_touched(wrapped, model):
        found = gs.sharpness(wrapped, [batch], "adaptive-l2", rho=0.1, steps=3, keep_worst=True)
    assert found.value == plainly.value
    assert len(gs.symmetries(wrapped, [batch]).used) == 4
    wrapped.load_state_dict(found.perturbed[0], strict=True)
    model.eval()._compiled_call_impl = None
    assert abs(zoo.loss_of(model, batch) - found.base_loss - found.value) < 1e-12


CONTEXTS: dict[str, Callable[[], Any]] = {  # what is no context is undone after the test
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "determinism": lambda: torch.use_deterministic_algorithms(True),
}


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("call", CALLS)
def test_the_modes_of_the_caller_change_no_bit_and_are_still_there_afterwards(call: str, context: str) -> None:
    model, batch, blocks = build("bert")
    model.float()
    forget_verifications()
    expected = exact(CALLS[call](model, batch, blocks))
    forget_verifications()
    with CONTEXTS[context]() or contextlib.nullcontext(), nothing_touched(model):
        assert exact(CALLS[call](model, batch, blocks)) == expected


def test_these_modes_would_change_what_the_model_itself_returns() -> None:
    model, batch, _ = build("bert")
    plainly = zoo.loss_of(model.float().eval(), batch)
    with CONTEXTS["autocast"]():
        assert zoo.loss_of(model, batch) != plainly
    with CONTEXTS["inference_mode"]():
        assert not model(**batch).loss.requires_grad


@pytest.mark.parametrize("call", WITH_BATCHES)
@pytest.mark.parametrize("name", MODELS)
def test_batches_are_bit_identical_afterwards(name: str, call: str) -> None:
    model, batch, blocks = build(name)
    if name == "untidy":  # inputs with a gradient of the caller's own
        wide = torch.stack([batch[0], batch[0]], -1)[..., 0].requires_grad_()  # not contiguous
        wide.grad = torch.ones_like(wide)
        batch = (wide, batch[1])

    def content() -> list[Any]:
        pairs = (batch if isinstance(batch, dict) else dict(enumerate(batch))).items()
        return [(key, id(t), t._version, exact(t), exact(t.grad if t.requires_grad and t.is_leaf else None)) for key, t in pairs]

    before = content()
    CALLS[call](model, batch, blocks)
    assert content() == before


def test_an_iterator_of_batches_is_read_once() -> None:
    model, _, blocks = build("untidy")
    batches = [plain.batch_of_vectors(8, seed) for seed in range(3)]
    several = {"symmetries": blocks, "samples": 2, **RADII}
    for call in (
        lambda read: gs.measure(model, read, SEVERAL, **several),
        lambda read: gs.compare({"one": model, "two": model}, read, SEVERAL, **several)["two"],
    ):
        read = iter(batches)
        assert [len(found.rows) for found in call(read)] == [3] * 9
        assert exact(call(iter(batches))) == exact(call(batches))
        assert next(read, None) is None
    read = iter(batches)
    gs.verify(model, read, symmetries=blocks)
    assert next(read) is batches[1]


@pytest.mark.parametrize("call", ["measure", "compare"])
def test_batches_in_random_order_leave_the_random_state(call: str) -> None:
    model, _, blocks = build("untidy")
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*VECTORS), batch_size=4, shuffle=True)
    with nothing_touched(model):
        getattr(gs, call)({"one": model} if call == "compare" else model, loader, "geodesic-inv", symmetries=blocks, **RADII)


def test_a_model_that_changes_its_inputs_in_place_is_measured_on_the_batch_as_given() -> None:
    inputs, targets = plain.batch_of_vectors(8)
    model = plain.seeded(untouched.Doubling)
    expected = float(cross_entropy(model(inputs.clone()), targets).detach())
    given = inputs.clone()
    assert abs(gs.sharpness(model, [(given, targets)], "adaptive-l2", **RADII | {"rho": 0.1}).base_loss - expected) < 1e-12
    assert torch.equal(given, inputs)


def test_a_pulled_back_loss_leaves_the_random_state_where_the_model_draws_from_it() -> None:
    model = plain.seeded(untouched.Doubling)
    F = gs.pull_back(model, [plain.batch_of_vectors(8)], symmetries=plain.neuron_block())
    with nothing_touched(model):
        F.value_and_grad(F.zero())


def test_weights_and_batches_made_under_inference_mode_are_measured_like_others() -> None:
    expected = gs.sharpness(*build("bert")[:1], [build("bert")[1]], "geodesic-inv", **RADII | {"rho": 0.1}).value
    with torch.inference_mode():
        model, batch, _ = build("bert")
    assert gs.sharpness(model, [batch], "geodesic-inv", **RADII | {"rho": 0.1}).value == expected
