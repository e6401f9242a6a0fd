"""Members of one generation in threads of this process, joined by real sockets."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import distributed as dist

from raycloud.errors import TransportError
from raycloud.net.direct import DirectTransport, Make, meet
from raycloud.net.gloo import GlooTransport
from raycloud.net.transport import Transport
from raycloud.net.tree import TreeTransport
from raycloud.net.zones import Zones

_CLOSES_S = 10.0


@contextmanager
def gloo_members(size: int, *, meeting_s: float = 20.0) -> Iterator[list[GlooTransport]]:
    """Transports that have met over this machine's loopback interface."""
    store = dist.HashStore()
    store.set_timeout(datetime.timedelta(seconds=meeting_s))

    def meet(rank: int) -> GlooTransport:
        return GlooTransport(store, rank=rank, size=size, address="127.0.0.1")

    members = together(partial(meet, rank) for rank in range(size))
    try:
        yield members
    finally:
        close_all(members)


class Rounds:
    """Members tell each other bytes, in rounds; who waits longer than `most_s` is let go."""

    def __init__(self, size: int, *, most_s: float = 20.0) -> None:
        self.told: list[bytes] = [b""] * size
        self._all = threading.Barrier(size)
        self._most_s = most_s

    def tell(self, rank: int, told: bytes) -> list[bytes]:
        """Everybody's."""
        self.told[rank] = told
        try:
            self._all.wait(self._most_s)
            told_by_all = [*self.told]
            self._all.wait(self._most_s)  # before the next round
        except threading.BrokenBarrierError:
            raise TransportError("a member has left") from None
        return told_by_all


@contextmanager
def direct_members(
    size: int, *, nonce: int = 5, zones: Sequence[str] = (), small: Zones | None = None
) -> Iterator[list[DirectTransport]]:
    """Transports that have met over this machine's loopback interface; closed at the end.

    Where there are `zones`, by rank, they are a tree's, and sum what is small by others.
    """
    rounds = Rounds(size)
    make: Make = DirectTransport
    if zones:
        make = partial(TreeTransport, zones=Zones.of(zones), small=small)

    def come(rank: int) -> DirectTransport:
        tell = partial(rounds.tell, rank)
        [one] = meet(tell, rank=rank, size=size, address="127.0.0.1", nonce=nonce, makes=[make])
        return one

    members = together(partial(come, rank) for rank in range(size))
    try:
        yield members
    finally:
        for member in members:
            member.close()


def close_all(members: Iterable[Transport]) -> None:
    """Let go of transports of one meeting, which may be broken, or closed by the test."""
    held = list(members)
    for member in held:
        member.hang_up()
    closing = [threading.Thread(target=_close, args=(member,), daemon=True) for member in held]
    for thread in closing:  # as members do, since gloo may wait for what is under way elsewhere
        thread.start()
    for thread in closing:
        thread.join(_CLOSES_S)


def _close(member: Transport) -> None:
    with suppress(AttributeError):
        member.close()


def together(calls: Iterable[Callable[[], Any]]) -> list[Any]:
    """What the calls return, each made in a thread of its own; raises what the first raised."""
    todo = list(calls)
    with ThreadPoolExecutor(len(todo)) as threads:
        return [future.result() for future in [threads.submit(call) for call in todo]]


def alike(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    """Whether they have the same names, in any order, with the same tensors of the same types."""
    return one.keys() == other.keys() and all(
        t.dtype == other[name].dtype and torch.equal(t, other[name]) for name, t in one.items()
    )
