"""Models without transformers: PyTorch's own layers, timm's and OpenCLIP's ways of writing attention, sequences, gates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as attend

import geosharp as gs
from geosharp.symmetry.discover import Found

pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor")

WIDTH, HEADS, CLASSES = 16, 4, 3
INPUTS = torch.randn(3, 7, WIDTH, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
BATCH = (INPUTS, torch.arange(3))


def noisy(build: Callable[[], nn.Module]) -> nn.Module:
    """With noise on every parameter, in float64."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build().double().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def found_in(build: Callable[[], nn.Module]) -> Found:
    """All blocks with the null space of each attention module; every block verified, and the model's own outputs stay."""
    model = noisy(build)
    found = gs.symmetries(model, [BATCH], complete=True)
    assert all(verdict.verified for verdict in found.verdicts)
    twin = gs.reparametrize(model, scale=3.0)
    with torch.no_grad():
        before, after = model(INPUTS), twin(INPUTS)
    assert float((after - before).norm() / before.norm()) < 1e-12
    return found


class Pooled(nn.Module):
    """Layers, a mean over tokens, a head."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(layers), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(torch.tanh(x).mean(1))


def heads_of(x: Tensor) -> Tensor:
    """(rows, tokens, heads · width) -> (rows, heads, tokens, width)."""
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


class TimmAttention(nn.Module):
    """timm's: one map for all three, norms that may be identities."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.Identity) -> None:
        super().__init__()
        self.num_heads, self.head_dim = HEADS, WIDTH // HEADS
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.q_norm, self.k_norm = norm(self.head_dim), norm(self.head_dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(joined(attend(self.q_norm(q), self.k_norm(k), v)))


class TimmBlock(nn.Module):
    """timm's block: norms before, GELU."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.Identity) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(WIDTH), TimmAttention(norm), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 20), nn.GELU(), nn.Linear(20, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class OpenClipBlock(nn.Module):
    """OpenCLIP's residual attention block: PyTorch's attention, named children in the feed-forward sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential()
        for name, layer in (("c_fc", nn.Linear(WIDTH, 20)), ("gelu", nn.GELU()), ("c_proj", nn.Linear(20, WIDTH))):
            self.mlp.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


class OpenClipAttention(nn.Module):
    """OpenCLIP's own attention: fused parameters in the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.in_proj_weight, self.in_proj_bias = nn.Parameter(torch.randn(3 * WIDTH, WIDTH) / 4), nn.Parameter(torch.zeros(3 * WIDTH))
        self.out_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = nn.functional.linear(x, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        return self.out_proj(joined(attend(heads_of(q), heads_of(k), heads_of(v))))


class GatedAttention(nn.Module):
    """Each feature of the context times a gate of the token's own."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.q_proj, self.k_proj, self.v_proj, self.gate_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        context = joined(attend(heads_of(self.q_proj(x)), heads_of(self.k_proj(x)), heads_of(self.v_proj(x))))
        return self.o_proj(context * torch.sigmoid(self.gate_proj(x)))


class CrossAttention(nn.Module):
    """PyTorch's attention to something else, of other sizes."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.keys, self.values = nn.Linear(WIDTH, options.get("kdim", WIDTH)), nn.Linear(WIDTH, options.get("vdim", WIDTH))
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x, self.keys(x), self.values(x))[0]


def encoder(**options: Any) -> nn.Module:
    return Pooled(nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, 20, batch_first=True, **options), 2))


def attention(layers: int, *, biases: bool = True) -> dict[str, int]:
    found = {"query-key GL(4)": HEADS * layers, "value-output GL(4)": HEADS * layers}
    return {**found, "key bias R^4": HEADS * layers, "value bias R^4": HEADS * layers} if biases else found


RELU = "ReLU neurons GL+(1)"
MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, int]]] = {
    "encoder": (encoder, {**attention(2), RELU: 40}),
    "encoder, GELU, norms first": (lambda: encoder(activation="gelu", norm_first=True), attention(2)),
    "encoder without biases": (lambda: encoder(bias=False), {**attention(2, biases=False), RELU: 40}),
    "timm": (lambda: Pooled(TimmBlock(), TimmBlock()), attention(2)),
    "OpenCLIP": (lambda: Pooled(OpenClipBlock(), OpenClipBlock()), attention(2)),
    "OpenCLIP's own attention": (lambda: Pooled(OpenClipAttention()), attention(1)),
    "cross attention": (lambda: Pooled(CrossAttention()), attention(1)),
    "cross attention of other sizes": (lambda: Pooled(CrossAttention(kdim=12, vdim=10)), attention(1)),
    "an extra key and value": (lambda: Pooled(CrossAttention(add_bias_kv=True)), attention(1, biases=False)),
    "an extra key of zeros": (lambda: Pooled(CrossAttention(add_zero_attn=True)), attention(1, biases=False)),
    "a gate a feature": (
        lambda: Pooled(GatedAttention()),
        {"query-key GL(4)": 4, "key bias R^4": 4, "value-output channels GL(1)": 16},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_symmetry_of_the_attention_is_found(name: str) -> None:
    build, expected = MODELS[name]
    found = found_in(build)
    labels = dict(label.rsplit(" x ", 1) for label in found.kinds(found.used))
    assert {label: int(count) for label, count in labels.items()} == expected
    assert found.completeness
    assert all(module.complete for module in found.completeness), found.completeness


def test_pytorchs_fast_path_and_its_slow_one_are_the_same_model() -> None:
    """Without gradients the encoder layer takes a path that reads its attention's weights itself."""
    model = noisy(encoder).float()
    found = gs.symmetries(model, [(INPUTS.float(), BATCH[1])])
    assert all(verdict.verified for verdict in found.verdicts)


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_norms_of_queries_and_keys_leave_their_gains(norm: Callable[[int], nn.Module]) -> None:
    model = noisy(lambda: Pooled(TimmBlock(norm)))
    found = gs.symmetries(model, [BATCH])
    assert [item.name for item in found.refused] == ["layers.0.attn.query_key"]
    assert "q_norm and k_norm" in found.refused[0].reason
    assert "query-key gains GL(1) x 4" in found.kinds(found.used)


class Sequence(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).mean(1)


SEQUENCES: dict[str, tuple[list[nn.Module], tuple[str, ...], tuple[str, ...]]] = {
    "two linear maps": ([nn.Linear(16, 5), nn.Dropout(), nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3)], ("product GL(5) x 1",), ()),
    "a wide product": ([nn.Linear(16, 20), nn.Linear(20, 3)], (), ("product (400 dimensions)",)),
    "ReLU": ([nn.Linear(16, 5), nn.ReLU(inplace=True), nn.Linear(5, 3)], ("ReLU neurons GL+(1) x 5",), ()),
    "leaky ReLU": ([nn.Linear(16, 5), nn.LeakyReLU(), nn.Linear(5, 3)], ("ReLU neurons GL+(1) x 5",), ()),
    "GELU": ([nn.Linear(16, 5), nn.GELU(), nn.Linear(5, 3)], (), ()),
    "squared ReLU": ([nn.Linear(16, 5), nn.ReLU(), nn.Softplus(), nn.Linear(5, 3)], (), ()),
    "three layers": (
        [nn.Linear(16, 5), nn.ReLU(), nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)],
        ("ReLU neurons GL+(1) x 5",),
        ("ReLU neurons (6 dimensions)",),
    ),
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_neighbours_in_a_sequence(name: str) -> None:
    layers, used, known = SEQUENCES[name]
    found = gs.symmetries(noisy(lambda: Sequence(*layers)), [BATCH])
    assert found.kinds(found.used) == used
    assert found.known_kinds() == known
    assert all(verdict.verified for verdict in found.verdicts)
