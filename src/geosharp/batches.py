"""Batches as users have them: pairs `(inputs, targets)` or dicts as Hugging Face models take them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from geosharp.errors import GeosharpError
from geosharp.nested import tensors

Batch = Any
"""A pair `(inputs, targets)`, or a mapping of keyword arguments."""


def each_batch(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Checked batches, read once."""
    if isinstance(batches, (Tensor, str, bytes)) or not isinstance(batches, Iterable):
        raise GeosharpError(
            f"expected batches to be an iterable of (inputs, targets) pairs or dicts, got {type(batches).__name__}; "
            "wrap a single batch in a list"
        )
    # Among batches there is no bare tensor; in one batch, a pair, there is.
    if isinstance(batches, Mapping) or (isinstance(batches, (tuple, list)) and any(isinstance(item, Tensor) for item in batches)):
        raise GeosharpError("expected an iterable of batches, got one batch; wrap it in a list: [batch]")
    count = 0
    for batch in batches:
        check_batch(batch, count)
        yield batch
        count += 1
    if count == 0:
        raise GeosharpError("expected at least one batch, got an empty iterable; an exhausted generator can be read only once")


def check_batch(batch: Batch, index: int) -> None:
    """A batch has rows, all of them the same number."""
    if not isinstance(batch, Mapping) and not (isinstance(batch, (tuple, list)) and len(batch) == 2):
        raise GeosharpError(f"expected batch {index} to be a pair (inputs, targets) or a dict, got {type(batch).__name__}")
    if rows(batch) == 0:
        raise GeosharpError(f"expected batch {index} to have rows, got an empty one; drop it or use drop_last=True")


def check_lengths(batch: Batch) -> None:
    """A pair has a target for every input."""
    if isinstance(batch, Mapping) or not isinstance(batch[1], Tensor) or batch[1].ndim == 0:
        return
    inputs, targets = rows(batch), batch[1].shape[0]
    if inputs != targets:
        raise GeosharpError(f"expected as many targets as inputs ({inputs}), got {targets}; give loss= and weight= if this is meant")


def rows(batch: Batch) -> int:
    """The number of examples in a batch: the first dimension of its first tensor."""
    for tensor in tensors(batch):
        if tensor.ndim:
            return tensor.shape[0]
    raise GeosharpError("expected a batch to hold at least one tensor with a batch dimension, got none")


def mapped(value: Any, change: Any) -> Any:
    """The same structure with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: mapped(item, change) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(item, change) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(mapped(item, change) for item in value)
    return value


def ordinary(tensor: Tensor) -> Tensor:
    """The tensor, or a copy where it was made under `torch.inference_mode`: such tensors cannot be differentiated through."""
    return tensor.clone() if tensor.is_inference() else tensor


def moved_to(batch: Batch, device: torch.device, dtype: torch.dtype) -> Batch:
    """The batch on a device, floating tensors in the compute dtype."""

    def move(tensor: Tensor) -> Tensor:
        return ordinary(tensor).to(device=device, dtype=dtype if tensor.is_floating_point() else tensor.dtype)

    return mapped(batch, move)


def part(batch: Batch, start: int, stop: int) -> Batch:
    """Some rows of a batch; tensors without the batch dimension stay whole."""
    count = rows(batch)
    return mapped(batch, lambda tensor: tensor[start:stop] if tensor.ndim and tensor.shape[0] == count else tensor)


FEW = 2


def few(batch: Batch) -> Batch:
    """The first rows of a batch, for what is shown on examples: verification, precision, the noise floor."""
    return part(batch, 0, min(FEW, rows(batch)))


def content_hash(value: Any) -> str:
    """A hash of a batch's content, independent of device."""
    state = hashlib.blake2b(digest_size=20)
    _feed(state, value)
    return state.hexdigest()


def _feed(state: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        state.update(f"{value.dtype}{tuple(value.shape)}".encode())
        flat = value.detach().cpu().contiguous().reshape(-1)
        state.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            state.update(str(key).encode())
            _feed(state, value[key])
    elif isinstance(value, (tuple, list)):
        for item in value:
            _feed(state, item)
    else:
        state.update(repr(value).encode())
