"""Rendezvous: where the members of a generation learn how to reach each other.

A server lives with the driver, not on a mortal member. Members come in rounds: each gives a few
bytes, and gets those of all once the last one has come. So a member makes one call a round, however
many others there are, and the server keeps nothing of a round that is over.

What travels: a member connects and says the key (`stream.greeting`); then a header, `Head`; then
each round's bytes after their number. Back comes how many bytes follow, then how many are of each
rank, and then these, in order. Bytes are compressed by zlib. Nothing that arrives is unpickled.
"""

from __future__ import annotations

import contextlib
import datetime
import selectors
import socket
import struct
import threading
import zlib
from collections import deque
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from torch import distributed as dist

from raycloud.errors import TransportError
from raycloud.net.sockets import end_if_hung
from raycloud.net.stream import GREETING_BYTES, Listener, Place, greeting

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from raycloud.clock import Clock

WAIT_S = 900.0  # whoever does not come is taken for lost long before that
MOST_STRANGERS = 1024  # connections that have not said the key yet
STRANGER_S = 10.0  # and so long they have for it
MOST_BYTES = 2**20  # of a member in a round, compressed

_HEAD = struct.Struct(">QIII")  # generation, purpose, rank, size
_LENGTH = struct.Struct(">I")
_PART_BYTES = 2**18
_AT_ONCE = 64  # connections that are taken before others are heard


@dataclass(frozen=True, slots=True)
class Head:
    """Whose connection it is.

    Attributes:
        generation: The number of the generation that meets.
        purpose: A number; each purpose has rounds of its own.
        rank: The member's in that generation.
        size: Members of it.
    """

    generation: int
    purpose: int
    rank: int
    size: int


@dataclass(eq=False)
class _Round:
    """The members of a generation that meet for a purpose."""

    size: int
    members: dict[int, _Member] = field(default_factory=dict)
    given: dict[int, bytes] = field(default_factory=dict)


@dataclass(eq=False)
class _Member:
    """A connection, what has come of it, and what is still to be sent."""

    socket: socket.socket
    due_s: float  # by when it has said the key
    come: bytearray = field(default_factory=bytearray)
    out: deque[memoryview] = field(default_factory=deque)
    welcome: bool = False
    head: Head | None = None


class Rendezvous:
    """Lets members meet, in a thread of its own.

    Args:
        address: This node's, that members can reach.
        clock: For how long a stranger may be silent.

    Attributes:
        place: To be told to members.
    """

    def __init__(self, address: str, clock: Clock) -> None:
        self._listener = Listener(address, wait_s=0.0)
        self.place: Place = self._listener.place
        self._clock = clock
        self._rounds: dict[tuple[int, int], _Round] = {}
        self._known: set[_Member] = set()
        self._oldest = 0
        self._over = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener.door, selectors.EVENT_READ)
        self._waker, woken = socket.socketpair()
        self._woken = woken
        self._selector.register(woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="rendezvous", daemon=True)
        self._thread.start()

    def forget(self, before: int) -> None:
        """Generations with a smaller number are over: who waits there is let go. Any thread."""
        self._oldest = max(self._oldest, before)
        self._waker.send(b"!")

    def close(self) -> None:
        """Nobody can meet here any more."""
        self._over = True
        with contextlib.suppress(OSError):
            self._waker.send(b"!")
        self._thread.join()

    @property
    def waiting(self) -> int:
        """How many generations and purposes there are of which somebody is here."""
        return len(self._rounds)

    def _serve(self) -> None:
        while not self._over:
            for found, events in self._selector.select(STRANGER_S / 2):
                if found.fileobj is self._woken:
                    self._woken.recv(4096)
                elif isinstance(found.data, _Member):
                    self._attend(found.data, events)
                else:
                    self._accept()
            self._tidy()
        for member in list(self._known):
            self._part(member)
        self._selector.close()
        self._listener.close()
        self._waker.close()
        self._woken.close()

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                connection, _ = self._listener.door.accept()
            except OSError:  # no other one; or it is gone again, or no descriptors are left
                return
            self._receive(connection)

    def _receive(self, connection: socket.socket) -> None:
        strangers = sum(not member.welcome for member in self._known)
        if strangers >= MOST_STRANGERS:
            connection.close()
            return
        connection.settimeout(0.0)
        end_if_hung(connection)
        member = _Member(connection, self._clock.monotonic_s() + STRANGER_S)
        self._known.add(member)
        self._selector.register(connection, selectors.EVENT_READ, member)

    def _attend(self, member: _Member, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._send(member)
            if events & selectors.EVENT_READ:
                got = member.socket.recv(_PART_BYTES)
                if not got:
                    self._part(member)
                    return
                member.come += got
                self._understand(member)
        except BlockingIOError:
            pass
        except (OSError, ValueError):  # it is gone, or it is no member of ours
            self._part(member)

    def _understand(self, member: _Member) -> None:
        """Take what has come as a whole.

        Raises:
            ValueError: It is not what a member says.
        """
        if not member.welcome and len(member.come) >= GREETING_BYTES:
            if bytes(member.come[: GREETING_BYTES - 4]) != greeting(self.place.key, 0)[:-4]:
                raise ValueError("the key is another")
            del member.come[:GREETING_BYTES]
            member.welcome = True
        if member.welcome and member.head is None and len(member.come) >= _HEAD.size:
            member.head = Head(*_HEAD.unpack_from(member.come))
            del member.come[: _HEAD.size]
            self._join(member, member.head)
        while member.head is not None and len(member.come) >= _LENGTH.size:
            size = _LENGTH.unpack_from(member.come)[0]
            if size > MOST_BYTES:
                raise ValueError("too much at once")
            if len(member.come) < _LENGTH.size + size:
                return
            given = bytes(member.come[_LENGTH.size : _LENGTH.size + size])
            del member.come[: _LENGTH.size + size]
            self._give(member.head, given)
        if not member.welcome and len(member.come) > GREETING_BYTES:
            raise ValueError("no member says so much before the key")

    def _join(self, member: _Member, head: Head) -> None:
        key = head.generation, head.purpose
        there = self._rounds.get(key) or _Round(head.size)
        wrong = there.size != head.size or not 0 <= head.rank < head.size
        if wrong or head.rank in there.members or head.generation < self._oldest:
            member.head = None
            raise ValueError("it does not belong to those that meet there")
        self._rounds[key] = there
        there.members[head.rank] = member

    def _give(self, head: Head, given: bytes) -> None:
        there = self._rounds[head.generation, head.purpose]
        if head.rank in there.given:
            raise ValueError("it has given its part of this round")
        there.given[head.rank] = given
        if len(there.given) < there.size:
            return
        parts = [there.given[rank] for rank in range(there.size)]
        sizes = struct.pack(f">{there.size}I", *map(len, parts))
        whole = len(sizes) + sum(map(len, parts))
        everything = memoryview(b"".join((_LENGTH.pack(whole), sizes, *parts)))
        there.given.clear()
        for member in list(there.members.values()):
            member.out.append(everything)
            try:
                self._send(member)
            except OSError:
                self._part(member)

    def _send(self, member: _Member) -> None:
        with contextlib.suppress(BlockingIOError):
            while member.out:
                part = member.out.popleft()
                try:
                    sent = member.socket.send(part[:_PART_BYTES])
                except BlockingIOError:
                    member.out.appendleft(part)
                    raise
                if sent < len(part):
                    member.out.appendleft(part[sent:])
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if member.out else 0)
        if self._selector.get_key(member.socket).events != wanted:
            self._selector.modify(member.socket, wanted, member)

    def _part(self, member: _Member) -> None:
        """It is gone. Those that would wait for it in a round are let go."""
        if member not in self._known:
            return
        self._known.discard(member)
        self._selector.unregister(member.socket)
        member.socket.close()
        head, member.head = member.head, None
        there = None if head is None else self._rounds.get((head.generation, head.purpose))
        if head is None or there is None or there.members.get(head.rank) is not member:
            return
        del there.members[head.rank]
        if there.given or not there.members:
            self._rounds.pop((head.generation, head.purpose))
            for other in list(there.members.values()):
                self._part(other)

    def _tidy(self) -> None:
        now_s = self._clock.monotonic_s()
        for member in list(self._known):
            late = not member.welcome and now_s > member.due_s
            head = member.head
            if late or (head is not None and head.generation < self._oldest):
                self._part(member)


class RendezvousClient:
    """A member's connection to the rendezvous, for one generation and purpose.

    Args:
        place: Where that is.
        head: Who this is; one that is alone connects to nobody.

    Raises:
        TransportError: It cannot be reached.
    """

    def __init__(self, place: Place, head: Head) -> None:
        self._head = head
        self._socket: socket.socket | None = None
        if head.size == 1:
            return
        where = place.address, place.port
        try:
            self._socket = socket.create_connection(where, timeout=WAIT_S)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end_if_hung(self._socket)
            head_bytes = _HEAD.pack(head.generation, head.purpose, head.rank, head.size)
            self._socket.sendall(greeting(place.key, head.rank) + head_bytes)
        except OSError as error:
            self.close()
            raise TransportError(
                f"the rendezvous at {place.address}:{place.port} cannot be reached: {error}"
            ) from error

    def exchange(self, given: bytes) -> list[memoryview]:
        """Everybody's bytes, by rank, once all have given theirs; `opened` reads them.

        Raises:
            TransportError: A member has left, or the generation is over.
        """
        part = zlib.compress(given, 1)
        if self._socket is None:
            return [memoryview(part)]
        try:
            self._socket.sendall(_LENGTH.pack(len(part)) + part)
            come = self._take(_LENGTH.unpack(self._take(_LENGTH.size))[0])
        except OSError as error:
            raise TransportError(
                f"generation {self._head.generation} did not meet: {error}"
            ) from error
        sizes = struct.unpack_from(f">{self._head.size}I", come)
        ends = list(accumulate(sizes, initial=_LENGTH.size * self._head.size))
        return [come[at:end] for at, end in pairwise(ends)]

    def _take(self, size: int) -> memoryview:
        """So many bytes.

        Raises:
            OSError: The connection ended before.
        """
        assert self._socket is not None  # noqa: S101 - who is alone exchanges nothing
        found, at = memoryview(bytearray(size)), 0
        while at < size:
            got = self._socket.recv_into(found[at:])
            if not got:
                raise ConnectionError("a member has left, or the generation is over")
            at += got
        return found

    def close(self) -> None:
        """All is exchanged, or it is given up."""
        if self._socket is not None:
            self._socket.close()

    def __enter__(self) -> Self:
        """It is closed in the end."""
        return self

    def __exit__(self, *_: object) -> None:
        """See `close`."""
        self.close()


def opened(part: memoryview) -> bytes:
    """What a member gave.

    Raises:
        TransportError: It is damaged.
    """
    try:
        return zlib.decompress(part)
    except zlib.error as error:
        raise TransportError(f"what a member said at the rendezvous is damaged: {error}") from error


class RendezvousStore(dist.Store):
    """What gloo takes for a key-value store: a key that is not known yet is asked for in a round.

    Keys end in the number of the rank that sets them, as `0/3`. All members ask for the first time
    after as many `set`, so that a round brings all there is.

    Args:
        roll: Carries the rounds.
    """

    def __init__(self, roll: RendezvousClient) -> None:
        super().__init__()
        self._roll = roll
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
                self._parts = dict(enumerate(self._roll.exchange(_packed(own))))
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
