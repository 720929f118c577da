"""Law 1: f(g·θ) = f(θ) for every block found or declared; a planted false symmetry is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import geosharp as gs
import plain_networks as plain
import zoo
from geosharp.symmetry.verify import verify_blocks
from laws.kinds import FAMILIES, KINDS, drift, state, weights_moved
from oracles.attention_weights import Family

VECTORS, SEQUENCES = plain.batch_of_vectors(), plain.batch_of_sequences()


# True ones ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [2.0, 30.0])
@pytest.mark.parametrize("name", KINDS)
def test_outputs_are_the_same_all_over_the_orbit(name: str, scale: float) -> None:
    kind = KINDS[name]
    model = kind.model()
    for seed in range(2):
        twin = gs.reparametrize(model, scale=scale, seed=seed, symmetries=kind.symmetries)
        assert weights_moved(model, twin) > 0.1
        assert drift(kind.outputs(model), kind.outputs(twin)) < 1e-13 * scale**2


@pytest.mark.parametrize("name", KINDS)
def test_each_block_alone_leaves_the_outputs_and_its_one_sided_control_does_not(name: str) -> None:
    kind = KINDS[name]
    model = kind.model()
    generator = torch.Generator().manual_seed(3)
    for block in (block for blocks in kind.blocks(model).values() for block in blocks):
        twin, control = copy.deepcopy(model), copy.deepcopy(model)
        element = block.random_element(state(model), generator)
        block.act(state(twin), element)
        block.act(state(control), element, one_sided=True)
        assert weights_moved(model, twin) > 1e-2
        assert drift(kind.outputs(model), kind.outputs(twin)) < 1e-13
        assert drift(kind.outputs(model), kind.outputs(control)) > 1e-4


@pytest.mark.parametrize("name", FAMILIES)
def test_the_found_blocks_are_those_of_another_reading_of_the_model(name: str) -> None:
    """A head moved by hand, from weights read independently, ends where its block moves it."""
    kind = KINDS[name]
    model = kind.model()
    family, values = Family(model), state(model)
    layer, h = family.read(values, 0), 4
    A = torch.eye(h, dtype=torch.float64) + 0.4 * torch.randn(h, h, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    head = slice(h, 2 * h)  # the second of two
    moved = {field: getattr(layer, field).clone() for field in layer.__dataclass_fields__}
    moved["query"][:, head], moved["query_bias"][head] = layer.query[:, head] @ A.inverse(), layer.query_bias[head] @ A.inverse()
    moved["key"][:, head], moved["key_bias"][head] = layer.key[:, head] @ A.T, layer.key_bias[head] @ A.T
    by_hand = copy.deepcopy(model)
    by_hand.load_state_dict({**model.state_dict(), **family.write(0, type(layer)(**moved))})
    assert drift(kind.outputs(model), kind.outputs(by_hand)) < 1e-13
    twin = copy.deepcopy(model)
    block = next(b for blocks in kind.blocks(model).values() for b in blocks if b.kind == "query-key")
    block.act(state(twin), torch.stack([torch.eye(h, dtype=torch.float64), A]))
    assert weights_moved(by_hand, twin) < 1e-14


@pytest.mark.parametrize("name", FAMILIES)
def test_every_head_and_translation_is_found(name: str) -> None:
    kind = KINDS[name]
    labels = set(kind.blocks(kind.model()))
    assert labels == {"query-key GL(4) x 2", "value-output GL(4) x 2", "key bias R^4 x 2", "value bias R^4 x 2"}


def test_the_blocks_of_an_attention_layer_are_all_of_its_symmetries() -> None:
    """The null space of the Jacobian of the layer's outputs has the dimension of the groups: 64 GL + 8 + 8."""
    model = KINDS["bert"].model()
    attention = model.bert.encoder.layer[0].attention
    names = [f"{part}.{leaf}" for part in ("self.query", "self.key", "self.value", "output.dense") for leaf in ("weight", "bias")]
    at = {name: attention.get_parameter(name).detach() for name in names}
    hidden = torch.randn(8, 7, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def outputs(values: dict[str, Tensor]) -> Tensor:
        own = {name.removeprefix("self."): value for name, value in values.items() if name.startswith("self.")}
        mixed = torch.func.functional_call(attention.self, own, (hidden,))[0]
        return torch.nn.functional.linear(mixed, values["output.dense.weight"], values["output.dense.bias"]).reshape(-1)

    with sdpa_kernel(SDPBackend.MATH):
        jacobian = torch.cat([part.flatten(1) for part in torch.func.jacrev(outputs)(at).values()], 1)
    singular = torch.linalg.svdvals(jacobian)
    found = gs.verify(model, [KINDS["bert"].batch])
    nullity = jacobian.shape[1] - int((singular > 1e-9 * singular[0]).sum())
    assert nullity == 80
    assert sum(dimension for _, _, dimension in found.sizes.values()) == nullity


def test_a_weak_block_that_rounding_hides_in_float32_is_shown_in_float64() -> None:
    model = zoo.fresh("bert", layers=2, heads=4, width=32, spread=0.02).eval()
    for name, parameter in model.named_parameters():
        if ".query." in name:
            parameter.data.mul_(0.1)
    batch = zoo.batch_of("bert", slice(0, 6), torch.float32)
    found = gs.verify(model, [batch])
    assert all(verdict.verified for verdict in found.verdicts)
    values = {name: p.data for name, p in model.named_parameters()}
    few = {name: value[:2] for name, value in batch.items() if name != "labels"}
    narrow = verify_blocks(
        lambda v: torch.func.functional_call(model, v, kwargs=few).logits, values, [verdict.block for verdict in found.verdicts]
    )
    assert any(verdict.hidden_by_rounding for verdict in narrow)
