"""Rendezvous: where the members of a generation learn how to reach each other.

A server lives with the driver, not on a mortal member. Members come in rounds: each gives a few
bytes, and gets those of all once the last one has come. So a member makes one call a round, however
many others there are, and the server keeps nothing of a round that is over.

What travels: a member says the key (`stream.greeting`), then the generation, 0, its rank there and
how many members that has, then each round's bytes after their number. Back comes how many bytes
follow, then how many are of each rank, and then these, in order. Bytes are compressed by zlib.
Nothing that arrives is unpickled.
"""

from __future__ import annotations

import asyncio
import datetime
import struct
import threading
import zlib
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from torch import distributed as dist

from raycloud.errors import TransportError
from raycloud.net.sockets import end_if_hung
from raycloud.net.stream import BACKLOG, GREETING_BYTES, Place, Stream, connect, listen, rank_of

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

WAIT_S = 900.0  # whoever does not come is taken for lost long before that
MOST_STRANGERS = 2**14  # connections that have not said the key yet: members may all come at once
STRANGER_S = 10.0  # and so long they have for it
MOST_BYTES = 2**20  # of a member in a round, compressed

_HEAD = struct.Struct(">QIII")
_LENGTH = struct.Struct(">I")
_PART_BYTES = 2**16


@dataclass(eq=False)
class _Round:
    """The members of a generation that meet."""

    size: int
    members: dict[int, asyncio.StreamWriter] = field(default_factory=dict)
    given: dict[int, bytes] = field(default_factory=dict)


class Rendezvous:
    """Lets members meet at `place`, in a thread of its own, by an `address` that they can reach."""

    def __init__(self, address: str) -> None:
        door, self.place = listen(address)
        self._rounds: dict[int, _Round] = {}
        self._strangers = self._oldest = 0
        self._sending: set[asyncio.Task[None]] = set()
        self._over = asyncio.Event()
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._thread = threading.Thread(
            target=self._run, args=(door,), name="rendezvous", daemon=True
        )
        self._thread.start()

    def forget(self, before: int) -> None:
        """Generations with a smaller number are over: who waits there is let go. Any thread."""
        self._loop.call_soon_threadsafe(self._forget, before)

    def close(self) -> None:
        """Nobody can meet here any more."""
        with suppress(RuntimeError):  # it is closed already
            self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    def _run(self, door: socket.socket) -> None:
        with self._runner as runner:
            runner.run(self._serve(door))

    async def _serve(self, door: socket.socket) -> None:
        server = await asyncio.start_server(self._attend, sock=door, backlog=BACKLOG)
        await self._over.wait()
        server.close()

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Hear one connection to its end; who would wait for it in a round is let go then."""
        end_if_hung(writer.get_extra_info("socket"))
        with suppress(OSError, EOFError, ValueError):  # it is gone, or it is no member of ours
            try:
                generation, rank, size = await self._head(reader)
                there = self._join(generation, rank, size, writer)
                try:
                    await self._hear(rank, there, reader)
                finally:
                    self._leave(generation, rank, there)
            finally:
                writer.transport.abort()

    async def _head(self, reader: asyncio.StreamReader) -> tuple[int, int, int]:
        """Whose connection it is: generation, rank and size; `ValueError`: a stranger's."""
        if self._strangers >= MOST_STRANGERS:
            raise ValueError("too many have not said the key yet")
        self._strangers += 1
        try:
            async with asyncio.timeout(STRANGER_S):
                said = await reader.readexactly(GREETING_BYTES)
        finally:
            self._strangers -= 1
        if rank_of(said, self.place) is None:
            raise ValueError("the key is another")
        generation, _, rank, size = _HEAD.unpack(await reader.readexactly(_HEAD.size))
        return generation, rank, size

    def _join(self, generation: int, rank: int, size: int, writer: asyncio.StreamWriter) -> _Round:
        there = self._rounds.get(generation) or _Round(size)
        wrong = there.size != size or rank >= size
        if wrong or rank in there.members or generation < self._oldest:
            raise ValueError("it does not belong to those that meet there")
        self._rounds[generation] = there
        there.members[rank] = writer
        return there

    async def _hear(self, rank: int, there: _Round, reader: asyncio.StreamReader) -> None:
        while True:
            size = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))[0]
            if size > MOST_BYTES or rank in there.given:
                raise ValueError("too much at once, or a second part of this round")
            there.given[rank] = await reader.readexactly(size)
            if len(there.given) == there.size:
                self._answer(there)

    def _answer(self, there: _Round) -> None:
        parts = [there.given[rank] for rank in range(there.size)]
        there.given.clear()
        sizes = struct.pack(f">{there.size}I", *map(len, parts))
        whole = len(sizes) + sum(map(len, parts))
        everything = memoryview(b"".join((_LENGTH.pack(whole), sizes, *parts)))
        for writer in there.members.values():
            task = self._loop.create_task(_send(writer, everything))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    def _leave(self, generation: int, rank: int, there: _Round) -> None:
        del there.members[rank]
        if self._rounds.get(generation) is there and (there.given or not there.members):
            del self._rounds[generation]
            for other in there.members.values():
                other.transport.abort()

    def _forget(self, before: int) -> None:
        self._oldest = max(self._oldest, before)
        for generation, there in self._rounds.items():
            for writer in there.members.values() if generation < self._oldest else ():
                writer.transport.abort()


async def _send(writer: asyncio.StreamWriter, everything: memoryview) -> None:
    with suppress(OSError):  # it is gone
        for at in range(0, len(everything), _PART_BYTES):
            writer.write(everything[at : at + _PART_BYTES])
            await writer.drain()


class RendezvousClient(AbstractContextManager["RendezvousClient"]):
    """A member's connection to the rendezvous of a generation of so many members; to be closed.

    One that is alone connects to nobody. `TransportError`: the place cannot be reached.
    """

    def __init__(self, place: Place, generation: int, rank: int, size: int) -> None:
        self._generation, self._size = generation, size
        self._stream: Stream | None = None
        if size == 1:
            return
        try:
            self._stream = connect(place, rank, silent_s=WAIT_S)
            self._stream.give(_HEAD.pack(generation, 0, rank, size))
        except TransportError as error:
            self.__exit__()
            where = f"{place.address}:{place.port}"
            raise TransportError(
                f"the rendezvous at {where} cannot be reached: {error.message}"
            ) from error

    def exchange(self, given: bytes) -> list[memoryview]:
        """Everybody's bytes, by rank, once all have given theirs; `opened` reads them.

        Raises:
            TransportError: A member has left, or the generation is over.
        """
        part = zlib.compress(given, 1)
        if self._stream is None:
            return [memoryview(part)]
        try:
            self._stream.give(_LENGTH.pack(len(part)) + part)
            size = _LENGTH.unpack(self._stream.take(_LENGTH.size))[0]
            come = memoryview(self._stream.take(size))
        except TransportError as error:
            raise TransportError(
                f"generation {self._generation} did not meet, as a member has left or it is "
                f"over: {error.message}"
            ) from error
        sizes = struct.unpack_from(f">{self._size}I", come)
        ends = list(accumulate(sizes, initial=_LENGTH.size * self._size))
        return [come[at:end] for at, end in pairwise(ends)]

    def __exit__(self, *_: object) -> None:
        """All is exchanged, or it is given up."""
        if self._stream is not None:
            self._stream.close()


def opened(part: memoryview) -> bytes:
    """What a member gave; `TransportError`: it is damaged."""
    try:
        return zlib.decompress(part)
    except zlib.error as error:
        raise TransportError(f"what a member said at the rendezvous is damaged: {error}") from error


class RendezvousStore(dist.Store):
    """What gloo takes for a key-value store: a key that is not known yet is asked for in a round.

    Keys end in the number of the rank that sets them, as `0/3`. All members ask for the first time
    after as many `set`, so that a round brings all there is. Ranks here may be others than at the
    rendezvous: `order` has those, by rank here.
    """

    def __init__(self, roll: RendezvousClient, order: Sequence[int] = ()) -> None:
        super().__init__()
        self._roll, self._order = roll, order
        self._known: dict[str, bytes] = {}
        self._parts: dict[int, memoryview] = {}  # of the newest round, by rank, not yet looked into
        self._own: dict[str, bytes] = {}

    def set(self, key: str, value: bytes | str) -> None:
        """Tell the others with the next round."""
        self._own[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        """What a member has set, after a round where that is not known yet.

        Raises:
            TransportError: As of `RendezvousClient.exchange`; or nobody has set it.
        """
        rank = int(key.rpartition("/")[2])
        for again in (False, True):
            if again or not self._parts:
                own, self._own = self._own, {}
                parts = self._roll.exchange(_packed(own))
                self._parts = dict(enumerate(parts[r] for r in self._order or range(len(parts))))
            if key not in self._known and rank in self._parts:
                self._known |= _unpacked(opened(self._parts.pop(rank)))
            if key in self._known:
                return self._known[key]
        raise TransportError(f"rank {rank} has not told {key!r} in this round")

    def wait(self, keys: Sequence[str], *_: object) -> None:
        """Until these are known."""
        for key in keys:
            self.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether these are known."""
        return all(key in self._known for key in keys)

    def has_extended_api(self) -> bool:
        """Keys are asked for one by one: that costs nothing here."""
        return False

    @property
    def timeout(self) -> datetime.timedelta:
        """Of `get`."""
        return datetime.timedelta(seconds=WAIT_S)


def _packed(values: dict[str, bytes]) -> bytes:
    parts = [part for key, value in values.items() for part in (key.encode(), value)]
    return b"".join(_LENGTH.pack(len(part)) + part for part in parts)


def _unpacked(given: bytes) -> dict[str, bytes]:
    parts, at = [], 0
    while at < len(given):
        size = _LENGTH.unpack_from(given, at)[0]
        parts.append(given[at + _LENGTH.size : at + _LENGTH.size + size])
        at += _LENGTH.size + size
    return {key.decode(): value for key, value in zip(parts[::2], parts[1::2], strict=True)}
