"""The table "On trouble": train mode, data, labels, weights that are not finite, options that do not exist."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import geosharp as gs
import plain_networks as plain
import zoo
from clear_errors import one_clear_line
from untouched import nothing_touched

BATCH = plain.batch_of_vectors()
QUICK: dict[str, Any] = {"rho": 0.1, "steps": 4}


# Train mode, dropout, batch norm --------------------------------------------------------------------------------------


class Noisy(nn.Module):
    """Dropout and batch norm: in train mode random, and a measurement would move the running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(plain.INPUTS, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.second = nn.Linear(8, plain.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.drop(torch.tanh(self.norm(self.first(x)))))


def warmed() -> nn.Module:
    model = plain.seeded(Noisy).train()
    with torch.random.fork_rng():
        model(plain.batch_of_vectors(64, seed=5)[0])
    return model


def test_train_mode_dropout_and_batch_norm_are_measured_in_eval_and_restored() -> None:
    model = warmed()
    model.drop.eval()  # a mixture of modes, to be found again
    with nothing_touched(model):
        in_train = gs.sharpness(model, [BATCH], "adaptive-l2", **QUICK)
    assert model.training
    assert not model.drop.training
    assert in_train.value == gs.sharpness(model.eval(), [BATCH], "adaptive-l2", **QUICK).value
    with torch.no_grad():
        assert in_train.base_loss == float(nn.functional.cross_entropy(model(BATCH[0]), BATCH[1]))


def test_a_hugging_face_model_in_train_mode_with_dropout_is_measured_in_eval() -> None:
    model, batch = zoo.make("bert"), zoo.batch_of("bert", slice(0, 8))
    calm = gs.sharpness(model, [batch], "geodesic-inv", **QUICK)
    with nothing_touched(model.train()):
        assert gs.sharpness(model, [batch], "geodesic-inv", **QUICK).value == calm.value


# Empty data -----------------------------------------------------------------------------------------------------------


def test_no_batches_is_an_error() -> None:
    with one_clear_line("at least one batch", "empty"):
        gs.sharpness(plain.seeded(plain.Product), [], "adaptive-l2", **QUICK)


def test_an_exhausted_generator_is_named_as_the_likely_cause() -> None:
    batches = (batch for batch in [BATCH])
    gs.sharpness(plain.seeded(plain.Product), batches, "adaptive-l2", **QUICK)
    with one_clear_line("exhausted generator"):
        gs.sharpness(plain.seeded(plain.Product), batches, "adaptive-l2", **QUICK)


def test_an_empty_batch_is_named_by_its_number() -> None:
    with one_clear_line("batch 1", "rows", "drop_last"):
        gs.sharpness(plain.seeded(plain.Product), [BATCH, (BATCH[0][:0], BATCH[1][:0])], "adaptive-l2", **QUICK)


def test_inputs_and_targets_of_different_length_are_an_error_that_names_the_batch() -> None:
    with one_clear_line("batch 0", "12", "11"):
        gs.sharpness(plain.seeded(plain.Product), [(BATCH[0], BATCH[1][:-1])], "adaptive-l2", **QUICK)


def test_all_labels_ignored_is_an_error() -> None:
    model = language_model()
    ids = torch.randint(1, 20, (2, 6), generator=torch.Generator().manual_seed(0))
    with one_clear_line("-100"):
        gs.sharpness(model, [{"input_ids": ids, "labels": torch.full_like(ids, -100)}], "adaptive-l2", **QUICK)


# Labels out of range --------------------------------------------------------------------------------------------------


def language_model() -> nn.Module:
    sizes = {"vocab_size": 20, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8, "bos_token_id": 0, "eos_token_id": 0}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return zoo.add_noise(GPT2LMHeadModel(GPT2Config(**sizes))).eval()


@pytest.mark.parametrize("wrong", [3, -1])
def test_labels_out_of_range_of_a_pair_say_the_range_and_what_was_found(wrong: int) -> None:
    targets = BATCH[1].clone()
    targets[5] = wrong
    with one_clear_line("from 0 to 2", str(wrong), "head"):
        gs.sharpness(plain.seeded(plain.Product), [(BATCH[0], targets)], "adaptive-l2", **QUICK)


def test_labels_out_of_range_of_a_classifier_say_where() -> None:
    batch = zoo.batch_of("vit", slice(0, 4))
    batch["labels"] = batch["labels"] + 10
    with one_clear_line('batch["labels"]', "from 0 to 9"):
        gs.sharpness(zoo.make("vit"), [batch], "adaptive-l2", **QUICK)


def test_labels_out_of_range_of_a_language_model_say_where() -> None:
    ids = torch.randint(1, 20, (2, 6), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[1, 2] = 20
    with one_clear_line('batch["labels"]', "from 0 to 19", "20"):
        gs.sharpness(language_model(), [{"input_ids": ids, "labels": labels}], "adaptive-l2", **QUICK)


# What is not finite ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_non_finite_weight_is_counted_and_named(wrong: float) -> None:
    model = plain.seeded(plain.Product)
    with torch.no_grad():
        model.second.weight[1, :2] = wrong
    with one_clear_line("second.weight", "2 non-finite", "checkpoint"):
        gs.sharpness(model, [BATCH], "adaptive-l2", **QUICK)


def test_a_non_finite_frozen_weight_is_an_error_too() -> None:
    model = plain.seeded(plain.Product)
    model.second.weight.requires_grad_(False)
    with torch.no_grad():
        model.second.weight[1, :2] = float("nan")
    with one_clear_line("finite", "checkpoint"):
        gs.sharpness(model, [BATCH], "adaptive-l2", **QUICK)


@pytest.mark.parametrize(("measure", "options"), [("adaptive-l2", QUICK), ("average-adaptive-l2", {"rho": 0.1}), ("gradient-norm", {})])
def test_non_finite_inputs_are_an_error_that_names_the_measure_and_the_batch(measure: str, options: dict[str, Any]) -> None:
    inputs = BATCH[0].clone()
    inputs[3, 1] = float("nan")
    with one_clear_line(f"{measure} on batch 1", "finite loss", "inputs"):
        gs.sharpness(plain.seeded(plain.Product), [BATCH, (inputs, BATCH[1])], measure, **options)


# Calls that make no sense ---------------------------------------------------------------------------------------------

MISTAKES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "no such measure": ({"measure": "geodesic-in"}, ('did you mean "geodesic-inv"',)),
    "no such option": ({"step": 3}, ("step", 'did you mean "steps"')),
    "a radius for what has none": ({"measure": "gradient-norm"}, ("gradient-norm", "rho")),
    "no radius": ({"rho": None}, ("adaptive-l2", "rho=")),
    "a negative radius": ({"rho": -0.1}, ("positive", "-0.1")),
    "an infinite radius": ({"rho": float("inf")}, ("finite", "inf")),
    "equal radii": ({"rho": (0.1, 0.1)}, ("distinct",)),
    "no radii": ({"rho": ()}, ("radi",)),
    "no steps": ({"steps": 0}, ("steps", "at least 1")),
    "half a step": ({"steps": 2.5}, ("steps", "2.5")),
    "a negative tolerance": ({"tolerance": -1.0}, ("tolerance",)),
    "no such solver": ({"solver": "auto-pdg"}, ('did you mean "auto-pgd"',)),
    "samples for a worst case": ({"samples": 10}, ("samples", "adaptive-l2")),
    "epsilon for an element-wise measure": ({"epsilon": 0.1}, ("epsilon", "adaptive-l2")),
    "epsilon on an exact path": ({"measure": "geodesic-inv-exact", "epsilon": 0.1}, ("exact", "epsilon", "second-order")),
    "no such symmetries": ({"measure": "geodesic-inv", "symmetries": "everything"}, ("all, published, none", "everything")),
    "a pattern that matches nothing": ({"params": "encoder.*"}, ("encoder.*", "first.weight")),
    "no patterns": ({"params": []}, ("params",)),
    "no rows in a micro-batch": ({"micro_batch": 0}, ("micro_batch", "at least 1")),
    "two radii for one number": ({"rho": (0.1, 0.2)}, ("geosharp.measure",)),
    "no such logit normalization": ({"logit_normalization": "sdt"}, ("logit_normalization", "std", "norm")),
    "a dtype by name": ({"dtype": "float64"}, ("dtype", "float64")),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_call_is_one_clear_line(mistake: str) -> None:
    options, words = MISTAKES[mistake]
    options = {**QUICK, "measure": "adaptive-l2", **options}
    model = plain.seeded(plain.Product)
    with nothing_touched(model), one_clear_line(*words):
        gs.sharpness(model, [BATCH], **options)


def test_a_radius_may_be_any_real_number() -> None:
    numpy = pytest.importorskip("numpy")
    model = plain.seeded(plain.Product)
    found = gs.sharpness(model, [BATCH], "adaptive-l2", rho=numpy.float32(0.5), steps=4)
    assert found.value == gs.sharpness(model, [BATCH], "adaptive-l2", rho=0.5, steps=4).value


def test_a_path_instead_of_a_model_is_an_error() -> None:
    with one_clear_line("torch.nn.Module", "str"):
        gs.sharpness("runs/model", [BATCH], "adaptive-l2", **QUICK)  # type: ignore[arg-type]


def test_weights_on_the_meta_device_are_an_error() -> None:
    with torch.device("meta"):
        model = plain.Product()
    with one_clear_line("meta", "first.weight", "load"):
        gs.sharpness(model, [BATCH], "adaptive-l2", **QUICK)


class Locked(nn.Linear):
    def __deepcopy__(self, memo: dict[int, object]) -> nn.Module:
        raise RuntimeError("this module holds a lock\nand says so\nin three lines")


def test_a_model_that_cannot_be_copied_says_so_in_one_line() -> None:
    model = nn.Sequential(nn.Linear(plain.INPUTS, 4), Locked(4, plain.CLASSES)).double()
    with one_clear_line("Sequential", "lock"):
        gs.sharpness(model, [BATCH], "adaptive-l2", **QUICK)


def test_keys_that_the_model_does_not_take_are_an_error() -> None:
    with one_clear_line("pixels", "does not take"):
        gs.sharpness(plain.seeded(plain.Product), [{"x": BATCH[0], "pixels": BATCH[0]}], "adaptive-l2", **QUICK)


def test_a_dict_without_labels_is_an_error() -> None:
    batch = {"pixel_values": zoo.batch_of("vit", slice(0, 4))["pixel_values"]}
    with one_clear_line("labels", "loss="):
        gs.sharpness(zoo.make("vit"), [batch], "adaptive-l2", **QUICK)


def test_a_loss_that_is_not_one_number_is_an_error() -> None:
    with one_clear_line("one floating number"):
        loss = lambda outputs, batch: nn.functional.cross_entropy(outputs, batch[1], reduction="none")  # noqa: E731
        gs.sharpness(plain.seeded(plain.Product), [BATCH], "adaptive-l2", loss=loss, **QUICK)


def test_a_loss_that_does_not_see_the_parameters_is_an_error() -> None:
    with one_clear_line("depend", "loss="):
        gs.sharpness(plain.seeded(plain.Product), [BATCH], "adaptive-l2", loss=lambda o, b: o.detach().mean(), **QUICK)
