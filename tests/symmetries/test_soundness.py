"""What a few rows do not show is noticed before a value is given; what stands beside the weights is part of the model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import geosharp as gs
from geosharp.symmetry.layouts.feed_forward import commutes_with

INPUTS = torch.randn(8, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
BATCH = (INPUTS, torch.arange(8) % 3)


class Neurons(nn.Module):
    """ReLU neurons, and another use of them that a switch turns on."""

    def __init__(self, leak: float = 0.0) -> None:
        super().__init__()
        self.fc1, self.fc2, self.leak = nn.Linear(6, 8), nn.Linear(8, 3), leak

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.fc1(x))
        return self.fc2(h) + self.leak * h[:, :3].tanh()


class Heard(Neurons):
    """The neurons leave by an attribute that the model around reads."""

    def forward(self, x: Tensor) -> Tensor:
        self.h = torch.relu(self.fc1(x))
        return self.fc2(self.h)


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Heard()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.inner.h[:, :3].tanh()


class Cut(Neurons):
    """Neurons that are cut off at a size which only later rows of the batch reach."""

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(torch.relu(self.fc1(x)).clamp(max=30.0))


class Two(Neurons):
    """Two outputs, of which the second holds what the first does not show."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        h = torch.relu(self.fc1(x))
        return self.fc2(h), h


def seeded(build: type[nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build().double()


def both(outputs: tuple[Tensor, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(outputs[0], batch[1]) + outputs[1].square().mean()


LARGE = (torch.cat([INPUTS[:2], 300 * INPUTS[2:]]), BATCH[1])
HIDDEN = {
    "an attribute": (Around, BATCH, {}),
    "rows that were not looked at": (Cut, LARGE, {}),
    "a loss of another output": (Two, BATCH, {"loss": both}),
}


@pytest.mark.parametrize("measure", ["geodesic-inv", "average-geodesic-mix", "riemannian-gradient-norm-inv"])
@pytest.mark.parametrize("name", HIDDEN)
def test_a_value_is_not_given_where_the_canonical_form_has_another_loss(name: str, measure: str) -> None:
    build, batch, options = HIDDEN[name]
    radius = {} if "gradient" in measure else {"rho": 0.1}
    with pytest.raises(gs.SymmetryError, match="expected the model's loss"):
        gs.sharpness(seeded(build), [batch], measure, **radius, **options)
    assert gs.sharpness(seeded(build), [batch], "adaptive-l2", rho=0.1, **options).value > 0


def test_a_switch_on_the_same_weights_is_another_model() -> None:
    model = seeded(Neurons)
    assert gs.sharpness(model, [BATCH], "geodesic-inv", rho=0.1).invariant_to == ("ReLU neurons GL+(1) x 8",)
    twin = copy.deepcopy(model)
    twin.leak = 1.0
    for other in (twin, model):
        other.leak = 1.0
        with pytest.raises(gs.SymmetryError, match="expected a usable symmetry block"):
            gs.sharpness(other, [BATCH], "geodesic-inv", rho=0.1)


@pytest.mark.parametrize(
    ("activation", "kind"),
    [
        (nn.ReLU(), "positive"), (nn.LeakyReLU(), "positive"), (nn.Identity(), "linear"), (nn.ReLU6(), "nothing"), (nn.GELU(), "nothing"),
        (nn.Hardtanh(-20, 20), "nothing"), (nn.Tanh(), "nothing"), (lambda x: x.clamp(0, 1e4), "nothing"),
        (nn.ReLU(inplace=True), "positive"),
    ],
)  # fmt: skip
def test_what_passes_an_activation(activation: nn.Module, kind: str) -> None:
    assert commutes_with(activation) == kind


def test_a_parametrized_projection_leaves_the_rest_of_its_layer() -> None:
    layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
    torch.nn.utils.parametrizations.weight_norm(layer.linear1)
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(12, 3)).double()
    found = gs.symmetries(model, [(torch.stack([INPUTS, INPUTS.flip(0)], 1), BATCH[1])])
    assert "query-key GL(3) x 2" in found.kinds(found.used)


def test_embeddings_that_change_in_the_forward_pass_are_refused_and_not_touched() -> None:
    model = nn.Sequential(nn.Embedding(5, 6, max_norm=0.1), nn.Flatten(), nn.Linear(12, 3))
    before = model[0].weight.detach().clone()
    with pytest.raises(gs.GeosharpError, match="max_norm"):
        gs.symmetries(model, [(torch.zeros(4, 2, dtype=torch.long), torch.zeros(4, dtype=torch.long))])
    assert torch.equal(model[0].weight, before)


class Listed(Neurons):
    """A weight in a list beside its parameter: a copy of the model has the copy's module and the original's list."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = [self.fc1.weight]

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(torch.relu(nn.functional.linear(x, self.kept[0], self.fc1.bias)))


@pytest.mark.parametrize("measure", ["standard-l2", "geodesic-inv"])
def test_a_weight_that_a_copy_cannot_replace_is_refused(measure: str) -> None:
    model = seeded(Listed)
    model.kept = [model.fc1.weight]
    with pytest.raises(gs.GeosharpError, match=r"expected the forward pass to reach 'fc1.weight' through its module only"):
        gs.sharpness(model, [BATCH], measure, rho=0.1)
    closed = seeded(Neurons)
    closed.forward = lambda x: Neurons.forward(closed, x)
    with pytest.raises(gs.GeosharpError, match="through its module only"):
        gs.sharpness(closed, [BATCH], measure, rho=0.1)


@pytest.mark.filterwarnings("ignore")
def test_scripted_models_are_refused_in_one_line() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)).double())
    for call in (gs.symmetries, gs.reparametrize):
        with pytest.raises(gs.GeosharpError, match=r"before torch\.jit"):
            call(scripted)
