"""Servers: an actor each, spread over the nodes, that Ray starts again where it dies."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raycloud.checkpoint import LimitedStore, open_store
from raycloud.server.serving import Server

if TYPE_CHECKING:
    from raycloud.net.stream import Place
    from raycloud.planner.inventory import Inventory
    from raycloud.spec import Job


@ray.remote
class ServerActor:
    """A server in a process of its own; members ask it over its own sockets."""

    def __init__(self, number: int, count: int, checkpoints: str, *, parameters: bool) -> None:
        store, address = LimitedStore(open_store(checkpoints)), ray.util.get_node_ip_address()
        self._server = Server(number, count, store, address, parameters=parameters)

    def place(self) -> Place:
        """Where it listens."""
        return self._server.place


class Servers:
    """The servers of a run.

    Attributes:
        names: Of their actors, by which members find them: those of each shard.
    """

    def __init__(self, job: Job, nodes: Inventory, checkpoints: str) -> None:
        """Start them: the copies of a shard on the nodes that follow its own."""
        asked = job.servers
        run, each = secrets.token_hex(4), 1 + asked.copies
        self.names = tuple(
            tuple(f"raycloud-server-{run}-{shard}-{copy}" for copy in range(each))
            for shard in range(asked.shards)
        )
        places = [node.name for node in nodes.nodes]
        self._actors: list[Any] = []
        for shard, names in enumerate(self.names):
            for copy, name in enumerate(names):
                node = places[(shard + copy) % len(places)]
                actor = ServerActor.options(  # type: ignore[attr-defined]
                    name=name,
                    num_cpus=0,
                    max_restarts=-1,
                    # Softly: where its node is lost, it is started again on another.
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=True),
                ).remote(shard, asked.shards, checkpoints, parameters=job.served)
                self._actors.append(actor)

    def close(self) -> None:
        """End them."""
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []
