"""Ingest: one process of a run makes its task's `Source`s into blocks, for all members.

The pipeline is a named actor on the driver's node, whose files the user named, and in nobody's
placement group. The driver makes it where the task looks as if it were needed, else the first
member to need it; any member makes it again where it has died.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raycloud.clock import SystemClock
from raycloud.data.digest import rows_digest
from raycloud.data.index import HELD_OUT, TRAIN, Prepared
from raycloud.data.location import is_local, locate
from raycloud.data.sampling import sample
from raycloud.errors import InternalError, RaycloudError
from raycloud.events import DataGrew
from raycloud.on_ray.attach import hash_seeded, keep_confidential, node_id_here
from raycloud.on_ray.block_store import ClusterBlocks, NodeBlocks, answer
from raycloud.on_ray.ingest_split import SplitIngest, keys_first_read
from raycloud.on_ray.read_tasks import Readers, WorkQueue
from raycloud.step.contract import construct
from raycloud.task import Source
from raycloud.worker.dataset import task_splits

if TYPE_CHECKING:
    from raycloud.data.cache import DataSet
    from raycloud.data.index import Block, Index, Input
    from raycloud.data.location import File
    from raycloud.packing.code import TaskCode
    from raycloud.spec import Job
    from raycloud.spec.sizes import SourceRate
    from raycloud.task import Splits, Task

_THREADS = 64  # members wait in one while others ask


def pipeline_name() -> str:
    """A name that no other run's pipeline has."""
    return f"raycloud-data-{secrets.token_hex(8)}"


Told = tuple[tuple[str, Mapping[str, Any]], ...]  # what should be known: texts and their details


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineConfig:
    """What a pipeline is told.

    Attributes:
        job: The job.
        task: The task's class, or its code.
        known: Inputs of the training samples that the run has already, with their versions.
        version: How often the data had grown, of this start of the run, to those inputs.
        wary: One before this has died, perhaps of what it read: leave reading to other processes.
    """

    task: type[Task] | TaskCode  # first: what follows may be of its modules
    job: Job
    known: tuple[Input, ...] = ()
    version: int = 0
    wary: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """Data by split, actors that hold its blocks by node, and notices: told to who asks next.

    `records` are of the data sets in it, and `rows` is the `rows_digest` of it.
    """

    prepared: Mapping[str, Prepared]
    records: tuple[DataSet, ...]
    handles: Mapping[str, Any]
    notices: Told
    rows: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Refreshed:
    """The data with the files that were added; None where there are none to take up yet."""

    grown: DataGrew | None
    notices: Told


class Pipeline:
    """Prepares data once for all who ask, and again where it has grown. Thread-safe.

    `me` is the actor that others ask for the blocks of `own`, and for work.
    """

    def __init__(self, config: PipelineConfig, own: NodeBlocks, me: Any) -> None:
        self._config = config
        self.queue = WorkQueue(me)
        self._turn = Lock()  # one change at a time
        self._remaking = Lock()  # not held up by growth, which may take long
        self._asking = Lock()
        self._looking = Lock()
        self._ready: Future[dict[str, Prepared]] | None = None
        self._notices: list[tuple[str, Mapping[str, Any]]] = []
        self._blocks = ClusterBlocks(own, me, self._notice)
        self._places: tuple[list[str] | None] | None = None  # nodes that read; None: not known yet
        self._rows: str | None = None
        self._splits: dict[str, SplitIngest] = {}
        self._versions: dict[int, Index] = {}  # of the training samples
        self._seen: list[File] = []

    def prepare(self) -> Ready:
        """The data of the task, ready to be read. The first who asks has it prepared.

        Raises:
            RaycloudError: Why it cannot be; the same to all who ask.
        """
        prepared = self._prepared()
        return Ready(
            prepared=prepared,
            records=tuple(one for split in self._splits.values() for one in split.records),
            handles=dict(self._blocks.handles),
            notices=self._take_notices(),
            rows=self._rows,
        )

    def begin(self) -> None:
        """Have the data prepared, before there are members to ask for it."""
        self._prepared()

    def refresh(self) -> Refreshed:
        """Look for files that were added, and read those that nobody is writing to any more.

        A file is taken up once it was seen twice, of the same size and time.

        Raises:
            RaycloudError: They cannot be read, or a known one is gone or has changed.
        """
        with self._turn:
            grown = self._grow()
        return Refreshed(grown=grown, notices=self._take_notices())

    def grown(self, version: int) -> Index:
        """The index of the training samples of a version.

        Raises:
            InternalError: There is none.
        """
        self._prepared()
        if version not in self._versions:
            raise InternalError(
                f"the data of version {version} was asked for; there are {sorted(self._versions)}"
            )
        return self._versions[version]

    def remake(self, key: str) -> Block:
        """Make a block again that is on no node any more.

        Raises:
            RaycloudError: It cannot be.
        """
        self._prepared()
        with self._remaking:
            for split in self._splits.values():
                block = split.remake(key, self._readers(1))
                if block is not None:
                    return block
        raise InternalError(f"the block {key} was asked for, which belongs to no data of this run")

    def _prepared(self) -> dict[str, Prepared]:
        with self._asking:
            first = self._ready is None
            ready = self._ready = self._ready or Future()
        if first:
            try:
                with self._turn:
                    ready.set_result(self._prepare())
            except BaseException as error:  # noqa: BLE001 - raised to all who ask
                ready.set_exception(error)
        return ready.result()

    def _prepare(self) -> dict[str, Prepared]:
        config, job = self._config, self._config.job
        task = construct(config.task, job)
        splits = task_splits(task, job)
        if not isinstance(splits.train, Source):
            raise InternalError("the task's training samples need no pipeline")
        train = SplitIngest(task, splits.train, TRAIN, self._blocks, config.known)
        self._splits = {TRAIN: train}
        if isinstance(splits.held_out, Source):
            self._splits[HELD_OUT] = SplitIngest(task, splits.held_out, HELD_OUT, self._blocks)
        self._rows = rows_of(task, splits)
        self._train = splits.train
        prepared = {name: split.run(self._readers(None)) for name, split in self._splits.items()}
        self._versions[config.version] = prepared[TRAIN].index
        self._pin([one.index for one in prepared.values()])
        return prepared

    def _grow(self) -> DataGrew | None:
        train = self._splits.get(TRAIN)
        if train is None or train.source.path is None:
            return None
        known = {one.path for one in train.inputs}
        new = [file for file in locate(train.source) if file.path not in known]
        seen, self._seen = self._seen, new
        if not new or new != seen:
            return None
        prepared = train.run(self._readers(1))
        newest = max(self._versions)
        if prepared.index.rows == self._versions[newest].rows:
            return None  # files without a row
        version = newest + 1
        self._versions[version] = prepared.index
        self._pin([prepared.index])
        return DataGrew(
            samples=prepared.index.rows,
            version=version,
            inputs=tuple(file.path for file in new),
            partitions=prepared.index.partitions,
        )

    def _readers(self, most: int | None) -> Readers:
        """Readers on all CPUs, or on `most` of them; never on more than the job allows."""
        cpus, own = self._config.job.data.cpus, self._blocks.own
        total = max(1, int(ray.cluster_resources().get("CPU", 1)))
        if cpus == "auto":
            cpus = most or total
        return Readers(
            self.queue,
            min(cpus, total),
            own.clock,
            here=self._reads_here,
            notice=self._notice,
            places=self._reading,
        )

    def _reads_here(self) -> bool:
        """Whether this process may read: it sees the files, and none before it has died of them."""
        if self._config.wary:
            return False
        file = self._on_disk
        return file is None or bool(self._blocks.here("sees", file.path, file.bytes))

    def _reading(self) -> list[str] | None:
        """The nodes where others may read; None: all."""
        with self._looking:
            if self._places is None:
                self._blocks.begin()  # what is made on a node is asked of its process
                self._places = (self._seeing(),)
            return self._places[0]

    @cached_property
    def _on_disk(self) -> File | None:
        """A file of the training samples that not all nodes may see; None: there is none."""
        source = self._train
        if self._blocks.alone or source.path is None or source.filesystem is not None:
            return None
        first = locate(source)[0]
        return first if is_local(first.path) else None

    def _seeing(self) -> list[str] | None:
        """The nodes that see the files; None: all do, or it does not matter."""
        first = self._on_disk
        if first is None:
            return None
        seen = self._blocks.ask("sees", first.path, first.bytes)
        nodes = [node for node, sees in seen.items() if sees]
        if len(nodes) == len(seen):
            return None
        self._notice(
            "not all nodes see the data's files, so only those that do read them",
            file=first.path,
            nodes=nodes,
        )
        return nodes

    def _pin(self, indexes: list[Index]) -> None:
        """Pin what is read first, everywhere."""
        self._blocks.tell("pin", keys_first_read(indexes, self._config.job))

    def _take_notices(self) -> Told:
        with self._asking:
            notices, self._notices = tuple(self._notices), []
        return notices

    def _notice(self, what: str, **detail: Any) -> None:
        with self._asking:
            self._notices.append((what, detail))


# What is asked while others wait for the data has threads of its own; Ray's types do not know them.
@ray.remote(concurrency_groups={"blocks": 8, "turns": 2})  # type: ignore[call-overload]
class PipelineActor:
    """A run's pipeline and its node's blocks, in a process of their own."""

    def __init__(self, config: PipelineConfig) -> None:
        keep_confidential(config.job)
        context = ray.get_runtime_context()
        node = context.get_node_id()
        self._blocks = NodeBlocks(config.task, config.job, node, SystemClock())
        self._pipeline = Pipeline(config, self._blocks, context.current_actor)

    @ray.method(concurrency_group="blocks")
    def ask(self, method: str, *args: Any) -> Any:
        """See `NodeBlocksActor.ask`."""
        return answer(self._blocks, method, *args)

    @ray.method(concurrency_group="turns")
    def take(self, ticket: str) -> int | None:
        """See `WorkQueue.take`."""
        return self._pipeline.queue.take(ticket)

    def call(self, method: str, *args: Any) -> Any:
        """What a method of `Pipeline` returns, or the `RaycloudError` that it raised."""
        return answer(self._pipeline, method, *args)


def sampled(task: type[Task] | TaskCode, job: Job) -> tuple[str, SourceRate] | str | None:
    """Where training samples come from, and how fast this process has read some of them.

    None: not from another machine. A text: why it could not. Held-out files are counted, too.
    """
    try:
        splits = task_splits(construct(task, job), job)
        if not isinstance(splits.train, Source) or splits.train.path is None:
            return None
        files = _remote(splits.train)
        if not files:
            return None
        here = min(int(ray.cluster_resources().get("CPU", 1)), os.cpu_count() or 1)
        readers = here if job.data.cpus == "auto" else min(here, job.data.cpus)
        found = sample(splits.train, SystemClock(), max(1, readers), files)
        if isinstance(splits.held_out, Source) and splits.held_out.path is not None:
            others = _remote(splits.held_out)
            size = found.bytes + sum(file.bytes for file in others)
            found = replace(found, files=found.files + len(others), bytes=size)
    except RaycloudError as error:
        return error.message
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    return f"{files[0].path}{more}", found  # without credentials, also of a chained URL


def _remote(source: Source) -> list[File]:
    return [file for file in locate(source) if not is_local(file.path)]


def sample_here(code: TaskCode, job: Job) -> tuple[str, SourceRate] | str | None:
    """See `sampled`; in another process of this node, since the task's code may do anything."""
    there = NodeAffinitySchedulingStrategy(node_id_here(), soft=False)
    asked = ray.remote(sampled).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
    try:
        found: tuple[str, SourceRate] | str | None = ray.get(asked.remote(code, code.named_in(job)))
    except RayError as error:
        return f"its process ended: {type(error).__name__}"
    return found


def rows_of(task: Task, splits: Splits) -> str | None:
    """The `rows_digest` of a task's splits that go through a pipeline."""
    named = {TRAIN: splits.train, HELD_OUT: splits.held_out}
    return rows_digest(task, {n: one for n, one in named.items() if isinstance(one, Source)})


def pipeline_of(name: str, config: Any, home: str, *, after: int = -1) -> tuple[int, Any]:
    """The run's pipeline, made if it is not there, and its number.

    Args:
        name: What all pipelines of the run are called, before their numbers.
        config: What to tell a new one: a `PipelineConfig`, or where it is in Ray's store.
        home: The node it has to be on.
        after: The number of the last one known to be dead.
    """
    number = max(_numbers(name), default=-1)
    number = number if number > after else after + 1
    actor = PipelineActor.options(  # type: ignore[attr-defined]
        # Each has a name of its own: a process that holds a dead one is given it again by its name.
        name=f"{name}-{number}",
        get_if_exists=True,
        num_cpus=0,
        max_concurrency=_THREADS,
        # Softly is not enough: it would also go elsewhere. Where the driver dies, so does the run.
        scheduling_strategy=NodeAffinitySchedulingStrategy(home, soft=False),
        **hash_seeded(),
    ).remote(config)
    return number, actor


def living_pipeline(name: str) -> Any:
    """The run's pipeline; a `ValueError` where there is none."""
    return ray.get_actor(f"{name}-{max(_numbers(name))}")


def _numbers(name: str) -> list[int]:
    """The numbers of those that live."""
    found = (one.removeprefix(f"{name}-") for one in ray.util.list_named_actors())
    return [int(one) for one in found if one.isdecimal()]
