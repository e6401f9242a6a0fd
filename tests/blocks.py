"""Points in Parquet files, prepared into blocks in this process: a task and its provider."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn

from raycloud.clock import SystemClock
from raycloud.data.cache import BlockCache
from raycloud.data.index import Input
from raycloud.data.provider import Provided
from raycloud.data.samples import BlockSamples
from raycloud.order import Layout, Order
from raycloud.rows import Rows
from raycloud.spec import Job
from raycloud.task import Source, Splits, Task
from raycloud.worker.dataset import block_layout
from tests.lockstep import NetTask, job
from tests.one_process import prepare_here

SEEN: dict[str, list[int]] = {}  # ids in the order in which they were computed, by a task's tag


def write_points(path: Path, first: int, count: int) -> None:
    """Rows with ids [first, first + count); what they hold follows from their id."""
    ids = np.arange(first, first + count)
    columns: dict[str, Any] = {"id": ids, "label": (ids * 7) % 3}
    for axis in range(6):
        columns[f"x{axis}"] = np.sin(ids * (axis + 1.7) + axis)
    pq.write_table(pa.table(columns), path, row_group_size=17)


class BlockTask(NetTask):
    """`NetTask` of points that lie in files. Batches are augmented, and know whose they are."""

    def __init__(
        self, *, noise: float = 0.1, scale: float = 1.0, tag: str = "", **settings: Any
    ) -> None:
        super().__init__(**settings)
        self.noise, self.factor, self.tag = noise, scale, tag

    def data(self, path: str | None) -> Splits:
        return Splits(train=Source(path=path, format="parquet"))

    def preprocess(self, rows: Rows) -> Rows | Mapping[str, Any]:
        point = np.stack([rows[f"x{axis}"] for axis in range(6)], axis=1) * self.factor
        return {"id": rows["id"], "point": point, "label": rows["label"]}

    def batch(self, samples: Sequence[Any], rng: np.random.Generator | None) -> Any:
        assert isinstance(samples, Rows)
        points = samples["point"]
        if rng is not None and self.noise:
            points = points + self.noise * rng.standard_normal(points.shape)
        return torch.from_numpy(points), torch.from_numpy(samples["label"]), samples["id"]

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        SEEN.setdefault(self.tag, []).extend(batch[2].tolist())
        return super().loss(model, batch[:2])

    def scheduler(self, optimizer: torch.optim.Optimizer, steps: int) -> Any:
        return None  # so that a run in two parts is the whole run


class Here:
    """Provides what is prepared in this process; as one worker of a run would be provided."""

    def __init__(
        self, job: Job, cache: Path, known: Mapping[str, Sequence[Input]] | None = None
    ) -> None:
        self.job, self.known = job, known
        self.cache = BlockCache(cache)
        self.asked: tuple[Task, Splits] | None = None
        self.provided: Provided | None = None

    def provide(self, task: Task, splits: Splits) -> Provided:
        self.asked = (task, splits)
        clock = SystemClock()
        self.provided = prepare_here(self.job, task, splits, self.cache, clock, self.known)
        return self.provided

    def grown(self, version: int) -> BlockSamples:
        assert self.asked is not None
        self.known = self.inputs()
        return self.provide(*self.asked).train

    def inputs(self) -> dict[str, tuple[Input, ...]]:
        """What a run would remember."""
        assert self.provided is not None
        return {split: one.index.inputs for split, one in self.provided.prepared.items()}


def asked(path: Path, **changes: Any) -> Job:
    """A job of `BlockTask` with small partitions."""
    data = {"path": str(path), "partition_bytes": 1024, "window": 2, **changes.pop("data", {})}
    return job(task=BlockTask, data=data, **changes)


def provided(job: Job, task: Task, cache: Path) -> tuple[BlockSamples, Order]:
    """The samples of a job's data, and their order."""
    samples = Here(job, cache).provide(task, task.data(job.data.path)).train
    layout = block_layout(job, samples.index)
    assert isinstance(layout, Layout)
    return samples, Order(samples=len(samples), seed=job.seed, layout=layout)
