"""Relay: a third member passes a state on, where the link from its sender to its receiver is thin.

Each member of the generation has a door while newcomers take the state. A receiver that wants a
sender's part through a third member connects to that one's door and names the sender; the third
connects to the sender's door, names it, too, and from then on passes on bytes both ways as they
are. So the receiver talks to the sender as it does without a third, checks what comes, and takes
over each link only what it asks for there.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from typing import TYPE_CHECKING

from raycloud.errors import TransportError
from raycloud.net.sockets import shut
from raycloud.net.stream import MOST_STRANGERS, SILENT_S, connect, listen, welcome

if TYPE_CHECKING:
    import socket

    from raycloud.net.stream import Place, Stream
    from raycloud.recovery.rendezvous import Host

_MOST = 16  # connections that it has at a time


def ask_through(place: Place, rank: int, source: int, host: Host) -> Stream:
    """A stream from the member of rank `source`, through the one whose door is at `place`.

    Raises:
        TransportError: That one cannot be reached.
    """
    stream = connect(place, rank, host.sockets)
    try:
        stream.tell({"of": source})
    except TransportError:
        stream.close()
        raise
    return stream


class Relay:
    """This member's door: it passes on what others send, and `serves` what this one does.

    It opens with `begin`, once all have been told where doors are. It ends with `close`, or where
    nobody has come, and nothing is passed on, for half a minute.

    Args:
        address: This node's, that other members can reach.
        host: Where threads and connections come from.

    Attributes:
        place: Where it is.
    """

    def __init__(self, address: str, host: Host) -> None:
        self._host = host
        self._door, self.place = listen(address, host.sockets)
        self._turn = threading.Lock()
        self._streams: set[Stream] = set()
        self._strangers: deque[socket.socket] = deque()
        self._over = False

    def begin(
        self, rank: int, places: Sequence[Place], serve: Callable[[Stream], None] | None
    ) -> None:
        """Answer from now on.

        Args:
            rank: This member's.
            places: All doors, by rank.
            serve: Sends this member's own part; None: it has none. The stream is closed afterwards.
        """
        self._rank, self._places, self._serve = rank, tuple(places), serve
        self._host.threads.thread(self._accept, name="relay").start()

    def close(self) -> None:
        """Nothing is passed on any more."""
        with self._turn:
            self._over = True
            streams, strangers = tuple(self._streams), tuple(self._strangers)
        shut(self._door)
        for connection in strangers:
            shut(connection)
        self._door.close()
        for stream in streams:
            stream.hang_up()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._door.accept()
            except TimeoutError:
                with self._turn:
                    if not self._streams:
                        break
                continue
            except OSError:  # it is closed
                break
            with self._turn:
                self._strangers.append(connection)
                if len(self._strangers) > MOST_STRANGERS:
                    shut(self._strangers.popleft())  # its thread closes it
            self._host.threads.thread(self._answer, connection, name="relay").start()
        self._door.close()

    def _answer(self, connection: socket.socket) -> None:
        known = welcome(connection, self.place, self._host.sockets)
        with self._turn, suppress(ValueError):
            self._strangers.remove(connection)
        if known is None:
            return
        _, stream = known
        with closing(stream), suppress(TransportError):  # who asks is told by the end of it
            if not self._keep(stream):
                return
            try:
                self._lead(stream, stream.hear().get("of"))
            finally:
                self._drop(stream)

    def _lead(self, stream: Stream, source: object) -> None:
        if source == self._rank:
            if self._serve is not None:
                self._serve(stream)
            return
        if type(source) is not int or not 0 <= source < len(self._places):
            raise TransportError(f"a member of rank {source!r} is asked for")
        with closing(ask_through(self._places[source], self._rank, source, self._host)) as other:
            if not self._keep(other):
                return
            try:
                back = self._host.threads.thread(_pass_on, stream, other, name="relay-back")
                back.start()
                _pass_on(other, stream)
            finally:
                self._drop(other)

    def _keep(self, stream: Stream) -> bool:
        with self._turn:
            if self._over or len(self._streams) >= _MOST:
                return False
            self._streams.add(stream)
            return True

    def _drop(self, stream: Stream) -> None:
        with self._turn:
            self._streams.discard(stream)


def _pass_on(one: Stream, other: Stream) -> None:
    """Pass on what comes from one to the other, until either ends: then both do."""
    with suppress(TransportError):
        while some := one.some(SILENT_S):
            other.give(some)
    one.hang_up()
    other.hang_up()
