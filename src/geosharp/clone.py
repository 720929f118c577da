"""A structural clone of a model: modules copied, parameters shared, buffers cloned, set up for measuring.

Nothing of the user's is touched by construction: mode, gradients, buffers and config belong to the clone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from geosharp.errors import GeosharpError, one_line

_WRAPPERS = {"_orig_mod": "_orig_mod.", "module": "module."}


def unwrap(model: nn.Module) -> tuple[nn.Module, str]:
    """The model inside `torch.compile` and `DataParallel` wrappers, and the prefix of its names in the user's state dict."""
    prefix = ""
    while True:
        inner = next((name for name in _WRAPPERS if _is_wrapper(model, name)), None)
        if inner is None:
            if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
                raise GeosharpError("expected a model in Python, got one with scripted or traced parts; give the model before torch.jit")
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
        if getattr(module, "max_norm", None) is not None and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            raise GeosharpError(
                "expected embeddings without max_norm: with it the forward pass itself changes the weights; set max_norm=None"
            )
        if isinstance(getattr(module, "base_layer", None), nn.MultiheadAttention) and not (module.merged or module.disable_adapters):
            raise GeosharpError(
                "expected no adapter on torch.nn.MultiheadAttention: peft adds one of its products twice, of which autograd sees one; "
                "merge the adapter first"
            )
        if any(kind.__name__ == "DoraLinearLayer" for kind in type(module).__mro__):
            module.forward = _with_true_gradient(module, module.forward)
    return clone


def _with_true_gradient(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """DoRA detaches the norm that it divides by, so what autograd gives is no derivative of its loss; and it may keep old norms."""

    def run(*args: Any, **kwargs: Any) -> Any:
        getattr(module, "_dora_cache", {}).clear()
        with _Attached():
            return forward(*args, **kwargs)

    return run


class _Attached(TorchFunctionMode):
    """`detach` leaves tensors in the graph."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is Tensor.detach else func(*args, **(kwargs or {}))


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


def padding_rows(model: nn.Module, alias: Mapping[str, str]) -> dict[str, Any]:
    """Embedding weights (by coordinate name) -> the index of the row (a column in an adapter) whose gradient autograd masks."""
    return {alias.get(path, path): index for name, module in model.named_modules() for path, index in _masked(name, module)}


def _masked(name: str, module: nn.Module) -> Iterator[tuple[str, Any]]:
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.padding_idx is not None:
        yield f"{name}.weight".lstrip("."), int(module.padding_idx)
    factors = getattr(module, "lora_embedding_A", None)
    row = getattr(getattr(module, "base_layer", None), "padding_idx", None)
    if isinstance(factors, nn.ParameterDict) and row is not None:
        for adapter in factors:
            yield f"{name}.lora_embedding_A.{adapter}".lstrip("."), (slice(None), int(row))
