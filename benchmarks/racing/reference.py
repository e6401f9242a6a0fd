"""One process that trains the race's workload undisturbed: which learning rate, and which target.

    python -m benchmarks.racing.reference --json benchmarks/results/reference.json

Dense synchronous training computes the same updates wherever it runs, so what one process finds
holds for all of those contestants: each gets the best of the three learning rates, and the target
is the held-out loss that this one reaches after `TARGET_UPDATES` updates.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.machine import describe
from benchmarks.workload import (
    CLIP_NORM,
    LEARNING_RATE,
    SEED,
    Stream,
    build_model,
    build_optimizer,
    load_held_out,
    load_text,
    loss_of,
)

FORMAT = 1
GLOBAL_BATCH = 64
LEARNING_RATES = (LEARNING_RATE / 4, LEARNING_RATE / 2, LEARNING_RATE)
UPDATES = 60
EVERY = 5  # updates between two held-out losses
TARGET_UPDATES = 40
_PASS = 16  # samples computed at once


def held_out_loss(model: nn.Module, held_out: Tensor) -> float:
    """Mean nats per byte of samples of shape (samples, length + 1)."""
    with torch.inference_mode():
        parts = [float(loss_of(model, part)) * len(part) for part in held_out.split(_PASS)]
    return sum(parts) / len(held_out)


def curve(learning_rate: float, updates: int, *, small: bool = False) -> list[dict[str, float]]:
    """Held-out losses of one training: `update` and `loss`, every few updates and at the start."""
    model = build_model(small=small)
    optimizer = build_optimizer(model, learning_rate=learning_rate)
    stream, held_out = Stream(load_text(), seed=SEED), load_held_out()
    found = [{"update": 0, "loss": held_out_loss(model, held_out)}]
    for update in range(1, updates + 1):
        optimizer.zero_grad(set_to_none=True)
        for part in stream.batch((update - 1) * GLOBAL_BATCH, GLOBAL_BATCH).split(_PASS):
            (loss_of(model, part) * (len(part) / GLOBAL_BATCH)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        if update % EVERY == 0:
            found.append({"update": update, "loss": held_out_loss(model, held_out)})
    return found


def record(updates: int) -> dict[str, Any]:
    """The three trainings, the best learning rate, and the target."""
    curves = {rate: curve(rate, updates) for rate in LEARNING_RATES}
    at = min(TARGET_UPDATES, updates)
    losses = {
        rate: next(point["loss"] for point in points if point["update"] == at)
        for rate, points in curves.items()
    }
    best = min(losses, key=lambda rate: losses[rate])
    return {
        "format": FORMAT,
        "machine": describe(set()),
        "global_batch": GLOBAL_BATCH,
        "learning_rate": best,
        "target_loss": round(losses[best], 3),
        "target_updates": at,
        "curves": [{"learning_rate": r, "points": p} for r, p in curves.items()],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Train three times, write and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--updates", type=int, default=UPDATES)
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found = record(asked.updates)
    asked.json.parent.mkdir(parents=True, exist_ok=True)
    asked.json.write_text(json.dumps(found, indent=1) + "\n")
    for one in found["curves"]:
        losses = "  ".join(f"{point['update']}: {point['loss']:.3f}" for point in one["points"])
        print(f"{one['learning_rate']:.4g}  {losses}")
    print(f"learning rate {found['learning_rate']:.4g}, target {found['target_loss']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
