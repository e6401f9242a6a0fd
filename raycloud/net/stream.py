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
from raycloud.net.sockets import end_if_hung, listening
from raycloud.threads import THREADS

if TYPE_CHECKING:
    from raycloud.threads import Threads

FORMAT = 2  # 1: a state was sent without being asked for
SILENT_S = 30.0  # so long may a peer have nothing to say

_GREETING = struct.Struct(">8sHQI")  # what this is, format, key, the sender's rank
GREETING_BYTES = _GREETING.size
_HEADER = struct.Struct(">I")  # its bytes
_CHUNK = struct.Struct(">II")  # bytes, CRC-32
_NAME = b"raycloud"
_KEY_BITS = 48  # float64, in which it travels to the others, holds it exactly
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
        made: list[socket.socket] = []

        def listen() -> None:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            made.append(socket.create_server((address, 0), family=family))

        listening(listen)  # else it could be taken for one of gloo's that is opened just now
        return made[0]

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
    """One end of a connection.

    Args:
        connection: It is this stream's from now on.
        sockets: Where it comes from.
    """

    def __init__(self, connection: socket.socket, sockets: Sockets = SOCKETS) -> None:
        self._socket, self._sockets = connection, sockets
        self._socket.settimeout(SILENT_S)

    def tell(self, header: Mapping[str, Any]) -> None:
        """Send a header."""
        text = json.dumps(header).encode()
        self.give(_HEADER.pack(len(text)), text)

    def send(self, chunk: memoryview) -> None:
        """Send at most `chunk_bytes`; the caller may reuse them once this returns."""
        self.give(_CHUNK.pack(len(chunk), zlib.crc32(chunk)), chunk)

    def hear(self) -> dict[str, Any]:
        """The header.

        Raises:
            TransportError: The connection broke, or what came is no header.
        """
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
        """Fill `place` with the bytes that were sent for it, chunk by chunk.

        Raises:
            TransportError: The connection broke, or what came is not what was sent.
        """
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

    def on_its_way(self) -> int:
        """How many bytes were sent and have not arrived, as far as the system tells."""
        return self._sockets.unacknowledged(self._socket)

    def send_at_once(self) -> None:
        """From now on nothing small waits to be sent with more: an answer is waited for."""
        with contextlib.suppress(OSError):  # it is no TCP connection
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def some(self, timeout_s: float) -> bytes:
        """Bytes that have come, whatever they are; none where none do within `timeout_s`.

        Raises:
            TransportError: The connection broke, or is closed.
        """
        if not self.heard(timeout_s):
            return b""
        with _broken():
            got = self._socket.recv(_SOME_BYTES)
        if not got:
            raise TransportError("the connection to a member was closed")
        return got

    def hang_up(self) -> None:
        """End the connection, which another thread uses and then closes."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection; another thread that waits for it is told."""
        self.hang_up()
        self._socket.close()

    def give(self, *parts: bytes | memoryview) -> None:
        """Send bytes as they are.

        Raises:
            TransportError: The connection broke.
        """
        with _broken():
            for part in parts:
                self._socket.sendall(part)

    def take(self, size: int) -> bytes:
        """The next `size` bytes, as they are.

        Raises:
            TransportError: The connection broke.
        """
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


def connect(place: Place, rank: int, sockets: Sockets = SOCKETS) -> Stream:
    """Open a connection to who listens at `place`, and say whose it is.

    Raises:
        TransportError: It cannot be reached.
    """
    where = place.address, place.port
    try:
        connection = sockets.connect(where, SILENT_S)
    except OSError as error:
        raise TransportError(f"a member cannot be reached at {where}: {error}") from error
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    end_if_hung(connection)
    stream = Stream(connection, sockets)
    try:
        stream.give(greeting(place.key, rank))
    except TransportError:
        stream.close()
        raise
    return stream


def greeting(key: int, rank: int) -> bytes:
    """The first bytes of a connection."""
    return _GREETING.pack(_NAME, FORMAT, key, rank)


class Listener:
    """Where others connect to this member.

    Args:
        address: This node's, that peers can reach.
        wait_s: For the next connection; None: for ever.
        sockets: Where they come from.

    Attributes:
        place: To be told to those who are to connect.
    """

    def __init__(
        self, address: str, wait_s: float | None = SILENT_S, sockets: Sockets = SOCKETS
    ) -> None:
        self._sockets = sockets
        self._socket = sockets.listen(address)
        self._socket.settimeout(wait_s)
        self._wait_s = wait_s
        port = self._socket.getsockname()[1]
        self.place = Place(address, port, sockets.new_key())

    @property
    def door(self) -> socket.socket:
        """What listens, for who looks after many connections at once."""
        return self._socket

    def accept(self, serve: Callable[[socket.socket], None]) -> None:
        """Wait for the next connection, and let `serve` have it.

        Raises:
            TransportError: None came in time, or this is closed.
        """
        try:
            connection, _ = self._socket.accept()
        except OSError as error:
            waited = "" if self._wait_s is None else f" in {self._wait_s:g} s"
            raise TransportError(f"no member has connected{waited}: {error}") from error
        end_if_hung(connection)
        serve(connection)

    def welcome(self, connection: socket.socket) -> tuple[int, Stream] | None:
        """The sender's rank and its stream; None for one who does not know the key."""
        stream = Stream(connection, self._sockets)
        with contextlib.suppress(TransportError):
            told = _GREETING.unpack(stream.take(_GREETING.size))
            if told[:3] == (_NAME, FORMAT, self.place.key):
                return told[3], stream
        stream.close()
        return None

    def hang_up(self) -> None:
        """Nobody is waited for any more, by another thread, which then closes."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Nobody is waited for any more."""
        self.hang_up()
        self._socket.close()


MOST_STRANGERS = 64  # that have not said the key; the oldest makes room for another


class Arrivals:
    """Waits for members that connect to this one, and hears each in a thread of its own.

    Args:
        address: This node's, that they can reach.
        count: How many.
        hear: Given the rank of each and its stream, which is closed once it returns.
        fail: Told where one does not come, or `hear` raises.
        threads: Where each is heard.
        sockets: Over which they come.

    Attributes:
        place: Where they are to connect.
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
        self._threads = threads
        self._listener = Listener(address, sockets=sockets)
        self.place = self._listener.place
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
        self._listener.hang_up()
        for stream in self.streams:
            stream.hang_up()
        with self._turn:
            while self._strangers:
                _hang_up(self._strangers.popleft())

    def _accept(self) -> None:
        while not self._all_here():
            try:
                self._listener.accept(self._serve)
            except TransportError as error:
                if not self._all_here():
                    self._fail(error)
                break
        self._listener.close()

    def _all_here(self) -> bool:
        with self._turn:
            return self._closed or len(self._streams) == self._count

    def _serve(self, connection: socket.socket) -> None:
        with self._turn:
            self._strangers.append(connection)
            if len(self._strangers) > MOST_STRANGERS:
                _hang_up(self._strangers.popleft())
        self._threads.thread(self._answer, connection, name="arrival").start()

    def _answer(self, connection: socket.socket) -> None:
        known = self._listener.welcome(connection)
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
            self._listener.hang_up()  # nobody else is waited for
        try:
            self._hear(rank, stream)
        except TransportError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - the last line before the thread's end
            self._fail(TransportError(f"what a member sent could not be taken: {error}"))
        finally:
            stream.close()


def _hang_up(connection: socket.socket) -> None:
    """Nothing comes from it any more; its thread closes it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
