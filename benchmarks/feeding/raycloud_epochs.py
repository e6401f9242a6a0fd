"""raycloud as a contestant: its pipeline on an embedded Ray, its feed as in a worker.

Cold: from asking the pipeline for data whose cache is empty to the last batch of the first epoch:
Ray Data reads, decodes and writes blocks, the feed reads them. Warm: the epochs that follow. Second
run: another pipeline, which finds the blocks, and its first epoch. Not cached: the same feed, but
every batch is decoded anew, from JPEGs in memory. A pipeline's process is started before it is
asked, and its readers have prepared a small data set.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
import torch

from benchmarks.feeding.consumer import Batches, consume, write
from benchmarks.feeding.tasks import Images
from raycloud.clock import SystemClock
from raycloud.data.provider import Provided
from raycloud.on_ray.attach import attached
from raycloud.order import Position
from raycloud.rows import Rows
from raycloud.spec import Job
from raycloud.step.collate import Collate, Making
from raycloud.step.device import keep_freed_memory
from raycloud.step.feed import Feed
from raycloud.worker.context import MemberConfig
from raycloud.worker.dataset import DataSet

PREFETCH = 8


def job_of(images: Path, cache: Path, rows: int) -> Job:
    """A job that reads a directory; a step is one batch."""
    return Job(
        name="ingest",
        task="benchmarks.feeding.tasks:Images",
        epochs=100,
        global_batch=rows,
        micro_batch=rows,
        data={
            "path": str(images),
            "prefetch_steps": PREFETCH,
            "cache": {"path": str(cache)},
        },
    )


class Decoding:
    """Samples that are decoded whenever they are read: what there was before the cache."""

    def __init__(self, directory: Path, task: Images) -> None:
        table = pq.read_table(sorted(directory.glob("*.parquet")))
        self._images = table["image"].to_pylist()
        self._labels = table["label"].to_numpy()
        self._task = task

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._images)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One row."""
        return self.gather(np.array([index]))[0]

    def gather(self, ids: npt.NDArray[np.int64]) -> Rows:
        """These rows, decoded now."""
        images = [self._images[i] for i in ids.tolist()]
        return Rows(self._task.preprocess(Rows({"image": images, "label": self._labels[ids]})))


class Reading:
    """A feed over samples, epoch after epoch, and how long each batch took to read."""

    def __init__(self, job: Job, data: Provided) -> None:
        clock = SystemClock()
        self._job, self._clock = job, clock
        data_set = DataSet(job, data, None)
        self._steps = data_set.steps
        self._collate = Collate(
            Images(),
            data.train,
            data_set.order,
            pinned=False,
            making=Making(threads=job.data.threads),
            clock=clock,
        )
        self._epoch = 0
        self.read_ms: list[float] = []

    def epoch(self) -> Batches:
        """The next epoch."""
        first = Position(epoch=self._epoch)
        count = self._steps.per_epoch()
        self._epoch += 1
        feed = Feed(
            self._collate,
            lambda span: span.micro_batches,
            self._steps.walk(0, first),
            fuse=lambda: 1,
            depth=self._job.data.prefetch_steps,
            clock=self._clock,
        )
        try:
            for _ in range(count):
                work = feed.take()
                self.read_ms.append(1e3 * work.read_s)
                for one in work.passes:
                    yield one.batch["image"], one.batch["label"]
        finally:
            feed.close()

    def latency(self) -> dict[str, float]:
        """How long reading a batch took, in the epochs so far."""
        return {
            "mean": float(np.mean(self.read_ms)),
            "p99": float(np.percentile(self.read_ms, 99)),
        }


class Run:
    """One run's pipeline, started and not asked yet."""

    def __init__(self, job: Job, name: str) -> None:
        import ray  # noqa: PLC0415 - its settings come first

        from raycloud.on_ray.ingest import pipeline_of  # noqa: PLC0415 - loads Ray, too
        from raycloud.on_ray.pipeline import PipelineConfig  # noqa: PLC0415 - so does it
        from raycloud.on_ray.provider import RayProvider  # noqa: PLC0415

        node = ray.get_runtime_context().get_node_id()
        config = MemberConfig(
            member=0,
            job=job,
            address="127.0.0.1",
            node=node,
            task=Images,
            checkpoints="",
            pipeline=name,
            home=node,
        )
        self._job = job
        told = PipelineConfig(job=job, task=Images)
        _, self._pipeline = pipeline_of(name, told, node)  # the provider finds it there
        ray.get(self._pipeline.ask.remote("sees", "", 0))
        self._provider = RayProvider(config, node)
        self.reading: Reading | None = None
        self.prepared: Any = None

    def first(self) -> Batches:
        """Prepare the data, and the first epoch."""
        task = Images()
        found = self._provider.provide(task, task.data(self._job.data.path))
        self.prepared = found.prepared
        supply = Provided(train=found.train, held_out=None, prepared=found.prepared)
        self.reading = Reading(self._job, supply)
        return self.reading.epoch()


def main() -> None:
    """Warm up; then cold, warm, a second run, and without the cache."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--small", type=Path, required=True)
    parser.add_argument("--decoder", choices=("same",), required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--warm", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)

    def epoch(make: Callable[[], Batches], kind: str) -> Any:
        return consume(make, kind=kind, shuffled=True)

    with tempfile.TemporaryDirectory(prefix="cache") as place:
        cache = Path(place)
        small = job_of(asked.small, cache, asked.batch)
        job = job_of(asked.images, cache, asked.batch)
        with attached(job, None):
            for name in ("warm-up", "warm-up again"):
                epoch(Run(small, name).first, "warm-up")
            cold = Run(job, "cold")
            epochs = [epoch(cold.first, "cold")]
            cold.reading.read_ms.clear()
            epochs += [epoch(cold.reading.epoch, "warm") for _ in range(asked.warm)]
            again = Run(job, "again")
            epochs.append(epoch(again.first, "second run"))
            decoding = Provided(train=Decoding(asked.images, Images()), held_out=None)
            without = Reading(job, decoding)
            epochs.append(epoch(without.epoch, "not cached"))
            write(
                asked.out,
                epochs,
                prefetch_steps=PREFETCH,
                read_ms={"warm": cold.reading.latency(), "not cached": without.latency()},
                prepared_s={
                    "cold": cold.prepared["train"].seconds,
                    "second run": again.prepared["train"].seconds,
                },
                blocks=len(cold.prepared["train"].index.blocks),
            )


if __name__ == "__main__":
    main()
