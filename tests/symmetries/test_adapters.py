"""Adapters as peft writes them: which products are blocks, on which base, and what is refused."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn

import geosharp as gs
import zoo
from clear_errors import one_clear_line
from families.tiny import tiny
from geosharp.errors import RankError, SymmetryError
from geosharp.symmetry.block import Factors, moved
from untouched import nothing_touched

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*Merging is not supported.*"),
]

Model, Batch = nn.Module, Any
OPTIONS: dict[str, Any] = {"rho": 0.1, "steps": 3}
QUERY_VALUE = ["query", "value"]


# Models ---------------------------------------------------------------------------------------------------------------


class Packed(nn.Linear):
    """As quantized layers are: whole numbers for weights, and a scale."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features)
        self.scale = float(linear.weight.detach().abs().max()) / 127
        self.weight = nn.Parameter((linear.weight.detach() / self.scale).round().to(torch.int8), requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


class Convolutions(nn.Module):
    """A grouped one, and one over sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.grouped, self.sequence, self.head = nn.Conv2d(4, 8, (3, 2), groups=2), nn.Conv1d(4, 8, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.grouped(x)).mean((2, 3)) + torch.tanh(self.sequence(x[:, :, 0])).mean(2))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x + self.attention(x, x, x, need_weights=False)[0]).mean(1))


def base(family: str) -> tuple[Model, Batch]:
    generator = torch.Generator().manual_seed(0)
    if family in ("llama", "mixtral"):
        made = tiny(family, "causal-lm", narrow=True)
        return made.model, made.batch
    if family in ("convolutions", "attention"):
        shape = (6, 4, 5, 5) if family == "convolutions" else (6, 5, 8)
        model = Convolutions() if family == "convolutions" else Attention()
        return zoo.add_noise(model.double()), (torch.randn(shape, generator=generator, dtype=torch.float64), torch.arange(6) % 3)
    model, batch = (
        zoo.make("bert" if family == "packed" else family, layers=2, heads=2, width=12),
        zoo.batch_of("bert" if family == "packed" else family, slice(0, 6)),
    )
    if family == "packed":
        for layer in model.bert.encoder.layer:
            layer.attention.self.query = Packed(layer.attention.self.query)
    return model, batch


def stirred(model: Model, size: float = 0.3) -> Model:
    """Noise on all that is trained, as after training: peft begins with products that are 0."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad or "lora_" in name:
                parameter.add_(size * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return model.eval()


def adapted(family: str, *, fresh: bool = False, config: Any = None, **options: Any) -> tuple[PeftModel, Batch]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, batch = base(family)
        model = get_peft_model(model, config or LoraConfig(**{"r": 2, "lora_alpha": 4, **options}), autocast_adapter_dtype=False)
    model = model.double()  # beside packed weights peft keeps float32
    return (model.eval() if fresh else stirred(model)), batch


KINDS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "BERT": ("bert", {"target_modules": QUERY_VALUE}, ("GL(2) x 4",)),
    "LLaMA": ("llama", {"target_modules": ["q_proj", "v_proj"]}, ("GL(2) x 4",)),
    "Conv1D": ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True}, ("GL(2) x 2",)),
    "all linear": ("vit", {"target_modules": "all-linear"}, ("GL(2) x 13",)),
    "embedding": ("bert", {"target_modules": ["word_embeddings"]}, ("GL(2) x 1",)),
    "patches": ("vit", {"target_modules": ["projection"]}, ("GL(2) x 1",)),
    "convolutions": ("convolutions", {"target_modules": ["grouped", "sequence"], "r": 4}, ("GL(2) x 2", "GL(4) x 1")),
    "ranks": ("bert", {"target_modules": QUERY_VALUE, "rank_pattern": {"layer.1.*": 3}}, ("GL(2) x 2", "GL(3) x 2")),
    "rsLoRA": ("bert", {"target_modules": QUERY_VALUE, "use_rslora": True, "r": 3}, ("GL(3) x 4",)),
    "biases": ("bert", {"target_modules": QUERY_VALUE, "lora_bias": True}, ("GL(2) x 4",)),
    "DoRA": ("bert", {"target_modules": QUERY_VALUE, "use_dora": True}, ("GL(2) x 4",)),
    "DoRA Conv1D": ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True, "use_dora": True}, ("GL(2) x 2",)),
    "DoRA embedding": ("bert", {"target_modules": ["word_embeddings"], "use_dora": True}, ("GL(2) x 1",)),
    "DoRA patches": ("vit", {"target_modules": ["projection"], "use_dora": True}, ("GL(2) x 1",)),
    "saved classifier": ("bert", {"target_modules": QUERY_VALUE, "modules_to_save": ["classifier"]}, ("GL(2) x 4",)),
    "experts": ("mixtral", {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}, ("GL(2) x 8",)),
    "packed base": ("packed", {"target_modules": QUERY_VALUE}, ("GL(2) x 4",)),
}
FLOAT32 = ("LLaMA", "experts")
"""Families that cast to float32 inside."""


@functools.cache
def _built(kind: str) -> tuple[PeftModel, Batch]:
    family, options, _ = KINDS[kind]
    return adapted(family, **options)


def built(kind: str) -> tuple[PeftModel, Batch]:
    model, batch = _built(kind)
    return copy.deepcopy(model), batch


def two_adapters(active: list[str]) -> tuple[PeftModel, Batch]:
    model, batch = adapted("bert", target_modules=QUERY_VALUE)
    model.add_adapter("other", LoraConfig(r=3, lora_alpha=7, target_modules=["query"]), autocast_adapter_dtype=False)
    model.base_model.set_adapter(active)
    return stirred(model), batch


def outputs(model: Model, batch: Batch) -> Tensor:
    with torch.no_grad():
        return model(**batch).logits if isinstance(batch, dict) else model(batch[0])


def drift(model: Model, twin: Model, batch: Batch) -> float:
    before = outputs(model, batch)
    return float((outputs(twin, batch) - before).norm() / before.norm())


def parameters(model: Model) -> dict[str, Tensor]:
    return {name: parameter.data for name, parameter in model.named_parameters()}


def values(model: Model, batch: Batch, *measures: str) -> list[float]:
    return [gs.sharpness(model, [batch], measure, **OPTIONS).value for measure in measures]


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


# Merged, switched off, on a base that is measured ----------------------------------------------------------------------


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


# Gradients that autograd does not give -----------------------------------------------------------------------------------


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


# Other methods ----------------------------------------------------------------------------------------------------------

OTHERS: dict[str, tuple[str, Callable[[], Any]]] = {
    "IA3": ("bert", lambda: peft.IA3Config(target_modules=["key", "value"], feedforward_modules=[])),
    "VeRA": ("bert", lambda: peft.VeraConfig(target_modules=QUERY_VALUE, r=4)),
    "LoHa": ("bert", lambda: peft.LoHaConfig(target_modules=QUERY_VALUE, r=2)),
    "AdaLoRA": ("bert", lambda: peft.AdaLoraConfig(task_type="SEQ_CLS", target_modules=QUERY_VALUE, init_r=2, target_r=2, total_step=10)),
    "prompt tuning": ("llama", lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)),
    "KaSA": ("bert", lambda: LoraConfig(target_modules=QUERY_VALUE, r=2, kasa_config=peft.KasaConfig())),
    "block-diagonal": (
        "bert",
        lambda: LoraConfig(target_modules=["query"], r=4, use_bdlora=peft.BdLoraConfig(target_modules_bd_a=["query"], nblocks=2)),
    ),
}


@pytest.mark.parametrize("method", OTHERS)
def test_other_methods_claim_nothing_and_say_so(method: str) -> None:
    family, config = OTHERS[method]
    model, batch = adapted(family, config=config())
    for found in (gs.symmetries(model), gs.symmetries(model, [batch])):
        assert not found.verdicts
    with one_clear_line("symmetry block" if method not in ("AdaLoRA", "KaSA", "block-diagonal") else "adapter", kind=SymmetryError):
        gs.sharpness(model, [batch], **OPTIONS)
    with one_clear_line("expected a model with symmetry blocks"):
        gs.reparametrize(model)
    assert gs.sharpness(model, [batch], "adaptive-l2", **OPTIONS).value > 0


def test_the_loss_of_adalora_sees_what_its_outputs_do_not() -> None:
    """Why the scalings of its factors, free for the outputs, are refused."""
    model, batch = adapted("bert", config=OTHERS["AdaLoRA"][1]())
    twin, state = copy.deepcopy(model), {}
    for name, value in twin.state_dict().items():
        state[name] = value * 2 if "lora_A" in name else value / 2 if "lora_B" in name else value
    twin.load_state_dict(state)
    assert drift(model, twin, batch) < 1e-13
    assert abs(zoo.loss_of(model, batch) - zoo.loss_of(twin, batch)) > 1e-2
    assert all("penalty" in item.reason for item in gs.symmetries(model).refused if item.name.endswith("default"))


def test_a_variant_that_is_no_product_breaks_under_the_group() -> None:
    """The control of the refusals: KaSA has a diagonal between its factors."""
    model, batch = adapted("bert", config=OTHERS["KaSA"][1]())
    layer = "base_model.model.bert.encoder.layer.0.attention.self.query"
    down, up = (gs.View(f"{layer}.{side}.default.weight") for side in ("lora_A", "lora_B"))
    with one_clear_line("not a symmetry", kind=SymmetryError):
        gs.verify(model, [batch], symmetries=Factors("kasa", (down.T,), (up,)))


def test_an_adapter_of_torch_attention_is_refused_because_autograd_sees_half_of_it() -> None:
    model, batch = adapted("attention", target_modules=["attention"])
    with one_clear_line("torch.nn.MultiheadAttention", "twice", "merge the adapter first"):
        gs.sharpness(model, [batch], **OPTIONS)
    factor = next(parameter for name, parameter in model.named_parameters() if "out_proj.lora_A" in name)
    model(batch[0]).square().sum().backward()
    sums = []
    for step in (1e-6, -2e-6):
        factor.data[0, 0] += step
        sums.append(float(outputs(model, batch).square().sum()))
    assert (sums[0] - sums[1]) / 2e-6 == pytest.approx(2 * float(factor.grad[0, 0]), rel=1e-5)


def test_adapters_of_tied_embeddings_that_share_memory_are_refused() -> None:
    made = tiny("llama", "causal-lm", narrow=True, tie_word_embeddings=True)
    config = LoraConfig(r=2, target_modules=["embed_tokens", "lm_head"], ensure_weight_tying=True)
    with torch.random.fork_rng():
        model = get_peft_model(made.model, config, autocast_adapter_dtype=False).eval()
    with one_clear_line("share memory in part"):
        gs.sharpness(model, [made.batch], **OPTIONS)
