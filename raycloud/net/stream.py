"""Keyed sockets: bytes from one member to another, counted, checked, as they are.

Who is to receive listens, and tells the others where, and a key. A connection says whose it is and
the key, then a header in JSON, then chunks of bytes with their check sums. The other way goes what
is asked for. Nothing that arrives is unpickled.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import secrets
import select
import socket
import struct
import termios
import threading
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raycloud.errors import TransportError
from raycloud.net.sockets import answers, end_if_hung, listening, shut
from raycloud.threads import THREADS

if TYPE_CHECKING:
    from raycloud.threads import Threads

FORMAT = 2  # 1: a state was sent without being asked for
SILENT_S = 30.0  # so long may a peer have nothing to say
BACKLOG = 1024  # connections that may wait to be taken in

_GREETING = struct.Struct(">8sHQI")  # what this is, format, key, the sender's rank
GREETING_BYTES = _GREETING.size
_HEADER = struct.Struct(">I")  # its bytes
_CHUNK = struct.Struct(">II")  # bytes, CRC-32
_NAME = b"raycloud"
_KEY_BITS = 48
_HEADER_BYTES = 2**26
_BUFFER_BYTES = 2**19  # what lies in the kernel cannot give way any more
_SOME_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class Place:
    """Where a member listens, and the key that it asks for."""

    address: str
    port: int
    key: int


class Sockets:
    """TCP connections of this machine; tests have others, which break where a script says.

    Attributes:
        chunk_bytes: At most so many are sent, and checked, together.
    """

    chunk_bytes = 2**20

    def listen(self, address: str) -> socket.socket:
        """Listen on a free port."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        # Else it could be taken for one of gloo's that is opened just now.
        return listening(
            lambda: socket.create_server((address, 0), family=family, backlog=BACKLOG)
        )[0]

    def connect(self, where: tuple[str, int], timeout_s: float) -> socket.socket:
        """Open a connection."""
        return socket.create_connection(where, timeout_s)

    def readable(self, connection: socket.socket, timeout_s: float) -> bool:
        """Whether something has come, or the end, within `timeout_s`."""
        poll = select.poll()  # `select` would know no descriptor from 1,024 on
        poll.register(connection, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000.0))

    def unacknowledged(self, connection: socket.socket) -> int:
        """Bytes that lie in the kernel or travel; 0 where it does not say."""
        found = array("i", [0])
        with contextlib.suppress(OSError):
            fcntl.ioctl(connection, termios.TIOCOUTQ, found)
        return found[0]

    def new_key(self) -> int:
        """A key that nobody guesses."""
        return secrets.randbits(_KEY_BITS)


SOCKETS = Sockets()


class Stream:
    """One end of a connection, its own from now on. What breaks it raises `TransportError`.

    Args:
        connection: Nothing small waits there to be sent with more.
        sockets: Where it comes from.
        silent_s: So long may the peer have nothing to say.
    """

    def __init__(
        self, connection: socket.socket, sockets: Sockets = SOCKETS, silent_s: float = SILENT_S
    ) -> None:
        self._socket, self._sockets = connection, sockets
        connection.settimeout(silent_s)
        with contextlib.suppress(OSError):  # it is no TCP connection
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def tell(self, header: Mapping[str, Any]) -> None:
        """Send a header."""
        text = json.dumps(header).encode()
        self.give(_HEADER.pack(len(text)), text)

    def send(self, chunk: memoryview) -> None:
        """Send at most `chunk_bytes`; the caller may reuse them once this returns."""
        self.give(_CHUNK.pack(len(chunk), zlib.crc32(chunk)), chunk)

    def hear(self) -> dict[str, Any]:
        """The header; `TransportError` also where what came is none."""
        size = _HEADER.unpack(self.take(_HEADER.size))[0]
        if size > _HEADER_BYTES:
            raise TransportError(f"a header of {size} bytes came; at most {_HEADER_BYTES} may")
        try:
            told = json.loads(self.take(size))
        except ValueError as error:
            raise TransportError(f"a header came that is no JSON: {error}") from error
        if not isinstance(told, dict):
            raise TransportError(f"a header came that is no object but {type(told).__name__}")
        return told

    def receive(self, place: memoryview) -> None:
        """Fill `place` with the bytes that were sent for it, chunk by chunk, and check them."""
        at = 0
        while at < len(place):
            size, check = _CHUNK.unpack(self.take(_CHUNK.size))
            if not 0 < size <= min(self._sockets.chunk_bytes, len(place) - at):
                raise TransportError(f"a chunk of {size} bytes came, {len(place) - at} are missing")
            chunk = place[at : at + size]
            self._fill(chunk)
            if zlib.crc32(chunk) != check:
                raise TransportError(f"a chunk of {size} bytes was damaged on its way")
            at += size

    def heard(self, timeout_s: float) -> bool:
        """Whether something has come from the peer, or the end, within `timeout_s`."""
        return self._sockets.readable(self._socket, timeout_s)

    def ended(self) -> bool:
        """Whether the peer has closed it, or it broke, and nothing is left to be read."""
        if not self.heard(0.0):
            return False
        try:
            return not self._socket.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def is_silent(self) -> bool:
        """Whether the other machine has not answered for a while, as far as is known."""
        with contextlib.suppress(OSError, AttributeError):  # it is no TCP, or no Linux
            return answers(self._socket).is_silent
        return False

    def on_its_way(self) -> int:
        """How many bytes were sent and have not arrived, as far as the system tells."""
        return self._sockets.unacknowledged(self._socket)

    def some(self, timeout_s: float) -> bytes:
        """Bytes that have come, whatever they are; none where none do within `timeout_s`."""
        if not self.heard(timeout_s):
            return b""
        with _broken():
            got = self._socket.recv(_SOME_BYTES)
        if not got:
            raise TransportError("the connection to a member was closed")
        return got

    def detach(self) -> socket.socket:
        """The connection, which is the caller's from now on: this stream is closed."""
        return socket.socket(fileno=self._socket.detach())

    def hang_up(self) -> None:
        """End the connection, which another thread uses and then closes."""
        shut(self._socket)

    def close(self) -> None:
        """End the connection; another thread that waits for it is told."""
        self.hang_up()
        self._socket.close()

    def give(self, *parts: bytes | memoryview) -> None:
        """Send bytes as they are."""
        with _broken():
            for part in parts:
                self._socket.sendall(part)

    def take(self, size: int) -> bytes:
        """The next `size` bytes, as they are."""
        found = bytearray(size)
        self._fill(memoryview(found))
        return bytes(found)

    def _fill(self, place: memoryview) -> None:
        at = 0
        while at < len(place):
            with _broken():
                got = self._socket.recv_into(place[at:])
            if not got:
                raise TransportError("the connection to a member was closed before its end")
            at += got


@contextlib.contextmanager
def _broken() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TransportError(f"the connection to a member broke: {error}") from error


def connect(
    place: Place,
    rank: int,
    sockets: Sockets = SOCKETS,
    silent_s: float = SILENT_S,
    hung_s: float | None = None,
    timeout_s: float | None = None,
) -> Stream:
    """Open a connection to who listens at `place`, and say whose it is.

    It ends where the other machine acknowledges nothing for `hung_s`, or, where nothing is on its
    way, for two seconds at least, and is waited for no longer than twice `hung_s`, or `timeout_s`;
    None: see `end_if_hung`.

    Raises:
        TransportError: It cannot be reached.
    """
    where = place.address, place.port
    if timeout_s is None:
        timeout_s = silent_s if hung_s is None else 2.0 * hung_s
    try:
        connection = sockets.connect(where, timeout_s)
    except OSError as error:
        raise TransportError(f"a member cannot be reached at {where}: {error}") from error
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    end_if_hung(connection)
    if hung_s is not None:
        with contextlib.suppress(OSError, AttributeError):  # it is no TCP, or no Linux
            hung_ms = int(1000.0 * hung_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, hung_ms)
            for often in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):  # while nothing is sent
                connection.setsockopt(socket.IPPROTO_TCP, often, 1)
    stream = Stream(connection, sockets, silent_s)
    try:
        stream.give(greeting(place.key, rank))
    except TransportError:
        stream.close()
        raise
    return stream


def greeting(key: int, rank: int) -> bytes:
    """The first bytes of a connection."""
    return _GREETING.pack(_NAME, FORMAT, key, rank)


def listen(address: str, sockets: Sockets = SOCKETS) -> tuple[socket.socket, Place]:
    """A socket that waits for others to `connect`, and what they are to be told for that.

    `address` is this node's, that they can reach.
    """
    door = sockets.listen(address)
    door.settimeout(SILENT_S)
    return door, Place(address, door.getsockname()[1], sockets.new_key())


def rank_of(said: bytes, place: Place) -> int | None:
    """The sender's rank in a `greeting`; None for one who does not know the place's key."""
    *told, rank = _GREETING.unpack(said)
    return rank if told == [_NAME, FORMAT, place.key] else None


def welcome(
    connection: socket.socket, place: Place, sockets: Sockets = SOCKETS
) -> tuple[int, Stream] | None:
    """The rank and the stream of who has connected; None for one who does not know the key."""
    end_if_hung(connection)
    stream = Stream(connection, sockets)
    with contextlib.suppress(TransportError):
        rank = rank_of(stream.take(GREETING_BYTES), place)
        if rank is not None:
            return rank, stream
    stream.close()
    return None


MOST_STRANGERS = 64  # that have not said the key; the oldest makes room for another


class Arrivals:
    """Waits at `place` for `count` members to connect, and hears each in a thread of its own.

    `hear` is given the rank of each and its stream, which is closed once it returns; `fail` is told
    where one does not come, or `hear` raises.
    """

    def __init__(
        self,
        address: str,
        count: int,
        hear: Callable[[int, Stream], None],
        fail: Callable[[TransportError], None],
        threads: Threads = THREADS,
        sockets: Sockets = SOCKETS,
    ) -> None:
        self._threads, self._sockets = threads, sockets
        self._door, self.place = listen(address, sockets)
        self._count, self._hear, self._fail = count, hear, fail
        self._turn = threading.Lock()
        self._streams: dict[int, Stream] = {}
        self._strangers: deque[socket.socket] = deque()
        self._closed = False
        threads.thread(self._accept, name="arrivals").start()

    @property
    def streams(self) -> list[Stream]:
        """Of those that have come."""
        with self._turn:
            return list(self._streams.values())

    def close(self) -> None:
        """Nobody is waited for or heard any more: each thread closes what it waits for."""
        with self._turn:
            self._closed = True
        shut(self._door)
        for stream in self.streams:
            stream.hang_up()
        with self._turn:
            strangers = list(self._strangers)
        for connection in strangers:
            shut(connection)

    def _accept(self) -> None:
        while not self._all_here():
            try:
                connection, _ = self._door.accept()
            except OSError as error:
                if not self._all_here():
                    what = f"no member has connected in {SILENT_S:g} s"
                    self._fail(TransportError(f"{what}: {error}"))
                break
            with self._turn:
                self._strangers.append(connection)
                if len(self._strangers) > MOST_STRANGERS:
                    shut(self._strangers.popleft())  # its thread closes it
            self._threads.thread(self._answer, connection, name="arrival").start()
        self._door.close()

    def _all_here(self) -> bool:
        with self._turn:
            return self._closed or len(self._streams) == self._count

    def _answer(self, connection: socket.socket) -> None:
        known = welcome(connection, self.place, self._sockets)
        with self._turn, contextlib.suppress(ValueError):
            self._strangers.remove(connection)
        if known is None:
            return
        rank, stream = known
        with self._turn:
            late = rank in self._streams or self._closed
            if not late:
                self._streams[rank] = stream
        if late:
            stream.close()
            return
        if self._all_here():
            shut(self._door)  # nobody else is waited for
        try:
            self._hear(rank, stream)
        except TransportError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - the last line before the thread's end
            self._fail(TransportError(f"what a member sent could not be taken: {error}"))
        finally:
            stream.close()
