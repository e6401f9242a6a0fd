"""MosaicML Streaming: `StreamingDataset` over MDS shards, read by its `StreamingDataLoader`.

Runs in an environment of its own (`benchmarks.feeding.environment`). The shards hold the JPEGs as
they are, and are written beforehand, which is not timed. Cold: the local directory is empty, shards
are copied there from a remote one, which is a directory on the same disk; making the data set and
forking its two workers belongs to it, since a loader's workers know one data set only. Warm: later
epochs with the same workers. The process has read a small data set before.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
from PIL import Image
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset

from benchmarks.feeding.consumer import Batches, consume, write
from raycloud.data.images import decode

WORKERS = 2
PREFETCH = 4
ENCODINGS = {"own": "jpeg", "same": "bytes"}


class Images(StreamingDataset):
    """Items as its documentation makes them: the image as an array, and the label."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """One image, decoded by Streaming's `jpeg` encoding: Pillow."""
        item = super().__getitem__(index)
        return torch.from_numpy(np.array(item["image"].convert("RGB"))), item["label"]


class Quick(StreamingDataset):
    """The same with raycloud's decoder."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """One image."""
        item = super().__getitem__(index)
        return torch.from_numpy(decode([item["image"]])[0]), item["label"]


KINDS: dict[str, type[StreamingDataset]] = {"own": Images, "same": Quick}


def write_shards(directory: Path, to: Path, decoder: str) -> None:
    """Write the images of a directory's Parquet files as MDS shards, not encoded anew."""
    with tempfile.NamedTemporaryFile(suffix=".jpg") as file:
        jpeg = Path(file.name)

        def kept(data: bytes) -> Image.Image | bytes:
            """What the encoding takes; `jpeg` copies the file that an image was opened from."""
            if ENCODINGS[decoder] == "bytes":
                return data
            jpeg.write_bytes(data)
            return Image.open(jpeg)

        columns = {"image": ENCODINGS[decoder], "label": "int"}
        with MDSWriter(out=str(to), columns=columns) as writer:
            for path in sorted(directory.glob("*.parquet")):
                for batch in pq.ParquetFile(path).iter_batches():
                    for row in batch.to_pylist():
                        writer.write({"image": kept(row["image"]), "label": row["label"]})


def opened(remote: Path, local: Path, *, decoder: str, batch: int) -> StreamingDataLoader:
    """A loader over shards; none of them is here yet."""
    dataset = KINDS[decoder](remote=str(remote), local=str(local), batch_size=batch, shuffle=True)
    return StreamingDataLoader(
        dataset,
        batch_size=batch,
        num_workers=WORKERS,
        persistent_workers=True,
        prefetch_factor=PREFETCH,
    )


def main() -> None:
    """Warm up, then one cold epoch and some warm ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--small", type=Path, required=True)
    parser.add_argument("--decoder", choices=tuple(ENCODINGS), required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--warm", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="mds", ignore_cleanup_errors=True) as place:
        for name in ("small", "images"):
            write_shards(getattr(asked, name), Path(place, "remote", name), asked.decoder)
        loaders: list[StreamingDataLoader] = []

        def first(name: str) -> Callable[[], Batches]:
            def make() -> Batches:
                remote, local = Path(place, "remote", name), Path(place, "local", name)
                loader = opened(remote, local, decoder=asked.decoder, batch=asked.batch)
                loaders.append(loader)
                return iter(loader)

            return make

        consume(first("small"), kind="warm-up", shuffled=True)
        epochs = [consume(first("images"), kind="cold", shuffled=True)]
        epochs += [
            consume(lambda: iter(loaders[1]), kind="warm", shuffled=True) for _ in range(asked.warm)
        ]
        write(asked.out, epochs, workers=WORKERS, prefetch_factor=PREFETCH)


if __name__ == "__main__":
    main()
