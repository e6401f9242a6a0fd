"""Sources prepared in one process: files, a task, and a bench to make blocks on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raycloud.clock import VirtualClock
from raycloud.data import slices
from raycloud.data.cache import BlockCache
from raycloud.data.provider import Provided
from raycloud.rows import Rows
from raycloud.spec import Job
from raycloud.task import Source, Splits, Task
from tests.one_process import prepare_here

FILES = (7, 3, 10, 4, 6)
ROWS = sum(FILES)


class Doubled(Task):
    """Multiplies x; `width` is not read by preprocess."""

    model = data = loss = optimizer = None  # type: ignore[assignment]

    def __init__(self, factor: int = 2, width: int = 1) -> None:
        self.factor = factor
        self.width = width

    def preprocess(self, rows: Rows) -> Mapping[str, Any]:
        return {"x": rows["x"] * self.factor, "label": rows["label"]}


def task(**settings: int) -> Task:
    Doubled.__abstractmethods__ = frozenset()
    return Doubled(**settings)


def job(**data: Any) -> Job:
    values = {"task": "a.py:A", "steps": 1, "global_batch": 8, "micro_batch": 4, "data": data}
    return Job(**values)


def table(first: int, rows: int) -> pa.Table:
    x = np.arange(first, first + rows)
    return pa.table({"x": x, "label": [["cat", "dog", "emu"][i % 3] for i in x]})


class Bench:
    """A cache and a clock, and what was read."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(slices, "SLICE_BYTES", 2000)  # two files
        self.cache = BlockCache(root / "cache")
        self.clock = VirtualClock(1e10)
        self.read: list[str] = []
        monkeypatch.setattr("raycloud.data.prepare.read", self._read)

    def _read(self, source: Source, piece: Any) -> Any:
        self.read += [Path(one.path).name for one in piece.inputs]
        self.clock.advance(1.0)
        return slices.read(source, piece)

    def prepare(
        self, train: Any, *, of: Task | None = None, known: Any = None, **data: Any
    ) -> Provided:
        self.read.clear()
        source = train if not isinstance(train, Path) else Source(path=str(train))
        return prepare_here(
            job(**data), of or task(), Splits(train=source), self.cache, self.clock, known
        )


def x_of(provided: Provided) -> list[int]:
    return [int(row["x"]) for row in provided.train]


def five_files(root: Path) -> Path:
    """A folder of five Parquet files with x = 0, 1, 2, ..."""
    root.mkdir()
    first = 0
    for number, rows in enumerate(FILES):
        pq.write_table(table(first, rows), root / f"{number}.parquet")
        first += rows
    return root


def bench_of(bench: Bench) -> tuple[BlockCache, VirtualClock]:
    return bench.cache, bench.clock
