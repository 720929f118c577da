"""The table "On trouble": what goes wrong during a search is an outcome in the record, with the best value kept."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import geosharp as gs
import plain_networks as plain

BATCH = plain.batch_of_vectors()


class Exponential(nn.Module):
    """A loss that overflows float32 a short way from the model."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((plain.CLASSES, plain.INPUTS), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(x @ self.weight.T)


def explosive() -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    inputs = BATCH[0].float()
    return Exponential(), [(inputs, torch.zeros(len(inputs), plain.CLASSES))]


@pytest.mark.parametrize("solver", ["default", "auto-pgd"])
@pytest.mark.parametrize("measure", ["standard-l2", "adaptive-linf"])
def test_a_non_finite_loss_on_the_way_is_diverged_with_the_best_finite_value_kept(measure: str, solver: str) -> None:
    model, batches = explosive()
    found = gs.measure(model, batches, measure, rho=(1.0, 1e4, 1e5), solver=solver, keep_worst=True)
    calm, *wild = found
    assert calm.outcome in ("stationary", "budget")
    for item in wild:
        assert item.outcome == "diverged"
        assert math.isfinite(item.value)
        assert item.value >= calm.value > 0
        assert "float64" in item.advice
        model.load_state_dict(item.perturbed[0], strict=True)
        with torch.no_grad():
            loss = float(nn.functional.mse_loss(model(batches[0][0]), batches[0][1]))
        assert loss - item.base_loss == pytest.approx(item.value, rel=1e-5)


def test_a_diverged_average_says_so_and_is_no_number_that_looks_fine() -> None:
    model, batches = explosive()
    found = gs.sharpness(model, batches, "average-standard-l2", rho=1e4, samples=4)
    assert found.outcome == "diverged"
    assert math.isnan(found.value)


def test_a_list_of_radii_goes_on_after_divergence_and_stays_monotone() -> None:
    model, batches = explosive()
    values = [m.value for m in gs.measure(model, batches, "standard-l2", rho=(0.5, 1.0, 1e4, 1e6))]
    assert values == sorted(values)


@pytest.mark.parametrize("measure", ["standard-l2", "adaptive-l2", "geodesic-inv", "geodesic-mix", "average-adaptive-l2"])
def test_an_effect_under_the_noise_floor_is_below_resolution(measure: str) -> None:
    model = plain.seeded(plain.Product).float()
    options = {"symmetries": plain.product_block()} if "geodesic" in measure else {}
    found = gs.sharpness(model, [BATCH], measure, rho=1e-9, **options)
    assert found.outcome == "below-resolution"
    assert abs(found.value) <= found.rows[0].noise
    assert "zero" in found.advice


def test_float64_resolves_what_float32_does_not() -> None:
    model = plain.seeded(plain.Product)
    found = gs.sharpness(model, [BATCH], "adaptive-l2", rho=1e-9)
    assert found.outcome == "stationary"
    slope = torch.linalg.vector_norm(torch.cat([g.reshape(-1) for g in adaptive_gradient(model)]))
    assert found.value == pytest.approx(1e-9 * float(slope), rel=1e-3)


def adaptive_gradient(model: nn.Module) -> list[Tensor]:
    weights = list(model.parameters())
    found = torch.autograd.grad(cross_entropy(model(BATCH[0]), BATCH[1]), weights)
    return [g * w.detach().abs() for g, w in zip(found, weights, strict=True)]


@pytest.mark.parametrize("rho", [1e-8, 1e-7, 3e-7, 1e-6, 1e-4])
def test_a_loss_that_is_cast_to_float32_inside_is_not_believed_to_more_than_float32(rho: float) -> None:
    """Hugging Face casts logits to float32 in its losses: float64 weights do not make these numbers float64."""
    model = plain.seeded(plain.Product)

    def loss(outputs: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return cross_entropy(outputs.float(), batch[1])

    truth = gs.sharpness(model, [BATCH], "adaptive-l2", rho=rho).value
    found = gs.sharpness(model, [BATCH], "adaptive-l2", rho=rho, loss=loss)
    assert found.outcome == "below-resolution" or found.value == pytest.approx(truth, rel=0.5)


class Scalars(nn.Module):
    """x ↦ w₂w₁x: its mix geodesic is β(t) = β₀(1 + 2bt) with ‖η‖ = √2 β₀|b|, so it loses rank at ‖η‖ = β₀/√2 (math.md 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


PRODUCT, TARGET = 1.2, 3.0
SCALARS: dict[str, Any] = {"symmetries": gs.Factors("scalars", (gs.View("first.weight"),), (gs.View("second.weight"),)), "steps": 3}
ONE_POINT = [(torch.ones(1, 1, dtype=torch.float64), torch.full((1, 1), TARGET, dtype=torch.float64))]


def scalars() -> nn.Module:
    model = Scalars().double()
    with torch.no_grad():
        model.first.weight.fill_(0.8)
        model.second.weight.fill_(PRODUCT / 0.8)
    return model


def test_a_mix_geodesic_that_loses_rank_is_left_manifold_with_the_best_value_before_it() -> None:
    model, lost = scalars(), PRODUCT / math.sqrt(2)
    calm, left = gs.measure(model, ONE_POINT, "geodesic-mix-exact", rho=(0.8 * lost, 1.3 * lost), keep_worst=True, **SCALARS)
    before = ((1 - 0.8) * PRODUCT - TARGET) ** 2 - (PRODUCT - TARGET) ** 2
    assert calm.value == pytest.approx(before, rel=1e-9)
    assert left.outcome == "left-manifold"
    assert left.value >= calm.value * (1 - 1e-12)
    assert math.isfinite(left.value)
    assert "geodesic-inv" in left.advice
    assert left.provenance.geometry["s_min"] == pytest.approx(PRODUCT)
    model.load_state_dict(left.perturbed[0], strict=True)
    with torch.no_grad():
        assert float(nn.functional.mse_loss(model(ONE_POINT[0][0]), ONE_POINT[0][1])) - left.base_loss == pytest.approx(left.value)


def test_inv_never_leaves_the_manifold_where_mix_does() -> None:
    found = gs.sharpness(scalars(), ONE_POINT, "geodesic-inv-exact", rho=1.3 * PRODUCT / math.sqrt(2), **SCALARS)
    assert found.outcome in ("stationary", "budget")
    assert found.value > 0


def test_an_average_over_a_mix_geodesic_that_loses_rank_is_left_manifold() -> None:
    options = {**SCALARS, "samples": 4}
    del options["steps"]
    assert gs.sharpness(scalars(), ONE_POINT, "average-geodesic-mix-exact", rho=3.0, **options).outcome == "left-manifold"


def test_a_search_that_ended_early_is_called_budget_and_not_stationary() -> None:
    found = gs.sharpness(plain.seeded(plain.Product), [BATCH], "standard-l2", rho=3.0, steps=1, tolerance=1e-6)
    assert found.outcome == "budget"
    assert found.rows[0].residual > 1e-6
    assert "steps=" in found.advice
