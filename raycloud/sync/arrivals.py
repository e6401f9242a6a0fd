"""Members that connect to this one, each heard in a thread of its own."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from raycloud.errors import TransportError
from raycloud.sync.stream import SOCKETS, Listener
from raycloud.threads import THREADS

if TYPE_CHECKING:
    from raycloud.sync.stream import Sockets, Stream
    from raycloud.threads import Threads

MOST_STRANGERS = 64  # that have not said the key; the oldest makes room for another


class Arrivals:
    """So many members are waited for, that know where, and the key.

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
        """Listen, and hear who comes."""
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
