"""What finding and verifying the symmetries of large models costs: time in forward passes, memory beyond the weights.

BERT-base, ViT-B/32 and a LLaMA of a billion parameters (16 layers, hidden size 2048, 32 heads, 8 key-value heads, gated
layers of 8192), built from their Hugging Face classes with random weights; LLaMA's are stored in bfloat16, so that a
float32 copy of them is made first (the up-cast, timed on its own). One forward pass is that of the whole batch that is
given (4 rows) in float32; verification takes the first 2 of them.

Memory is the process's resident set, read every 5 ms: the largest while `gs.symmetries` ran, minus what was there before it and
minus the up-cast copy; beside it the same for one forward pass of the same rows, and the largest parameter.
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM, ViTConfig, ViTForImageClassification

import geosharp as gs
from bench.machine import Report
from geosharp.objective import Objective
from geosharp.session import forget_verifications

MIB = 2**20


def bert() -> tuple[nn.Module, dict[str, Tensor]]:
    """BERT-base and 4 rows of 128 tokens."""
    return BertForSequenceClassification(BertConfig()), {"input_ids": torch.randint(1000, 30000, (4, 128))}


def vit() -> tuple[nn.Module, dict[str, Tensor]]:
    """ViT-B/32 and 4 images."""
    return ViTForImageClassification(ViTConfig(patch_size=32)), {"pixel_values": torch.randn(4, 3, 224, 224)}


def llama() -> tuple[nn.Module, dict[str, Tensor]]:
    """The shape of LLaMA 3.2 1B (vocabulary 32,000, so 1.1 billion parameters) in bfloat16, and 4 rows of 128 tokens."""
    config = LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, vocab_size=32000,
        max_position_embeddings=2048,
    )  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return LlamaForCausalLM(config), {"input_ids": torch.randint(1000, 30000, (4, 128))}
    finally:
        torch.set_default_dtype(before)


MODELS = {"BERT-base": bert, "ViT-B/32": vit, "LLaMA 1B, bfloat16": llama}


@dataclass(frozen=True)
class Spent:
    """One call: seconds, and the resident set beyond what was there before, in MiB."""

    seconds: float
    memory: float


def spent(call: Callable[[], object]) -> Spent:
    """Run a call while its memory is watched."""
    before, stop, most = _resident(), threading.Event(), [0]

    def watch() -> None:
        while not stop.wait(0.005):
            most[0] = max(most[0], _resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    try:
        call()
    finally:
        took = time.perf_counter() - start
        stop.set()
        watcher.join()
    return Spent(took, max(0, most[0] - before) / MIB)


def _resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main(arguments: Sequence[str]) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="./run bench discovery", description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--save", action="store_true", help="write bench/results/discovery.txt")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    report = Report("discovery", "./run bench discovery")
    report.say(
        f"{'':20s} {'pass s':>7s} {'up-cast s':>9s} {'whole s':>8s} {'ratio':>6s} {'MiB':>6s} {'pass MiB':>8s} {'weight MiB':>10s}  blocks"
    )
    for name, build in MODELS.items():
        torch.manual_seed(0)
        model, batch = build()
        report.say(_line(name, model.eval(), batch, chosen.repeats))
        del model
    report.say("\nratio: (whole - up-cast) / pass. MiB: beyond what was there before, without the up-cast copy.")
    if chosen.save:
        report.save()
    return 0


def _line(name: str, model: nn.Module, batch: dict[str, Tensor], repeats: int) -> str:
    ratios, wholes, passes, casts, own = [], [], [], [], []
    # Memory is that of the first call: later ones find freed memory that the process still holds.
    extra = spent(lambda: gs.symmetries(model, [batch])).memory
    for _ in range(repeats):
        forget_verifications()
        made: list[Objective] = []
        cast = spent(lambda made=made: made.append(Objective(model)))
        objective = made.pop()
        copied = sum(value.numel() * 4 for key, value in objective.values.items() if objective.stored[key] != torch.float32) / MIB
        ready = objective.prepare(batch)
        with torch.no_grad():
            forward = [spent(lambda o=objective, r=ready: o.outputs({**o.fixed, **o.values}, r)) for _ in range(3)]
        del objective, ready
        found: list[object] = []
        whole = spent(lambda found=found: found.append(gs.symmetries(model, [batch])))
        once = statistics.median(one.seconds for one in forward)
        wholes.append(whole.seconds)
        casts.append(cast.seconds)
        passes.append(once)
        ratios.append((whole.seconds - cast.seconds) / once)
        own.append(max(one.memory for one in forward))
    result = found[0]
    assert isinstance(result, gs.Found)
    assert all(verdict.verified for verdict in result.verdicts)
    largest = max(parameter.numel() for parameter in model.parameters()) * 4 / MIB
    numbers = [statistics.median(values) for values in (passes, casts, wholes, ratios)]
    return (
        f"{name:20s} {numbers[0]:7.2f} {numbers[1]:9.2f} {numbers[2]:8.2f} {numbers[3]:6.2f} {extra - copied:6.0f} {max(own):8.0f} "
        f"{largest:10.0f}  {', '.join(result.kinds(result.used))}"
    )
