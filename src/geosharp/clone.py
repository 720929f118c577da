"""A structural clone of a model: modules copied, parameters shared, buffers cloned, set up for measuring.

Nothing of the user's is touched by construction: mode, gradients, buffers and config belong to the clone.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from geosharp.errors import GeosharpError, one_line

_WRAPPERS = {"_orig_mod": "_orig_mod.", "module": "module."}


def unwrap(model: nn.Module) -> tuple[nn.Module, str]:
    """The model inside `torch.compile` and `DataParallel` wrappers, and the prefix of its names in the user's state dict."""
    prefix = ""
    while True:
        inner = next((name for name in _WRAPPERS if _is_wrapper(model, name)), None)
        if inner is None:
            return model, prefix
        prefix += _WRAPPERS[inner]
        model = getattr(model, inner)


def _is_wrapper(model: nn.Module, name: str) -> bool:
    if not isinstance(getattr(model, name, None), nn.Module):
        return False
    if name == "_orig_mod":
        return True
    return isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel))


def structural_clone(model: nn.Module) -> nn.Module:
    """A copy whose parameters are the user's own tensors and whose everything else is its own."""
    memo: dict[int, object] = {id(parameter): parameter for parameter in model.parameters()}
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and not value.is_leaf:
                memo[id(value)] = value.detach().clone()
    try:
        clone = copy.deepcopy(model, memo)
    except Exception as error:  # whatever a user's own attribute raises, the user needs to know which model and why
        raise GeosharpError(
            f"could not copy the structure of {type(model).__name__} ({one_line(error)}); "
            "remove attributes that cannot be copied (locks, open files, generators) before measuring"
        ) from error
    clone.eval()
    for module in clone.modules():
        config = getattr(module, "config", None)
        if config is not None and getattr(config, "use_cache", False) is True:
            config.use_cache = False
        if getattr(module, "gradient_checkpointing", False) is True:
            setattr(module, "gradient_checkpointing", False)  # noqa: B010 - an attribute of some modules only
    return clone


def tied_names(model: nn.Module) -> dict[str, str]:
    """Every further name of a parameter -> its first name; views of one storage that are not the same are refused."""
    first: dict[tuple[object, ...], str] = {}
    storages: dict[tuple[object, ...], str] = {}
    alias: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.is_meta:
            raise GeosharpError(f"expected weights in memory, got parameter {name!r} on the meta device; load the model's weights first")
        storage = (parameter.device, parameter.untyped_storage().data_ptr())
        exact = (*storage, parameter.storage_offset(), tuple(parameter.shape), parameter.stride())
        if parameter.numel() and exact in first:
            alias[name] = first[exact]
        elif parameter.numel() and storages.get(storage) is not None and _overlap(model, storages[storage], parameter):
            raise GeosharpError(f"parameters {storages[storage]!r} and {name!r} share memory in part; geosharp needs them equal or apart")
        else:
            first[exact] = name
            storages.setdefault(storage, name)
    return alias


def _overlap(model: nn.Module, other: str, parameter: Tensor) -> bool:
    from_other = model.get_parameter(other)

    def span(tensor: Tensor) -> tuple[int, int]:
        start = int(tensor.storage_offset())
        return start, start + sum((int(size) - 1) * int(step) for size, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1

    (a, b), (c, d) = span(from_other), span(parameter)
    return a < d and c < b


def install(clone: nn.Module, tensors: Mapping[str, Tensor], alias: Mapping[str, str], dtype: torch.dtype) -> None:
    """Give the clone these weights (shared, not trainable), tied names one tensor, and buffers in the compute dtype."""
    owners = dict(clone.named_modules(remove_duplicate=False))  # a shared module is found under each of its names
    made = {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in tensors.items()}
    for name in (*tensors, *alias):
        owner, _, leaf = name.rpartition(".")
        owners[owner]._parameters[leaf] = made[alias.get(name, name)]
    for module in owners.values():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point() and buffer.dtype != dtype:
                module._buffers[name] = buffer.to(dtype)


def padding_rows(model: nn.Module, alias: Mapping[str, str]) -> dict[str, int]:
    """Embedding weights (by coordinate name) -> the row whose gradient autograd masks."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.padding_idx is not None:
            full = f"{name}.weight".lstrip(".")
            found[alias.get(full, full)] = int(module.padding_idx)
    return found
