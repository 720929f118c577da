"""Where in a model a claim can be judged: the innermost module that uses its parameters, on the inputs that it really gets.

One pass through the model visits every such module. While it runs, each claimed parameter is there only inside its own
module and NaN everywhere else, so that a use outside shows in the outputs; then the claim is judged on the whole model
instead. Moved weights exist for one module at a time: there is never a second copy of the model's.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from geosharp.errors import GeosharpError
from geosharp.nested import tensors

Run = Callable[[dict[str, Tensor]], Tensor]
"""The model's outputs on the verification examples, as one tensor, for given parameter values."""

Evaluate = Callable[[Mapping[str, Tensor]], Tensor]
"""The outputs of a module (or of the whole model) with some parameters replaced."""


@dataclass(frozen=True)
class Call:
    """One call of a module, on its real inputs: it can be repeated with other parameters, or on other inputs."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Tensor
    """Its outputs as one vector."""
    installed: Callable[[Mapping[str, Tensor]], contextlib.AbstractContextManager[None]]
    """Within it some parameters are replaced."""

    def evaluate(self, moved: Mapping[str, Tensor]) -> Tensor:
        """The outputs with some parameters replaced."""
        with self.installed(moved):
            return flat(self.module(*self.args, **self.kwargs)).detach()


Judge = Callable[[Call], None]
"""What to do at a module's first call."""


class Places:
    """Under which names, and in which modules, the parameters of a model lie."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._names: dict[int, list[str]] = {}
        self._first: dict[str, int] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._names.setdefault(id(parameter), []).append(name)
            self._first[name] = id(parameter)
        self._modules = dict(model.named_modules(remove_duplicate=False))

    def slots(self, name: str) -> list[tuple[nn.Module, str]]:
        """Every module that holds a parameter, and the name it has there."""
        found = (other.rpartition(".") for other in self._names[self._first[name]])
        return [(self._modules[owner], leaf) for owner, _, leaf in found]

    def scope(self, names: Iterable[str], within: str = "") -> str:
        """The innermost module with a forward pass around all places of these parameters, and around or at `within`; "" is the model."""
        every = [other.split(".")[:-1] for name in names for other in self._names[self._first[name]]]
        if every and within and within in self._modules:  # what a norm makes is judged where it is used
            every.append(within.split("."))
        depth = min((len(path) for path in every), default=0)
        while depth and (len({tuple(path[:depth]) for path in every}) > 1 or not self._runs(".".join(every[0][:depth]))):
            depth -= 1
        return ".".join(every[0][:depth]) if every else ""

    def _runs(self, path: str) -> bool:
        """A container is not called, and what a single map makes moves with it: claims are about what is made of that."""
        module = self._modules[path]
        return bool(module._modules) and not isinstance(module, (nn.ModuleList, nn.ModuleDict))


def visit(places: Places, run: Run, values: Mapping[str, Tensor], judges: Mapping[str, tuple[set[str], Judge]]) -> set[str]:
    """Run the model once and call every scope's judge at its module's first call; returns the scopes that could be judged.

    `judges` has for each scope the parameters that belong to it and what to do there.
    """
    visitor = _Visitor(places, values, judges)
    try:
        with visitor.hooked():
            output = run({**values, **visitor.poison})
    except GeosharpError:
        if visitor.failed:
            raise
        return set()  # outputs that are not finite: where they are so without us too, judging on the whole model says it again
    return visitor.judged if bool(torch.isfinite(output).all()) else set()


class _Visitor:
    def __init__(self, places: Places, values: Mapping[str, Tensor], judges: Mapping[str, tuple[set[str], Judge]]) -> None:
        self.places, self.values, self.judges = places, values, judges
        self.slots = {name: places.slots(name) for names, _ in judges.values() for name in names}
        self.poison = {name: torch.full_like(values[name].reshape(-1)[:1], torch.nan).expand(values[name].shape) for name in self.slots}
        self.judged: set[str] = set()
        self.failed = False
        """Whether a judgement raised."""
        self._paused = False
        self._open: Counter[str] = Counter()
        """How many modules that a parameter belongs to are running."""
        self._versions: dict[str, list[int]] = {}

    @contextlib.contextmanager
    def hooked(self) -> Iterator[None]:
        handles = []
        for scope in self.judges:
            module = self.places.model.get_submodule(scope)
            handles.append(module.register_forward_pre_hook(self._enter(scope), with_kwargs=True))
            handles.append(module.register_forward_hook(self._leave(scope), with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, scope: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not self._paused:
                self._versions[scope] = [tensor._version for tensor in tensors((args, kwargs))]
                self._open.update(self.judges[scope][0])
                self._show()

        return enter

    def _leave(self, scope: str) -> Callable[..., None]:
        names, judge = self.judges[scope]

        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if self._paused:
                return
            untouched = self._versions[scope] == [tensor._version for tensor in tensors((args, kwargs))]
            untouched = untouched and not any(_keeps_state(value) for value in (*args, *kwargs.values())) and _is_all_seen(output)
            if scope not in self.judged and untouched:
                self.failed = True  # unless it comes back
                with self._all_in_place():
                    judge(Call(module, args, kwargs, flat(output), self._installed))
                self.failed = False
                self.judged.add(scope)
            self._open.subtract(names)
            self._show()

        return leave

    @contextlib.contextmanager
    def _all_in_place(self) -> Iterator[None]:
        """Within a judgement every parameter is there, whatever module is inside."""
        self._paused = True
        self._set({name: self.values[name] for name in self.slots})
        try:
            yield
        finally:
            self._paused = False

    def _show(self) -> None:
        """Every parameter where it may be used, and NaN elsewhere."""
        self._set({name: self.values[name] if self._open[name] else self.poison[name] for name in self.slots})

    @contextlib.contextmanager
    def _installed(self, moved: Mapping[str, Tensor]) -> Iterator[None]:
        self._set(moved)
        try:
            yield
        finally:
            self._set({name: self.values[name] for name in moved})

    def _set(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            for module, leaf in self.slots[name]:
                module._parameters[leaf] = tensor  # type: ignore[assignment]  # as torch.func.functional_call does


def _keeps_state(value: Any) -> bool:
    """Whether an argument (a cache of keys and values) is another one after the call than before it."""
    return callable(getattr(value, "update", None)) and not isinstance(value, (Mapping, set))


def _is_all_seen(output: Any) -> bool:
    """Whether everything that a module returns can be compared: real numbers in lists and dicts, and what is no tensor at all."""
    if isinstance(output, Tensor):
        return output.is_floating_point()
    if isinstance(output, Mapping):
        return all(_is_all_seen(item) for item in output.values())
    if isinstance(output, (tuple, list)):
        return all(_is_all_seen(item) for item in output)
    return output is None or isinstance(output, (bool, int, float, str))


def flat(output: Any) -> Tensor:
    """All floating numbers in a module's output as one vector."""
    parts = [tensor.reshape(-1) for tensor in tensors(output) if tensor.is_floating_point()]
    return torch.cat(parts) if parts else torch.zeros(0)
