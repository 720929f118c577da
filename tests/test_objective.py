"""The loss of a dict of parameters: data types, normalization, weights of micro-batches, what is a coordinate, batches read once."""

from __future__ import annotations

import copy
import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from transformers import BatchEncoding, GPT2Config, GPT2LMHeadModel

import geosharp as gs
import plain_networks as plain
import zoo
from clear_errors import one_clear_line
from geosharp.objective import Objective

BATCH = plain.batch_of_vectors()


def own_loss(model: nn.Module, batch: tuple[Tensor, Tensor] = BATCH) -> float:
    with torch.no_grad():
        return float(cross_entropy(model(batch[0]), batch[1]))


def loss_of(objective: Objective, batch: Any, values: dict[str, Tensor] | None = None) -> float:
    return float(objective.loss(objective.values if values is None else values, objective.prepare(batch)).detach())


# Data types -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_half_precision_weights_are_up_cast_to_float32(stored: torch.dtype) -> None:
    model = plain.seeded(plain.Product).to(stored)
    objective = Objective(model)
    assert objective.dtype is torch.float32
    assert {value.dtype for value in objective.values.values()} == {torch.float32}
    inputs = BATCH[0].to(stored)
    expected = own_loss(copy.deepcopy(model).float(), (inputs.float(), BATCH[1]))
    assert loss_of(objective, (inputs, BATCH[1])) == expected
    assert {p.dtype for p in model.parameters()} == {stored}


def test_a_state_dict_from_up_cast_weights_loads_into_the_half_precision_model() -> None:
    model = plain.seeded(plain.Product).to(torch.bfloat16)
    found = gs.sharpness(model, [BATCH], "adaptive-l2", rho=0.5, steps=4, keep_worst=True)
    assert found.provenance.options["dtype"] == "float32"
    model.load_state_dict(found.perturbed[0], strict=True)


def test_bfloat16_on_autocast_is_only_used_when_asked_for() -> None:
    model = plain.seeded(plain.Product).float()
    with torch.autocast("cpu", torch.bfloat16):
        inside = gs.sharpness(model, [BATCH], "adaptive-l2", rho=0.1, steps=4)
    plainly = gs.sharpness(model, [BATCH], "adaptive-l2", rho=0.1, steps=4)
    asked = gs.sharpness(model, [BATCH], "adaptive-l2", rho=0.1, steps=4, autocast=torch.bfloat16)
    assert inside.value == plainly.value
    assert abs(asked.base_loss - plainly.base_loss) > 1e-6


def test_float64_is_an_option_and_float_inputs_follow_it() -> None:
    model = plain.seeded(plain.Product).float()
    inputs = BATCH[0].float()
    objective = Objective(model, dtype=torch.float64)
    assert objective.prepare((inputs, BATCH[1]))[0].dtype is torch.float64
    assert objective.prepare((inputs, BATCH[1]))[1].dtype is torch.int64
    expected = own_loss(copy.deepcopy(model).double(), (inputs.double(), BATCH[1]))
    assert loss_of(objective, (inputs, BATCH[1])) == pytest.approx(expected, rel=1e-14)


def test_float64_weights_are_measured_in_float64_without_asking() -> None:
    assert Objective(plain.seeded(plain.Product)).dtype is torch.float64


def test_the_loss_is_that_of_the_values_given_and_not_of_the_model() -> None:
    model, other = plain.seeded(plain.Product), plain.seeded(plain.Product, seed=3)
    objective = Objective(model)
    assert loss_of(objective, BATCH) == own_loss(model)
    assert loss_of(objective, BATCH, dict(other.named_parameters())) == own_loss(other)


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_the_loss_of_a_hugging_face_model_is_its_own(family: str) -> None:
    model, batch = zoo.make(family), zoo.batch_of(family, slice(0, 8))
    assert loss_of(Objective(model), batch) == pytest.approx(zoo.loss_of(model, batch), rel=1e-12)


# Frozen weights, buffers, params= -------------------------------------------------------------------------------------


def test_frozen_weights_are_fixed_and_the_others_are_coordinates() -> None:
    model = plain.seeded(plain.Product)
    model.first.requires_grad_(False)
    objective = Objective(model)
    assert set(objective.fixed) == {"first.weight", "first.bias"}
    assert set(objective.values) == {"second.weight", "second.bias", "head.weight", "head.bias"}
    assert loss_of(objective, BATCH) == own_loss(model)


@pytest.mark.parametrize(
    ("patterns", "chosen"),
    [
        ("*.bias", {"first.bias", "second.bias", "head.bias"}),
        (["first.*", "head.weight"], {"first.weight", "first.bias", "head.weight"}),
        ("*", {f"{layer}.{leaf}" for layer in ("first", "second", "head") for leaf in ("weight", "bias")}),
    ],
)
def test_patterns_choose_coordinates_by_name_frozen_ones_too(patterns: str | list[str], chosen: set[str]) -> None:
    model = plain.seeded(plain.Product)
    model.head.requires_grad_(False)
    assert set(Objective(model, params=patterns).values) == chosen


def test_only_the_chosen_parameters_are_perturbed() -> None:
    model = plain.seeded(plain.Product)
    found = gs.sharpness(model, [BATCH], "adaptive-l2", rho=0.5, steps=3, params="head.*", keep_worst=True)
    state = model.state_dict()
    moved = {name for name, value in found.perturbed[0].items() if not torch.equal(value, state[name])}
    assert moved == {"head.weight", "head.bias"}


def test_a_pattern_that_matches_nothing_is_an_error_even_beside_one_that_does() -> None:
    with one_clear_line("'heda.*'", "first.weight"):
        Objective(plain.seeded(plain.Product), params=["first.*", "heda.*"])


class Buffered(nn.Module):
    """A buffer in float32 and one of integers, with the weights in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(plain.INPUTS, plain.CLASSES).double()
        self.register_buffer("shift", torch.full((plain.CLASSES,), 0.3))
        self.register_buffer("order", torch.tensor([2, 0, 1]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) + self.shift)[:, self.order]


def test_buffers_are_constants_in_the_compute_dtype_and_the_users_stay_as_they_are() -> None:
    model = Buffered()
    objective = Objective(model)
    assert set(objective.values) == {"linear.weight", "linear.bias"}
    assert loss_of(objective, BATCH) == pytest.approx(own_loss(model), rel=1e-14)
    assert model.shift.dtype is torch.float32
    state = gs.sharpness(model, [BATCH], "adaptive-l2", rho=0.1, steps=3, keep_worst=True).perturbed[0]
    assert torch.equal(state["shift"], model.shift)
    model.load_state_dict(state, strict=True)


# Logit normalization --------------------------------------------------------------------------------------------------


def normalized_by_hand(logits: Tensor, how: str) -> Tensor:
    rows = []
    for row in logits:
        centred = row - sum(row) / len(row)
        norm = math.sqrt(sum(float(x) ** 2 for x in centred))
        rows.append(centred / (norm / math.sqrt(len(row)) if how == "std" else norm))
    return torch.stack(rows)


@pytest.mark.parametrize("how", ["std", "norm"])
def test_logit_normalization_of_a_pair_a_dict_and_a_custom_loss_match_the_hand_formula(how: Any) -> None:
    model = plain.seeded(plain.Product)
    with torch.no_grad():
        expected = float(cross_entropy(normalized_by_hand(model(BATCH[0]), how), BATCH[1]))
    assert loss_of(Objective(model, logit_normalization=how), BATCH) == pytest.approx(expected, rel=1e-12)
    custom = Objective(model, logit_normalization=how, loss=lambda outputs, batch: cross_entropy(outputs, batch[1]))
    assert loss_of(custom, BATCH) == pytest.approx(expected, rel=1e-12)
    vit, batch = zoo.make("vit"), zoo.batch_of("vit", slice(0, 6))
    with torch.no_grad():
        expected = float(cross_entropy(normalized_by_hand(vit(**batch).logits, how), batch["labels"]))
    assert loss_of(Objective(vit, logit_normalization=how), batch) == pytest.approx(expected, rel=1e-12)


def test_logits_by_norm_are_those_by_standard_deviation_over_root_k() -> None:
    from geosharp.losses import normalized

    logits = plain.seeded(plain.Product)(BATCH[0]).detach()
    torch.testing.assert_close(normalized(logits, "std") / math.sqrt(plain.CLASSES), normalized(logits, "norm"), rtol=1e-14, atol=0)


def test_constant_logits_are_normalized_to_zero_and_not_to_nan() -> None:
    from geosharp.losses import normalized

    assert not bool(normalized(torch.full((2, 4), 3.0), "std").any())


# Weights of micro-batches ---------------------------------------------------------------------------------------------


@functools.cache
def language_model() -> nn.Module:
    sizes = {"vocab_size": 20, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 12, "bos_token_id": 0, "eos_token_id": 0}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return zoo.add_noise(GPT2LMHeadModel(GPT2Config(**sizes, initializer_range=0.3))).eval()


def uneven_tokens() -> dict[str, Tensor]:
    """Rows with very different numbers of labels that count."""
    ids = torch.randint(1, 20, (5, 10), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[0, :8], labels[1, 3:], labels[3, 1:9] = -100, -100, -100
    return {"input_ids": ids, "labels": labels}


def test_the_weight_of_a_causal_batch_is_its_labels_after_the_shift() -> None:
    batch = uneven_tokens()
    objective = Objective(language_model())
    assert objective.weight_of(batch) == int((batch["labels"][:, 1:] != -100).sum())
    assert objective.weight_of(batch) != int((batch["labels"] != -100).sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_micro_batches_of_a_causal_language_model_add_up_to_the_whole(size: int, dtype: torch.dtype) -> None:
    options: dict[str, Any] = {"rho": 0.1, "steps": 4, "dtype": dtype}
    whole = gs.sharpness(language_model(), [uneven_tokens()], "adaptive-l2", **options)
    split = gs.sharpness(language_model(), [uneven_tokens()], "adaptive-l2", micro_batch=size, **options)
    assert split.base_loss == pytest.approx(whole.base_loss, rel=1e-6)
    assert split.value == pytest.approx(whole.value, rel=1e-4)


def test_micro_batches_of_a_classifier_add_up_exactly_and_are_weighted_by_rows() -> None:
    model = plain.seeded(plain.Product)
    whole = gs.sharpness(model, [BATCH], "adaptive-l2", rho=0.1)
    split = gs.sharpness(model, [BATCH], "adaptive-l2", rho=0.1, micro_batch=5)
    assert split.value == pytest.approx(whole.value, rel=1e-9)
    shares = [share for _, share in Objective(model, micro_batch=5).micro_batches(BATCH)]
    assert shares == pytest.approx([5 / 12, 5 / 12, 2 / 12])


def contrastive(outputs: Tensor, batch: Any) -> Tensor:
    """Every row against every other row of its batch: does not add up over rows."""
    unit = nn.functional.normalize(outputs, dim=-1)
    return cross_entropy(5 * unit @ unit.mT, torch.arange(len(unit)))


def test_a_contrastive_loss_in_micro_batches_is_an_error() -> None:
    model = plain.seeded(plain.Product)
    assert gs.sharpness(model, [BATCH], "adaptive-l2", rho=0.1, steps=3, loss=contrastive).value > 0
    with one_clear_line("does not add up", "weight=", "micro_batch="):
        gs.sharpness(model, [BATCH], "adaptive-l2", rho=0.1, steps=3, loss=contrastive, micro_batch=4)


def test_a_custom_loss_takes_outputs_and_batch_and_a_custom_weight_its_denominator() -> None:
    def loss(outputs: Tensor, batch: Any) -> Tensor:
        error = mse_loss(outputs, batch["wanted"], reduction="none").sum(-1)
        return (error * batch["importance"]).sum() / batch["importance"].sum()

    model = plain.seeded(plain.Product)
    generator = torch.Generator().manual_seed(1)
    batch = {"x": BATCH[0], "wanted": torch.randn(12, 3, generator=generator), "importance": torch.rand(12, generator=generator)}

    def forward_of_x_alone(module: nn.Module) -> nn.Module:
        class Taking(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = module

            def forward(self, x: Tensor, **rest: Tensor) -> Tensor:
                return self.inner(x)

        return Taking()

    options: dict[str, Any] = {"loss": loss, "rho": 0.1, "steps": 6}
    whole = gs.sharpness(forward_of_x_alone(model), [batch], "adaptive-l2", **options)
    weight = lambda batch: batch["importance"].sum()  # noqa: E731
    split = gs.sharpness(forward_of_x_alone(model), [batch], "adaptive-l2", weight=weight, micro_batch=5, **options)
    assert split.value == pytest.approx(whole.value, rel=1e-9)
    with one_clear_line("does not add up"):
        gs.sharpness(forward_of_x_alone(model), [batch], "adaptive-l2", micro_batch=5, **options)


# Batches --------------------------------------------------------------------------------------------------------------


def test_a_generator_is_read_once_for_all_measures_and_radii() -> None:
    model, halves = plain.seeded(plain.Product), [(BATCH[0][:6], BATCH[1][:6]), (BATCH[0][6:], BATCH[1][6:])]
    reads = []

    def loader() -> Any:
        for index, half in enumerate(halves):
            reads.append(index)
            yield half

    measures, options = ["adaptive-l2", "average-standard-l2", "gradient-norm"], {"rho": (0.1, 0.2), "steps": 4}
    once = gs.measure(model, loader(), measures, **options)
    assert reads == [0, 1]
    assert [m.per_batch for m in once] == [m.per_batch for m in gs.measure(model, halves, measures, **options)]
    assert [(m.measure, m.rho) for m in once][:3] == [("adaptive-l2", 0.1), ("adaptive-l2", 0.2), ("average-standard-l2", 0.1)]


@pytest.mark.parametrize(
    "single",
    [BATCH, list(BATCH), {"x": BATCH[0]}, BATCH[0], ({"x": BATCH[0]}, BATCH[1]), ((BATCH[0], BATCH[0]), BATCH[1])],
    ids=["pair", "list pair", "dict", "tensor", "dict and targets", "two inputs and targets"],
)
def test_one_batch_without_a_list_is_an_error_that_says_so(single: Any) -> None:
    with one_clear_line("list"):
        gs.sharpness(plain.seeded(plain.Product), single, "adaptive-l2", rho=0.1, steps=3)


def test_a_batch_may_be_a_batch_encoding_or_a_pair_of_keywords_and_targets() -> None:
    bert, batch = zoo.make("bert"), zoo.batch_of("bert", slice(0, 6))
    expected = zoo.loss_of(bert, batch)
    assert loss_of(Objective(bert), BatchEncoding(batch)) == pytest.approx(expected, rel=1e-12)
    keywords = {name: value for name, value in batch.items() if name != "labels"}
    assert loss_of(Objective(bert), (keywords, batch["labels"])) == pytest.approx(expected, rel=1e-12)
