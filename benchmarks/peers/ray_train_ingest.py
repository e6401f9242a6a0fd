"""Ray Train's ingest: `get_dataset_shard(...).iter_torch_batches` in one `TorchTrainer` worker.

A first trainer reads the lazy data set, cold; a second one reads the same data set materialised,
which is not timed, as Ray's documentation advises where it fits into memory. Both read a small
data set before. Unshuffled and shuffled by a local buffer, as `ray_data` does.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray
import torch
from ray import train
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from benchmarks.feeding.consumer import consume
from benchmarks.peers.ray_data import BUFFER_ROWS, PREFETCH, arguments, batches, lazy, start

Columns = dict[str, Any]


def read(settings: Columns) -> None:
    """What the worker runs: each data set once, then again as often as it is warm."""
    torch.set_num_threads(1)
    rows = settings["batch"]
    found = []
    for name in ("small", *settings["names"]):
        shard = train.get_dataset_shard(name)
        shuffled = name.endswith("shuffled")
        kind = "warm-up" if name == "small" else settings["kind"]
        for _ in range(settings["epochs"]):
            epoch = consume(
                lambda shard=shard, shuffled=shuffled: batches(shard, rows=rows, shuffled=shuffled),
                kind=kind,
                shuffled=shuffled,
            )
            if kind != "warm-up":
                found.append(asdict(epoch))
    Path(settings["out"]).write_text(json.dumps(found))
    train.report({"epochs": len(found)})


def main() -> None:
    """A cold trainer, then a warm one."""
    asked = arguments(__doc__)
    start()
    small = lazy(asked.small, asked.decoder, shuffled=False)
    plain = lazy(asked.images, asked.decoder, shuffled=False)
    shuffled = lazy(asked.images, asked.decoder, shuffled=True)
    small.materialize()  # starts the processes that decode
    found = []
    with tempfile.TemporaryDirectory(prefix="train") as place:
        found += _fit(
            Path(place),
            {"small": small, "plain": plain, "shuffled": shuffled},
            {"kind": "cold", "epochs": 1, "batch": asked.batch},
        )
        kept = plain.materialize()
        found += _fit(
            Path(place),
            {"small": small, "plain": kept, "shuffled": kept.randomize_block_order()},
            {"kind": "warm", "epochs": asked.warm, "batch": asked.batch},
        )
    said = {"prefetch_batches": PREFETCH, "local_shuffle_buffer_size": BUFFER_ROWS}
    asked.out.write_text(json.dumps({"epochs": found, **said}))
    ray.shutdown()


def _fit(place: Path, datasets: dict[str, ray.data.Dataset], settings: Columns) -> list[Columns]:
    """Run one trainer; what its worker measured."""
    out = place / f"{settings['kind']}.json"
    names = [name for name in datasets if name != "small"]
    TorchTrainer(
        read,
        train_loop_config={**settings, "names": names, "out": str(out)},
        scaling_config=ScalingConfig(num_workers=1, use_gpu=False),
        torch_config=TorchConfig(backend="gloo"),
        datasets=datasets,
        run_config=RunConfig(name=settings["kind"], storage_path=str(place / "storage")),
    ).fit()
    found: list[Columns] = json.loads(out.read_text())
    return found


if __name__ == "__main__":
    main()
