"""Law 2: measure(g·θ) = measure(θ) for every group in `invariant_to`; a measure without the invariance fails the law."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import geosharp as gs
import plain_networks as plain
import zoo
from geosharp import measures
from geosharp.symmetry.block import Factors, Translation
from laws.kinds import FAMILIES, KINDS, SMALL
from oracles.attention_weights import Family

ALL: dict[str, Any] = {"rho": 0.05, "steps": 4, "samples": 2}
EXACT = 1e-9
SEEN = 1e-2
"""A measure without an invariance changes by more than this somewhere (at a radius, or among measures of its sort) ..."""
FAILS = 1e-6
"""... and everywhere by more than this, so that it fails the law clearly."""


QUICK = [name for name in measures.names() if "mix-exact" not in name]
"""An integration a step is slow: those are measured where all groups move together."""


def measured(model: nn.Module, name: str, names: list[str] | None = None, **options: Any) -> gs.Measurements:
    kind = KINDS[name]
    dtype = next(model.parameters()).dtype
    batch = gs_batch(kind.batch, dtype)
    return gs.measure(model, [batch], names or measures.names(), **{**ALL, "symmetries": kind.symmetries, **options})


def gs_batch(batch: Any, dtype: torch.dtype) -> Any:
    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return {name: cast(value) for name, value in batch.items()} if isinstance(batch, dict) else tuple(map(cast, batch))


@functools.cache
def at_home(name: str, which: str = "all") -> gs.Measurements:
    """Measures of the kind's own network: "all", the "quick" ones, or the quick ones by the "published" recipe."""
    if which == "quick":
        return gs.Measurements([m for m in at_home(name) if m.measure in QUICK])
    return measured(KINDS[name].model(), name) if which == "all" else measured(KINDS[name].model(), name, QUICK, symmetries=which)


def changes(first: gs.Measurements, second: gs.Measurements) -> list[tuple[gs.Measurement, float]]:
    """Relative change of every measurement."""
    return [(a, abs(b.value / a.value - 1)) for a, b in zip(first, second, strict=True)]


def test_every_registered_measure_is_in_the_table() -> None:
    assert {m.measure for m in at_home("product")} == set(measures.names())
    claims = {m.measure for m in at_home("product") if m.invariant_to}
    assert claims == {name for name in measures.names() if measures.resolve(name).geometry.metric is not None}


@pytest.mark.parametrize("name", KINDS)
def test_every_measure_respects_each_group_that_it_claims_and_no_other(name: str) -> None:
    """Each group of blocks moves alone. Claimed: equal to 1e-9. A product block that is not claimed: seen."""
    kind = KINDS[name]
    model = kind.model()
    for label, blocks in kind.blocks(model).items():
        twin = gs.reparametrize(model, scale=10.0, seed=1, symmetries=blocks)
        unclaimed = [0.0]
        for m, change in changes(at_home(name, "quick"), measured(twin, name, QUICK)):
            claimed = label in m.invariant_to
            assert claimed != any(label in other for other in m.not_invariant_to), f"{m.measure} says nothing, or two things, of {label}"
            if claimed:
                assert change <= EXACT, f"{m}: {label} changes it by {change:.1e}"
            elif isinstance(blocks[0], Factors):
                assert change > FAILS, f"{m}: {label} is not claimed and changes it by {change:.1e} only"
                unclaimed.append(change)
        assert len(unclaimed) == 1 or max(unclaimed) > SEEN


@pytest.mark.parametrize("name", KINDS)
def test_every_geodesic_measure_claims_all_groups_and_respects_them_together(name: str) -> None:
    kind = KINDS[name]
    model = kind.model()
    labels = set(kind.blocks(model))
    largest: dict[str, float] = {}
    for seed, scale, names in ((0, 3.0, measures.names()), (1, 30.0, QUICK)):
        twin = gs.reparametrize(model, scale=scale, seed=seed, symmetries=kind.symmetries)
        for m, change in changes(at_home(name, "all" if names is not QUICK else "quick"), measured(twin, name, names)):
            if measures.resolve(m.measure).geometry.metric is not None:
                assert set(m.invariant_to) == labels
                assert m.not_invariant_to == gs.symmetries(model, symmetries=kind.symmetries).known_kinds()
                assert change <= EXACT
            elif not m.invariant_to:
                largest[m.measure] = max(change, largest.get(m.measure, 0.0))
    assert all(change > SEEN for change in largest.values()), largest
    assert {"standard-l2", "gradient-norm"} <= set(largest)


@pytest.mark.parametrize("element", [-1.0, -2.5])
def test_a_claimed_line_includes_its_negative_scalars(element: float) -> None:
    """GL(1) has two components: what is claimed for the group must hold on the one without the identity."""
    kind, twin = KINDS["line"], KINDS["line"].model()
    kind.symmetries.act({n: p.data for n, p in twin.named_parameters()}, torch.full((1, 1, 1), element, dtype=torch.float64))
    assert float((kind.outputs(twin) - kind.outputs(kind.model())).abs().max()) < 1e-13
    for m, change in changes(at_home("line", "quick"), measured(twin, "line", QUICK)):
        if m.invariant_to:
            assert change <= EXACT, f"{m}: {element} changes it by {change:.1e}"


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("a", [0.01, 1.0, 100.0])
def test_heads_moved_by_hand_with_gaussian_matrices(name: str, a: float) -> None:
    """A = aG per head, written with an independent reading of the model: condition numbers are what they are."""
    model, kind = KINDS[name].model(), KINDS[name]
    twin, family = copy.deepcopy(model), Family(model)
    layer = family.read(dict(model.named_parameters()), 0)
    moved = {field: getattr(layer, field).detach().clone() for field in layer.__dataclass_fields__}
    generator = torch.Generator().manual_seed(7)
    for head in (slice(0, 4), slice(4, 8)):
        A, B = (a * torch.randn(4, 4, generator=generator, dtype=torch.float64) for _ in range(2))
        for field, matrix in (("query", A.inverse()), ("key", A.T), ("value", B.inverse())):
            moved[field][:, head] = moved[field][:, head] @ matrix
            moved[f"{field}_bias"][head] = moved[f"{field}_bias"][head] @ matrix
        moved["output"][head] = B @ moved["output"][head]
    twin.load_state_dict({**model.state_dict(), **family.write(0, type(layer)(**moved))})
    assert float((kind.outputs(twin) - kind.outputs(model)).abs().max()) < 1e-10
    before = at_home(name, "quick")
    largest: dict[str, float] = {}
    for m, after in zip(before, measured(twin, name, QUICK), strict=True):
        change = abs(after.value / m.value - 1)
        if m.invariant_to:
            assert change <= EXACT
        else:
            largest[m.measure] = max(change, largest.get(m.measure, 0.0))
    assert all(change > SEEN for change in largest.values()), largest


# float32 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert", *SMALL])
def test_in_float32_the_tolerance_follows_the_drift_of_the_function(name: str) -> None:
    kind = KINDS[name]
    model = kind.model().float()
    single = gs_batch(kind.batch, torch.float32)
    twin = gs.reparametrize(model, scale=4.0, seed=2, symmetries=kind.symmetries)

    def outputs(m: nn.Module) -> Tensor:
        with torch.no_grad():
            return m(**single).logits if kind.family else m(single[0])

    drift = float((outputs(twin) - outputs(model)).norm() / outputs(model).norm())
    assert drift < 1e-5
    names = [n for n in QUICK if measures.resolve(n).geometry.metric]
    options = {"rho": 0.2, "samples": 20}
    for m, change in changes(measured(model, name, names, **options), measured(twin, name, names, **options)):
        size = change if not m.measure.startswith("average") else change * abs(m.value) / max(abs(m.value), m.stderr)
        assert size <= max(1e-4, 10 * drift), f"{m}: {size:.1e}"


# Translations, and the published recipe ---------------------------------------------------------------------------------


def shifted(name: str, which: str, size: float = 2.0) -> nn.Module:
    """The same function with another key or value bias."""
    kind = KINDS[name]
    twin = kind.model()
    values = {n: p.data for n, p in twin.named_parameters()}
    for block in (b for blocks in kind.blocks(twin).values() for b in blocks):
        if isinstance(block, Translation) and block.kind == which:
            block.act(values, size * block.random_element(values, torch.Generator().manual_seed(0)))
    assert float((kind.outputs(twin) - kind.outputs(kind.model())).abs().max()) < 1e-12
    return twin


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("which", ["key bias", "value bias"])
def test_shifts_of_biases_are_respected_by_all_and_seen_by_published(name: str, which: str) -> None:
    names = [n for n in QUICK if measures.resolve(n).geometry.metric]
    twin = shifted(name, which)
    for m, after in zip([m for m in at_home(name) if m.measure in names], measured(twin, name, names), strict=True):
        assert any(which in label for label in m.invariant_to)
        assert abs(after.value / m.value - 1) <= EXACT
    before, seen = [m for m in at_home(name, "published") if m.measure in names], []
    for m, after in zip(before, measured(twin, name, names, symmetries="published"), strict=True):
        assert not any(which in label for label in m.invariant_to)
        assert any(which in label for label in m.not_invariant_to)
        seen.append(abs(after.value / m.value - 1))
    assert min(seen) > FAILS
    assert max(seen) > SEEN


@pytest.mark.parametrize("name", FAMILIES)
def test_the_published_recipe_respects_its_product_blocks(name: str) -> None:
    kind = KINDS[name]
    model = kind.model()
    blocks = gs.verify(model, [kind.batch], symmetries="published").used
    twin = gs.reparametrize(model, scale=4.0, seed=1, symmetries=blocks)
    for m, change in changes(at_home(name, "published"), measured(twin, name, QUICK, symmetries="published")):
        if measures.resolve(m.measure).geometry.metric is not None:
            assert change <= EXACT
            assert len(m.invariant_to) == 2


def test_epsilon_is_respected_in_the_canonical_gauge() -> None:
    kind = KINDS["product"]
    model = kind.model()
    twin = gs.reparametrize(model, scale=4.0, seed=1, symmetries=kind.symmetries)
    names = ["geodesic-inv", "geodesic-mix", "average-geodesic-inv"]
    plainly = measured(model, "product", names)
    for (m, change), without in zip(
        changes(measured(model, "product", names, epsilon=0.1), measured(twin, "product", names, epsilon=0.1)), plainly, strict=True
    ):
        assert change <= EXACT
        assert abs(without.value / m.value - 1) > 1e-3


def test_several_batches_and_micro_batches_are_respected_too() -> None:
    kind = KINDS["product"]
    model = kind.model()
    twin = gs.reparametrize(model, scale=4.0, seed=1, symmetries=kind.symmetries)
    batches = [plain.batch_of_vectors(seed=seed) for seed in range(3)]
    options: dict[str, Any] = {"rho": 0.1, "symmetries": kind.symmetries, "micro_batch": 5, "steps": 6}
    first, second = (gs.sharpness(m, batches, "geodesic-inv", **options) for m in (model, twin))
    assert second.per_batch == pytest.approx(first.per_batch, rel=EXACT)


def test_deeper_models_with_a_list_of_radii_and_restarts() -> None:
    model = zoo.make("bert", layers=2, heads=2, width=8)
    twin = gs.reparametrize(model, scale=10.0, seed=3)
    options: dict[str, Any] = {"rho": (0.05, 0.1), "steps": 10, "restarts": 1}
    batch = zoo.batch_of("bert", slice(0, 6))
    first, second = (gs.measure(m, [batch], ["geodesic-inv", "geodesic-mix"], **options) for m in (model, twin))
    for a, b in zip(first, second, strict=True):
        assert b.value == pytest.approx(a.value, rel=EXACT)
        assert b.rows[0].restart_values == pytest.approx(a.rows[0].restart_values, rel=1e-8)
