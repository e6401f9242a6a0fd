"""Meeting the other members of a generation."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYetError
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import distributed as dist

from raycloud.errors import TransportError
from raycloud.sync.gloo import GlooDevice, GlooTransport
from raycloud.sync.nccl import NcclTransport
from raycloud.sync.transport import Abandoned

if TYPE_CHECKING:
    import torch

    from raycloud.commands import Back
    from raycloud.sync.transport import Transport

_MEETING_S = 900.0  # whoever does not come is taken for lost long before that
_LOOK_UP_S = 0.025  # a meeting that is given up holds up the next one for so long
# Buckets that travel at the same time: in a ring of slow processors each waits more than it moves.
_THREADS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """Where and as what to meet the other members of a generation.

    `nodes` are the ids of the nodes that the members run on, by rank; empty where unknown.
    `settled` is the number of the last change that is over, in force or withdrawn. A `planned`
    meeting is that change itself: those that compute come to it `ahead`, while they do, and give
    its number there. Members of `following` need not have the state yet. Where nobody had it any
    more they go `back` before they come.
    """

    host: str
    port: int
    generation: int
    rank: int
    members: tuple[int, ...]
    shares: tuple[int, ...]
    nodes: tuple[str, ...] = ()
    settled: int = 0
    planned: bool = False
    following: tuple[int, ...] = ()
    ahead: int | None = None
    back: Back | None = None


def meet(
    meeting: Meeting, address: str, device: torch.device, abandoned: Callable[[], bool]
) -> tuple[Transport, Transport]:
    """What carries the gradients, and what carries the control lane.

    Nobody can be called back from a meeting that a member does not come to, so it is waited for in
    a thread of its own, which is left alone once the meeting is abandoned.

    Args:
        meeting: Where.
        address: This node's, that peers can reach.
        device: Where gradients are.
        abandoned: Says that the driver has given the generation up.

    Raises:
        Abandoned: It has.
        TransportError: The meeting place or a peer cannot be reached.
    """
    met: Future[tuple[Transport, Transport]] = Future()

    def come() -> None:
        try:
            met.set_result(_meet(meeting, address, device))
        except BaseException as error:  # noqa: BLE001 - raised to who waits
            met.set_exception(error)

    threading.Thread(target=come, name=f"meet-{meeting.generation}", daemon=True).start()
    while True:
        try:
            return met.result(_LOOK_UP_S)
        except NotYetError:
            if abandoned():
                raise Abandoned("the generation was abandoned before all had met") from None


def leave(transports: Iterable[Transport]) -> None:
    """Let go of those of a generation that is over; nobody holds any of its work any more.

    Left open, gloo would look for ever at what peers had sent of an exchange that broke here.
    """
    for transport in transports:
        threading.Thread(target=transport.close, name="leave", daemon=True).start()


def _meet(meeting: Meeting, address: str, device: torch.device) -> tuple[Transport, Transport]:
    size = len(meeting.shares)
    try:
        store = dist.TCPStore(
            meeting.host,
            meeting.port,
            is_master=False,
            timeout=datetime.timedelta(seconds=_MEETING_S),
        )
    except (RuntimeError, ValueError) as error:
        raise TransportError(
            f"the meeting place at {meeting.host}:{meeting.port} cannot be reached: {error}"
        ) from error

    listens = GlooDevice(address)

    def gloo(purpose: str, threads: int) -> Transport:
        prefix = dist.PrefixStore(f"generation-{meeting.generation}/{purpose}", store)
        return GlooTransport(prefix, rank=meeting.rank, size=size, device=listens, threads=threads)

    lane = gloo("lane", 1)
    if device.type == "cuda":
        prefix = dist.PrefixStore(f"generation-{meeting.generation}/gradients", store)
        return NcclTransport(prefix, rank=meeting.rank, size=size), lane
    return gloo("gradients", _THREADS), lane
