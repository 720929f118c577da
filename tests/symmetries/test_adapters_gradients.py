"""Gradients that autograd does not give: norms that DoRA detaches, and padding columns that embeddings mask."""

from __future__ import annotations

import pytest
import torch

import geosharp as gs
from symmetries.adapted_models import OPTIONS, QUIET, Batch, Model, built, drift, outputs, values

pytestmark = QUIET


def slopes(model: Model, batch: Batch, metric: str | None) -> tuple[tuple[float, float], tuple[float, float]]:
    """First and second derivative in a random direction, by autograd and from values alone."""
    F = gs.pull_back(model, [batch], metric=metric)
    along = F.probe(torch.Generator().manual_seed(1))
    along /= along.norm()
    value, gradient = F.value_and_grad(F.zero())
    up, down = ([F.value(sign * h * along) for h in (1e-5, 1e-3)] for sign in (1, -1))
    numeric = ((up[0] - down[0]) / 2e-5, (up[1] - 2 * value + down[1]) / 1e-6)
    return (float(gradient @ along), float(along @ F.hvp(F.zero(), along))), numeric


@pytest.mark.parametrize("metric", ["inv", "mix", None])
@pytest.mark.parametrize("kind", ["BERT", "DoRA", "DoRA Conv1D", "DoRA embedding", "DoRA patches"])
def test_gradients_are_the_derivatives_of_the_values(kind: str, metric: str | None) -> None:
    """DoRA divides by a norm that it detaches."""
    exact, numeric = slopes(*built(kind), metric)
    assert exact[0] == pytest.approx(numeric[0], rel=1e-6, abs=1e-8)
    assert exact[1] == pytest.approx(numeric[1], rel=1e-3, abs=1e-5)


def test_norms_that_dora_keeps_are_not_used_at_other_points() -> None:
    from peft.helpers import DoraCaching

    model, batch = built("DoRA")
    expected = values(model, batch, "geodesic-inv", "adaptive-l2")
    with DoraCaching():
        outputs(model, batch)
        assert values(model, batch, "geodesic-inv", "adaptive-l2") == expected


@pytest.mark.parametrize("metric", ["inv", "mix", None])
@pytest.mark.parametrize("kind", ["embedding", "DoRA embedding"])
def test_the_padding_column_follows_and_is_no_coordinate(kind: str, metric: str | None) -> None:
    """Autograd masks the gradient of what token 0 looks up."""
    model, batch = built(kind)
    batch = {**batch, "input_ids": batch["input_ids"].clone()}
    batch["input_ids"][:, ::3] = 0
    exact, numeric = slopes(model, batch, metric)
    assert exact == pytest.approx(numeric, rel=1e-4, abs=1e-7)
    twin = gs.reparametrize(model, scale=10.0)
    assert drift(model, twin, batch) < 1e-12
    if metric is not None:
        assert values(twin, batch, f"geodesic-{metric}") == pytest.approx(values(model, batch, f"geodesic-{metric}"), rel=1e-9)
        state = gs.sharpness(model, [batch], f"geodesic-{metric}", keep_worst=True, **OPTIONS).perturbed[0]
        name = next(name for name in state if "lora_embedding_A" in name)
        assert torch.allclose(state[name][:, 0], model.state_dict()[name][:, 0], rtol=1e-9, atol=0)
        assert not torch.allclose(state[name], model.state_dict()[name], rtol=1e-9, atol=0)
