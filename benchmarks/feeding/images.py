"""The images that everyone reads: CIFAR-10 as JPEGs in Parquet files, or generated ones."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from benchmarks.feeding.consumer import Sums
from benchmarks.machine import ROOT

DEFAULT = ROOT.parent / "shared" / "data" / "images"
FILES = 6
ROWS = 60_000
SMALL_ROWS = 12_000  # several slices of raycloud's: all of its readers get to work
QUICK_ROWS = 6_000
ROWS_PER_GROUP = 1_000
SIDE = 32
_AT_ONCE = 1_000


@dataclass(frozen=True, kw_only=True)
class ImageSet:
    """A directory of Parquet files with columns `image` (JPEG) and `label` (0 to 9).

    Attributes:
        directory: Where they are.
        small: A directory with the first few of them, to warm up with.
        kind: What they are, for people.
        rows: How many.
        encoded_bytes: Bytes of all JPEGs.
        decoded_bytes: Bytes of all pixels.
        sums: What one epoch adds up to.
    """

    directory: Path
    small: Path
    kind: str
    rows: int
    encoded_bytes: int
    decoded_bytes: int
    sums: Sums

    def record(self) -> dict[str, Any]:
        """What to note of them, without the path."""
        return {
            "kind": self.kind,
            "rows": self.rows,
            "encoded_bytes": self.encoded_bytes,
            "decoded_bytes": self.decoded_bytes,
        }


def find(asked: Path | None, place: Path, *, quick: bool) -> ImageSet:
    """The images to measure with.

    Args:
        asked: The directory that the user names; None: `../shared/data/images` beside the checkout,
            and where that is absent a generated set.
        place: Where generated, small and quick sets are written.
        quick: Take a tenth.

    Raises:
        FileNotFoundError: The directory named has no Parquet files.
    """
    directory = asked or DEFAULT
    kind = "CIFAR-10 as JPEGs" if asked is None else "the user's own"
    if not sorted(directory.glob("*.parquet")):
        if asked is not None:
            raise FileNotFoundError(f"--images {asked}: no Parquet files there")
        kind = "generated JPEGs of smooth noise"
        directory = place / "generated"
        _write(directory, _generated(QUICK_ROWS if quick else ROWS))
    elif quick:
        kind, whole = f"{kind}, a tenth of them", directory
        directory = place / "quick"
        _write(directory, _first(whole, QUICK_ROWS))
    small = place / "small"
    _write(small, _first(directory, SMALL_ROWS))
    return _looked_at(directory, small, kind)


def _looked_at(directory: Path, small: Path, kind: str) -> ImageSet:
    """Decode all of it once, with Pillow."""
    encoded = decoded = 0
    sums = Sums()
    for table in _pieces(directory):
        jpegs = table["image"].to_pylist()
        pixels = np.stack([np.asarray(Image.open(io.BytesIO(one)).convert("RGB")) for one in jpegs])
        encoded += sum(map(len, jpegs))
        decoded += pixels.nbytes
        sums = sums.plus(pixels, table["label"].to_numpy())
    return ImageSet(
        directory=directory,
        small=small,
        kind=kind,
        rows=sums.rows,
        encoded_bytes=encoded,
        decoded_bytes=decoded,
        sums=sums,
    )


def _pieces(directory: Path) -> Iterator[pa.Table]:
    for path in sorted(directory.glob("*.parquet")):
        for batch in pq.ParquetFile(path).iter_batches(_AT_ONCE, columns=["image", "label"]):
            yield pa.Table.from_batches([batch])


def _first(directory: Path, rows: int) -> pa.Table:
    found, left = [], rows
    for table in _pieces(directory):
        found.append(table.slice(0, left))
        left -= len(found[-1])
        if not left:
            break
    return pa.concat_tables(found)


def _generated(rows: int) -> pa.Table:
    """JPEGs of a few random waves each, of about the size that photographs have."""
    random = np.random.default_rng(0)
    place = np.linspace(0, 2 * np.pi, SIDE)
    jpegs = []
    for _ in range(rows):
        across, down = random.uniform(0.5, 6, (2, 3, 4))
        waves = np.sin(place[:, None, None, None] * across + place[None, :, None, None] * down)
        pixels = waves.sum(-1) * 24 + random.normal(128, 12, (SIDE, SIDE, 3))
        out = io.BytesIO()
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(out, "JPEG", quality=75)
        jpegs.append(out.getvalue())
    labels = random.integers(0, 10, rows).astype(np.int8)
    return pa.table({"image": pa.array(jpegs, pa.binary()), "label": labels})


def _write(directory: Path, table: pa.Table) -> None:
    """Write a table as six files, named like those of the real set: five to train, one to test."""
    directory.mkdir(parents=True)
    each = -(-len(table) // FILES)
    for number in range(FILES):
        part = table.slice(number * each, each)
        split = "test" if number == FILES - 1 else "train"
        pq.write_table(part, directory / f"{split}-{number}.parquet", row_group_size=ROWS_PER_GROUP)
