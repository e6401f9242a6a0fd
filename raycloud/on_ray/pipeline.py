"""The pipeline of a run: one for all of its members, which makes a task's `Source`s into blocks.

See `pipeline_actor` for the process it is in.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Any

import ray

from raycloud.data.location import is_local, locate
from raycloud.data.provide import HELD_OUT, TRAIN
from raycloud.errors import InternalError
from raycloud.events import DataGrew
from raycloud.on_ray.holders import Holders
from raycloud.on_ray.preparing import Means, Preparing
from raycloud.on_ray.reader import Turns
from raycloud.on_ray.readers import Readers
from raycloud.on_ray.warming import keys_first_read
from raycloud.step.contract import construct
from raycloud.task import Source
from raycloud.training.supply import asked

if TYPE_CHECKING:
    from raycloud.clock import Clock
    from raycloud.data.index import Block, Index, Input
    from raycloud.data.location import File
    from raycloud.data.provide import Prepared
    from raycloud.on_ray.holder import Holder
    from raycloud.packing.code import TaskCode
    from raycloud.spec import Job
    from raycloud.task import Splits, Task


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
    """What members are given.

    Attributes:
        prepared: By split.
        handles: By node, the holders of blocks.
        notices: What should be known, each a text and its details; told once, to who asks next.
    """

    prepared: Mapping[str, Prepared]
    handles: Mapping[str, Any] = field(default_factory=dict)
    notices: tuple[tuple[str, Mapping[str, Any]], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Looked:
    """What a look for added files gave.

    Attributes:
        grown: The data with them; None where there are none to take up yet.
        notices: What should be known, each a text and its details.
    """

    grown: DataGrew | None
    notices: tuple[tuple[str, Mapping[str, Any]], ...]


class Pipeline:
    """Prepares data once for all who ask, and again where it has grown. Thread-safe.

    Args:
        config: What it is told.
        holder: The holder of this process's node.
        me: An actor through which others ask `holder`.
        clock: For durations and for when caches were used.
    """

    def __init__(self, config: PipelineConfig, holder: Holder, me: Any, clock: Clock) -> None:
        """Nothing is prepared yet."""
        self._config = config
        self._holder = holder
        self._me = me
        self._turns = Turns(me)
        self._clock = clock
        self._turn = Lock()  # one change at a time
        self._remaking = Lock()  # not held up by growth, which may take long
        self._asking = Lock()
        self._ready: Future[dict[str, Prepared]] | None = None
        self._holders: Holders | None = None
        self._nodes: list[str] | None = None
        self._splits: dict[str, Preparing] = {}
        self._versions: dict[int, Index] = {}  # of the training samples
        self._seen: list[File] = []
        self._notices: list[tuple[str, Mapping[str, Any]]] = []

    def prepare(self) -> Ready:
        """The data of the task, ready to be read. The first who asks has it prepared.

        Raises:
            RaycloudError: Why it cannot be; the same to all who ask.
        """
        prepared = self._prepared()
        handles = self._holders.handles if self._holders is not None else {}
        with self._asking:
            notices, self._notices = tuple(self._notices), []
        return Ready(prepared=prepared, handles=dict(handles), notices=notices)

    def begin(self) -> None:
        """Have the data prepared, before there are members to ask for it.

        Raises:
            RaycloudError: As `prepare` does.
        """
        self._prepared()

    def take(self, ticket: str) -> int | None:
        """See `Turns`."""
        return self._turns.take(ticket)

    def refresh(self) -> Looked:
        """Look for files that were added, and read those that nobody is writing to any more.

        A file is taken up once it was seen twice, of the same size and time.

        Raises:
            RaycloudError: They cannot be read, or a known one is gone or has changed.
        """
        with self._turn:
            grown = self._grow()
        with self._asking:
            notices, self._notices = tuple(self._notices), []
        return Looked(grown=grown, notices=notices)

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
                block = split.again(key, self._readers(1))
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
        splits = asked(task, job)
        _sourced(splits)
        self._holders = Holders.start(self._holder, self._me, job, config.task, self._notice)
        means = Means(
            job=job, task=task, code=config.task, holders=self._holders, clock=self._clock
        )
        self._splits = _preparing(means, splits, config.known)
        self._nodes = self._seeing(self._holders)
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
        cpus = self._config.job.data.cpus
        total = max(1, int(ray.cluster_resources().get("CPU", 1)))
        if cpus == "auto":
            cpus = most or total
        return Readers(
            self._turns,
            min(cpus, total),
            self._clock,
            here=not self._config.wary and self._sees_all(),
            notice=self._notice,
            nodes=self._nodes,
        )

    def _sees_all(self) -> bool:
        return self._nodes is None or self._holder.place.node in self._nodes

    def _seeing(self, holders: Holders) -> list[str] | None:
        """The nodes that see the files; None: all do, or it does not matter."""
        source = self._splits[TRAIN].source
        if len(holders.nodes) == 1 or source.path is None or source.filesystem is not None:
            return None
        first = locate(source)[0]
        if not is_local(first.path):
            return None
        seen = holders.ask("sees", first.path, first.bytes)
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
        if self._holders is not None:
            self._holders.ask("pin", keys_first_read(indexes, self._config.job))

    def _notice(self, what: str, **detail: Any) -> None:
        with self._asking:
            self._notices.append((what, detail))


def _preparing(means: Means, splits: Splits, known: tuple[Input, ...]) -> dict[str, Preparing]:
    held_out = splits.held_out
    found = {TRAIN: Preparing(means, _sourced(splits), TRAIN, known)}
    if isinstance(held_out, Source):
        found[HELD_OUT] = Preparing(means, held_out, HELD_OUT)
    return found


def _sourced(splits: Splits) -> Source:
    if not isinstance(splits.train, Source):
        raise InternalError("the task's training samples need no pipeline")
    return splits.train
