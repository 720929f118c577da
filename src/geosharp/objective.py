"""The loss of a dict of parameters on a batch.

Three instances: `model(**batch).loss` of a Hugging Face model; cross-entropy of `model(inputs)` against integer targets;
any `loss(outputs, batch)` that returns a mean, with `weight(batch)` as its denominator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from geosharp import batches as data
from geosharp.batches import Batch
from geosharp.clone import install, padding_rows, structural_clone, tied_names, unwrap
from geosharp.errors import GeosharpError
from geosharp.losses import (
    NORMALIZATIONS,
    LogitNormalization,
    Loss,
    Weight,
    check_model_labels,
    default_weight,
    loss_of_outputs,
    output_tensor,
)
from geosharp.nested import tensors

Values = Mapping[str, Tensor]


class Objective:
    """The loss of one model as a function of its parameters, on a clone."""

    def __init__(
        self,
        model: nn.Module,
        *,
        loss: Loss | None = None,
        weight: Weight | None = None,
        params: str | Sequence[str] | None = None,
        dtype: torch.dtype | None = None,
        micro_batch: int | None = None,
        logit_normalization: LogitNormalization | None = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise GeosharpError(f"expected model to be a torch.nn.Module, got {type(model).__name__}")
        _check_options(dtype, autocast, micro_batch, logit_normalization)
        inner, self.prefix = unwrap(model)
        self.user_model = inner
        self.custom_loss, self.custom_weight = loss, weight
        self.micro_batch, self.logit_normalization, self.autocast = micro_batch, logit_normalization, autocast
        self.alias = tied_names(inner)
        everything = {name: p for name, p in inner.named_parameters(remove_duplicate=False) if name not in self.alias}
        chosen = select(everything, params)
        self.stored = {name: parameter.dtype for name, parameter in everything.items()}
        self.dtype = dtype or _compute_dtype([parameter.dtype for parameter in chosen.values()])
        self.device = next(iter(chosen.values())).device
        self.resolution = autocast or self.dtype
        """The coarsest dtype that the way from parameters to loss goes through; `watch_precision` finds casts inside the model."""
        self._params = params
        self.copies_inputs = False
        """Whether the model is given copies of its inputs, because it changes them in place."""
        self._check(chosen)
        self.values = {name: data.ordinary(parameter.detach()).to(self.dtype) for name, parameter in chosen.items()}
        self.fixed = {
            name: data.ordinary(parameter.detach()).to(self.dtype if parameter.is_floating_point() else parameter.dtype)
            for name, parameter in everything.items()
            if name not in chosen
        }
        self.clone = structural_clone(inner)
        install(self.clone, {**self.values, **self.fixed}, self.alias, self.dtype)
        self.padding = {name: row for name, row in padding_rows(inner, self.alias).items() if name in chosen}

    def widened(self) -> Objective:
        """The same objective in float64."""
        wide = Objective(self.user_model, loss=self.custom_loss, weight=self.custom_weight, params=self._params, dtype=torch.float64)
        wide.copies_inputs = self.copies_inputs
        return wide

    def _check(self, chosen: Mapping[str, Tensor]) -> None:
        for name, parameter in chosen.items():
            if parameter.device != self.device:
                raise GeosharpError(
                    f"expected all measured parameters on one device, got {name!r} on {parameter.device} and others on {self.device}"
                )
            # What is not finite shows in the sum, which costs less than looking at every entry.
            if not bool(torch.isfinite(parameter.detach().sum(dtype=torch.float32 if parameter.dtype.itemsize < 4 else None))):
                finite = torch.isfinite(parameter.detach())
                if bool(finite.all()):
                    continue
                raise GeosharpError(
                    f"expected finite weights, got {int((~finite).sum())} non-finite entries in {name!r}; "
                    "this checkpoint is broken: measure an earlier one"
                )

    def state_dict_with(self, moved: Values) -> dict[str, Tensor]:
        """The user's state dict with some parameters replaced; loads into the user's model with `strict=True`."""
        state = {}
        for name, value in self.user_model.state_dict().items():
            found = moved.get(self.alias.get(name, name))
            state[self.prefix + name] = (value if found is None else found).detach().clone()
        return state

    # Batches --------------------------------------------------------------------------------------------------

    def prepare(self, batch: Batch) -> Batch:
        """The batch on the model's device, floating inputs in the compute dtype, its labels checked."""
        check_model_labels(self.clone, batch)
        if self.custom_loss is None:
            data.check_lengths(batch)
        return data.moved_to(batch, self.device, self.dtype)

    def weight_of(self, batch: Batch) -> float:
        """The denominator of the loss's mean on this batch."""
        weight = self.custom_weight(batch) if self.custom_weight is not None else default_weight(self.clone, batch, self.custom_loss)
        value = float(weight)
        if not value > 0:
            raise GeosharpError(f"expected the weight of a batch to be positive, got {value:g}; are all its labels ignored (-100)?")
        return value

    def micro_batches(self, batch: Batch) -> list[tuple[Batch, float]]:
        """The batch in parts of at most `micro_batch` rows with their shares of the whole."""
        count = data.rows(batch)
        if self.micro_batch is None or count <= self.micro_batch:
            return [(batch, 1.0)]
        parts = [data.part(batch, start, start + self.micro_batch) for start in range(0, count, self.micro_batch)]
        weights = [self.weight_of(piece) for piece in parts]
        total = sum(weights)
        return [(piece, weight / total) for piece, weight in zip(parts, weights, strict=True)]

    def check_additive(self, batch: Batch) -> None:
        """Micro-batches, weighted, must add up to the whole: otherwise splitting would change what is measured."""
        count = data.rows(batch)
        if count < 2:
            return
        half = min(self.micro_batch or count, (count + 1) // 2)
        parts = [data.part(batch, start, start + half) for start in range(0, count, half)]
        with torch.no_grad():
            whole = float(self.loss(self.values, batch))
            weights = [self.weight_of(piece) for piece in parts]
            split = sum(float(self.loss(self.values, piece)) * w for piece, w in zip(parts, weights, strict=True)) / sum(weights)
        tolerance = 1e3 * torch.finfo(self.resolution).eps * max(abs(whole), 1.0)
        if not abs(whole - split) <= tolerance:
            raise GeosharpError(
                f"the loss of the first batch is {whole:.6g} as a whole but {split:.6g} as the weighted mean of its parts; "
                "it does not add up over examples (contrastive, auxiliary or batch-statistics loss, or a wrong weight=): "
                "give weight=, or measure one batch at a time without micro_batch="
            )

    def watch_precision(self, batch: Batch) -> None:
        """Set `resolution` from one forward pass on a batch: some models cast logits, norms or soft-max to float32 inside.

        The same pass shows whether the model changes its inputs in place; then it is given copies from here on.
        """
        leaves = {name: value.detach().requires_grad_() for name, value in self.values.items()}
        own = data.mapped(batch, torch.clone)
        with torch.enable_grad(), _Watch(self.resolution, {id(p): name for name, p in self.user_model.named_parameters()}) as seen:
            self.loss(leaves, own)
        if seen.foreign:
            raise GeosharpError(
                f"expected the forward pass to reach {seen.foreign!r} through its module only, got it from elsewhere too (a list, a "
                "closure), where a copy of the model still has the original; use the module's own attribute"
            )
        self.resolution = seen.dtype
        self.copies_inputs = any(tensor._version for tensor in tensors(own))

    @contextlib.contextmanager
    def watched_lookups(self) -> Iterator[dict[str, list[Tensor]]]:
        """Which index tensors each embedding is called with inside, by the name of its weight; tied ones are left out."""
        seen: dict[str, list[Tensor]] = {}
        shared = set(self.alias.values())
        handles = []
        for name, module in self.clone.named_modules():
            weight = f"{name}.weight".lstrip(".")
            if type(module) is nn.Embedding and weight in self.values and weight not in shared:

                def note(_: nn.Module, inputs: tuple[Any, ...], weight: str = weight) -> None:
                    seen.setdefault(weight, []).append(inputs[0])

                handles.append(module.register_forward_pre_hook(note))
        try:
            yield seen
        finally:
            for handle in handles:
                handle.remove()

    # Evaluation ------------------------------------------------------------------------------------------------

    def loss(self, values: Values, batch: Batch, *, second_order: bool = False) -> Tensor:
        """The mean loss of these parameters on the batch, differentiable in them."""
        return self._run(values, batch, second_order, self._loss_of)

    def loss_of_parts(self, batch: Batch) -> float:
        """The model's own mean loss on a prepared batch, in micro-batches where there are such."""
        with torch.no_grad():
            return sum(float(self.loss(self.values, part)) * share for part, share in self.micro_batches(batch))

    def outputs(self, values: Values, batch: Batch) -> Tensor:
        """The model's outputs as one tensor (logits where there are such)."""
        return self._run(values, batch, False, output_tensor)

    def _loss_of(self, outputs: Any, batch: Batch) -> Tensor:
        value = loss_of_outputs(self.clone, outputs, batch, self.custom_loss, self.logit_normalization)
        if value.ndim or not value.is_floating_point():
            raise GeosharpError(f"expected the loss to be one floating number (a mean), got shape {tuple(value.shape)}, {value.dtype}")
        return value

    def _run(self, values: Values, batch: Batch, second_order: bool, finish: Callable[[Any, Batch], Tensor]) -> Tensor:
        # Fused attention kernels have no double backward; the math backend is used for second order only.
        attention = sdpa_kernel(SDPBackend.MATH) if second_order else contextlib.nullcontext()
        with attention, torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            outputs = self._call(dict(values), batch)
            return finish(outputs, batch)

    def _call(self, values: dict[str, Tensor], batch: Batch) -> Any:
        arguments, keywords = _arguments(data.mapped(batch, torch.clone) if self.copies_inputs else batch)
        try:
            return torch.func.functional_call(self.clone, values, arguments, keywords)
        except TypeError as error:
            if "argument" in str(error):
                raise GeosharpError(f"the model does not take this batch: {error}") from error
            raise


def _arguments(batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    inputs = batch[0]
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)), {}


def select(parameters: Mapping[str, nn.Parameter], params: str | Sequence[str] | None) -> dict[str, nn.Parameter]:
    """The parameters to perturb: the trainable ones, or those whose names match the patterns."""
    floating = {name: p for name, p in parameters.items() if p.is_floating_point() and p.numel()}
    if params is None:
        chosen = {name: p for name, p in floating.items() if p.requires_grad}
        if not chosen:
            raise GeosharpError('expected trainable parameters, got none (requires_grad is False on all); use params="*" to measure all')
        return chosen
    patterns = [params] if isinstance(params, str) else list(params)
    if not patterns:
        raise GeosharpError('expected params= to hold name patterns, got none; leave it out for all trainable parameters, or params="*"')
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in floating):
            some = ", ".join(list(floating)[:5])
            raise GeosharpError(f"expected params= pattern {pattern!r} to match a parameter, it matches none; names look like: {some}")
    return {name: p for name, p in floating.items() if any(fnmatchcase(name, pattern) for pattern in patterns)}


def _compute_dtype(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    return torch.float64 if torch.float64 in dtypes else torch.float32


def _check_options(dtype: object, autocast: object, micro_batch: int | None, normalization: str | None) -> None:
    for name, value in (("dtype", dtype), ("autocast", autocast)):
        if value is not None and not (isinstance(value, torch.dtype) and value.is_floating_point):
            raise GeosharpError(f"expected {name}= to be a floating torch.dtype such as torch.float64, got {value!r}")
    if micro_batch is not None and micro_batch < 1:
        raise GeosharpError(f"expected micro_batch to be at least 1, got {micro_batch}")
    if normalization not in (None, *NORMALIZATIONS):
        known = ", ".join(NORMALIZATIONS)
        raise GeosharpError(f"expected logit_normalization to be one of {known} or None, got {normalization!r}")


class _Watch(TorchFunctionMode):
    """The coarsest floating dtype among results that depend on leaves which require gradients; the user's own parameters in use."""

    def __init__(self, dtype: torch.dtype, own: Mapping[int, str]) -> None:
        super().__init__()
        self.dtype, self.own, self.foreign = dtype, own, ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.foreign = self.foreign or next((self.own[id(one)] for one in tensors((args, kwargs)) if id(one) in self.own), "")
        result = func(*args, **(kwargs or {}))
        for tensor in tensors(result):
            if tensor.requires_grad and torch.finfo(tensor.dtype).eps > torch.finfo(self.dtype).eps:
                self.dtype = tensor.dtype
        return result
