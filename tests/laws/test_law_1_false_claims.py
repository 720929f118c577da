"""Law 1, continued: planted false symmetries are refused, by name, wherever they hide."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import geosharp as gs
import plain_networks as plain
import zoo
from clear_errors import one_clear_line
from geosharp.errors import SymmetryError
from geosharp.objective import Objective
from geosharp.symmetry.block import Block, Factors, Translation
from geosharp.symmetry.verify import verify_blocks
from laws.kinds import KINDS, drift, state, weights_moved

VECTORS, SEQUENCES = plain.batch_of_vectors(), plain.batch_of_sequences()


class NormBetween(nn.Module):
    """Queries and keys of length 1 (a norm between projections and logits): O(h) acts, GL(h) does not."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(plain.INPUTS, width, bias=False) for _ in range(3))
        self.head = nn.Linear(width, plain.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        query, key = (nn.functional.normalize(part(x), dim=-1) for part in (self.query, self.key))
        return self.head(torch.tanh((3 * query @ key.mT).softmax(-1) @ self.value(x)).mean(1))


class SharedQueryKey(nn.Module):
    """One matrix for queries and keys, under two names."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.query, self.value = (nn.Linear(plain.INPUTS, width, bias=False) for _ in range(2))
        self.key = self.query
        self.head = nn.Linear(width, plain.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        query, key = self.query(x), self.key(x)
        return self.head(torch.tanh((query @ key.mT).softmax(-1) @ self.value(x)).mean(1))


def product_of(left: str, right: str, name: str = "false one") -> Factors:
    return Factors(name, (gs.View(f"{left}.weight").T,), (gs.View(f"{right}.weight").T,))


def bert_head(layer: str, heads: tuple[int, int], head: int) -> gs.View:
    return gs.View(f"bert.encoder.layer.0.attention.{layer}.weight").unflatten(0, heads)[head]


def other_head() -> Factors:
    """Queries of head 0 with keys of head 1."""
    query, key = bert_head("self.query", (2, 4), 0).T, bert_head("self.key", (2, 4), 1).T
    bias = gs.View("bert.encoder.layer.0.attention.self.query.bias")[0:4]
    return Factors("false one", (query, bias), (key,))


def strided_heads() -> Factors:
    """Head i as the rows i, i + 2, i + 4, i + 6, which is another order of the same rows."""
    rows = [
        gs.View(f"bert.encoder.layer.0.attention.self.{part}.weight").unflatten(0, (4, 2)).permute(1, 2, 0) for part in ("query", "key")
    ]
    bias = gs.View("bert.encoder.layer.0.attention.self.query.bias").unflatten(0, (4, 2)).mT[:, None, :]
    return Factors("false one", (rows[0], bias), (rows[1],))


def untransposed_output() -> Factors:
    """The rows of the output matrix instead of its columns: of the same shape where it is square."""
    value = gs.View("bert.encoder.layer.0.attention.self.value.weight").unflatten(0, (2, 4)).mT
    bias = gs.View("bert.encoder.layer.0.attention.self.value.bias").unflatten(0, (2, 1, 4))
    return Factors("false one", (value, bias), (gs.View("bert.encoder.layer.0.attention.output.dense.weight").unflatten(0, (2, 4)).mT,))


def rows_of_a_transposed_linear() -> Factors:
    """GPT-2's fused (in, out) weight read as (out, in): square slices, so that every shape fits."""
    fused = gs.View("transformer.h.0.attn.c_attn.weight")
    query, key = (fused[:, part : part + 8].mT.unflatten(1, (2, 4)).permute(1, 0, 2) for part in (0, 8))
    return Factors("false one", (query, gs.View("transformer.h.0.attn.c_attn.bias")[0:8].unflatten(0, (2, 1, 4))), (key,))


def missing_query_bias() -> Factors:
    """A block without its bias row: the bias would have to move along."""
    query, key = (gs.View(f"bert.encoder.layer.0.attention.self.{part}.weight").unflatten(0, (2, 4)).mT for part in ("query", "key"))
    return Factors("false one", (query,), (key,))


def unheard_key_bias_of_rotary() -> Translation:
    """With rotary positions the loss does see the key bias."""
    return Translation("false one", gs.View("key.bias"), control=gs.View("query.bias"))


def dense_on_neurons() -> Factors:
    """GL(4) over all hidden neurons, as if there were no ReLU."""
    return Factors("false one", (gs.View("first.weight").T, gs.View("first.bias")), (gs.View("second.weight"),))


FALSE: dict[str, tuple[Any, Any, Any]] = {
    "GL(4) on ReLU neurons": (lambda: plain.seeded(plain.Perceptron), VECTORS, dense_on_neurons()),
    "GL(1), signs included, on ReLU neurons": (
        lambda: plain.seeded(plain.Perceptron), VECTORS, plain.neuron_block("linear", "false one"),
    ),
    "a missing conjugate": (
        lambda: plain.seeded(plain.RotaryAttention), SEQUENCES, plain.rotary_block(conjugate_key=True, name="false one"),
    ),
    "GL(4) under rotary positions": (lambda: plain.seeded(plain.RotaryAttention), SEQUENCES, product_of("query", "key")),
    "key bias under rotary positions": (lambda: plain.seeded(plain.RotaryAttention), SEQUENCES, unheard_key_bias_of_rotary()),
    "GL(4) across a norm": (lambda: plain.seeded(NormBetween), SEQUENCES, product_of("query", "key")),
    "queries and keys of different heads": (KINDS["bert"].build, KINDS["bert"].batch, other_head()),
    "heads in another order": (KINDS["bert"].build, KINDS["bert"].batch, strided_heads()),
    "a slice that is not transposed": (KINDS["bert"].build, KINDS["bert"].batch, untransposed_output()),
    "a transposed linear read as a plain one": (KINDS["gpt2"].build, KINDS["gpt2"].batch, rows_of_a_transposed_linear()),
    "a bias left out": (KINDS["bert"].build, KINDS["bert"].batch, missing_query_bias()),
}  # fmt: skip


@pytest.mark.parametrize("name", FALSE)
def test_a_planted_false_symmetry_is_refused_by_name(name: str) -> None:
    build, batch, block = FALSE[name]
    with one_clear_line("'false one'", "not a symmetry", kind=SymmetryError):
        gs.verify(build(), [batch], symmetries=block)
    with one_clear_line("'false one'", kind=SymmetryError):
        gs.sharpness(build(), [batch], "geodesic-inv", rho=0.1, steps=2, symmetries=block)


def test_what_is_left_across_a_norm_is_orthogonal() -> None:
    """The planted GL claim is refused although O(h) does act: the elements of a verification are no rotations."""
    model = plain.seeded(NormBetween)
    twin = copy.deepcopy(model)
    Q = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0]
    product_of("query", "key").act(state(twin), Q[None])
    assert weights_moved(model, twin) > 0.1
    with torch.no_grad():
        assert drift(model(SEQUENCES[0]), twin(SEQUENCES[0])) < 1e-13


@pytest.mark.parametrize("shared", ["module", "parameter"])
def test_queries_and_keys_that_are_one_matrix_are_refused(shared: str) -> None:
    model = plain.seeded(SharedQueryKey)
    if shared == "parameter":
        model.key = nn.Linear(plain.INPUTS, 4, bias=False)
        model.key.weight = model.query.weight
    with one_clear_line("false one", "query.weight", "disjoint", kind=SymmetryError):
        gs.verify(model, [SEQUENCES], symmetries=product_of("query", "key"))


def per_head_blocks(model: nn.Module) -> list[Block]:
    """Every head of every layer as a block of its own, and the translations: many true claims."""
    found: list[Block] = []
    for block in gs.symmetries(model).verdicts:
        claim = block.block
        if isinstance(claim, Translation):
            found.append(claim)
            continue
        whole = claim.with_carried()
        heads = whole.read(state(model))[0].shape[0]
        for head in range(heads):
            sides = (tuple(view[head] for view in side) for side in (whole.left, whole.right))
            found.append(Factors(f"{claim.name}[{head}]", *sides, kind=claim.kind))
    return [block for block in found if isinstance(block, Factors)]


POOLER = Factors("false one", (gs.View("bert.pooler.dense.weight").T, gs.View("bert.pooler.dense.bias")), (gs.View("classifier.weight"),))


@pytest.mark.parametrize("place", [0, 7, 16])
def test_one_false_block_among_many_true_ones_is_the_only_one_refused(place: int) -> None:
    model = zoo.make("bert", layers=2, heads=4, width=16)
    blocks = per_head_blocks(model)
    assert len(blocks) == 16
    blocks.insert(place, POOLER)  # a tanh lies between
    objective = Objective(model)
    batch = zoo.batch_of("bert", slice(0, 2))
    verdicts = verify_blocks(lambda values: objective.outputs(values, batch), {**objective.values}, blocks)
    assert [verdict.block.name for verdict in verdicts if not verdict.verified] == ["false one"]
    assert verdicts[place].status == "refused"
    with one_clear_line("'false one'", kind=SymmetryError):
        gs.verify(model, [batch], symmetries=blocks)


class TwoBranches(nn.Module):
    """A product of two maps, and beside it a perceptron that speaks `softly`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(plain.INPUTS, 3), nn.Linear(3, plain.CLASSES)
        self.inner, self.outer = nn.Linear(plain.INPUTS, 3), nn.Linear(3, plain.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) + self.outer(torch.tanh(self.inner(x)))


@pytest.mark.parametrize("softly", [1.0, 1e-2, 1e-4])
def test_a_false_block_that_matters_little_cannot_hide_behind_a_true_one_that_matters_much(softly: float) -> None:
    model = plain.seeded(TwoBranches)
    with torch.no_grad():
        model.outer.weight.mul_(softly)
    false = Factors("false one", (gs.View("inner.weight").T, gs.View("inner.bias")), (gs.View("outer.weight"),))
    gs.verify(model, [VECTORS], symmetries=plain.product_block())
    with one_clear_line("'false one'", kind=SymmetryError):
        gs.verify(model, [VECTORS], symmetries=false)
    with one_clear_line("'false one'", kind=SymmetryError):
        gs.verify(model, [VECTORS], symmetries=[plain.product_block(), false])
