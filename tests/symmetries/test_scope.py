"""Claims are judged at their own module; where that would not be enough, on the whole model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import geosharp as gs
from geosharp.objective import Objective
from geosharp.symmetry.scope import Call, Places, visit

WIDTH = 6
INPUTS = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
BATCH = (INPUTS, torch.arange(5) % 3)


class Inner(nn.Module):
    """Two linear maps in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.calls = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.second(self.first(x))


class InPlace(Inner):
    """The same, adding to its own input."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.second(self.first(x.add_(1)))


class Outer(nn.Module):
    """The inner module and a head; and what else `forward` of a subclass does."""

    def __init__(self, inner: type[Inner] = Inner) -> None:
        super().__init__()
        self.inner, self.head = inner(), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(x.clone())))


class Elsewhere(Outer):
    """The first map's weight is used outside of its module too, so the product is not all that it is in."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + nn.functional.linear(x, self.inner.first.weight)[:, :3]


class Unused(Outer):
    """The inner module is not called."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


class Twice(Outer):
    """The inner module is called twice, as shared layers are."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(torch.tanh(self.inner(x)))))


def build(kind: type[Outer], *arguments: type[Inner]) -> Outer:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind(*arguments).double()


PRODUCT = gs.Factors("product", (gs.View("inner.first.weight").T,), (gs.View("inner.second.weight"),))


@pytest.mark.parametrize("model", [build(Outer), build(Outer, InPlace), build(Twice)], ids=["plain", "in place", "twice"])
def test_a_true_claim_is_shown(model: Outer) -> None:
    found = gs.verify(model, [BATCH], symmetries=PRODUCT)
    assert found.verdicts[0].verified
    assert found.verdicts[0].control > 0.1


def test_a_users_hooks_take_part() -> None:
    model = build(Outer)
    model.inner.register_forward_hook(lambda module, args, output: torch.sin(output))
    assert gs.verify(model, [BATCH], symmetries=PRODUCT).verdicts[0].verified
    model.inner.first.register_forward_hook(lambda module, args, output: torch.sin(output))
    with pytest.raises(gs.SymmetryError, match="is not a symmetry"):
        gs.verify(model, [BATCH], symmetries=PRODUCT)


def test_only_what_was_shown_can_be_moved() -> None:
    model = build(Outer)
    twin = gs.reparametrize(model, symmetries=PRODUCT, batches=[BATCH])
    torch.testing.assert_close(twin(INPUTS), model(INPUTS))
    assert not torch.equal(twin.inner.first.weight, model.inner.first.weight)


def test_a_use_outside_of_the_module_is_noticed() -> None:
    with pytest.raises(gs.SymmetryError, match="'product' is not a symmetry of this model"):
        gs.verify(build(Elsewhere), [BATCH], symmetries=PRODUCT)


def test_a_module_that_does_not_run_shows_nothing() -> None:
    with pytest.raises(gs.SymmetryError, match="undecidable on this batch: a one-sided move does not change the outputs"):
        gs.verify(build(Unused), [BATCH], symmetries=PRODUCT)


def test_a_claim_about_one_module_runs_that_module_again_and_the_model_once() -> None:
    model = build(Outer)
    objective = Objective(model)
    passes, names, seen = [0], {"inner.first.weight", "inner.second.weight", "inner.second.bias"}, []

    def run(values: dict[str, Tensor]) -> Tensor:
        passes[0] += 1
        return objective.outputs(values, BATCH)

    def judge(call: Call) -> None:
        with torch.no_grad():
            seen.append(call.evaluate({"inner.second.bias": objective.values["inner.second.bias"] + 1}) - call.output)

    with torch.no_grad():
        judged = visit(Places(objective.clone), run, dict(objective.values), {"inner": (names, judge)})
    assert judged == {"inner"}
    assert passes == [1]
    assert objective.clone.inner.calls == 2
    torch.testing.assert_close(seen[0], torch.ones_like(seen[0]))
    assert model.inner.calls == 0


def test_what_a_judge_raises_reaches_the_caller() -> None:
    model = build(Outer)
    objective = Objective(model)

    def judge(call: Call) -> None:
        raise gs.SymmetryError("no")

    with pytest.raises(gs.SymmetryError, match="no"):
        visit(
            Places(objective.clone), lambda values: objective.outputs(values, BATCH), dict(objective.values),
            {"inner": ({"inner.first.weight"}, judge)},
        )  # fmt: skip
