"""Law 2 on the families: a value does not change when a model is rewritten along every block that was found in it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import geosharp as gs
from families.report import narrow, outputs

pytestmark = pytest.mark.filterwarnings("ignore")

CLEAN = ("ALBERT", "ConvBERT", "DeBERTa-v2", "MobileBERT", "RoFormer", "GPT-NeoX", "Falcon new decoder", "StableLM", "SwinV2", "BART")
"""Float64 throughout: rotary and partly rotary heads, grouped queries, joined positions, ReLU and gated neurons, cross attention."""
NARROWED = ("LLaMA", "Qwen3", "OLMo2", "Cohere", "ModernBERT", "T5 gated", "GPT-J")
"""Norms, soft-max or rotations in float32 inside."""
MEASURES = ("geodesic-inv", "geodesic-mix", "geodesic-inv-exact", "average-geodesic-mix", "riemannian-gradient-norm-inv")


def loss(result: Any, batch: dict[str, Tensor]) -> Tensor:
    """A mean over rows of the logits, in their own dtype: the library's own losses cast to float32."""
    logits = result.logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, -2), torch.arange(logits.flatten(0, -2).shape[0]) % logits.shape[-1])


def values(model: torch.nn.Module, batch: dict[str, Tensor], measures: tuple[str, ...]) -> list[float]:
    found = []
    for measure in measures:
        options: dict[str, Any] = {} if "gradient-norm" in measure else {"rho": 0.02}
        options |= {"samples": 2} if "average" in measure else {"steps": 2} if options else {}
        found.append(gs.sharpness(model, [batch], measure, loss=loss, **options).value)
    return found


@pytest.mark.parametrize("name", [*CLEAN, *NARROWED])
def test_values_stay_along_the_orbit_and_adaptive_ones_do_not(name: str) -> None:
    made = narrow(name)
    twin = gs.reparametrize(made.model, scale=3.0, seed=1)
    drift = float((outputs(twin, made.batch) - outputs(made.model, made.batch)).norm() / outputs(made.model, made.batch).norm())
    tolerance = 1e-9 if name in CLEAN else 1e-4
    assert drift < (1e-12 if name in CLEAN else 1e-5)
    before, after = values(made.model, made.batch, MEASURES), values(twin, made.batch, MEASURES)
    assert after == pytest.approx(before, rel=tolerance)
    assert min(map(abs, before)) > 0
    changed = [values(model, made.batch, ("adaptive-l2",))[0] for model in (made.model, twin)]
    assert abs(changed[1] / changed[0] - 1) > 0.01


KNOWN = {"SwinV2": "query-key rotations", "MPNet": "position bias", "BERT": "output mean"}


@pytest.mark.parametrize("name", [*KNOWN, "Qwen3"])
def test_the_record_says_what_is_known_and_not_quotiented(name: str) -> None:
    made = narrow(name)
    found = gs.sharpness(made.model, [made.batch], "geodesic-inv", rho=0.02, steps=1)
    if name in KNOWN:
        assert any(KNOWN[name] in text for text in found.not_invariant_to)
    else:  # what a norm rules out is nowhere claimed
        assert not any("query-key GL" in text for text in (*found.invariant_to, *found.not_invariant_to))
    assert any("value-output" in text for text in found.invariant_to)
