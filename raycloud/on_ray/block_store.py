"""Block store: what each node holds of a data set, in its cache and pinned in memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from threading import Condition, Lock, RLock, Thread
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raycloud.clock import SystemClock
from raycloud.data.cache import BlockCache, DamagedBlock
from raycloud.data.prepare import labels_of, make_block
from raycloud.errors import RaycloudError
from raycloud.on_ray.attach import first_line, keep_confidential
from raycloud.spec import Environment
from raycloud.step.contract import construct, raised

if TYPE_CHECKING:
    import pyarrow as pa
    from ray import ObjectRef

    from raycloud.clock import Clock
    from raycloud.data.cache import DataSet, Use
    from raycloud.data.index import Block
    from raycloud.data.recipe import Made, Recipe, Work
    from raycloud.data.samples import Ids, Wanted
    from raycloud.packing.code import TaskCode
    from raycloud.spec import Job
    from raycloud.task import Task

_MEMORY_SHARE = 0.5  # of the object store; readers and collators use the rest
_THREADS = 8
_TRIES = 2  # a copy may have been removed for that of another thread
_FETCH_S = 120.0  # a block of some MB, over a thin link

Notice = Callable[..., None]  # called with what happened and, by keyword, its details


def cache_of(job: Job) -> BlockCache:
    """This node's cache for a job."""
    return BlockCache.of(job.data.cache, Environment.from_process().cache)


class NodeBlocks:
    """One node's blocks: which are there, which are in use, which are pinned. Thread-safe."""

    def __init__(self, code: type[Task] | TaskCode, job: Job, node: str, clock: Clock) -> None:
        self.code, self.job, self.node, self.clock = code, job, node, clock
        self.cache = cache_of(job)
        self._memory_bytes = job.data.cache.memory_bytes
        self._uses: dict[str, Use] = {}
        self._pinned: dict[str, ObjectRef[Any]] = {}
        self._pinned_bytes = 0
        self._pinning = 0  # threads that are at it
        self._idle = Condition()
        self._turn = Lock()

    @cached_property
    def _task(self) -> Task:
        return construct(self.code, self.job)

    def claim(self, data_sets: Sequence[DataSet]) -> None:
        """Use data sets from now on, so that no other run evicts them."""
        for one in data_sets:
            if one.id not in self._uses:
                self._uses[one.id] = self.cache.use(one, self.clock, f"run {self.job.name}")

    def close(self) -> None:
        """Use none of them any more."""
        while self._uses:
            _, use = self._uses.popitem()
            use.close()

    def complete(self, data_sets: Sequence[DataSet]) -> None:
        """All blocks of these data sets are there, on this node or another. Makes room on disk."""
        for one in data_sets:
            self.cache.complete(one)
        self.cache.evict(keep=[key for one in data_sets for key in one.keys])

    def find(self, id: str) -> DataSet | None:  # noqa: A002 - it is what it is called
        """The record of a data set that is complete."""
        found = self.cache.find(id)
        return found if found is not None and found.complete else None

    def made(self, recipe: Recipe, works: Sequence[Work]) -> dict[str, Made]:
        """By key, those of these works whose blocks are whole in this node's cache."""
        return {
            work.key: make_block(recipe, work, self._task, self.cache, self.clock, self.node)
            for work in works
            if self.cache.open_whole(work.key) is not None
        }

    def sizes(self, keys: Sequence[str]) -> dict[str, tuple[int, int]]:
        """By key, rows and bytes of those of these blocks that are whole in this node's cache."""
        return {
            key: (len(table), self.cache.path_of(key).stat().st_size)
            for key in keys
            if self.cache.has(key) and (table := self.cache.open_whole(key)) is not None
        }

    def labels(self, keys: Sequence[str], column: str) -> dict[str, pa.Array]:
        """By key, the classes of these blocks' rows; a `DataError` where there are none."""
        tables = {key: self.cache.open_whole(key) for key in keys}
        return {key: labels_of(t, column) for key, t in tables.items() if t is not None}

    def content(self, key: str) -> pa.Buffer | None:
        """The bytes of a block's file, mapped; None where it is not here."""
        import pyarrow as pa

        try:
            with pa.memory_map(str(self.cache.path_of(key))) as file:
                return file.read_buffer()
        except OSError:
            return None

    def rows(self, wanted: Mapping[str, Ids]) -> dict[str, pa.Table]:
        """By key, the rows with these numbers of those of these blocks that are whole here."""
        import pyarrow as pa

        tables = {key: self.cache.open_whole(key) for key in wanted}
        return {k: t.take(pa.array(wanted[k])) for k, t in tables.items() if t is not None}

    def sees(self, path: str, size: int) -> bool:
        """Whether this node's file system has a file of this size at `path`."""
        try:
            return Path(path).stat().st_size == size
        except OSError:
            return False

    def pin(self, keys: Sequence[str]) -> None:
        """Pin those of these blocks that are here, in this order, as far as the limit goes.

        Returns at once: a thread does it. What is pinned stays.
        """
        with self._idle:
            self._pinning += 1
        Thread(target=self._pin, args=(keys,), name="pin", daemon=True).start()

    def pinned(self, timeout_s: float) -> dict[str, ObjectRef[Any]]:
        """By key, what is pinned once all that was asked for is, or after `timeout_s`."""
        with self._idle:
            self._idle.wait_for(lambda: not self._pinning, timeout_s)
            return dict(self._pinned)

    def _pin(self, keys: Sequence[str]) -> None:
        try:
            with self._turn:
                for key in keys:
                    if key not in self._pinned and not self._pin_one(key):
                        return
        finally:
            with self._idle:
                self._pinning -= 1
                self._idle.notify_all()

    def _pin_one(self, key: str) -> bool:
        """Whether there is room for more."""
        table = self.cache.open_whole(key)
        if table is None:
            return True
        if self._memory_bytes == "auto":
            resources = {one["NodeID"]: one["Resources"] for one in ray.nodes()}
            store_bytes = resources.get(self.node, {}).get("object_store_memory", 0)
            self._memory_bytes = int(_MEMORY_SHARE * store_bytes)
        if self._pinned_bytes + table.nbytes > self._memory_bytes:
            return False
        self._pinned_bytes += table.nbytes
        self._pinned[key] = ray.put(table)
        return True


@ray.remote
class NodeBlocksActor:
    """The blocks of a node that the pipeline is not on, in a process of their own."""

    def __init__(self, code: type[Task] | TaskCode, job: Job) -> None:
        keep_confidential(job)
        node = ray.get_runtime_context().get_node_id()
        self._blocks = NodeBlocks(code, job, node, SystemClock())

    def ask(self, method: str, *args: Any) -> Any:
        """What a method of `NodeBlocks` returns, or the `RaycloudError` that it raised."""
        return answer(self._blocks, method, *args)


def answer(one: Any, method: str, *args: Any) -> Any:
    """What a method returns; an error of ours is returned too, so that it travels as it is."""
    try:
        return getattr(one, method)(*args)
    except RaycloudError as error:
        return error
    except SystemExit as error:  # an actor that raises it ends without a word
        return raised("the task's code", error)


class ClusterBlocks:
    """The blocks of all nodes that were alive when this was made.

    Processes of other nodes are begun where something is asked of them, and not before: on a slow
    node one takes as long to start as dozens of steps, and takes that time from the workers there.

    Args:
        own: Those of the node this process is on.
        me: An actor through which others ask `own`; it has a method `ask` like `NodeBlocksActor`'s.
        notice: Told of nodes that do not answer.

    Attributes:
        handles: Actors that hold blocks, by node, this one first; those that are begun.
    """

    def __init__(self, own: NodeBlocks, me: Any, notice: Notice) -> None:
        self.own, self._notice = own, notice
        self.handles: dict[str, Any] = {own.node: me}
        nodes = [found["NodeID"] for found in ray.nodes() if found["Alive"]]
        self._others = [node for node in nodes if node != own.node]  # not begun
        self._words: list[tuple[str, tuple[Any, ...]]] = []  # that those are to be told
        self._turn = RLock()
        self.alone = not self._others

    def begin(self) -> None:
        """Begin the processes of other nodes, and tell them what was told here."""
        with self._turn:
            others, self._others = self._others, []
            words, self._words = self._words, []
            for node in others:
                options = NodeBlocksActor.options(  # type: ignore[attr-defined]
                    num_cpus=0,
                    max_concurrency=_THREADS,
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
                )
                handle = options.remote(self.own.code, self.own.job)
                for method, args in words:
                    handle.ask.remote(method, *args)
                self.handles[node] = handle

    def here(self, method: str, *args: Any) -> Any:
        """What this node returns.

        Raises:
            RaycloudError: As it did.
        """
        found = answer(self.own, method, *args)
        if isinstance(found, RaycloudError):
            raise found
        return found

    def tell(self, method: str, *args: Any) -> None:
        """Have it done on each node: here at once, and on others once they are begun.

        Raises:
            RaycloudError: This node did. Of others nobody waits to hear.
        """
        with self._turn:
            if self._others:
                self._words.append((method, args))
            for node, handle in [*self.handles.items()]:
                if node != self.own.node:
                    handle.ask.remote(method, *args)
        self.here(method, *args)

    def others(
        self,
        method: str,
        *args: Any,
        nodes: Collection[str] | None = None,
        patience_s: float | None = None,
    ) -> dict[str, Any]:
        """What each other node returns, by node. A dead one is left out.

        Args:
            method: Of `NodeBlocks`.
            args: For it.
            nodes: That are asked; None: all.
            patience_s: Who has not answered by then is left out, too; None: all are waited for.

        Raises:
            RaycloudError: The first that a node raised.
        """
        self.begin()
        others = [one for one in [*self.handles.items()] if one[0] != self.own.node]
        asked = [one for one in others if nodes is None or one[0] in nodes]
        calls = {node: handle.ask.remote(method, *args) for node, handle in asked}
        if patience_s is not None and calls:
            every = [*calls.values()]
            done, _ = ray.wait(every, num_returns=len(every), timeout=patience_s)
            calls = {node: call for node, call in calls.items() if call in done}
        return self._taken(calls)

    def ask(self, method: str, *args: Any) -> dict[str, Any]:
        """The same of all nodes, this one first."""
        return {self.own.node: self.here(method, *args), **self.others(method, *args)}

    def _taken(self, calls: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for node, call in calls.items():
            try:
                found[node] = ray.get(call)
            except RayError as error:
                self.handles.pop(node, None)
                self._notice("a node's blocks are out of reach", node=node, why=first_line(error))
        for result in found.values():
            if isinstance(result, RaycloudError):
                raise result
        return found


class BlockFetcher:
    """Finds the rows of blocks from one node: in its own cache, or at another node."""

    def __init__(
        self, cache: BlockCache, node: str, handles: Mapping[str, Any], notice: Notice
    ) -> None:
        self._cache, self._node, self._notice = cache, node, notice
        self._handles = dict(handles)
        self._copies: list[str] = []

    def table(self, block: Block) -> pa.Table | None:
        """The block's rows; None where no node has them.

        What another node has is copied into this node's cache.

        Raises:
            MachineError: The cache cannot be written to.
        """
        there = self._cache.open_whole(block.key)
        if there is not None:
            return there
        if self._node in block.nodes:
            self._notice("a cached block is missing or damaged", block=block.key, node=self._node)
        first = [node for node in block.nodes if node in self._handles]
        for node in [*first, *(n for n in self._handles if n not in first)]:
            for _ in range(_TRIES if node != self._node else 0):
                if not self._fetched(block.key, node):
                    break
                if (found := self._cache.open_whole(block.key)) is not None:
                    return found
        return None

    def rows(self, wanted: Wanted) -> dict[str, pa.Table]:
        """By key, these rows of blocks that are not on this node, as far as others gave them."""
        by_node: dict[str, dict[str, Ids]] = {}
        for block, numbers in wanted:
            node = next((one for one in block.nodes if one in self._handles), self._node)
            if node != self._node and not self._cache.has(block.key):
                by_node.setdefault(node, {})[block.key] = numbers
        asked = [self._ask(node, "rows", of_node) for node, of_node in by_node.items()]
        found: dict[str, pa.Table] = {}
        for call in filter(None, asked):
            with suppress(RayError, GetTimeoutError):  # whole blocks are asked for, then
                answer = ray.get(call, timeout=_FETCH_S)
                found |= {} if isinstance(answer, RaycloudError) else answer
        return found

    def _ask(self, node: str, method: str, *args: Any) -> ObjectRef[Any] | None:
        handle = self._handles.get(node)  # another thread may have given it up
        return None if handle is None else handle.ask.remote(method, *args)

    def _fetched(self, key: str, node: str) -> bool:
        if (call := self._ask(node, "content", key)) is None:
            return False
        try:
            content = ray.get(call, timeout=_FETCH_S)
        except GetTimeoutError:
            return False  # others' blocks may have been before it on a thin link
        except RayError as error:
            self._handles.pop(node, None)
            self._notice("a node's blocks are out of reach", node=node, why=first_line(error))
            return False
        if content is None or isinstance(content, RaycloudError):
            return False
        try:
            self._cache.copy_in(key, [memoryview(content)])
        except DamagedBlock:
            return False
        # Reading goes round and round: what came last is needed last.
        self._cache.evict(keep=[key], order=list(reversed(self._copies)))
        self._copies.append(key)
        return True
