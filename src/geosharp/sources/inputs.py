"""A random batch that a model reads, made up from its config: enough to show what leaves its outputs unchanged.

Three instances: words for a language model; images for a vision transformer; a spectrogram and words for Whisper. A guess
counts only once the model has run on it.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from geosharp.errors import GeosharpError, one_line
from geosharp.sources.quiet import quiet
from geosharp.text import cut

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

TOKENS = 12
FRAMES = 64
"""Of a spectrogram, where the config does not fix its length."""
SAMPLES = 3200
"""Of raw audio: ten frames after the usual convolutions."""
PIXELS = 64
"""The side of an image where the config leaves it open, as convolutional networks do."""

POSITIONS = (
    "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length", "max_target_positions", "seq_length",
)  # fmt: skip
"""What configs call the longest sequence."""

WORDS = ("input_ids", "decoder_input_ids")


def example_batch(model: nn.Module, rows: int = 2, seed: int = 0) -> dict[str, Tensor]:
    """Keyword arguments for the model, random and valid; one clear line where they cannot be guessed."""
    import torch

    unwrapped: Any = getattr(model, "get_base_model", None)  # an adapter around a model
    inner: Any = unwrapped() if callable(unwrapped) else model
    config = getattr(inner, "config", None)
    if not (hasattr(config, "to_dict") and hasattr(inner, "main_input_name")):
        raise _no_guess(model, "it has no Hugging Face config")
    generator = torch.Generator().manual_seed(seed)
    first = next((p for p in inner.parameters() if p.is_floating_point()), torch.zeros(()))
    accepted = frozenset(inspect.signature(inner.forward).parameters)
    guesses = _Guesses(config, accepted, inner.main_input_name, rows, generator, first.dtype)
    problem = "its forward takes none of the inputs that are known"
    for guess in guesses.each():
        batch = {name: value.to(first.device) for name, value in guess.items()}
        failure = _failure(model, batch)
        if not failure:
            return batch
        problem = f"on {', '.join(batch)}: {failure}"
    raise _no_guess(model, problem)


def _no_guess(model: nn.Module, problem: str) -> GeosharpError:
    return GeosharpError(
        f"expected a model whose inputs can be made up from its config, got {type(model).__name__} ({problem}); "
        "give a file.py:function that returns (model, batches)"
    )


def _failure(model: nn.Module, batch: Mapping[str, Tensor]) -> str:
    """What the model raises on a batch, or nothing. It runs as it is measured: in eval mode, without gradients."""
    import torch

    with quiet(), torch.random.fork_rng(), torch.no_grad(), _in_eval_mode(model):
        try:
            model(**batch)
        except Exception as error:  # whatever a model raises, the guess was wrong
            return cut(one_line(error), 200)
    return ""


@contextlib.contextmanager
def _in_eval_mode(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@dataclass(frozen=True)
class _Guesses:
    """Batches that a model might read, likeliest first."""

    config: Any
    accepted: frozenset[str]
    """What its forward takes."""
    main: str
    rows: int
    generator: torch.Generator
    dtype: torch.dtype

    def each(self) -> Iterator[dict[str, Tensor]]:
        """Everything that the forward takes; the main input alone; images where the config also has frames; one row.

        A head that pools at the last word before the padding takes one row only where there is no padding token.
        """
        import torch

        kinds = {"pixel_values": self._images, "input_features": self._spectrogram, "input_values": self._audio, "input_ids": self._words}
        made = {name: make() for name, make in kinds.items() if name in self.accepted}
        if not made:
            return
        main = self.main if self.main in made else next(iter(made))
        alone = made[main] | self._besides(made[main])
        everything = {name: value for one in made.values() for name, value in one.items()}
        everything |= self._besides(everything)
        yield everything
        if everything.keys() != alone.keys():
            yield alone
        if everything.get("pixel_values", torch.empty(0)).ndim == 5:
            yield everything | {"pixel_values": everything["pixel_values"][:, 0]}
        if self.rows > 1:
            yield {name: value[:1] for name, value in everything.items()}

    def _besides(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What goes with the main input: a decoder's words, places of words on a page."""
        import torch

        found: dict[str, Tensor] = {}
        if "decoder_input_ids" in self.accepted and getattr(self.config, "is_encoder_decoder", False):
            found["decoder_input_ids"] = self._ids()
        if "bbox" in self.accepted and "input_ids" in batch:
            corners = torch.randint(0, 15, (*batch["input_ids"].shape, 2), generator=self.generator)
            found["bbox"] = torch.cat([corners, corners + 5], -1)
        return found

    # Words ------------------------------------------------------------------------------------------------------------

    def _words(self) -> dict[str, Tensor]:
        import torch

        ids = self._ids()
        return {"input_ids": ids} | ({"attention_mask": torch.ones_like(ids)} if "attention_mask" in self.accepted else {})

    def _ids(self) -> Tensor:
        """Ordinary words of every vocabulary in the model, and the end token last, which some families pool at."""
        import torch

        vocabulary = min(self._all("vocab_size"), default=0) or 2
        special = {index for name in self._special_names() for index in self._all(name)}
        ordinary = torch.tensor([index for index in range(vocabulary) if index not in special] or [0])
        ids = ordinary[torch.randint(len(ordinary), (self.rows, self._length()), generator=self.generator)]
        end = next((index for index in self._all("eos_token_id") if index < vocabulary), None)
        if end is not None:
            ids[:, -1] = end
        return ids

    def _special_names(self) -> set[str]:
        names = {name for config in _with_nested(self.config) for name in vars(config)}
        return {name for name in names if name.endswith(("_token_id", "_token_index", "_token_ids"))}

    def _length(self) -> int:
        """Short, and within the model's positions, which RoBERTa counts from behind the padding token."""
        longest = min((size for name in POSITIONS for size in self._all(name)), default=sys.maxsize)
        reserved = 1 + max((index for index in self._all("pad_token_id") if index < longest - 1), default=-1)
        return max(1, min(TOKENS, longest - reserved))

    # Images and sound -------------------------------------------------------------------------------------------------

    def _images(self) -> dict[str, Tensor]:
        import torch

        channels = self._one("num_channels", 3)
        if "spatial_shapes" in self.accepted:  # SigLIP 2 takes images in patches
            side = max(1, int(self._one("num_patches", 16) ** 0.5))
            return {
                "pixel_values": self._numbers(side * side, channels * self._one("patch_size", 16) ** 2),
                "pixel_attention_mask": torch.ones(self.rows, side * side, dtype=torch.long),
                "spatial_shapes": torch.full((self.rows, 2), side),
            }
        frames = [self._one("num_frames", 1)] if self._all("num_frames") else []
        return {"pixel_values": self._numbers(*frames, channels, *self._image_size())}

    def _image_size(self) -> tuple[int, int]:
        for config in _with_nested(self.config):
            size = getattr(config, "image_size", None)
            if isinstance(size, Mapping) and {"height", "width"} <= size.keys():
                return int(size["height"]), int(size["width"])
            if isinstance(size, (list, tuple)) and len(size) == 2:
                return int(size[0]), int(size[1])
            if isinstance(size, int):
                return size, size
        return PIXELS, PIXELS

    def _spectrogram(self) -> dict[str, Tensor]:
        """Mel bins by frames as Whisper reads them (its convolutions halve the frames), frames by features elsewhere."""
        bins, positions = self._one("num_mel_bins", 80), self._one("max_source_positions", 0)
        if "input_feat_per_channel" in vars(self.config):
            return {"input_features": self._numbers(FRAMES, self._one("input_feat_per_channel", 80))}
        return {"input_features": self._numbers(bins, 2 * positions if positions else FRAMES)}

    def _audio(self) -> dict[str, Tensor]:
        if self._all("num_mel_bins") and self._all("max_length"):  # a spectrogram under the name of raw audio
            return {"input_values": self._numbers(self._one("max_length", FRAMES), self._one("num_mel_bins", 80))}
        return {"input_values": self._numbers(SAMPLES)}

    def _numbers(self, *shape: int) -> Tensor:
        import torch

        return torch.randn(self.rows, *shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    # The config -------------------------------------------------------------------------------------------------------

    def _all(self, name: str) -> list[int]:
        """Every whole number of this name in the config and those inside it, outermost first."""
        found: list[int] = []
        for config in _with_nested(self.config):
            value = getattr(config, name, None)
            several = value if isinstance(value, (list, tuple)) else [value]
            found += [item for item in several if isinstance(item, int) and not isinstance(item, bool) and item >= 0]
        return found

    def _one(self, name: str, default: int) -> int:
        return next(iter(self._all(name)), default)


def _with_nested(config: Any) -> Iterator[Any]:
    """A config and the configs inside it."""
    yield config
    for value in vars(config).values():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            yield from _with_nested(value)
