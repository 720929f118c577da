"""Every family: the blocks that its structure says, all of its attention's symmetries, and nothing false."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import pytest
import torch
import transformers

import geosharp as gs
from families.report import END, PAGE, START, found_in, line, narrow, outputs, row_of
from families.table import FAMILIES
from geosharp.symmetry.block import moved

OLDEST = transformers.__version__.startswith("5.0.")
BROKEN = {"MPT"} if OLDEST else set()
"""transformers 5.0's own MPT overflows in float64."""

pytestmark = pytest.mark.filterwarnings("ignore")
NAMES = [name for name in FAMILIES if name not in BROKEN]


@dataclass(frozen=True)
class Expected:
    """What a family's papers and code say, by hand."""

    layers: int = 2
    """Attention layers, cross attention included."""
    groups: int = 4
    """Key-value heads."""
    width: int = 4
    rotated: int = 0
    key_bias: bool = True
    value_bias: bool = True
    """Values and output have biases."""
    free_query_key: bool = True
    rest: dict[str, int] = field(default_factory=dict)

    def kinds(self) -> dict[str, int]:
        """Label -> copies."""
        heads, still = self.layers * self.groups, self.width - self.rotated
        found = {f"value-output GL({self.width})": heads}
        if self.value_bias:
            found[f"value bias R^{self.width}"] = heads
        if self.free_query_key and self.rotated:
            found["rotary query-key GL(1, C)"] = heads * self.rotated // 2
        if self.free_query_key and still:
            found[f"query-key GL({still})"] = heads
        if self.free_query_key and still and self.key_bias:
            found[f"key bias R^{still}"] = heads
        return {**found, **self.rest}


GLU, RELU, EMBEDDED = {"GLU neurons GL(1)": 40}, {"ReLU neurons GL+(1)": 40}, {"factorized embeddings GL(1)": 8}
PLAIN = Expected()
NO_BIAS = Expected(key_bias=False, value_bias=False)
LLAMA = Expected(groups=2, rotated=4, value_bias=False, rest=GLU)
SEQ2SEQ = Expected(layers=6)
T5 = Expected(layers=6, key_bias=False, value_bias=False)

EXPECTED = {
    **dict.fromkeys(("BERT", "RoBERTa", "XLM-R", "DistilBERT", "MPNet", "GPT-2", "BLOOM", "Falcon alibi", "BioGPT"), PLAIN),
    **dict.fromkeys(("ViT", "DeiT", "DINOv2", "ViT-MSN", "CLIP text", "CLIP vision", "SigLIP text"), PLAIN),
    **dict.fromkeys(("GPT-Neo", "MPT"), NO_BIAS),
    **dict.fromkeys(("LLaMA", "Mistral", "Qwen2", "Gemma", "Gemma2", "Phi3", "Granite", "Cohere"), LLAMA),
    **dict.fromkeys(("BART", "Pegasus", "Marian"), SEQ2SEQ),
    "ALBERT": Expected(layers=1, rest=EMBEDDED),
    "ELECTRA": Expected(rest=EMBEDDED),
    "DeBERTa-v2": PLAIN,  # the bias of the position keys is free, the keys' own is seen by the position queries
    "DeBERTa-v2 shared key": Expected(key_bias=False),
    "ConvBERT": Expected(
        groups=2,
        free_query_key=False,
        rest={"key bias R^4": 4, "query-key channels GL(1)": 16, "convolution-output GL(4)": 4},
    ),
    "MobileBERT": Expected(rest={"ReLU neurons GL+(1)": 80, "factorized embeddings GL(8)": 1}),
    "ModernBERT": Expected(rotated=4, value_bias=False, rest=GLU),
    "RoFormer": Expected(rotated=4, rest=EMBEDDED),
    "BEiT": Expected(key_bias=False),
    "Swin": Expected(layers=2, rest={"query-key GL(4)": 8, "value-output GL(4)": 8}),
    "SwinV2": Expected(free_query_key=False, rest={"ReLU neurons GL+(1)": 1536}),
    "SigLIP": Expected(layers=3),  # and a pooling head
    "SigLIP vision": Expected(layers=3),
    "GPT-NeoX": Expected(rotated=2),
    "GPT-J": Expected(rotated=2, key_bias=False, value_bias=False),
    "OPT": Expected(rest=RELU),
    "Falcon new decoder": Expected(groups=2, rotated=4, value_bias=False),
    "Falcon multi-query": Expected(groups=1, rotated=4, value_bias=False),
    "Qwen3": Expected(groups=2, width=8, free_query_key=False, value_bias=False, rest={"query-key gains GL(1)": 8, **GLU}),
    "Phi": Expected(rotated=2),
    "StableLM": Expected(rotated=2, value_bias=False, rest=GLU),
    "OLMo": Expected(rotated=4, value_bias=False, rest=GLU),
    "OLMo2": Expected(groups=2, free_query_key=False, value_bias=False, rest={"query-key gains GL(1)": 8, **GLU}),
    "Starcoder2": Expected(groups=2, rotated=4),
    "T5": Expected(layers=6, key_bias=False, value_bias=False, rest={"ReLU neurons GL+(1)": 80}),
    "T5 gated": Expected(layers=6, key_bias=False, value_bias=False, rest={"GLU neurons GL(1)": 80}),
    "Whisper": Expected(layers=6, key_bias=False),
}


def test_every_family_has_an_expectation() -> None:
    assert set(EXPECTED) == set(FAMILIES)


@pytest.mark.parametrize("name", NAMES)
def test_the_blocks_are_those_of_the_family(name: str) -> None:
    found = found_in(name)
    labels = dict(label.rsplit(" x ", 1) for label in found.kinds(found.used))
    assert {label: int(count) for label, count in labels.items()} == EXPECTED[name].kinds()
    assert all(verdict.verified for verdict in found.verdicts)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_missed_in_the_attention_modules(name: str) -> None:
    """The null space of each module's Jacobian is what is found and known in it, and is clearly told from the rest."""
    found = found_in(name)
    assert found.completeness
    for module in found.completeness:
        assert module.null == module.explained, module
        assert module.error < 1e-13
        assert module.gap > 1e5
        assert module.complete


@pytest.mark.parametrize("name", NAMES)
def test_the_model_itself_does_not_change_on_the_orbit_and_does_with_one_side_alone(name: str) -> None:
    made, found = narrow(name), found_in(name)
    before, changes = outputs(made.model, made.batch), {}
    for one_sided in (False, True):
        twin = copy.deepcopy(made.model)
        values = {name: parameter.data for name, parameter in twin.named_parameters()}
        generator = torch.Generator().manual_seed(1)
        moved([(block, block.random_element(values, generator)) for block in found.used], values, one_sided=one_sided)
        changes[one_sided] = float((outputs(twin, made.batch) - before).norm() / before.norm())
    assert changes[False] < (1e-12 if row_of(name).tolerance == "1e-13" else 1e-5)
    assert changes[True] > 0.02


def test_the_page_shows_what_is_found() -> None:
    shown = PAGE.read_text().split(START)[1].split(END)[0].strip().splitlines()[2:]
    kept = [text for text in shown if text.split(" | ")[0].removeprefix("| ") not in BROKEN]
    expected = [line(row_of(name)) for name in NAMES]
    if OLDEST:  # which module holds a table of positions, and what is cast to float32 inside, changed between versions
        kept, expected = ([text.rsplit(" | ", 2)[0] for text in lines] for lines in (kept, expected))
    assert kept == expected, "run python -m families.report in tests/ to write it again"


def test_a_model_too_large_for_a_dense_jacobian_gets_one_line() -> None:
    made = narrow("BERT")
    wide = copy.deepcopy(made.model.config)
    wide.hidden_size = 64
    with pytest.raises(gs.SymmetryError, match="at most 4000 parameters"):
        gs.symmetries(type(made.model)(wide).double(), [made.batch], complete=True)
