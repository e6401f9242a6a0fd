"""What a member reads its data through: the run's pipeline, this node's blocks, other nodes'.

What reads blocks is loaded where there are some: a task with samples of its own starts sooner.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from threading import Event, Lock
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    ObjectLostError,
    RayError,
)

from raycloud.clock import SystemClock
from raycloud.data.index import HELD_OUT, TRAIN
from raycloud.data.provider import Provided
from raycloud.errors import InternalError, MachineError, RaycloudError
from raycloud.events import Noticed
from raycloud.net.served import LostServerError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pyarrow as pa
    from ray import ObjectRef

    from raycloud.data.index import Block, Index
    from raycloud.data.provider import Least
    from raycloud.data.samples import BlockSamples, Wanted
    from raycloud.net.stream import Place
    from raycloud.on_ray.block_store import BlockFetcher, NodeBlocks
    from raycloud.on_ray.pipeline import Ready
    from raycloud.step.collate import Collate
    from raycloud.task import Samples, Splits, Task
    from raycloud.worker.collators import RemoteCollators
    from raycloud.worker.context import MemberConfig, ServerNames

_TRIES = 3  # the pipeline is made again as often
_WARM_S = 120.0  # pinning goes at about 1 GB/s
_OBJECT_S = 30.0
_SERVER_STARTS_S, _ANSWERS_S = 20.0, 0.2


def _asked_place(name: str) -> ObjectRef[Place] | None:
    """What a server answers where it listens; None: there is none of this name now."""
    try:
        server: Any = ray.get_actor(name)
    except ValueError:
        return None
    answer: ObjectRef[Place] = server.place.remote()
    return answer


def _place(asked: ObjectRef[Place] | None) -> Place | None:
    """Where a server listens; None: it does not answer now, as one that is started again."""
    if asked is None:
        return None
    try:
        place: Place = ray.get(asked, timeout=0)
    except (GetTimeoutError, RayError):
        return None
    return place


def _collator_place(name: str) -> Place:
    """Where a collator listens; waits until it does. `LookupError`: there is none of this name."""
    try:
        collator: Any = ray.get_actor(name)
        place: Place = ray.get(collator.place.remote())
    except (ValueError, RayError) as error:
        raise LookupError(type(error).__name__) from error
    return place


class RayProvider:
    """Gives a member its samples, and finds their blocks wherever they are. Thread-safe.

    A block is taken from the object store where it is pinned, else mapped from this node's cache,
    else fetched from another node, else made again.
    """

    def __init__(self, config: MemberConfig, node: str) -> None:
        """Ask nobody yet: a task with samples of its own needs nothing of this."""
        self._config = config
        self.member = config.member
        self._node = node
        self._lock = Lock()
        self._noticing = Lock()  # of its own: nobody waits in it for another process
        self._warming = Lock()
        self._layouts: Sequence[ServerNames] = config.servers
        self._pipeline: Any = None
        self._number = self._dead = -1  # that of the pipeline, and of the last that died
        self._wary = False
        self._fetcher: BlockFetcher | None = None
        self._handles: Mapping[str, Any] = {}
        self._own: NodeBlocks | None = None  # where no other process claims what is used here
        self._pinned: dict[str, ObjectRef[Any]] = {}
        self._pinning: Any = None
        self._inputs = config.known
        self._version = 0
        self._notices: list[Noticed] = []

    @property
    def layout(self) -> int:
        """See `Provider.layout`."""
        return len(self._layouts) - 1

    def serve(self, layouts: Sequence[ServerNames]) -> None:
        """These are the layouts of servers that there have been, by the names of their actors."""
        self._layouts = layouts

    def servers(self, layout: int = 0, *, least: Least = "each") -> list[list[Place | None]]:
        """See `Provider.servers`."""
        clock = SystemClock()
        until_s = clock.monotonic_s() + _SERVER_STARTS_S
        while True:
            asked = [[_asked_place(name) for name in names] for names in self._layouts[layout]]
            every = [one for shard in asked for one in shard if one is not None]
            if every:
                ray.wait(every, num_returns=len(every), timeout=_ANSWERS_S)
            found = [[_place(one) for one in shard] for shard in asked]
            there = [any(shard) for shard in found]
            if {"each": all(there), "one": any(there), "none": True}[least]:
                return found
            if clock.monotonic_s() >= until_s:
                raise LostServerError("no server of a shard is there")
            Event().wait(_ANSWERS_S)

    def provide(self, task: Task, splits: Splits) -> Provided:
        """The samples of both splits: see `Provider.provide`."""
        from raycloud.on_ray.pipeline import rows_of

        ready: Ready = self._call("prepare")
        if self._config.own_pipeline:
            own = rows_of(task, splits)
            if own is None or own != ready.rows:
                self._leave_shared()
                ready = self._call("prepare")
        self._connect(ready)
        self._warm()
        samples = {name: self._samples(one.index) for name, one in ready.prepared.items()}
        self._inputs = ready.prepared[TRAIN].index.inputs
        return Provided(
            train=samples[TRAIN], held_out=samples.get(HELD_OUT), prepared=ready.prepared
        )

    def grown(self, version: int) -> BlockSamples:
        """The samples of grown data: see `Provider.grown`."""
        index: Index = self._call("grown", version)
        self._inputs, self._version = index.inputs, version
        self._claim(self._call("prepare"))
        self._warm()
        return self._samples(index)

    def collators(self, collate: Collate, samples: Samples) -> RemoteCollators | None:
        """The collators that make batches in the place of `collate`; None: there are none.

        Args:
            collate: This member's own.
            samples: What it reads.
        """
        names = self._config.collators
        if not names:
            return None
        from raycloud.worker.collator import training_fingerprint
        from raycloud.worker.collators import RemoteCollators

        own = {} if collate.reads_blocks else training_fingerprint(samples)
        first = self._config.member
        return RemoteCollators(names, _collator_place, collate, own, self._notice, first=first)

    def notices(self) -> list[Noticed]:
        """What had to be done in another way since the last call."""
        with self._noticing:
            found, self._notices = self._notices, []
        return found

    def table_of(self, block: Block) -> pa.Table:
        """The rows of a block.

        Raises:
            RaycloudError: They are nowhere, and cannot be made again.
        """
        table = self._from_memory(block)
        if table is None:
            table = self._connected().table(block)
        if table is None:
            self._notice("a block is made again", block=block.key)
            again = self._call("remake", block.key)
            self._connect(self._call("prepare"))  # to others, if the pipeline is another one
            table = self._connected().table(again)
        if table is None:
            raise MachineError(
                f"the block {block.key} was made again and cannot be read on this node",
                hint="see whether something else clears the cache directory",
            )
        return table

    def rows_of(self, wanted: Wanted) -> dict[str, pa.Table]:
        """By key, those rows of blocks that are sooner here from another node than whole blocks."""
        pinned = self._references()
        return self._connected().rows([one for one in wanted if one[0].key not in pinned])

    def _connect(self, ready: Ready) -> None:
        from raycloud.on_ray.block_store import BlockFetcher, cache_of

        for what, detail in ready.notices:
            self._notice(what, **detail)
        cache = cache_of(self._config.job)
        self._handles = ready.handles
        self._claim(ready)
        self._fetcher = BlockFetcher(cache, self._node, ready.handles, self._notice)

    def _claim(self, ready: Ready) -> None:
        """Use the data on this node, where no process of the pipeline does."""
        from raycloud.on_ray.block_store import NodeBlocks

        if self._node in ready.handles:
            return
        job, task = self._config.job, self._config.task
        self._own = self._own or NodeBlocks(task, job, self._node, SystemClock())
        try:
            self._own.claim(ready.records)
            self._own.complete(ready.records)
        except MachineError as error:  # what is in the cache can be read all the same
            self._notice("others do not see that the data is in use here", why=error.message)

    def close(self) -> None:
        """Others may remove what was used here."""
        if self._own is not None:
            with contextlib.suppress(MachineError, OSError):  # they find out that this has ended
                self._own.close()

    def _connected(self) -> BlockFetcher:
        if self._fetcher is None:
            raise InternalError("a block was asked for before the data was prepared")
        return self._fetcher

    def _samples(self, index: Index) -> BlockSamples:
        from raycloud.data.samples import BlockSamples

        elsewhere = any(node != self._node for node in self._handles)
        return BlockSamples(index, self.table_of, self.rows_of if elsewhere else None)

    def _from_memory(self, block: Block) -> pa.Table | None:
        reference = self._references().get(block.key)
        if reference is None:
            return None
        try:
            table: pa.Table = ray.get(reference, timeout=_OBJECT_S)
        except (ObjectLostError, GetTimeoutError) as error:
            self._notice("a pinned block was lost", block=block.key, why=type(error).__name__)
            self._pinned.pop(block.key, None)
            return None
        return table

    def _references(self) -> dict[str, ObjectRef[Any]]:
        """What is pinned on this node: asked for once, and waited for."""
        with self._warming:
            if self._pinning is not None:
                try:
                    self._pinned = ray.get(self._pinning, timeout=_WARM_S + _OBJECT_S)
                except RayError as error:
                    self._notice("no block is pinned", why=type(error).__name__)
                self._pinning = None
            return self._pinned

    def _warm(self) -> None:
        """Begin to ask what is pinned on this node."""
        blocks = self._handles.get(self._node)
        if blocks is not None:
            with self._warming:
                self._pinning = blocks.ask.remote("pinned", _WARM_S)

    def _call(self, method: str, *args: Any) -> Any:
        """Ask the pipeline; where it died, one is made again."""
        why = ""
        for _ in range(_TRIES):
            pipeline = self._found()
            try:
                answer = ray.get(pipeline.call.remote(method, *args))
            except (ActorDiedError, ActorUnavailableError) as error:
                self._forget(pipeline, dead=isinstance(error, ActorDiedError))
                why = str(error).strip()
                name = type(error).__name__
                self._notice("the data's pipeline is made again", why=name, detail=why[:500])
                continue
            except RayError as error:
                raise InternalError(f"the data's pipeline failed: {error}") from error
            if isinstance(answer, RaycloudError):
                raise answer
            return answer
        raise MachineError(
            f"the process that prepares the data died {_TRIES} times: {why}",
            hint="look for the kernel's word on memory (dmesg) on the driver's node",
        )

    def _found(self) -> Any:
        from raycloud.on_ray.ingest import pipeline_of
        from raycloud.on_ray.pipeline import PipelineConfig

        config = self._config
        with self._lock:
            if self._pipeline is None:
                told = PipelineConfig(
                    job=config.job,
                    task=config.task,
                    known=self._inputs,
                    version=self._version,
                    wary=self._wary,
                )
                self._number, self._pipeline = pipeline_of(
                    config.pipeline, told, config.home or self._node, after=self._dead
                )
            return self._pipeline

    def _leave_shared(self) -> None:
        """The pipeline of other runs has other rows than this one's."""
        name = self._config.own_pipeline
        with self._lock:
            self._config = replace(self._config, pipeline=name, own_pipeline="")
            self._pipeline, self._number, self._dead = None, -1, -1

    def _forget(self, pipeline: Any, *, dead: bool) -> None:
        with self._lock:
            self._wary = True
            if self._pipeline is pipeline:
                self._pipeline = None
                self._dead = self._number if dead else self._dead

    def _notice(self, what: str, **detail: Any) -> None:
        with self._noticing:
            self._notices.append(Noticed(what=what, member=self.member, detail=detail))
