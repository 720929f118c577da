"""Adapters as peft writes them: which products are blocks, alone, side by side, and on a base that is merged or measured."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import geosharp as gs
import zoo
from clear_errors import one_clear_line
from geosharp.errors import RankError, SymmetryError
from geosharp.symmetry.block import moved
from symmetries.adapted_models import FLOAT32, KINDS, OPTIONS, QUERY_VALUE, QUIET, adapted, built, drift, parameters, two_adapters, values
from untouched import nothing_touched

pytestmark = QUIET


# Products are blocks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_product_is_found_and_shown(kind: str) -> None:
    model, batch = built(kind)
    expected = tuple(f"adapter {group}" for group in KINDS[kind][2])
    # With experts, every forward pass of peft sets the base's parameters anew.
    with contextlib.nullcontext() if kind == "experts" else nothing_touched(model):
        found = gs.verify(model, [batch])
    assert found.kinds(found.used) == expected
    assert gs.symmetries(model).kinds(v.block for v in gs.symmetries(model).verdicts) == expected
    assert not found.known
    assert all(not name.endswith(("magnitude_vector.default.weight", "bias")) for block in found.used for name in block.parameters)


@pytest.mark.parametrize("kind", KINDS)
def test_the_outputs_are_those_of_the_whole_orbit_and_not_of_one_side(kind: str) -> None:
    model, batch = built(kind)
    rounding = 1e-5 if kind in FLOAT32 else 1e-12
    assert drift(model, gs.reparametrize(model, scale=10.0), batch) < rounding
    for verdict in gs.verify(model, [batch]).verdicts:
        control = copy.deepcopy(model)
        element = verdict.block.random_element(parameters(control), torch.Generator().manual_seed(0))
        moved([(verdict.block, element)], parameters(control), one_sided=True)
        assert drift(model, control, batch) > 100 * rounding


@pytest.mark.parametrize("kind", KINDS)
def test_geodesic_values_are_the_same_on_the_orbit_and_adaptive_ones_are_not(kind: str) -> None:
    model, batch = built(kind)
    twin = gs.reparametrize(model, scale=10.0)
    measures = ("geodesic-inv", "geodesic-mix", "adaptive-l2")
    before, after = values(model, batch, *measures), values(twin, batch, *measures)
    assert before[:2] == pytest.approx(after[:2], rel=1e-5 if kind in FLOAT32 else 1e-9)
    assert before[2] != pytest.approx(after[2], rel=1e-3)


@pytest.mark.parametrize("kind", ["BERT", "embedding", "patches", "DoRA", "saved classifier", "packed base"])
def test_the_worst_point_loads_into_the_model(kind: str) -> None:
    model, batch = built(kind)
    m = gs.sharpness(model, [batch], "geodesic-inv", keep_worst=True, **OPTIONS)
    assert m.value > 1e-3
    before, start = zoo.loss_of(model, batch), copy.deepcopy(parameters(model))
    model.load_state_dict(m.perturbed[0], strict=True)
    assert zoo.loss_of(model, batch) - before == pytest.approx(m.value, rel=1e-9)
    still = {name for name, value in parameters(model).items() if torch.equal(value, start[name])}
    assert still == {name for name, parameter in model.named_parameters() if not parameter.requires_grad}


def test_a_saved_module_is_measured_in_its_active_copy() -> None:
    model, batch = built("saved classifier")
    state = gs.sharpness(model, [batch], "geodesic-inv", keep_worst=True, **OPTIONS).perturbed[0]
    before = model.state_dict()
    changed = {name.partition("classifier.")[2] for name in state if "classifier" in name and not torch.equal(state[name], before[name])}
    assert changed == {"modules_to_save.default.weight", "modules_to_save.default.bias"}


# Several adapters -----------------------------------------------------------------------------------------------------


def test_an_adapter_that_is_not_active_is_no_block_and_no_coordinate() -> None:
    model, batch = two_adapters(["default"])
    found = gs.verify(model, [batch])
    assert found.kinds(found.used) == ("adapter GL(2) x 4",)
    state = gs.sharpness(model, [batch], keep_worst=True, **OPTIONS).perturbed[0]
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items() if ".other." in name)


def test_two_active_adapters_are_two_blocks_and_values_are_invariant_to_both() -> None:
    model, batch = two_adapters(["default", "other"])
    found = gs.verify(model, [batch])
    assert found.kinds(found.used) == ("adapter GL(2) x 4", "adapter GL(3) x 2")
    assert found.known_kinds() == ("adapter exchange (24 dimensions)",)
    twin = gs.reparametrize(model, scale=10.0)
    assert values(twin, batch, "geodesic-inv", "geodesic-mix") == pytest.approx(
        values(model, batch, "geodesic-inv", "geodesic-mix"), rel=1e-9
    )


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_blocks_and_exchanges_are_the_null_space_of_the_layer(scale: float) -> None:
    """GL(2 + 3) has 25 dimensions: 4 and 9 of the blocks, 12 of the exchanges; another scale would be another exchange."""
    model, batch = two_adapters(["default", "other"])
    path = "base_model.model.bert.encoder.layer.0.attention.self.query"
    layer, found = model.get_submodule(path), gs.verify(model, [batch])
    every = parameters(model)
    names = [name for name in every if name.startswith(f"{path}.lora")]
    inputs = torch.randn(40, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    layer.scaling["other"] *= scale

    def made(own: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(layer, {name.removeprefix(f"{path}."): value for name, value in own.items()}, (inputs,))

    slopes = torch.func.jacrev(made)({name: every[name] for name in names})
    jacobian = torch.cat([slopes[name].flatten(2).flatten(0, 1) for name in names], 1)
    claims = [block for block in found.used if block.name.startswith(path)] + [k for k in found.known if k.name.startswith(path)]
    basis = torch.stack(
        [
            torch.cat([change.get(name, torch.zeros_like(every[name])).reshape(-1) for name in names])
            for claim in claims
            for change in claim.tangents(every)
        ],
        1,
    )
    singular = torch.linalg.svdvals(jacobian)
    assert jacobian.shape[1] - int((singular > 1e-10 * singular[0]).sum()) == 25 == int(torch.linalg.matrix_rank(basis))
    seen = float((jacobian @ basis).norm() / jacobian.norm() / basis.norm())
    assert (seen < 1e-14) == (scale == 1.0)


# Merged, switched off, on a base that is measured ---------------------------------------------------------------------


def test_a_merged_adapter_is_none_and_its_base_has_its_blocks() -> None:
    model, batch = built("BERT")
    model.merge_adapter()
    plain = copy.deepcopy(model).unload()
    for one in (model, plain):
        for name, parameter in one.named_parameters():
            parameter.requires_grad_("lora_" not in name)
    expected, found = gs.verify(plain, [batch]), gs.verify(model, [batch])
    assert found.kinds(found.used) == expected.kinds(expected.used) != ()
    assert values(model, batch, "geodesic-inv") == pytest.approx(values(plain, batch, "geodesic-inv"), rel=1e-12)


def test_a_merged_adapter_on_a_frozen_base_leaves_nothing_to_measure() -> None:
    model, batch = built("BERT")
    model.merge_adapter()
    assert not gs.symmetries(model, [batch]).verdicts
    with one_clear_line("expected the loss to depend on the measured parameters"):
        gs.sharpness(model, [batch], "adaptive-l2", **OPTIONS)


def test_an_adapter_that_is_switched_off_is_none() -> None:
    model, batch = built("BERT")
    with model.disable_adapter():
        with one_clear_line("expected trainable parameters, got none", 'params="*"'):
            gs.sharpness(model, [batch], **OPTIONS)
        found = gs.symmetries(model, [batch], params="*")
    assert "adapter" not in {block.kind for block in found.used}
    assert "query-key" in {block.kind for block in found.used}


@pytest.mark.parametrize("options", [{}, {"modules_to_save": ["classifier"]}, {"use_dora": True}])
def test_an_adapter_on_a_measured_base_is_refused_with_the_advice_to_merge(options: dict[str, Any]) -> None:
    model, batch = adapted("bert", target_modules=["query"], layers_to_transform=[0], **options)
    model.requires_grad_(True)
    found = gs.symmetries(model, [batch])
    assert any("layer.1" in block.name for block in found.used), "there are blocks left over, and they are not to be measured alone"
    assert [item.name for item in found.refused if "merge the adapter first" in item.reason] == [
        "base_model.model.bert.encoder.layer.0.attention.self.query.default"
    ]
    for metric in ("inv", "mix"):
        with one_clear_line("layer.0.attention.self.query.default", "merge the adapter first", kind=SymmetryError):
            gs.sharpness(model, [batch], f"geodesic-{metric}", **OPTIONS)
    assert gs.sharpness(model, [batch], "adaptive-l2", **OPTIONS).value > 0
    merged = model.merge_and_unload()
    assert gs.sharpness(merged, [batch], **OPTIONS).value > 0


def test_blocks_of_a_frozen_base_are_listed_as_dropped() -> None:
    model, batch = built("embedding")
    found = gs.symmetries(model, [batch])
    assert {item.name.rpartition(".")[2] for item in found.dropped} == {"query_key", "value_output"}
    assert all("not trainable" in item.reason for item in found.dropped)


@pytest.mark.parametrize("side", ["lora_A", "lora_B"])
def test_a_frozen_factor_drops_its_block(side: str) -> None:
    model, batch = built("BERT")
    for name, parameter in model.named_parameters():
        if side in name:
            parameter.requires_grad_(False)
    found = gs.symmetries(model, [batch])
    assert not found.verdicts
    assert sum(item.name.endswith("default") for item in found.dropped) == 4


@pytest.mark.parametrize("family", ["bert", "vit"])
def test_a_fresh_adapter_is_degenerate(family: str) -> None:
    targets = ["projection"] if family == "vit" else QUERY_VALUE
    model, batch = adapted(family, fresh=True, target_modules=targets, modules_to_save=["classifier"])
    found = gs.symmetries(model, [batch])
    assert {verdict.status for verdict in found.verdicts} == {"degenerate"}
    for metric in ("inv", "mix"):
        with one_clear_line(found.verdicts[0].block.name, "train it first", kind=RankError):
            gs.sharpness(model, [batch], f"geodesic-{metric}", **OPTIONS)
    assert gs.sharpness(model, [batch], "adaptive-l2", **OPTIONS).value > 0
