"""One GPU: raycloud's loop against a plain PyTorch loop, same model, samples and updates.

    python -m benchmarks.gpu --json FILE

A GPT of 86 million parameters on the text of the standard library: 64 samples of 256 bytes a step,
in fp32 and in bf16. `plain` takes a step in one pass, `accumulating` in four, as micro-batches of
raycloud are; raycloud runs as many of them at once as fit. They take turns, each in a process of
its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.contestants import Attempt, raycloud_command
from benchmarks.machine import ROOT
from benchmarks.marks import Marker, measure, read_marks
from benchmarks.workload import load_text, windows
from raycloud import Splits, Task
from raycloud.order import Order

LENGTH, WIDTH, DEPTH, HEADS = 256, 768, 12, 12
GLOBAL_BATCH, MICRO_BATCH = 64, 16
STEPS, WARM_UP, REPEATS = 100, 20, 2
NAMES = ("plain", "accumulating", "raycloud")
SEED = 0
CLIP_NORM = 1.0
LIMIT_S = 120.0


class Transformer(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(
            *(WIDTH, HEADS, 4 * WIDTH), dropout=0.0, activation="gelu", batch_first=True,
            norm_first=True,
        )  # fmt: skip
        self.blocks = nn.TransformerEncoder(layer, DEPTH, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        """Shape (rows, length) in, (rows, length, 256) out."""
        x = self.bytes(text) + self.places.weight[: text.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1], device=text.device)
        logits: Tensor = self.head(self.norm(self.blocks(x, mask=mask, is_causal=True)))
        return logits


def build_model() -> Transformer:
    """The model, with the same initial weights in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(SEED)
        return Transformer()


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW in its fused form."""
    return torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Mean nats per byte of a batch of shape (rows, LENGTH + 1)."""
    logits = model(batch[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


class OneGpu(Task):
    """The workload as a raycloud task."""

    def __init__(self, *, marks: str) -> None:
        self._marker = Marker(Path(marks), STEPS)

    def model(self) -> nn.Module:
        """The same initial weights."""
        return build_model()

    def data(self, path: str | None) -> Splits:  # noqa: ARG002
        """The same samples; nothing is held out."""
        return Splits(train=windows(load_text(), LENGTH))

    def batch(self, samples: Sequence[Any], rng: np.random.Generator | None) -> Tensor:  # noqa: ARG002
        """Windows as int64."""
        return torch.from_numpy(np.stack(samples)).long()

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Mean nats per byte."""
        loss = loss_of(model, batch)
        self._marker.saw(loss)
        return loss

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Marked after each step."""
        optimizer = build_optimizer(model)
        self._marker.attach(optimizer)
        return optimizer


def plain_loop(marks: Path, precision: str, micro_batch: int) -> None:
    """Accumulate micro-batches, clip, step; batches from page-locked memory."""
    device = torch.device("cuda", 0)
    text = load_text()
    order = Order(samples=(len(text) - 1) // LENGTH, seed=SEED)
    ids = order.ids(0, 0, STEPS * GLOBAL_BATCH)
    window = np.arange(LENGTH + 1)
    model = build_model().to(device)
    optimizer = build_optimizer(model)
    marker = Marker(marks, STEPS)
    marker.attach(optimizer)
    for first in range(0, len(ids), GLOBAL_BATCH):
        for at in range(first, first + GLOBAL_BATCH, micro_batch):
            rows = text[ids[at : at + micro_batch, None] * LENGTH + window]
            batch = torch.from_numpy(rows).long().pin_memory().to(device, non_blocking=True)
            with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
                loss = loss_of(model, batch)
            marker.saw(loss)
            (loss * (micro_batch / GLOBAL_BATCH)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()


def job(attempt: Attempt, precision: str) -> dict[str, Any]:
    """The workload as a job file."""
    return {
        "format": 1,
        "name": "one-gpu",
        "task": "benchmarks.gpu:OneGpu",
        "settings": {"marks": str(attempt.marks)},
        "steps": attempt.steps,
        "seed": SEED,
        "global_batch": GLOBAL_BATCH,
        "micro_batch": MICRO_BATCH,
        "clip_norm": CLIP_NORM,
        "precision": precision,
        "elastic": {"min_workers": 1, "max_workers": 1},
        "resources": {"worker": {"gpus": 1}},
    }


def run_one(name: str, precision: str) -> dict[str, Any]:
    """One run in a process of its own, and what its marks come to."""
    with tempfile.TemporaryDirectory() as folder:
        attempt = Attempt(directory=Path(folder), steps=STEPS)
        attempt.marks.mkdir()
        micro_batch = MICRO_BATCH if name == "accumulating" else GLOBAL_BATCH
        loop = ("--loop", folder, precision, str(micro_batch))
        command = [sys.executable, "-m", "benchmarks.gpu", *loop]
        if name == "raycloud":
            command = raycloud_command(attempt, job(attempt, precision))
        began_s = time.monotonic()
        done = subprocess.run(
            command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=LIMIT_S,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
        )  # fmt: skip
        if done.returncode:
            sys.exit(f"{name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        measured = measure(
            read_marks(attempt.marks), began_s=began_s, warm_up=WARM_UP, global_batch=GLOBAL_BATCH
        )
    return {"contestant": name, "precision": precision, **asdict(measured)}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description="raycloud and a plain loop on one GPU")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--loop", nargs=3, metavar=("FOLDER", "PRECISION", "MICRO_BATCH"))
    arguments = parser.parse_args()
    if arguments.loop:
        folder, precision, micro_batch = arguments.loop
        plain_loop(Path(folder, "marks"), precision, int(micro_batch))
        return
    rows = []
    for repeat in range(REPEATS):
        for precision in ("fp32", "bf16"):
            for name in NAMES[:: 1 - 2 * (repeat % 2)]:
                rows.append(run_one(name, precision))
                sys.stdout.write(json.dumps(rows[-1]) + "\n")
                sys.stdout.flush()
    if arguments.json:
        record = {"format": 1, "gpu": torch.cuda.get_device_name(), "rows": rows}
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
