"""Small checkpoints of two parts: written, compared, damaged."""

from __future__ import annotations

import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from raycloud.checkpoint import Manifest, PartRecord, Store, open_store, publish
from raycloud.checkpoint.naming import is_draft
from raycloud.checkpoint.payload import load_tensors, write_part
from raycloud.checkpoint.values import Tagged

GOLDEN = Path(__file__).parent / "unit" / "golden" / "checkpoint"  # of format 1
GOLDEN_2 = GOLDEN.with_name("checkpoint-format-2")
GOLDEN_3 = GOLDEN.with_name("checkpoint-format-3")


def tensors_of(step: int) -> list[dict[str, torch.Tensor]]:
    """The tensors of both parts."""
    return [
        {
            "parameter/layer.weight": torch.arange(6.0).reshape(2, 3) + step,
            "buffer/steps": torch.tensor(step),
        },
        {
            "parameter/layer.bias": torch.tensor([0.5, -step], dtype=torch.bfloat16),
            "optimizer/layer.bias/exp_avg": torch.tensor([1 / 3, step], dtype=torch.float64),
        },
    ]


HELD = {
    "rate": Tagged("tensor", "buffer/steps"),
    "row": Tagged("array", "optimizer/layer.bias/exp_avg"),
    "after": Tagged(
        "object", {"kind": "StepLR", "state": {"last": [1.0], "function": Tagged("live", None)}}
    ),
    "mode": Tagged("member", "MIN"),
    "kind": Tagged("dtype", "float32"),
    "recent": Tagged("deque", [2, [1, (2, 3)]]),
    "number": Tagged("scalar", "buffer/steps"),
}


def manifest_of(step: int, parts: list[dict[str, Any]], *, number: int = 3) -> Manifest:
    records = [PartRecord.parse(part) for part in parts]
    if number == 3:  # of one replica of several workers
        records = [replace(one, replica=0, position=one.rank) for one in records]
    return Manifest(
        step=step,
        epoch=1,
        offset=step * 32,
        generation=2,
        samples_per_epoch=1000,
        job={"format": 1, "task": "jobs/gpt.py:Gpt", "seed": 0},
        values={
            "random": {"seed": 7, "step": step},
            "groups": [{"lr": 0.1, "betas": (0.9, 0.95), "best": float("inf")}],
            "schedule": {"milestones": {3: 1}},
            **({"held": HELD} if number > 1 else {}),
        },
        ledger={"epochs": [[0, [[0, 1000]]], [1, [[0, step * 32]]]]},
        parts=tuple(records),
        raycloud_version="0.1.0",
        torch_version="2.13.0",
        format=number,
    )


def save(store: Store, step: int, *, number: int = 3) -> Manifest:
    """Write and publish a checkpoint of two parts."""
    parts = [
        write_part(store, step=step, rank=rank, parts=2, tensors=tensors)
        for rank, tensors in enumerate(tensors_of(step))
    ]
    manifest = manifest_of(step, parts, number=number)
    publish(store, manifest)
    return manifest


def assert_holds(store: Store, manifest: Manifest) -> None:
    """The checkpoint is, bit for bit, what `save` wrote at its step."""
    read = load_tensors(store, manifest)
    expected = {name: t for part in tensors_of(manifest.step) for name, t in part.items()}
    assert set(read) == set(expected)
    assert all(torch.equal(read[name], expected[name]) for name in read)


def damage(store: Store, name: str) -> None:
    """Flip one bit in the middle of a file: its size stays."""
    content = bytearray(store.read(name))
    content[len(content) // 2] ^= 1
    store.write(name, [bytes(content)])


def drafts(store: Store) -> list[str]:
    """Unfinished files, of live and killed writers."""
    return [name for name in store.sizes() if is_draft(name)]


def memory_store() -> Store:
    """An empty store in memory, of its own."""
    return open_store(f"memory://{uuid.uuid4().hex}")
