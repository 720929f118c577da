"""What is listed as known is there: the model's outputs do not see its directions, and do see others of the same size."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import Tensor

from families.report import found_in, narrow, outputs

pytestmark = pytest.mark.filterwarnings("ignore")

MEAN, TABLE = "output mean", "position bias"
KNOWN = {
    **dict.fromkeys(("BERT", "RoBERTa", "XLM-R", "ALBERT", "ELECTRA", "DeBERTa-v2", "DeBERTa-v2 shared key", "RoFormer"), (MEAN,)),
    "MPNet": (MEAN, TABLE),
    "ConvBERT": (MEAN, "kernel channels", "kernel shift", "separable convolution"),
    "MobileBERT": ("output bias",),
    **dict.fromkeys(("BEiT", "Swin", "T5", "T5 gated"), (TABLE,)),
    "SwinV2": ("query-key scales", "query-key rotations"),
}
SOME = 6
"""Directions tried of each."""


def slope(name: str, change: dict[str, Tensor], step: float = 1e-4) -> float:
    """How fast the outputs of the whole model change in a direction."""
    made, ends = narrow(name), []
    for sign in (-1, 1):
        model = copy.deepcopy(made.model)
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for path, part in change.items():
                parameters[path].add_(sign * step * part)
        ends.append(outputs(model, made.batch))
    return float((ends[1] - ends[0]).norm()) / (2 * step)


@pytest.mark.parametrize("name", KNOWN)
def test_outputs_do_not_see_what_is_known(name: str) -> None:
    assert {known.kind for known in found_in(name).known} == set(KNOWN[name])
    values = {path: parameter.detach() for path, parameter in narrow(name).model.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    for known in found_in(name).known:
        every = list(known.tangents(values))
        assert len(every) == known.dimension
        for change in itertools.islice(every, 0, None, max(1, len(every) // SOME)):
            size = float(torch.stack([part.norm() for part in change.values()]).norm())
            unit = {path: part / size for path, part in change.items()}
            spread = sum(part.numel() for part in unit.values()) ** 0.5
            other = {path: torch.randn(part.shape, generator=generator, dtype=torch.float64) / spread for path, part in unit.items()}
            seen, control = slope(name, unit), slope(name, other)
            assert seen <= 1e-3 * control, f"{known.name}: {seen:.1e} against {control:.1e}"
