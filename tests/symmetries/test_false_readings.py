"""Readings of real models that are wrong in one thing are refused: another order, a missing conjugate, a norm passed over."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

import geosharp as gs
from families.report import narrow
from geosharp.symmetry.attention import reading_of
from geosharp.symmetry.block import Block, Factors
from geosharp.symmetry.features import Features
from geosharp.symmetry.layouts.feed_forward import neuron_block
from geosharp.symmetry.layouts.fused import fused
from geosharp.symmetry.layouts.separate import separate
from geosharp.symmetry.layouts.span_convolution import span_attention
from geosharp.symmetry.site import AttentionSite, Rotary
from geosharp.symmetry.view import View

pytestmark = pytest.mark.filterwarnings("ignore")


def site_of(family: str) -> AttentionSite:
    """The first attention layer of a family, as the layouts read it."""
    modules = dict(narrow(family).model.named_modules())
    for name, module in modules.items():
        parent = modules.get(name.rpartition(".")[0]) if name else None
        if sites := span_attention(name, module, parent) or separate(name, module, parent) or fused(name, module, parent):
            return sites[0]
    raise AssertionError(family)


def blocks_of(site: AttentionSite, kind: str) -> list[Block]:
    found = [block for block in reading_of(site, published=False, is_coordinate=lambda _: True).blocks if block.kind == kind]
    assert found
    return found


def changed(family: str, kind: str, **wrong: object) -> list[Block]:
    return blocks_of(dataclasses.replace(site_of(family), **wrong), kind)  # type: ignore[arg-type]


def other_rotary(family: str) -> list[Block]:
    site = site_of(family)
    assert site.rotary is not None
    return changed(family, "rotary query-key", rotary=dataclasses.replace(site.rotary, interleaved=not site.rotary.interleaved))


def by_the_other_order(family: str, kind: str) -> list[Block]:
    modules = dict(narrow(family).model.named_modules())
    for name, module in modules.items():
        if sites := fused(name, module, modules.get(name.rpartition(".")[0])):
            return blocks_of(sites[-1], kind)
    raise AssertionError(family)


def next_group(family: str) -> list[Block]:
    """Output columns of query heads that belong to the other key-value heads."""
    site = site_of(family)
    groups = tuple(
        Features(View(one.weight.parameter).T.unflatten(0, (2, 2, -1)).permute(1, 0, 2, 3)[:, j]) for j, one in enumerate(site.output)
    )
    return changed(family, "value-output", output=groups)


def conjugate(family: str) -> list[Block]:
    (block,) = changed(family, "rotary query-key")
    assert isinstance(block, Factors)
    mirrored = tuple(dataclasses.replace(view, real=view.imag, imag=view.real) for view in block.right)  # type: ignore[union-attr]
    return [dataclasses.replace(block, right=mirrored)]


def gate_as_the_linear_half(family: str) -> list[Block]:
    mlp = "model.layers.0.mlp"
    gate, down = Features(View(f"{mlp}.gate_proj.weight")), Features(View(f"{mlp}.down_proj.weight").T)
    return [neuron_block(f"{mlp}.neurons", "GLU neurons", gate, down, "linear")]


def without_positions(family: str) -> list[Block]:
    site = site_of(family)
    return changed(family, "query-key", key=site.key[:1], query=site.query[:1], key_shifts_free=(False,))


def signs_on_relu(family: str) -> list[Block]:
    layer = "model.decoder.layers.0"
    first, second = Features(View(f"{layer}.fc1.weight"), View(f"{layer}.fc1.bias")), Features(View(f"{layer}.fc2.weight").T)
    return [neuron_block(f"{layer}.neurons", "ReLU neurons", first, second, "linear")]


FALSE: dict[str, tuple[str, Callable[[str], list[Block]]]] = {
    "LLaMA: GL(h) under rotary positions": ("LLaMA", lambda f: changed(f, "query-key", rotary=None)),
    "LLaMA: interleaved pairs": ("LLaMA", other_rotary),
    "LLaMA: a missing conjugate": ("LLaMA", conjugate),
    "LLaMA: groups the other way round": ("LLaMA", next_group),
    "LLaMA: the gate as the linear half": ("LLaMA", gate_as_the_linear_half),
    "Cohere: pairs of halves": ("Cohere", other_rotary),
    "GPT-NeoX: all of a head rotated": ("GPT-NeoX", lambda f: changed(f, "rotary query-key", rotary=Rotary(4, False))),
    "GPT-NeoX: nothing of a head rotated": ("GPT-NeoX", lambda f: changed(f, "query-key", rotary=None)),
    "GPT-NeoX: queries, keys, values side by side": ("GPT-NeoX", lambda f: by_the_other_order(f, "value-output")),
    "BLOOM: queries, keys, values side by side": ("BLOOM", lambda f: by_the_other_order(f, "query-key")),
    "Qwen2: key bias under rotary positions": ("Qwen2", lambda f: changed(f, "key bias", rotary=None)),
    "Qwen3: GL(h) across norms": ("Qwen3", lambda f: changed(f, "query-key", norm=None, rotary=None)),
    "Qwen3: GL(1, C) across norms": ("Qwen3", lambda f: changed(f, "rotary query-key", norm=None)),
    "OLMo2: GL(1, C) across norms": ("OLMo2", lambda f: changed(f, "rotary query-key", norm=None)),
    "SwinV2: GL(h) where O(h) acts": ("SwinV2", lambda f: changed(f, "query-key", norm=None)),
    "DeBERTa: keys met by positions": ("DeBERTa-v2 shared key", lambda f: changed(f, "key bias", key_shifts_free=(True,))),
    "DeBERTa: positions left out of the stack": ("DeBERTa-v2", without_positions),
    "ConvBERT: GL(h) where only channels are free": ("ConvBERT", lambda f: changed(f, "query-key", only_channels=False)),
    "OPT: signs on ReLU neurons": ("OPT", signs_on_relu),
}


@pytest.mark.parametrize("name", FALSE)
def test_a_wrong_reading_is_refused(name: str) -> None:
    family, build = FALSE[name]
    made = narrow(family)
    with pytest.raises(gs.SymmetryError, match="is not a symmetry of this model"):
        gs.verify(made.model, [made.batch], symmetries=build(family))


@pytest.mark.parametrize("family", sorted({family for family, _ in FALSE.values()}))
def test_the_same_site_read_rightly_is_not(family: str) -> None:
    """What is refused above is refused for what was changed."""
    site, made = site_of(family), narrow(family)
    blocks = reading_of(site, published=False, is_coordinate=lambda _: True).blocks
    found = gs.verify(made.model, [made.batch], symmetries=list(blocks))
    assert all(verdict.verified for verdict in found.verdicts)
