"""PyTorch's `DataLoader`: two persistent worker processes decode each image again in every epoch.

`own`: Pillow and `default_collate`, one image at a time, as PyTorch's own examples do. `same`: the
same with raycloud's decoder. `batched`: written for this, a whole batch is decoded at once into the
tensor that is delivered (`__getitems__` and a `collate_fn` that does nothing), which spares the
loader a list of small tensors.
The workers are started, and have decoded a small data set, before the first epoch is timed; the
data set's files are opened within it.
"""

from __future__ import annotations

import argparse
import io
import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, default_collate

from benchmarks.feeding.consumer import Batches, consume, write
from raycloud.data.images import decode

WORKERS = 2
PREFETCH = 4


class Table:
    """Images and labels of Parquet files, read when the first is asked for."""

    def __init__(self, directory: Path) -> None:
        self._paths = sorted(directory.glob("*.parquet"))
        self.rows = sum(pq.ParquetFile(path).metadata.num_rows for path in self._paths)

    @cached_property
    def columns(self) -> tuple[list[bytes], torch.Tensor]:
        """All images as bytes, and all labels."""
        table = pq.read_table(self._paths)
        return table["image"].to_pylist(), torch.from_numpy(table["label"].to_numpy())


class Images(Dataset[Any]):
    """The rows of `first`, then those of `second`; an item is an image and its label."""

    def __init__(self, first: Table, second: Table) -> None:
        self._tables = (first, second)
        self._split = first.rows

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One image, decoded by Pillow."""
        row, (images, labels) = self._find(index)
        image = Image.open(io.BytesIO(images[row])).convert("RGB")
        return torch.from_numpy(np.array(image)), labels[row]

    def _find(self, index: int) -> tuple[int, tuple[list[bytes], torch.Tensor]]:
        second = index >= self._split
        return index - self._split * second, self._tables[second].columns


class Quick(Images):
    """The same with raycloud's decoder."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One image."""
        row, (images, labels) = self._find(index)
        return torch.from_numpy(decode([images[row]])[0]), labels[row]


class WholeBatches(Images):
    """The same, a batch at a time."""

    def __getitems__(self, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows of a batch, all from the same half."""
        first, (images, labels) = self._find(indices[0])
        rows = [index + first - indices[0] for index in indices]
        return torch.from_numpy(decode([images[row] for row in rows])), labels[rows]


KINDS: dict[str, type[Images]] = {"own": Images, "same": Quick, "batched": WholeBatches}


class Shuffled:
    """Batches of shuffled indices in [start, stop); the range may be changed between epochs."""

    def __init__(self, batch: int) -> None:
        self.start = self.stop = 0
        self._batch = batch
        self._random = np.random.default_rng(0)

    def __len__(self) -> int:
        """Number of batches."""
        return math.ceil((self.stop - self.start) / self._batch)

    def __iter__(self) -> Iterator[list[int]]:
        """One epoch."""
        order = self._random.permutation(np.arange(self.start, self.stop))
        for at in range(0, len(order), self._batch):
            yield order[at : at + self._batch].tolist()


def main() -> None:
    """Warm up, then one cold epoch and some warm ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--small", type=Path, required=True)
    parser.add_argument("--decoder", choices=tuple(KINDS), required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--warm", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    small, real = Table(asked.small), Table(asked.images)
    sampler = Shuffled(asked.batch)
    loader = DataLoader(
        KINDS[asked.decoder](small, real),
        batch_sampler=sampler,
        num_workers=WORKERS,
        persistent_workers=True,
        prefetch_factor=PREFETCH,
        collate_fn=_as_is if asked.decoder == "batched" else default_collate,
    )

    def epoch(start: int, stop: int) -> Batches:
        sampler.start, sampler.stop = start, stop
        return iter(loader)

    consume(lambda: epoch(0, small.rows), kind="warm-up", shuffled=True)
    whole = (small.rows, small.rows + real.rows)
    epochs = [
        consume(lambda: epoch(*whole), kind=kind, shuffled=True)
        for kind in ("cold", *["warm"] * asked.warm)
    ]
    write(asked.out, epochs, workers=WORKERS, prefetch_factor=PREFETCH)


def _as_is(batch: Any) -> Any:
    return batch


if __name__ == "__main__":
    main()
