"""Tasks whose samples go through the pipeline of a real Ray, and what provides them to a test."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray
from ray.util.placement_group import placement_group, remove_placement_group

from raycloud.data.cache import BlockCache
from raycloud.data.index import Input
from raycloud.data.samples import BlockSamples
from raycloud.data.slices import IMAGES_BYTES
from raycloud.rows import Rows
from raycloud.spec import Job
from raycloud.task import Source, Splits
from tests.blocks import BlockTask, write_points
from tests.live import wait_for
from tests.live_tasks import claim
from tests.lockstep import job

TASKS = Path(__file__)
LOAD_BYTES = IMAGES_BYTES // 2 + 1024


class Points(BlockTask):
    """The points of a directory's files, or the same rows in hand.

    Args:
        kind: In what they come: `files`; or a `table`, a `hugging` data set (reversed), or one of
            Ray Data: `ray`, `keyed` with a name, `shuffled`.
        killed: A file's name; with -0, the reader that first makes it is killed.
        deaths: So many are, the next ones for -1, -2 and so on.
        always: The same of every reader.
        bad: The id of a row that cannot be preprocessed.
        ran: A directory in which each call of `preprocess` leaves a file, with its process's id.
        together: No call ends before calls of so many processes have begun.
    """

    def __init__(
        self,
        *,
        kind: str = "files",
        killed: str | None = None,
        deaths: int = 1,
        always: bool = False,
        bad: int | None = None,
        ran: str | None = None,
        together: int = 0,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        self.kind, self.always, self.bad, self.ran = kind, always, bad, ran
        self.together = together
        self.claims = [killed and f"{killed}-{number}" for number in range(deaths)]

    def data(self, path: str | None) -> Splits:
        assert path is not None
        if self.kind == "files":
            return Splits(train=Source(path=path))
        table = pa.concat_tables(pq.read_table(file) for file in files_in(path))
        if self.kind == "table":
            return Splits(train=table)
        if self.kind == "hugging":
            import datasets

            whole = datasets.Dataset(table)
            return Splits(train=whole.select(range(len(whole) - 1, -1, -1)))
        import ray.data

        dataset = ray.data.read_parquet([str(file) for file in files_in(path)])
        if self.kind == "shuffled":
            dataset = dataset.random_shuffle(seed=1)
        return Splits(train=Source(dataset=dataset, key="points" if self.kind == "keyed" else None))

    def preprocess(self, rows: Rows) -> Rows | Mapping[str, Any]:
        if self.always or any(map(claim, self.claims)):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.ran is not None:
            (Path(self.ran) / f"{os.getpid()}-{secrets.token_hex(8)}").touch()
            wait_for("the others", lambda: len(processes_in(self.ran)) >= self.together)
        if self.bad is not None and self.bad in rows["id"]:
            raise ValueError("no such point")
        return super().preprocess(rows)


class PacedPoints(Points):
    """Makes a batch in `pause_s` until the file `gate` is there, and then as fast as it can."""

    def __init__(self, *, gate: str, pause_s: float = 0.03, **settings: Any) -> None:
        super().__init__(**settings)
        self.gate, self.pause_s = gate, pause_s

    def batch(self, samples: Sequence[Any], rng: np.random.Generator | None) -> Any:
        if not Path(self.gate).exists():
            threading.Event().wait(self.pause_s)
        return super().batch(samples, rng)


def processes_in(ran: str | Path | None) -> set[str]:
    """Which processes have left files in `Points.ran`."""
    return {path.name.partition("-")[0] for path in Path(str(ran)).iterdir()}


def files_in(path: str) -> list[Path]:
    """The Parquet files of a directory, by name."""
    return sorted(Path(path).glob("*.parquet"))


def written(folder: Path, files: int = 4, rows: int = 60, *, first: int = 0) -> str:
    """Write files of `rows` rows each, numbered from `first` on; returns the directory.

    Two of them are too large for one slice, so that each gives a block.
    """
    folder.mkdir(parents=True, exist_ok=True)
    padding = pa.array([os.urandom(LOAD_BYTES // rows) for _ in range(rows)])
    for number in range(first, first + files):
        path = folder / f"part-{number}.parquet"
        draft = path.with_name("_draft")  # nobody sees it half-written
        write_points(draft, number * rows, rows)
        pq.write_table(pq.read_table(draft).append_column("padding", padding), draft)
        draft.rename(path)
    return str(folder)


def asked(folder: Path, workers: int = 1, *, task: Any = None, **changes: Any) -> Job:
    """A small job on the points in `folder/data`, with its cache in `folder/cache`.

    Args:
        folder: Where they are.
        workers: How many.
        task: Its task; None: `Points`, by its file's name.
        changes: Further fields; those in `data` are added.
    """
    data = {"path": str(folder / "data"), "cache": {"path": str(folder / "cache")}}
    values: dict[str, Any] = {
        "task": task or f"{TASKS}:Points",
        "elastic": {"min_workers": workers, "max_workers": workers},
    }
    return job(**(values | changes | {"data": data | changes.get("data", {})}))


def ids_of(samples: BlockSamples) -> list[int]:
    """The ids of all rows, as they are written in them, in the samples' order."""
    found: list[int] = samples.gather(np.arange(len(samples)))["id"].tolist()
    return found


def cache(folder: Path) -> BlockCache:
    """The cache of `asked`'s jobs."""
    return BlockCache(folder / "cache")


def here() -> str:
    """The node of this process."""
    return str(ray.get_runtime_context().get_node_id())


@contextlib.contextmanager
def reserved(cpus: int) -> Iterator[None]:
    """No CPU is free, as where members have them all."""
    group = placement_group([{"CPU": 1}] * cpus)
    ray.get(group.ready())
    try:
        yield
    finally:
        remove_placement_group(group)


@contextlib.contextmanager
def provider(job: Job, *, known: Sequence[Input] = (), node: str | None = None) -> Iterator[Any]:
    """What a member of a run of `job` would have; its pipeline is ended afterwards."""
    from raycloud.on_ray.ingest import living_pipeline, pipeline_name
    from raycloud.on_ray.provider import RayProvider
    from raycloud.on_ray.tasks import code_of
    from raycloud.worker.context import MemberConfig

    code = code_of(job, job.task if isinstance(job.task, type) else Points)
    name = pipeline_name()
    config = MemberConfig(
        member=0,
        node="",
        address="",
        job=code.named_in(job),
        task=code,
        checkpoints="",
        pipeline=name,
        home=here(),
        known=tuple(known),
    )
    try:
        yield RayProvider(config, node or here())
    finally:
        with contextlib.suppress(ValueError):
            ray.kill(living_pipeline(name))


def provided(one: Any, job: Job) -> Any:
    """What a provider gives for the job's task."""
    task = Points(**job.settings)
    return one.provide(task, Splits(train=()))


def killed(one: Any) -> None:
    """End a provider's pipeline, as a death of its process would."""
    pipeline = one._found()
    ray.kill(pipeline)

    def is_dead() -> bool:
        try:
            ray.get(pipeline.ask.remote("sees", "/", 0))
        except ray.exceptions.RayActorError:
            return True
        return False

    wait_for("the pipeline's end", is_dead)
