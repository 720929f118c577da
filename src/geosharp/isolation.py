"""What goes on inside depends on none of the caller's modes and leaves no random state behind."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """What goes on inside depends on none of the caller's modes (autocast, inference, no-grad) and leaves no random state behind."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
            stack.enter_context(torch.autocast(device, enabled=False))
        stack.enter_context(_preserved_random_state())
        yield


@contextlib.contextmanager
def _preserved_random_state() -> Iterator[None]:
    """Whatever random numbers are drawn inside, the global generators are bit-identical afterwards."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
