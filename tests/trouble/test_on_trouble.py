"""The table "On trouble": weights, blocks and comparisons. What happens is written in the record or said in one line."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import geosharp as gs
import plain_networks as plain
import zoo
from clear_errors import one_clear_line
from geosharp.errors import RankError, SymmetryError

BATCH = [plain.batch_of_vectors()]


def product_with(second: torch.Tensor | None = None, dtype: torch.dtype = torch.float64) -> nn.Module:
    model = plain.seeded(plain.Product)
    if second is not None:
        with torch.no_grad():
            model.second.weight.copy_(second)
    return model.to(dtype)


def geodesic(model: nn.Module, measure: str = "geodesic-inv", **options: object) -> gs.Measurement:
    options = {"rho": 0.1, "symmetries": plain.product_block(), "steps": 6, **options}
    return gs.sharpness(model, [(BATCH[0][0].to(model.first.weight.dtype), BATCH[0][1])], measure, **options)


# A weight that is exactly 0 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("measure", ["adaptive-l2", "adaptive-linf", "geodesic-inv", "geodesic-mix", "average-adaptive-l2"])
def test_a_weight_that_is_exactly_zero_is_counted_and_never_moves(measure: str) -> None:
    model = plain.seeded(plain.Product)
    with torch.no_grad():
        model.head.weight[0, :2] = 0.0
        model.head.bias[1] = 0.0
    searched = {"keep_worst": True, "steps": 6} if not measure.startswith("average") else {}
    found = gs.sharpness(model, BATCH, measure, rho=0.3, symmetries=plain.product_block(), **searched)
    assert found.provenance.geometry["zero_weights"] == 3
    for state in found.perturbed:
        assert not bool(state["head.weight"][0, :2].any())
        assert float(state["head.bias"][1]) == 0.0
        assert bool((state["head.weight"][1:] != model.head.weight[1:]).all())


def test_standard_sharpness_moves_zero_weights_and_counts_none() -> None:
    model = plain.seeded(plain.Product)
    with torch.no_grad():
        model.head.weight[0, :2] = 0.0
    found = gs.sharpness(model, BATCH, "standard-l2", rho=0.3, keep_worst=True)
    assert found.provenance.geometry["zero_weights"] == 0
    assert bool((found.perturbed[0]["head.weight"][0, :2] != 0).all())


# A rank-deficient block -----------------------------------------------------------------------------------------------


def test_a_declared_adapter_with_zero_b_is_refused_as_rank_deficient() -> None:
    model = product_with(torch.zeros(5, 3, dtype=torch.float64))
    with one_clear_line("bottleneck", "s_min", "s_max", "train it first", kind=RankError):
        geodesic(model)


def test_a_block_that_lost_a_column_exactly_is_refused_by_name() -> None:
    model = product_with()
    with torch.no_grad():
        model.second.weight[:, 1] = model.second.weight[:, 0]
    with one_clear_line("bottleneck", "s_min", "s_max", "leave this block out", kind=RankError):
        geodesic(model)


def nearly_deficient() -> nn.Module:
    model = product_with(dtype=torch.float32)
    with torch.no_grad():
        model.second.weight[:, 1] = model.second.weight[:, 0] * (1 + 1e-7)
    return model


def test_a_block_deficient_at_the_stored_precision_names_epsilon_as_the_remedy() -> None:
    with one_clear_line("bottleneck", "s_min", "s_max", "epsilon=", "float32", kind=RankError):
        geodesic(nearly_deficient())


def test_the_epsilon_remedy_works_and_is_recorded() -> None:
    found = geodesic(nearly_deficient(), epsilon=1e-3)
    assert found.value > 0
    assert found.provenance.geometry["epsilon"] == 1e-3


def test_a_dead_head_of_a_found_block_is_named_with_its_number() -> None:
    model = zoo.make("bert")
    with torch.no_grad():
        model.bert.encoder.layer[0].attention.output.dense.weight[:, 8:16] = 0.0
    with one_clear_line("value_output[1]", "s_min", "s_max", kind=RankError):
        gs.sharpness(model, [zoo.batch_of("bert", slice(0, 8))], "geodesic-inv", rho=0.1, steps=3)


def test_a_block_wider_than_its_rows_is_refused() -> None:
    model = plain.seeded(plain.Product, 6)
    with one_clear_line("bottleneck", "width 6", "5 rows", "leave this block out", kind=RankError):
        geodesic(model)


# requires_grad=False --------------------------------------------------------------------------------------------------


def test_a_frozen_weight_is_no_coordinate() -> None:
    model = plain.seeded(plain.Product)
    model.head.weight.requires_grad_(False)
    found = geodesic(model, "adaptive-l2", keep_worst=True)
    assert torch.equal(found.perturbed[0]["head.weight"], model.head.weight)
    assert not torch.equal(found.perturbed[0]["head.bias"], model.head.bias)
    assert found.provenance.geometry["frozen"] == model.head.weight.numel()


def test_a_found_block_with_a_frozen_member_is_dropped_and_listed() -> None:
    model = zoo.make("bert")
    frozen = "bert.encoder.layer.0.attention.self.query.weight"
    model.get_parameter(frozen).requires_grad_(False)
    found = gs.sharpness(model, [zoo.batch_of("bert", slice(0, 8))], "geodesic-inv", rho=0.1, steps=3)
    dropped = found.provenance.geometry["dropped"]
    assert list(dropped) == ["bert.encoder.layer.0.attention.query_key"]
    assert frozen in dropped["bert.encoder.layer.0.attention.query_key"]
    assert not any("query-key" in kind for kind in found.invariant_to)
    assert any("value-output" in kind for kind in found.invariant_to)


def test_a_declared_block_with_a_frozen_member_is_listed_in_the_error_when_nothing_is_left() -> None:
    model = plain.seeded(plain.Product)
    model.second.weight.requires_grad_(False)
    with one_clear_line("bottleneck", "second.weight", "not trainable", "adaptive-l2", kind=SymmetryError):
        geodesic(model)


def test_nothing_trainable_suggests_params() -> None:
    model = plain.seeded(plain.Product).requires_grad_(False)
    with one_clear_line('params="*"', "requires_grad"):
        geodesic(model)
    everything = geodesic(model, params="*")
    assert everything.value == geodesic(plain.seeded(plain.Product)).value
    assert not any(p.requires_grad for p in model.parameters())


# No usable block ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("measure", ["geodesic-inv", "geodesic-mix", "average-geodesic-inv", "riemannian-gradient-norm-inv"])
def test_no_usable_block_for_a_geodesic_measure_is_an_error(measure: str) -> None:
    radius = {} if "gradient" in measure else {"rho": 0.1}
    with one_clear_line("this would equal adaptive-l2", "symmetries=", "allow_no_symmetry=True", kind=SymmetryError):
        gs.sharpness(plain.seeded(plain.Product), BATCH, measure, **radius)


def test_the_override_equals_adaptive_and_claims_nothing() -> None:
    model = plain.seeded(plain.Product)
    found = gs.sharpness(model, BATCH, "geodesic-inv", rho=0.1, allow_no_symmetry=True)
    assert found.value == gs.sharpness(model, BATCH, "adaptive-l2", rho=0.1).value
    assert found.invariant_to == ()


def test_symmetries_none_on_a_model_that_has_some_says_what_the_value_does_not_respect() -> None:
    model, batches = zoo.make("bert"), [zoo.batch_of("bert", slice(0, 8))]
    with one_clear_line("this would equal adaptive-l2", kind=SymmetryError):
        gs.sharpness(model, batches, "geodesic-inv", rho=0.1, symmetries="none")
    found = gs.sharpness(model, batches, "geodesic-inv", rho=0.1, symmetries="none", allow_no_symmetry=True, steps=3)
    assert found.invariant_to == ()
    assert any("query-key" in kind for kind in found.not_invariant_to)


# Comparisons ----------------------------------------------------------------------------------------------------------


def test_a_comparison_of_models_with_different_blocks_is_refused_with_the_difference() -> None:
    whole, frozen = zoo.make("bert"), zoo.make("bert", seed=1)
    frozen.bert.encoder.layer[0].attention.self.query.weight.requires_grad_(False)
    batches = [zoo.batch_of("bert", slice(0, 8))]
    with one_clear_line("whole", "frozen", "query-key GL(8) x 3"):
        gs.compare({"whole": whole, "frozen": frozen}, batches, "geodesic-inv", rho=0.1, steps=3)


def test_a_comparison_of_equal_blocks_takes_models_and_loaders() -> None:
    first, second = plain.seeded(plain.Product), plain.seeded(plain.Product, seed=1)
    measures, options = ["geodesic-inv", "adaptive-l2"], {"rho": 0.1, "steps": 6, "symmetries": plain.product_block()}
    found = gs.compare({"held": first, "loaded": lambda: copy.deepcopy(second)}, iter(BATCH), measures, **options)
    assert list(found) == ["held", "loaded"]
    for name, model in (("held", first), ("loaded", second)):
        assert [m.value for m in found[name]] == [m.value for m in gs.measure(model, BATCH, measures, **options)]


def test_a_comparison_of_nothing_is_refused() -> None:
    with one_clear_line("at least one model"):
        gs.compare({}, BATCH, "adaptive-l2", rho=0.1)
