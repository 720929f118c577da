"""How many of the library's own families have their attention covered, without being listed anywhere.

`python -m families.coverage` (from the folder of the tests; model types as arguments restrict it) prints a table and the
share of each task. Which modules attend is seen by watching a forward pass, not asked of the layouts: a soft-max whose
result is then multiplied, as a matrix, with something.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.models.auto import modeling_auto

import geosharp as gs
from families.table import SURVEYED, at_most, finite
from families.tiny import MAPPINGS, Tiny, tiny
from geosharp.symmetry.discover import Found

ATTENTIVE: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "levit": {"image_size": 128},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
}
"""Hybrids whose first two layers have no attention, and images that end as one token."""

COUNTED = ("covered", "partly", "refused by name", "not recognized", "error")
"""The ways of a family with soft-max attention: the denominator of the shares."""

# Which modules attend --------------------------------------------------------------------------------------------------

_WHOLE = ("scaled_dot_product_attention", "multi_head_attention_forward", "_native_multi_head_attention", "_transformer_encoder_layer_fwd")
_PRODUCTS = ("matmul", "__matmul__", "__rmatmul__", "bmm", "einsum", "baddbmm")
_KEEP = frozenset({
    "dropout", "to", "type", "type_as", "float", "double", "half", "view", "reshape", "transpose", "permute", "contiguous", "flatten",
    "unflatten", "squeeze", "unsqueeze", "expand", "__getitem__", "masked_fill", "mul", "__mul__", "__rmul__", "mT", "cat", "split",
    "chunk", "where", "nan_to_num", "clone", "swapaxes", "movedim", "unbind", "pad", "div", "__truediv__", "repeat", "sum", "sub",
    "__sub__", "__rsub__", "exp",
})  # fmt: skip
"""What may stand between a soft-max and the product with the values."""


class Watch(TorchFunctionMode):
    """The innermost modules with parameters in which soft-max attention happens during one forward pass."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.found: dict[str, None] = {}
        self._stack: list[str] = [""]
        self._weights: dict[int, tuple[Tensor, str]] = {}
        """Results of a soft-max by id, held so that no id is used again, and where they were made."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        sources = [self._weights[id(one)][1] for one in _flat((args, kwargs)) if id(one) in self._weights]
        if name in _WHOLE:
            self.found[self._stack[-1]] = None
        elif name in _PRODUCTS:
            self.found.update(dict.fromkeys(sources))
        elif name in ("softmax", "logsumexp") and result.ndim >= 3:
            self._weights[id(result)] = (result, self._stack[-1])
        elif name in _KEEP and sources:
            self._weights |= {id(one): (one, sources[0]) for one in _flat(result)}
        return result

    def hooked(self) -> Iterator[Callable[[], None]]:
        """What to undo afterwards, one for each hook."""
        for name, module in self.model.named_modules():
            if name and next(module.parameters(), None) is not None:
                yield module.register_forward_pre_hook(lambda *_, name=name: self._stack.append(name)).remove
                yield module.register_forward_hook(lambda *_: self._pop()).remove

    def _pop(self) -> None:
        self._stack.pop()


def attending(made: Tiny) -> list[str]:
    """The modules of a model in which soft-max attention happens on its batch; of those that share all parameters, the first."""
    watch = Watch(made.model)
    undo = list(watch.hooked())
    try:
        with torch.no_grad(), watch:
            outputs = made.model(**made.batch)
    finally:
        for remove in undo:
            remove()
    if not finite(outputs):
        raise ValueError("outputs are not finite")
    first: dict[frozenset[int], str] = {}
    for name in sorted(watch.found, key=list(dict(made.model.named_modules())).index):
        own = made.model.get_submodule(name)
        if any(parameter.requires_grad for parameter in own.parameters()):
            first.setdefault(frozenset(map(id, own.parameters())), name)
    return list(first.values())


def _flat(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _flat(list(value.values()))
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _flat(item)


# What became of them ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Coverage:
    """What became of one family at one task."""

    task: str
    model_type: str
    status: str
    note: str = ""


def classified(task: str, model_type: str, seconds: int = 60, **overrides: Any) -> Coverage:
    """Any failure of a family is a finding here, so nothing is let through."""
    try:
        with at_most(seconds), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = tiny(model_type, task, **{**ATTENTIVE.get(model_type, {}), **overrides})
            modules = attending(made)
    except Exception as problem:
        return Coverage(task, model_type, "not built", _line(problem))
    try:
        with at_most(seconds), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = gs.symmetries(made.model, [made.batch])
            status, note = judged(modules, found)
            return Coverage(task, model_type, status, "; ".join(filter(None, (_otherwise(found, gs.symmetries(made.model)), note))))
    except Exception as problem:
        return Coverage(task, model_type, "error" if modules else "no attention", _line(problem))


def judged(modules: list[str], found: Found) -> tuple[str, str]:
    """The status of a family with these attending modules, and what there is to say about it."""
    verified = {verdict.block.name for verdict in found.verdicts if verdict.verified}
    notes = _refusals(found)
    false = [f"false claim {_short(verdict.block.name)}" for verdict in found.verdicts if verdict.status == "refused"]
    if not modules:
        return "no attention", "; ".join(_unique(false + notes))
    sites = {part.name: {block.name for block in part.readings[0].blocks} for part in found.parts if part.kind == "attention"}
    open_, named, unshown = [], [], []
    for module in modules:
        blocks = [names for site, names in sites.items() if belongs(site, module)]
        if any(names & verified for names in blocks):
            continue
        refused = any(belongs(item.name.rpartition(".")[0], module) for item in found.refused)
        (unshown if any(blocks) else named if refused else open_).append(module)
    said = [f"{label} {_short(name)}" for label, names in (("open", open_), ("nothing shown in", unshown)) for name in names]
    note = "; ".join(_unique(false + said + notes))
    if not (open_ or named or unshown or false):
        return "covered", note
    if named and not open_ and not unshown and not false:
        return "refused by name", note
    return ("not recognized" if len(open_) == len(modules) else "partly"), note


def _otherwise(found: Found, structure: Found) -> str:
    """Parts that structure alone reads otherwise than verification does."""
    pairs = zip(found.parts, structure.parts, strict=True)
    names = [_short(one.name) for one, other in pairs if one.readings[0].blocks != other.readings[0].blocks]
    return f"structure alone differs in {', '.join(_unique(names))}" if names else ""


def belongs(site: str, module: str) -> bool:
    """Whether a site is that of an attending module: its own, the one right around it, or one inside."""
    return module == site or module.rpartition(".")[0] == site != "" or module.startswith(f"{site}.self") or site.startswith(f"{module}.")


def _refusals(found: Found) -> list[str]:
    return [f"refused {_short(item.name)}: {item.reason}" for item in found.refused]


def _short(name: str) -> str:
    """A path without numbers, so that layers look alike."""
    return ".".join("*" if step.isdigit() else step for step in name.split("."))


def _unique(notes: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(notes))


def _line(problem: Exception) -> str:
    return " ".join(f"{type(problem).__name__}: {problem}".split())[:160]


def families(task: str) -> list[str]:
    """The model types of a task, by the library's own tables."""
    return [name for table in MAPPINGS[task] for name in getattr(modeling_auto, table)]


def share(rows: list[Coverage], task: str) -> str:
    """How many of the families that attend are covered."""
    count = Counter(row.status for row in rows if row.task == task)
    total = sum(count[status] for status in COUNTED)
    rest = ", ".join(f"{number} {status}" for status, number in count.items() if status != "covered")
    return f"{task}: {count['covered']} of {total} with attention covered ({100 * count['covered'] / max(total, 1):.0f} %; {rest})"


def main() -> None:
    """Print the table and the share of each task."""
    transformers.logging.set_verbosity_error()
    only = set(sys.argv[1:])
    rows = []
    for task in SURVEYED:
        for model_type in families(task):
            if not only or model_type in only:
                rows.append(classified(task, model_type))
                print(f"{task:24} {model_type:28} {rows[-1].status:16} {rows[-1].note}", flush=True)
    for task in SURVEYED:
        print(share(rows, task))


if __name__ == "__main__":
    main()
