"""Ray Data: `read_parquet`, decode with `map_batches`, `iter_torch_batches` in the driver.

Cold: the lazy data set, streamed. Warm: the same data set, materialised in the object store, which
is not timed. Each with and without shuffling: blocks in random order and a local buffer, as Ray's
documentation advises for training. Ray's worker processes have run the same pipeline over a small
data set before.
"""

from __future__ import annotations

import argparse
import io
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.data
import torch
from PIL import Image

from benchmarks.feeding.consumer import Batches, Epoch, consume, write
from raycloud.data.images import decode

CPUS = 2
PREFETCH = 4
BUFFER_ROWS = 4096

Columns = dict[str, Any]


def decode_own(batch: Columns) -> Columns:
    """Decode with Pillow."""
    images = [np.asarray(Image.open(io.BytesIO(i)).convert("RGB")) for i in batch["image"]]
    return {"image": np.stack(images), "label": batch["label"]}


def decode_same(batch: Columns) -> Columns:
    """Decode with raycloud's decoder."""
    return {"image": decode(list(batch["image"])), "label": batch["label"]}


DECODERS: dict[str, Callable[[Columns], Columns]] = {"own": decode_own, "same": decode_same}


def start() -> None:
    """An embedded, quiet Ray; the benchmark's environment does the rest."""
    ray.init(
        address="local",
        num_cpus=CPUS,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)


def lazy(directory: Path, decoder: str, *, shuffled: bool) -> ray.data.Dataset:
    """The decoded images of a directory; nothing is read yet."""
    files = {"shuffle": "files"} if shuffled else {}
    return ray.data.read_parquet(str(directory), **files).map_batches(
        DECODERS[decoder], batch_format="numpy"
    )


def batches(source: Any, *, rows: int, shuffled: bool) -> Batches:
    """One epoch of a data set, or of a shard of one."""
    buffer = {"local_shuffle_buffer_size": BUFFER_ROWS} if shuffled else {}
    found = source.iter_torch_batches(
        batch_size=rows, prefetch_batches=PREFETCH, device="cpu", **buffer
    )
    return ((batch["image"], batch["label"]) for batch in found)


def main() -> None:
    """Warm up; then a cold epoch and some warm ones, unshuffled and shuffled."""
    asked = arguments(__doc__)
    torch.set_num_threads(1)
    start()

    def epoch(make: Callable[..., ray.data.Dataset], kind: str, *, shuffled: bool) -> Epoch:
        return consume(
            lambda: batches(make(shuffled=shuffled), rows=asked.batch, shuffled=shuffled),
            kind=kind,
            shuffled=shuffled,
        )

    for shuffled in (False, True):
        epoch(partial(lazy, asked.small, asked.decoder), "warm-up", shuffled=shuffled)
    opened = partial(lazy, asked.images, asked.decoder)
    epochs = [epoch(opened, "cold", shuffled=shuffled) for shuffled in (False, True)]
    kept = opened(shuffled=False).materialize()

    def again(*, shuffled: bool) -> ray.data.Dataset:
        return kept.randomize_block_order() if shuffled else kept

    epochs += [
        epoch(again, "warm", shuffled=shuffled)
        for shuffled in (False, True)
        for _ in range(asked.warm)
    ]
    write(asked.out, epochs, prefetch_batches=PREFETCH, local_shuffle_buffer_size=BUFFER_ROWS)
    ray.shutdown()


def arguments(description: str | None) -> argparse.Namespace:
    """The command line of the contestants on Ray."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--small", type=Path, required=True)
    parser.add_argument("--decoder", choices=tuple(DECODERS), required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--warm", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
