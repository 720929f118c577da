"""Watch a model and the process: what law 8 says must be bit-identical after any call."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def bits(tensor: Tensor) -> bytes:
    """The exact content of a tensor, nan included."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def plain_attributes(module: nn.Module) -> dict[str, str]:
    """What a module holds besides parameters, buffers and children, in words."""
    return {name: repr(value) for name, value in vars(module).items() if name[:1] != "_" and not isinstance(value, Tensor | nn.Module)}


def picture(model: nn.Module) -> dict[str, Any]:
    """Everything of a model that a measurement could touch."""
    config = getattr(model, "config", None)
    return {
        "weights": {name: bits(p) for name, p in model.named_parameters()},
        "versions": {name: p._version for name, p in model.named_parameters()},
        "identities": {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()},
        "requires_grad": {name: p.requires_grad for name, p in model.named_parameters()},
        "gradients": {name: None if p.grad is None else (id(p.grad), bits(p.grad)) for name, p in model.named_parameters()},
        "buffers": {name: (id(b), bits(b)) for name, b in model.named_buffers()},
        "modes": {name: module.training for name, module in model.named_modules()},
        "attributes": {name: plain_attributes(module) for name, module in model.named_modules()},
        "config": copy.deepcopy(config.to_dict()) if config is not None else None,
    }


def process() -> dict[str, Any]:
    """The global state of the process: random generators and torch's switches."""
    cuda = torch.backends.cuda
    return {
        "python": random.getstate(),
        "numpy": [part.tobytes() if isinstance(part, np.ndarray) else part for part in np.random.get_state()],
        "torch": bits(torch.get_rng_state()),
        "gradient mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "autocast": torch.is_autocast_enabled("cpu"),
        "default dtype": torch.get_default_dtype(),
        "attention": (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()),
    }


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The names of what is not the same."""
    found = []
    for name, value in before.items():
        if isinstance(value, dict):
            found += [f"{name}: {key}" for key in value if after[name].get(key) != value[key]]
        elif after[name] != value:
            found.append(name)
    return found


@contextlib.contextmanager
def nothing_touched(*models: nn.Module) -> Iterator[None]:
    """The models and the process are bit-identical afterwards, also when the body raises."""
    before, state = [picture(model) for model in models], process()
    try:
        yield
    finally:
        changed = differences(state, process())
        for model, was in zip(models, before, strict=True):
            changed += differences(was, picture(model))
        assert not changed, f"changed: {', '.join(changed)}"
