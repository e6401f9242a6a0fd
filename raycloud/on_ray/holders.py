"""All nodes' holders, asked together; and finding a block's rows from one node."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raycloud.data.cache import DamagedBlock
from raycloud.errors import RaycloudError
from raycloud.on_ray.holder import HolderActor, answer

if TYPE_CHECKING:
    import pyarrow as pa

    from raycloud.data.cache import BlockCache
    from raycloud.data.index import Block
    from raycloud.on_ray.holder import Holder
    from raycloud.packing.code import TaskCode
    from raycloud.spec import Job
    from raycloud.task import Task

_THREADS = 8
_FETCH_S = 120.0  # a block of some MB, over a thin link

Notice = Callable[..., None]
"""Called with what happened and, by keyword, its details."""


class Holders:
    """The holders of all nodes that were alive when this was made.

    Args:
        own: That of the node this process is on.
        me: An actor through which others ask `own`; it has a method `ask` like `HolderActor`'s.
        others: By node, the holders of the other nodes.
        notice: Told of nodes that do not answer.
    """

    def __init__(self, own: Holder, me: Any, others: Mapping[str, Any], notice: Notice) -> None:
        """Nobody is asked yet."""
        self.own = own
        self.handles: dict[str, Any] = {own.place.node: me, **others}
        self._notice = notice

    @classmethod
    def start(
        cls, own: Holder, me: Any, job: Job, task: type[Task] | TaskCode, notice: Notice
    ) -> Holders:
        """Start a holder on each other node."""
        home = own.place.node
        nodes = [n["NodeID"] for n in ray.nodes() if n["Alive"] and n["NodeID"] != home]
        others = {
            node: HolderActor.options(  # type: ignore[attr-defined]
                num_cpus=0,
                max_concurrency=_THREADS,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            ).remote(task, job, own.place.who)
            for node in nodes
        }
        return cls(own, me, others, notice)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Their nodes, this one first."""
        return tuple(self.handles)

    def ask(self, method: str, *args: Any) -> dict[str, Any]:
        """What each node's holder returns, by node, this one first. A dead one is left out.

        Raises:
            RaycloudError: The first that a holder raised.
        """
        home = self.own.place.node
        calls = {
            node: handle.ask.remote(method, *args)
            for node, handle in self.handles.items()
            if node != home
        }
        found = {home: answer(self.own, method, *args)}
        for node, call in calls.items():
            try:
                found[node] = ray.get(call)
            except RayError as error:
                del self.handles[node]
                self._notice("a node's blocks are out of reach", node=node, why=_first_line(error))
        for result in found.values():
            if isinstance(result, RaycloudError):
                raise result
        return found


class Reach:
    """Finds the rows of blocks from one node: in its own cache, or at another node's holder.

    Args:
        cache: This node's.
        node: Its id.
        handles: By node, the holders.
        notice: Told of what was fetched in place of a block that should have been here.
    """

    def __init__(
        self, cache: BlockCache, node: str, handles: Mapping[str, Any], notice: Notice
    ) -> None:
        """Nothing is fetched yet."""
        self._cache = cache
        self._node = node
        self._handles = dict(handles)
        self._notice = notice
        self._copies: list[str] = []

    def table(self, block: Block) -> pa.Table | None:
        """The block's rows; None where no node has them.

        What another node has is copied into this node's cache.

        Raises:
            MachineError: The cache cannot be written to.
        """
        there = self._cache.whole(block.key)
        if there is not None:
            return there
        if self._node in block.nodes:
            self._notice("a cached block is missing or damaged", block=block.key, node=self._node)
        first = [node for node in block.nodes if node in self._handles]
        for node in [*first, *(n for n in self._handles if n not in first)]:
            if node != self._node and self._fetched(block.key, node):
                return self._cache.whole(block.key)
        return None

    def _fetched(self, key: str, node: str) -> bool:
        try:
            content = ray.get(self._handles[node].ask.remote("content", key), timeout=_FETCH_S)
        except (RayError, GetTimeoutError) as error:
            self._handles.pop(node, None)
            self._notice("a node's blocks are out of reach", node=node, why=_first_line(error))
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


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
