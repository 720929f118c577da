"""From a model's outputs to one mean loss, and the denominator of that mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from geosharp import batches as data
from geosharp.batches import Batch
from geosharp.errors import GeosharpError

Loss = Callable[[Any, Batch], Tensor]
Weight = Callable[[Batch], float | Tensor]
LogitNormalization = Literal["std", "norm"]
NORMALIZATIONS = ("std", "norm")

IGNORED = -100
SMALLEST_SPREAD = 1e-10
"""Andriushchenko et al. 2023, reference code: the clamp under the normalized logits."""


def logits_of(outputs: Any) -> Tensor:
    """The logits among a model's outputs."""
    if isinstance(outputs, Tensor):
        return outputs
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    first = next(iter(outputs), None) if isinstance(outputs, (tuple, list)) else None
    if isinstance(first, Tensor):
        return first
    raise GeosharpError(f"expected the model to return logits (a tensor, or .logits), got {type(outputs).__name__}; give loss=")


def output_tensor(outputs: Any, batch: Batch) -> Tensor:
    """What is compared to see whether a function changed: logits, or else every floating output, flattened."""
    try:
        found = logits_of(outputs)
    except GeosharpError:
        parts = outputs.items() if isinstance(outputs, Mapping) else []
        flat = [value.reshape(-1) for key, value in parts if isinstance(value, Tensor) and value.is_floating_point() and key != "loss"]
        if not flat:
            raise
        found = torch.cat(flat)
    if not bool(torch.isfinite(found.detach()).all()):
        raise GeosharpError("expected finite model outputs, got inf or nan on the first batch; check the inputs and the checkpoint")
    return found


def normalized(logits: Tensor, how: LogitNormalization) -> Tensor:
    """Centred logits divided by their (biased) standard deviation (paper) or by their norm (reference code)."""
    centred = logits - logits.mean(-1, keepdim=True)
    spread = centred.square().mean(-1, keepdim=True).sqrt() if how == "std" else torch.linalg.vector_norm(centred, dim=-1, keepdim=True)
    return centred / spread.clamp_min(SMALLEST_SPREAD)


def is_causal(model: nn.Module) -> bool:
    """Whether a Hugging Face model shifts its labels by one token."""
    return getattr(model, "loss_type", None) == "ForCausalLM" or type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))


def default_weight(model: nn.Module, batch: Batch, custom_loss: Loss | None) -> float:
    """Rows; with integer labels of the default loss those that count, for causal Hugging Face models after the shift."""
    if custom_loss is None:
        labels = batch.get("labels") if isinstance(batch, Mapping) else batch[1]
        if isinstance(labels, Tensor) and labels.ndim and not labels.is_floating_point():
            counted = labels[:, 1:] if isinstance(batch, Mapping) and is_causal(model) else labels
            return float((counted != IGNORED).sum())
    return float(data.rows(batch))


def loss_of_outputs(
    model: nn.Module, outputs: Any, batch: Batch, custom_loss: Loss | None, normalization: LogitNormalization | None
) -> Tensor:
    """The mean loss; `normalization` replaces the logits first."""
    if custom_loss is not None:
        return custom_loss(outputs if normalization is None else _with_logits(outputs, normalization), batch)
    if isinstance(batch, Mapping):
        if normalization is None:
            found = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
            if not isinstance(found, Tensor):
                keys = ", ".join(map(str, batch))
                raise GeosharpError(
                    f"expected the model to return a loss for a dict batch, got none; add labels (it has {keys}) or give loss="
                )
            return found
        labels = batch.get("labels")
        if not isinstance(labels, Tensor) or labels.is_floating_point():
            raise GeosharpError("logit normalization needs integer labels in the batch; give loss=")
        logits = normalized(logits_of(outputs), normalization)
        if is_causal(model):
            logits, labels = logits[:, :-1], labels[:, 1:]
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), ignore_index=IGNORED)
    return _pair_loss(logits_of(outputs), batch[1], normalization)


def _with_logits(outputs: Any, normalization: LogitNormalization) -> Any:
    logits = normalized(logits_of(outputs), normalization)
    if isinstance(outputs, Tensor):
        return logits
    if isinstance(outputs, Mapping):
        return type(outputs)(**{**outputs, "logits": logits})
    raise GeosharpError("logit normalization with loss= needs outputs that are a tensor or a mapping with logits")


def _pair_loss(logits: Tensor, targets: Any, normalization: LogitNormalization | None) -> Tensor:
    if not isinstance(targets, Tensor):
        raise GeosharpError(f"expected targets to be a tensor, got {type(targets).__name__}; give loss=")
    if not targets.is_floating_point():
        logits = _classes_last(logits, targets)
        check_labels(targets, logits.shape[-1])
        if normalization is not None:
            logits = normalized(logits, normalization)
        return F.cross_entropy(logits, targets.reshape(-1), ignore_index=IGNORED)
    if normalization is not None:
        logits = normalized(logits, normalization)
    if logits.shape != targets.shape:
        raise GeosharpError(
            f"expected floating targets of the outputs' shape {tuple(logits.shape)}, got {tuple(targets.shape)}; give loss="
        )
    return F.mse_loss(logits, targets)


def _classes_last(logits: Tensor, targets: Tensor) -> Tensor:
    """Logits as (positions, classes): classes last as language models write them, or in dimension 1 as `F.cross_entropy` does."""
    last = logits.shape[:-1] == targets.shape
    second = logits.ndim > 2 and (logits.shape[:1] + logits.shape[2:]) == targets.shape
    if last and second:
        raise GeosharpError(f"logits {tuple(logits.shape)} may have their classes in dimension 1 or in the last; give loss=")
    if not last and not second:
        raise GeosharpError(
            f"expected integer targets for logits {tuple(logits.shape)} to have all dimensions but that of the classes, "
            f"got {tuple(targets.shape)}; give loss="
        )
    return (logits if last else logits.movedim(1, -1)).reshape(-1, logits.shape[-1 if last else 1])


def check_labels(labels: Tensor, classes: int, where: str = "targets") -> None:
    """Labels index classes, or are -100."""
    counted = labels[labels != IGNORED]
    if counted.numel() and (int(counted.min()) < 0 or int(counted.max()) >= classes):
        raise GeosharpError(
            f"expected {where} from 0 to {classes - 1}, got {int(counted.min())} to {int(counted.max())}; "
            "the head and the data do not belong together"
        )


def check_model_labels(model: nn.Module, batch: Batch) -> None:
    """Hugging Face labels against the model's config, before a kernel fails on them."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    config = getattr(model, "config", None)
    if not isinstance(labels, Tensor) or labels.is_floating_point() or config is None:
        return
    name = type(model).__name__
    if is_causal(model) or name.endswith(("ForMaskedLM", "ForConditionalGeneration")):
        classes = getattr(config, "vocab_size", None)
    elif name.endswith("Classification"):
        classes = getattr(config, "num_labels", None)
    else:
        return
    if isinstance(classes, int) and classes > 1:
        check_labels(labels, classes, 'batch["labels"]')
