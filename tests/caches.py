"""Caches to look into: data sets with blocks, and processes that use them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pyarrow as pa

from raycloud.clock import VirtualClock
from raycloud.data.cache import BlockCache, DataSet

ROWS = pa.table({"x": np.arange(1000)})


def data_set(name: str, *keys: str, **values: object) -> DataSet:
    made = DataSet(id=name, task="Cifar", split="train", source="/data", keys=keys)
    return replace(made, **values)  # type: ignore[arg-type]


def keep(cache: BlockCache, one: DataSet, used_s: float, *, complete: bool = True) -> None:
    """Put a data set's blocks there, last used at `used_s`."""
    clock = VirtualClock(used_s)
    use = cache.use(one, clock, "run a")
    for key in (*one.keys, *one.parts):
        if not cache.has(key):
            cache.add(key, [ROWS])
    if complete:
        cache.complete(replace(one, rows=1000 * len(one.keys)))
    use.close()


def keys(cache: BlockCache) -> list[str]:
    return sorted(path.stem for path in cache.root.glob("blocks/*/*.arrow"))


def ids(cache: BlockCache) -> list[str]:
    return [held.data_set.id for held in cache.ls().sets]


def block_bytes(cache: BlockCache) -> int:
    return cache.path_of("aa1").stat().st_size


@contextmanager
def other_process(cache: BlockCache, name: str) -> Iterator[subprocess.Popen[str]]:
    """A process that uses a data set until it is killed or its input ends."""
    code = (
        "import sys; from pathlib import Path\n"
        "from raycloud.clock import VirtualClock\n"
        "from raycloud.data.cache import BlockCache, DataSet\n"
        f"cache = BlockCache(Path({str(cache.root)!r}))\n"
        f"use = cache.use(cache.find({name!r}), VirtualClock(50.0), 'run other')\n"
        "print('ready', flush=True); sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.kill()
