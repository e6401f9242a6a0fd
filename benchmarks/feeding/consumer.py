"""The consumer of every contestant: takes batches, reads all of each, and times the epoch.

What it reads comes to sums that do not depend on the order of the rows, and in which each image
stands with its own label. They are known beforehand, so that nobody skips a row, delivers one twice
or mixes up labels. Imports nothing but numpy: it runs in processes without raycloud too.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_WRAP = 2**64

Batches = Iterable[tuple[Any, Any]]
"""Pairs of images, uint8 of shape (rows, height, width, 3), and integer labels: arrays or
tensors on the CPU."""


@dataclass(frozen=True, kw_only=True)
class Sums:
    """What an epoch adds up to, modulo 2**64; the same for any order of its rows.

    Attributes:
        rows: Rows seen.
        labels: Sum of the labels.
        pixels: Sum of the images, read as 64-bit words.
        paired: Sum over rows of an image's own sum times (label + 1).
    """

    rows: int = 0
    labels: int = 0
    pixels: int = 0
    paired: int = 0

    def plus(self, images: npt.NDArray[np.uint8], labels: npt.NDArray[Any]) -> Sums:
        """These sums and those of one batch."""
        words = np.ascontiguousarray(images).reshape(len(images), -1).view(np.uint64).sum(axis=1)
        weights = labels.astype(np.uint64)
        weights += np.uint64(1)
        return Sums(
            rows=self.rows + len(images),
            labels=self.labels + int(weights.sum()) - len(images),
            pixels=(self.pixels + int(words.sum())) % _WRAP,
            paired=(self.paired + int(words @ weights)) % _WRAP,
        )


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """One epoch as its consumer saw it.

    Attributes:
        kind: `cold`, `warm`, or what else the contestant distinguishes.
        shuffled: Whether rows came in a random order.
        wall_s: From opening the data set (cold) or asking for the epoch (warm) to its last batch.
        batches: Batches seen.
        first_s: Of these, until the first batch.
        mean_ms: Mean time that the consumer waited for a batch, the first left out.
        p99_ms: Its 99th percentile.
        sums: What the rows add up to.
    """

    kind: str
    shuffled: bool
    wall_s: float
    batches: int
    first_s: float
    mean_ms: float
    p99_ms: float
    sums: Sums


def consume(make: Callable[[], Batches], *, kind: str, shuffled: bool) -> Epoch:
    """Ask for an epoch and take all of it; all that `make` does counts.

    Raises:
        TypeError: Images are not uint8.
    """
    sums, waits_s = Sums(), []
    began_s = asked_s = time.perf_counter()
    for images, labels in make():
        pixels, classes = _array(images), _array(labels)
        waits_s.append(time.perf_counter() - asked_s)
        if pixels.dtype != np.uint8:
            raise TypeError(f"images of {pixels.dtype}, not uint8")
        sums = sums.plus(pixels, classes)
        asked_s = time.perf_counter()
    later_ms = [1e3 * wait_s for wait_s in waits_s[1:]] or [0.0]
    return Epoch(
        kind=kind,
        shuffled=shuffled,
        wall_s=asked_s - began_s,
        batches=len(waits_s),
        first_s=waits_s[0] if waits_s else 0.0,
        mean_ms=float(np.mean(later_ms)),
        p99_ms=float(np.percentile(later_ms, 99)),
        sums=sums,
    )


def write(path: Path, epochs: Sequence[Epoch], **said: Any) -> None:
    """Write what a contestant measured, and what it says of itself."""
    path.write_text(json.dumps({"epochs": [asdict(epoch) for epoch in epochs], **said}))


def _array(values: Any) -> npt.NDArray[Any]:
    """An array of what may be a tensor, not copied."""
    return values if isinstance(values, np.ndarray) else np.asarray(values.numpy())
