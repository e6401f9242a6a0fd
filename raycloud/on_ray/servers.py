"""Servers: an actor each, spread over the nodes, that Ray starts again where it dies."""

from __future__ import annotations

import secrets
from itertools import chain
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raycloud.checkpoint import LimitedStore, open_store
from raycloud.server.serving import Server

if TYPE_CHECKING:
    from raycloud.net.stream import Place
    from raycloud.planner.inventory import Inventory
    from raycloud.spec import Job
    from raycloud.worker.context import ServerNames


@ray.remote
class ServerActor:
    """A server in a process of its own; members ask it over its own sockets."""

    def __init__(self, number: int, count: int, checkpoints: str, *, parameters: bool) -> None:
        if parameters:
            import torch  # it sums with it

            torch.set_num_threads(1)  # it shares its node's processors with workers
        store, address = LimitedStore(open_store(checkpoints)), ray.util.get_node_ip_address()
        self._server = Server(number, count, store, address, parameters=parameters)

    def place(self) -> Place:
        """Where it listens."""
        return self._server.place

    def busy(self) -> bool:
        """Whether members may need what it has."""
        return self._server.busy


class Servers:
    """The servers of a run: of each layout, a number of shards, those of each shard.

    The first ones, where they are fewer than the workers a run begins with, and than nodes, are on
    the nodes whose workers are ready first: these are fast, a server takes a slow one's worker a
    good part of its processor, and nobody else knows it before. Else the largest nodes have some
    first.

    Where there are to be others, these are started beside them. Once all are there, members are
    told, who take them for theirs when they have what the others have; these are ended then.

    Attributes:
        layouts: Names of actors, by which members find them.
    """

    def __init__(self, job: Job, checkpoints: str) -> None:
        """There are none yet."""
        self._job, self._checkpoints, self._run = job, checkpoints, secrets.token_hex(4)
        self.layouts: tuple[ServerNames, ...] = ()
        self._coming: ServerNames | None = None
        self._actors: list[list[Any]] = []  # by layout
        self._asked: list[Any] = []  # what the coming, or the last ones, were asked
        self._nodes: list[str] = []  # in this order they get servers
        self._left: list[tuple[int, int]] = []  # shards and copies that have no node so far
        self._largest: list[str] = []

    @property
    def changing(self) -> bool:
        """Whether there are servers of two layouts."""
        return self._coming is not None or any(self._actors[:-1])

    @property
    def shards(self) -> int:
        """How many there are, or are to be."""
        return len(self._coming or self.layouts[-1])

    def begin(self, nodes: Inventory) -> None:
        """Start the first ones, or say by which names they will be there."""
        servers, least = self._job.servers, self._job.elastic.min_workers
        wanted = servers.shards + servers.copies
        self._largest = nodes.largest_first()
        if wanted < min(len(nodes.nodes), least):
            self._left = [(n, k) for n in range(servers.shards) for k in range(1 + servers.copies)]
            self.layouts = (self._names(servers.shards),)
        else:
            self.layouts = (self._start(servers.shards, nodes),)

    def see(self, node: str) -> tuple[ServerNames, ...]:
        """A worker is ready on that node; returns what it may not know: it waited for its place."""
        if self._left and node not in self._nodes:
            self._nodes.append(node)
            self._start_left()
        return self.layouts if len(self.layouts) > 1 else ()

    def start_all(self) -> None:
        """Start those that have no node so far: workers are going to meet, and look for them."""
        if self._left:
            self._nodes += [name for name in self._largest if name not in self._nodes]
            self._start_left()

    def _start_left(self) -> None:
        for shard, copy in [one for one in self._left if sum(one) < len(self._nodes)]:
            self._left.remove((shard, copy))
            self._place(self.layouts[0], shard, copy, self._nodes[shard + copy])

    def change(self, shards: int, nodes: Inventory) -> None:
        """Start others in so many shards."""
        self.start_all()
        self._coming = self._start(shards, nodes)
        self._asked = [actor.place.remote() for actor in self._actors[-1]]

    def poll(self) -> str:
        """Returns at once; what has come of a change since the last call, as words, or nothing.

        Members have to be told then what `layouts` there are.
        """
        if not self.changing or ray.wait(self._asked, num_returns=len(self._asked), timeout=0)[1]:
            return ""
        if self._coming is not None:
            if not all(map(_answer, self._asked)):  # one has died, and is started again
                self._asked = [actor.place.remote() for actor in self._actors[-1]]
                return ""
            self.layouts, self._coming = (*self.layouts, self._coming), None
            told = f"servers: {self.shards} to come in the place of {len(self.layouts[-2])}"
        else:
            told = ""
            answers = [*map(_answer, self._asked)]
            if not any(busy or busy is None for busy in answers):  # one that died may be needed
                for actor in self._actors[-2]:
                    ray.kill(actor)
                self._actors[-2] = []
                return f"servers: {self.shards} in the place of {len(self.layouts[-2])} from now on"
        self._asked = [actor.busy.remote() for actor in self._actors[-2]]
        return told

    def _names(self, shards: int) -> ServerNames:
        """Of a new layout."""
        begin = f"raycloud-server-{self._run}-{len(self._actors)}"
        self._actors.append([])
        copies = range(1 + self._job.servers.copies)
        return tuple(tuple(f"{begin}-{n}-{copy}" for copy in copies) for n in range(shards))

    def _start(self, shards: int, nodes: Inventory) -> ServerNames:
        """The copies of a shard on the nodes that follow its own."""
        there = nodes.largest_first()
        places = [name for name in self._nodes if name in there]
        places += [name for name in there if name not in places]
        every = self._names(shards)
        for shard, names in enumerate(every):
            for copy in range(len(names)):
                self._place(every, shard, copy, places[(shard + copy) % len(places)])
        return every

    def _place(self, every: ServerNames, shard: int, copy: int, node: str) -> None:
        """Start one of the newest layout."""
        actor = ServerActor.options(  # type: ignore[attr-defined]
            name=every[shard][copy],
            num_cpus=0,
            memory=1,  # a byte: who asks for nothing is put on any node where it is soft
            max_restarts=-1,
            # Softly: where its node is lost, it is started again on another.
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=True),
        ).remote(shard, len(every), self._checkpoints, parameters=self._job.served)
        self._actors[-1].append(actor)

    def close(self) -> None:
        """End them."""
        for actor in chain(*self._actors):
            ray.kill(actor)
        self._actors = []


def _answer(asked: Any) -> Any:
    """What a server has answered; None: it died before it did."""
    try:
        return ray.get(asked)
    except RayError:
        return None
