"""Rendezvous: members meet the others of a generation, and what a member needs of its host."""

from __future__ import annotations

import datetime
import json
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYetError
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import distributed as dist

from raycloud.checkpoint import Store, open_store
from raycloud.clock import Clock, SystemClock
from raycloud.commands import Form, Meet
from raycloud.errors import TransportError
from raycloud.net.direct import DirectTransport
from raycloud.net.direct import meet as meet_directly
from raycloud.net.gloo import GlooTransport
from raycloud.net.nccl import NcclTransport
from raycloud.net.rendezvous_store import RendezvousClient, RendezvousStore, opened
from raycloud.net.served import ServedTransport, reach
from raycloud.net.stream import SOCKETS, Sockets
from raycloud.net.transport import Abandoned
from raycloud.net.tree import TreeTransport
from raycloud.net.zones import WHOLE_MEMBERS, Zones
from raycloud.threads import THREADS, Threads

if TYPE_CHECKING:
    import torch

    from raycloud.commands import Back
    from raycloud.events import SyncPoint, WorkerKey
    from raycloud.net.direct import Make
    from raycloud.net.served import SumServers
    from raycloud.net.stream import Place
    from raycloud.net.transport import Transport

_CONNECTING_S = 30.0
_LOOK_UP_S = 0.025  # a meeting that is given up holds up the next one for so long
# Buckets that travel at the same time: in a ring of slow processors each waits more than it moves.
_THREADS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """Where and as what to meet the other members of a generation.

    `nodes` are the ids of the nodes that the members run on, by rank, and `zones` the names of
    these nodes' zones; empty where unknown, as a name is of a node that is in none.
    `settled` is the number of the last change that is over, in force or withdrawn. A `planned`
    meeting is that change itself: those that compute come to it `ahead`, while they do, and give
    its number there. Members of `following` need not have the state yet. Where nobody had it any
    more they go `back` before they come. `keys`, `sync` and `measured` are as in a `Form`.
    """

    place: Place
    generation: int
    rank: int
    members: tuple[int, ...]
    shares: tuple[float, ...]
    nodes: tuple[str, ...] = ()
    zones: tuple[str, ...] = ()
    settled: int = 0
    planned: bool = False
    following: tuple[int, ...] = ()
    ahead: int | None = None
    back: Back | None = None
    keys: tuple[WorkerKey, ...] = ()
    sync: SyncPoint | None = None
    measured: int = 0

    @property
    def labelled(self) -> Zones:
        """The zones of members; those of nodes in none are one."""
        return Zones.of(self.zones or ("",) * len(self.shares))

    @property
    def near(self) -> Zones:
        """The same, but that each of these nodes is a zone of its own."""
        nodes = self.nodes or ("",) * len(self.shares)
        zones = self.zones or nodes
        return Zones.of([zone or node for zone, node in zip(zones, nodes, strict=True)])

    @classmethod
    def of(cls, formed: Form | Meet, rank: int, place: Place, **more: Any) -> Meeting:
        """What the member of `rank` is told of a generation; `more` are other fields."""
        return cls(
            place=place,
            generation=formed.generation,
            rank=rank,
            members=formed.members,
            shares=formed.shares,
            planned=isinstance(formed, Meet),
            following=formed.following,
            keys=formed.keys,
            sync=formed.sync,
            back=formed.back if isinstance(formed, Form) else None,
            measured=formed.measured if isinstance(formed, Form) else 0,
            **more,
        )


def meet(
    meeting: Meeting,
    address: str,
    device: torch.device,
    abandoned: Callable[[], bool],
    *,
    topology: str = "ring",
    servers: SumServers | None = None,
) -> tuple[Transport, Transport]:
    """What carries the gradients, and what carries the control lane.

    Nobody can be called back from a meeting that a member does not come to, so it is waited for in
    a thread of its own, which is left alone once the meeting is abandoned.

    Args:
        meeting: Where.
        address: This node's, that peers can reach.
        device: Where gradients are.
        abandoned: Says that the driver has given the generation up.
        topology: As in a `SyncPoint`. Gradients go over sockets of our own but in a ring, and take
            codecs there; the lane does in all.
        servers: That sum, where the topology is servers.

    Raises:
        Abandoned: It has.
        TransportError: The meeting place or a peer cannot be reached.
    """
    met: Future[tuple[Transport, Transport]] = Future()

    def come() -> None:
        try:
            met.set_result(_meet(meeting, address, device, topology, servers))
        except BaseException as error:  # noqa: BLE001 - raised to who waits
            met.set_exception(error)

    threading.Thread(target=come, name=f"meet-{meeting.generation}", daemon=True).start()
    while True:
        try:
            return met.result(_LOOK_UP_S)
        except NotYetError:
            if abandoned():
                met.add_done_callback(_leave_late)
                raise Abandoned("the generation was abandoned before all had met") from None


def leave(transports: Iterable[Transport]) -> None:
    """Let go of those of a generation that is over; nobody holds any of its work any more.

    Left open, gloo would look for ever at what peers had sent of an exchange that broke here.
    """
    for transport in transports:
        threading.Thread(target=transport.close, name="leave", daemon=True).start()


def _leave_late(met: Future[tuple[Transport, Transport]]) -> None:
    if met.exception() is None:
        leave(met.result())


def _meet(
    meeting: Meeting,
    address: str,
    device: torch.device,
    topology: str,
    servers: SumServers | None,
) -> tuple[Transport, Transport]:
    rank, size = meeting.rank, len(meeting.shares)
    with (
        RendezvousClient(meeting.place, meeting.generation, rank, size) as members,
        ExitStack() as held,
    ):
        *gradients, lane = _meet_directly(meeting, address, topology, servers, members)
        for one in (*gradients, lane):
            held.callback(one.close)
        found = gradients[0] if gradients else _ring(meeting, address, device, members)
        held.pop_all()  # they are the caller's
    return found, lane


def _ring(
    meeting: Meeting, address: str, device: torch.device, members: RendezvousClient
) -> Transport:
    rank, size, order = meeting.rank, len(meeting.shares), meeting.labelled.order
    if device.type == "cuda" and size > 1:  # alone, NCCL would take memory for nothing
        store = _store(members, address, rank=rank, size=size)
        return NcclTransport(store, rank=rank, size=size, device=device)
    return GlooTransport(
        RendezvousStore(members, order),
        rank=rank,
        size=size,
        address=address,
        threads=_THREADS,
        order=order,
    )


def _meet_directly(
    meeting: Meeting,
    address: str,
    topology: str,
    servers: SumServers | None,
    members: RendezvousClient,
) -> list[DirectTransport]:
    """What is over sockets of our own: the control lane, and before it gradients but of a ring.

    A small sum takes one latency there, in a ring 2 (N - 1), and each step waits for one.
    """

    def tell(told: bytes) -> list[bytes]:
        return [opened(part) for part in members.exchange(told)]

    rank, size, generation = meeting.rank, len(meeting.shares), meeting.generation
    zones = meeting.near
    small = zones if size <= WHOLE_MEMBERS else meeting.labelled.in_parts
    by_zones: Make = DirectTransport
    if max(len(zones.groups), len(small.groups)) > 1:
        by_zones = partial(TreeTransport, zones=zones, small=small)
    with ExitStack() as held:
        gradients: Make = DirectTransport
        if topology == "tree" and len(zones.groups) > 1:
            gradients = by_zones
        if topology == "servers" and servers is not None and size > 1:
            reached = reach(tell, servers, rank=rank, size=size, generation=generation)
            for one in reached:
                held.callback(one.close)
            gradients = partial(ServedTransport, servers=reached)
        makes = [by_zones] if topology == "ring" else [gradients, by_zones]
        met = meet_directly(
            tell, rank=rank, size=size, address=address, nonce=generation % 2**32, makes=makes
        )
        held.pop_all()  # they are the transport's
    return met


def _store(members: RendezvousClient, address: str, *, rank: int, size: int) -> dist.Store:
    """A store for NCCL, at rank 0's member for as long as it lives."""
    limit = datetime.timedelta(seconds=_CONNECTING_S)
    try:
        own = (
            dist.TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=limit)
            if rank == 0
            else None
        )
        port = 0 if own is None else own.port
        told = members.exchange(json.dumps([address, port]).encode())
        host, port = json.loads(opened(told[0]))
        return own or dist.TCPStore(host, port, is_master=False, timeout=limit)
    except (RuntimeError, ValueError) as error:
        raise TransportError(f"the store of rank 0 of {size} failed: {error}") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """Where a member lives; tests give it another one, where time and faults are a script's.

    Attributes:
        clock: For the seconds reported.
        threads: Where it does what takes its time.
        sockets: Over which states travel from member to member.
        open_store: Opens the place of the checkpoints.
        meet: Meets the others; see `recovery.rendezvous.meet`.
        leave: Lets go of what carried a generation's messages.
    """

    clock: Clock = field(default_factory=SystemClock)
    threads: Threads = THREADS
    sockets: Sockets = SOCKETS
    open_store: Callable[[str], Store] = open_store
    meet: Callable[..., tuple[Transport, Transport]] = meet
    leave: Callable[[Iterable[Transport]], None] = leave


HOST = Host()
