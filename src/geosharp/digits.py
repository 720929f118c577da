"""What the demonstration trains: small vision transformers on the digits of scikit-learn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from geosharp.errors import GeosharpError

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class Recipe:
    """How one model is trained."""

    rate: float
    weight_decay: float = 0.0
    label_noise: float = 0.0

    @property
    def name(self) -> str:
        """The recipe in words."""
        extra = f", weight decay {self.weight_decay:g}" if self.weight_decay else ""
        return f"rate {self.rate:g}{extra}" + (f", {self.label_noise:.0%} label noise" if self.label_noise else "")


def digits(seed: int) -> tuple[Tensor, Tensor]:
    """Images (1797, 1, 8, 8) in [-1, 1] and labels, shuffled."""
    import torch

    try:
        import transformers  # noqa: F401 - so that whoever lacks it learns it before the work starts
        from sklearn.datasets import load_digits
    except ImportError as error:
        missing = str(error).splitlines()[0]
        raise GeosharpError(f"expected transformers and scikit-learn, got: {missing}; run: pip install 'geosharp[demo]'") from error
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 8 - 1
    return images[order], torch.tensor(labels)[order]


def with_noise(labels: Tensor, share: float, seed: int) -> Tensor:
    """Labels of which a share is drawn anew."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    replaced = torch.rand(len(labels), generator=generator) < share
    return torch.where(replaced, torch.randint(0, 10, labels.shape, generator=generator), labels)


def train(recipe: Recipe, images: Tensor, labels: Tensor, steps: int, seed: int) -> nn.Module:
    """A vision transformer of two layers and four heads a layer, by AdamW with a cosine schedule."""
    import torch
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=8, patch_size=2, num_channels=1,
        num_labels=10, initializer_range=0.1,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: nn.Module = ViTForImageClassification(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.rate, weight_decay=recipe.weight_decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        rows = torch.randint(0, len(labels), (32,), generator=generator)
        optimizer.zero_grad()
        model(pixel_values=images[rows], labels=labels[rows]).loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()
