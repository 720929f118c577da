"""Watch a model and the process: what law 8 says must be bit-identical after any call; and models that are easy to touch."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import geosharp as gs
import plain_networks as plain
import zoo


def bits(tensor: Tensor) -> bytes:
    """The exact content of a tensor, nan included."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def plain_attributes(module: nn.Module) -> dict[str, str | bytes]:
    """What a module holds besides parameters, buffers and children, in words or bits; and how many hooks it has."""
    held = {name: value for name, value in vars(module).items() if name[:1] != "_" and not isinstance(value, nn.Module)}
    hooks = {name: str(len(value)) for name, value in vars(module).items() if name.endswith("_hooks") and value is not None}
    return hooks | {name: bits(value) if isinstance(value, Tensor) else repr(value) for name, value in held.items()}


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
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "default dtype": torch.get_default_dtype(),
        "determinism": (torch.are_deterministic_algorithms_enabled(), torch.get_num_threads(), torch.get_float32_matmul_precision()),
        "attention": (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()),
    }


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The names of what is not the same."""
    found = []
    for name, value in before.items():
        if isinstance(value, dict):
            names = value.keys() | after[name].keys()
            found += [f"{name}: {key}" for key in sorted(names) if value.get(key, "absent") != after[name].get(key, "absent")]
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


def in_use(model: nn.Module) -> nn.Module:
    """As in the middle of training: train mode but for one module, gradients on some parameters, one parameter frozen."""
    model.train()
    list(model.modules())[-1].eval()
    generator = torch.Generator().manual_seed(1)
    parameters = list(model.parameters())
    for parameter in parameters[::2]:
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)
    parameters[-1].requires_grad_(False)
    return model


def exact(value: Any) -> Any:
    """A result to the last bit, without the time it took."""
    if isinstance(value, Tensor):
        return bits(value)
    if isinstance(value, gs.Measurement):
        return [repr({**row.to_dict(), "seconds": None}) for row in value.rows], [exact(state) for state in value.perturbed]
    if isinstance(value, nn.Module):
        return exact(value.state_dict())
    if isinstance(value, Mapping):
        return {key: exact(item) for key, item in value.items()}
    return [exact(item) for item in value] if isinstance(value, (list, tuple, gs.Measurements)) else str(value)


@contextlib.contextmanager
def process_restored() -> Iterator[None]:
    """Whatever the body does to random generators and torch's switches is undone."""
    python, numpy, threads = random.getstate(), np.random.get_state(), torch.get_num_threads()
    dtype, strict = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
    with torch.random.fork_rng():
        yield
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(strict)


# Models that are easy to touch ----------------------------------------------------------------------------------------


class Untidy(nn.Module):
    """Everything that a call could move: dropout, running statistics, tied weights, buffers and attributes that forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm, self.drop = nn.Linear(plain.INPUTS, 4), nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.5)
        self.mixer, self.again, self.head = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, plain.CLASSES)
        self.again.weight = self.mixer.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("recent", torch.zeros(()), persistent=False)
        self.history: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.recent.mul_(0.9).add_(0.1 * x.detach().mean())
        self.history.append(len(x))
        x = self.drop(self.norm(self.second(torch.relu(self.first(x)))))
        return self.head(torch.tanh(self.again(torch.tanh(self.mixer(x)))))


def language_model() -> nn.Module:
    """GPT-2 with its embedding and its head tied."""
    config = GPT2Config(vocab_size=zoo.TOKENS, n_embd=8, n_layer=1, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0)
    return zoo.add_noise(GPT2LMHeadModel(config)).double()


def build(name: str) -> tuple[nn.Module, Any, Any]:
    """A model in use, a batch, and its symmetries as a user gives them; the global random state stays."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if name == "untidy":
            return in_use(plain.seeded(Untidy)), plain.batch_of_vectors(8), plain.neuron_block()
        if name == "tied gpt2":
            tokens = zoo.batch_of("gpt2", slice(0, 4))["input_ids"]
            return in_use(language_model()), {"input_ids": tokens, "labels": tokens.clone()}, "all"
        return in_use(zoo.make(name, heads=2, width=8)), zoo.batch_of(name, slice(0, 6)), "all"


class Fuse:
    """Counts, and raises at one count."""

    def __init__(self) -> None:
        self.set(0)

    def set(self, at: int, error: BaseException | None = None) -> None:
        self.at, self.error, self.calls = at, error, 0

    def __call__(self, *_: Any) -> None:
        self.calls += 1
        if self.error is not None and self.calls == self.at:
            raise self.error


def armed(name: str) -> tuple[nn.Module, Any, Any, Fuse]:
    """A model of a class whose forward burns a fuse."""
    model, batch, blocks = build(name)
    fuse, kind = Fuse(), type(model)

    def forward(self: nn.Module, *inputs: Any, **named: Any) -> Any:
        fuse()
        return kind.forward(self, *inputs, **named)

    model.__class__ = type(kind.__name__, (kind,), {"forward": forward})
    return model, batch, blocks, fuse


class Holder(nn.Module):
    """Not a wrapper: a model that calls its only child `module`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, **batch: Tensor) -> Any:
        return self.module(**batch)


class Doubling(plain.Perceptron):
    """Changes its inputs in place, and draws random numbers in eval mode too."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2)) + 0 * torch.rand(())


def never(*_: Any) -> None:
    raise AssertionError("compiled")


def compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend=never)
    return model


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "data parallel": nn.DataParallel,
    "compile": functools.partial(torch.compile, backend=never),
    "both": lambda model: torch.compile(nn.DataParallel(model), backend=never),
    "in place": compiled_in_place,
    "no wrapper": Holder,
}


# Everything that users call -------------------------------------------------------------------------------------------

SEVERAL = ["geodesic-mix", "standard-linf", "average-geodesic-inv-exact", "average-adaptive-linf", "gradient-norm"]
RADII: dict[str, Any] = {"rho": (0.05, 0.1), "steps": 3}


def every_number(F: Any) -> list[Any]:
    """What a pulled-back loss can be asked for."""
    z = 0.05 * F.probe(torch.Generator().manual_seed(0))
    return [F.value(z), F.value_and_grad(z), F.hvp(z, z), F.lift(z), F.project(z), F.state_at(z)]


Call = Callable[[nn.Module, Any, Any], Any]
WITH_BATCHES: dict[str, Call] = {
    "sharpness": lambda model, batch, blocks: gs.sharpness(model, [batch], rho=0.1, steps=3, symmetries=blocks),
    "measure": lambda model, batch, blocks: gs.measure(
        model, [batch], SEVERAL, samples=4, restarts=1, keep_worst=True, symmetries=blocks, **RADII
    ),
    "measure in parts": lambda model, batch, blocks: gs.measure(
        model, [batch], ["geodesic-inv", "riemannian-gradient-norm-mix"], micro_batch=3, solver="auto-pgd", dtype=torch.float32,
        params="*", logit_normalization="std", symmetries=blocks, **RADII,
    ),
    "compare": lambda model, batch, blocks: gs.compare(
        {"held": model, "loaded": lambda: model}, [batch], ["geodesic-inv", "average-standard-l2"], samples=2, autocast=torch.bfloat16,
        symmetries=blocks, **RADII
    ),
    "symmetries": lambda model, batch, blocks: gs.symmetries(model, [batch], symmetries=blocks),
    "verify": lambda model, batch, blocks: gs.verify(model, [batch], symmetries=blocks),
    "pull_back": lambda model, batch, blocks: every_number(gs.pull_back(model, [batch], metric="mix", symmetries=blocks)),
}  # fmt: skip
CALLS: dict[str, Call] = {
    **WITH_BATCHES,
    "symmetries by structure": lambda model, batch, blocks: gs.symmetries(model, symmetries=blocks),
    "reparametrize": lambda model, batch, blocks: gs.reparametrize(model, symmetries=blocks),
}


# Another process ------------------------------------------------------------------------------------------------------


def started(function: Callable[..., list[str]], **environment: str) -> subprocess.Popen[str]:
    """A function of a test file, its lines printed, in a process of its own with as many threads as this one."""
    root, threads = str(Path(__file__).parent), torch.get_num_threads()
    module = f"laws.{function.__module__.rpartition('.')[2]}"
    code = f"import torch; torch.set_num_threads({threads}); import {module} as law; print(*law.{function.__name__}(), sep=chr(10))"
    variables = {**os.environ, "PYTHONPATH": root, "HF_HUB_OFFLINE": "1", **environment}
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=variables)
