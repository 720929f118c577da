"""Methods of peft that are no plain products, and adapters that autograd or memory ties: they claim nothing and say so."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, get_peft_model

import geosharp as gs
import zoo
from clear_errors import one_clear_line
from families.tiny import tiny
from geosharp.errors import SymmetryError
from geosharp.symmetry.block import Factors
from symmetries.adapted_models import OPTIONS, QUERY_VALUE, QUIET, adapted, drift, outputs

pytestmark = QUIET

OTHERS: dict[str, tuple[str, Callable[[], Any]]] = {
    "IA3": ("bert", lambda: peft.IA3Config(target_modules=["key", "value"], feedforward_modules=[])),
    "VeRA": ("bert", lambda: peft.VeraConfig(target_modules=QUERY_VALUE, r=4)),
    "LoHa": ("bert", lambda: peft.LoHaConfig(target_modules=QUERY_VALUE, r=2)),
    "AdaLoRA": ("bert", lambda: peft.AdaLoraConfig(task_type="SEQ_CLS", target_modules=QUERY_VALUE, init_r=2, target_r=2, total_step=10)),
    "prompt tuning": ("llama", lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)),
    "KaSA": ("bert", lambda: LoraConfig(target_modules=QUERY_VALUE, r=2, kasa_config=peft.KasaConfig())),
    "block-diagonal": (
        "bert",
        lambda: LoraConfig(target_modules=["query"], r=4, use_bdlora=peft.BdLoraConfig(target_modules_bd_a=["query"], nblocks=2)),
    ),
}


@pytest.mark.parametrize("method", OTHERS)
def test_other_methods_claim_nothing_and_say_so(method: str) -> None:
    family, config = OTHERS[method]
    model, batch = adapted(family, config=config())
    for found in (gs.symmetries(model), gs.symmetries(model, [batch])):
        assert not found.verdicts
    with one_clear_line("symmetry block" if method not in ("AdaLoRA", "KaSA", "block-diagonal") else "adapter", kind=SymmetryError):
        gs.sharpness(model, [batch], **OPTIONS)
    with one_clear_line("expected a model with symmetry blocks"):
        gs.reparametrize(model)
    assert gs.sharpness(model, [batch], "adaptive-l2", **OPTIONS).value > 0


def test_the_loss_of_adalora_sees_what_its_outputs_do_not() -> None:
    """Why the scalings of its factors, free for the outputs, are refused."""
    model, batch = adapted("bert", config=OTHERS["AdaLoRA"][1]())
    twin, state = copy.deepcopy(model), {}
    for name, value in twin.state_dict().items():
        state[name] = value * 2 if "lora_A" in name else value / 2 if "lora_B" in name else value
    twin.load_state_dict(state)
    assert drift(model, twin, batch) < 1e-13
    assert abs(zoo.loss_of(model, batch) - zoo.loss_of(twin, batch)) > 1e-2
    assert all("penalty" in item.reason for item in gs.symmetries(model).refused if item.name.endswith("default"))


def test_a_variant_that_is_no_product_breaks_under_the_group() -> None:
    """The control of the refusals: KaSA has a diagonal between its factors."""
    model, batch = adapted("bert", config=OTHERS["KaSA"][1]())
    layer = "base_model.model.bert.encoder.layer.0.attention.self.query"
    down, up = (gs.View(f"{layer}.{side}.default.weight") for side in ("lora_A", "lora_B"))
    with one_clear_line("not a symmetry", kind=SymmetryError):
        gs.verify(model, [batch], symmetries=Factors("kasa", (down.T,), (up,)))


def test_an_adapter_of_torch_attention_is_refused_because_autograd_sees_half_of_it() -> None:
    model, batch = adapted("attention", target_modules=["attention"])
    with one_clear_line("torch.nn.MultiheadAttention", "twice", "merge the adapter first"):
        gs.sharpness(model, [batch], **OPTIONS)
    factor = next(parameter for name, parameter in model.named_parameters() if "out_proj.lora_A" in name)
    model(batch[0]).square().sum().backward()
    sums = []
    for step in (1e-6, -2e-6):
        factor.data[0, 0] += step
        sums.append(float(outputs(model, batch).square().sum()))
    assert (sums[0] - sums[1]) / 2e-6 == pytest.approx(2 * float(factor.grad[0, 0]), rel=1e-5)


def test_adapters_of_tied_embeddings_that_share_memory_are_refused() -> None:
    made = tiny("llama", "causal-lm", narrow=True, tie_word_embeddings=True)
    config = LoraConfig(r=2, target_modules=["embed_tokens", "lm_head"], ensure_weight_tying=True)
    with torch.random.fork_rng():
        model = get_peft_model(made.model, config, autocast_adapter_dtype=False).eval()
    with one_clear_line("share memory in part"):
        gs.sharpness(model, [made.batch], **OPTIONS)
