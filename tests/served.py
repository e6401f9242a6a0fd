"""Servers that sum, in this process and over real sockets; and their algorithm in plain words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from raycloud.checkpoint import open_store
from raycloud.net.direct import DirectTransport, meet
from raycloud.net.exchange import parts_of
from raycloud.net.lane import Lane
from raycloud.net.served import ServedTransport, reach
from raycloud.net.stream import Place
from raycloud.net.transport import Coding
from raycloud.server.serving import Server
from raycloud.step.replica import Replica
from tests.lockstep import Fleet, NetTask, job
from tests.loopback import Loopback
from tests.sockets import Rounds, together

HERE = "127.0.0.1"


def simulated_by_servers(
    rows: list[torch.Tensor], codec: Coding, servers: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The algorithm in one process, in plain words: the sum, and each member's residual."""
    residuals, total = [row.clone() for row in rows], torch.zeros_like(rows[0])
    cut = [parts_of(residual, servers) for residual in residuals]
    for server, into in enumerate(parts_of(total, servers)):
        if not into.numel():
            continue
        codes = torch.empty(codec.bound(into.numel()), dtype=torch.uint8)
        summed = torch.zeros_like(into)
        for rank in range(len(rows)):
            codec.encode(cut[rank][server], codes)
            codec.add(codes, summed)
            codec.subtract(codes, cut[rank][server])
        codec.encode(summed, codes)
        codec.add(codes, into)
        codec.subtract(codes, summed)
        codec.encode(summed, codes)
        codec.add(codes, cut[server % len(rows)][server])
    return total, residuals


class Known:
    """Servers that rank 0 knows."""

    def __init__(self, places: Sequence[Place]) -> None:
        self._places, self.which = places, list[bool]()

    def places(self) -> Sequence[Place]:
        return self._places

    def taken(self, which: Sequence[bool]) -> None:
        self.which = list(which)


def served_members(
    size: int, places: Sequence[Place], *, generation: int = 0
) -> list[DirectTransport]:
    """Transports that have met over this machine's loopback interface, and reach these servers."""
    rounds, known = Rounds(size), Known(places)

    def come(rank: int) -> DirectTransport:
        tell = partial(rounds.tell, rank)
        reached = reach(tell, known, rank=rank, size=size, generation=generation)
        make = partial(ServedTransport, servers=reached)
        [one] = meet(tell, rank=rank, size=size, address=HERE, nonce=generation, makes=[make])
        return one

    return together(partial(come, rank) for rank in range(size))


@contextmanager
def summing(folder: Path, count: int) -> Iterator[list[Server]]:
    """So many servers; closed at the end."""
    store = open_store(folder)
    made = [Server(at, count, store, HERE, parameters=True) for at in range(count)]
    try:
        yield made
    finally:
        for one in made:
            one.close()


class ServedFleet(Fleet):
    """Replicas that exchange gradients by servers, over real sockets; the lane is a loopback."""

    def __init__(
        self, servers: list[Server], task: NetTask, shares: Sequence[int], **changes: Any
    ) -> None:
        self.servers, self.generation = servers, 0
        self.transports: list[DirectTransport] = []
        sync = {"topology": "servers", "bucket_bytes": 1024, **changes.pop("sync", {})}
        super().__init__(job(servers=len(servers), sync=sync, **changes), task, shares)

    def join(self, replicas: Sequence[Replica], shares: Sequence[int]) -> None:
        """See `Fleet.join`."""
        self.close()
        self.replicas, self.shares = list(replicas), tuple(shares)
        self.generation += 1
        self.transports = self.met()
        self.hubs = Loopback(len(shares)), Loopback(len(shares))
        for replica, transport in zip(self.replicas, self.transports, strict=True):
            replica.connect(transport)
        self.lanes = [Lane(member) for member in self.hubs[1].members]

    def met(self) -> list[DirectTransport]:
        """The members' transports, in a new generation."""
        if len(self.shares) == 1:
            return [DirectTransport(0, {})]
        places = [one.place for one in self.servers]
        return served_members(len(self.shares), places, generation=self.generation)

    def close(self) -> None:
        """Members leave."""
        for one in self.transports:
            one.close()
        self.transports = []
