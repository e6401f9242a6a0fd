"""The TCP connections of members that live in one process: slow, cut and broken as a script says.

Each takes the place of a socket under `raycloud.net.stream`, whose words are the real ones.
"""

from __future__ import annotations

import socket
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from tests.scenario.stage import here
from tests.scenario.threads import Bell

if TYPE_CHECKING:
    from tests.scenario.stage import Process, Stage

_TRAVELS_S = (0.001, 0.01)
_SENDS_S = (0.0005, 0.02)
_HEARS_S = (0.005, 0.3)  # from a connection's end to a peer's knowing
_HEARS = 0.7  # the chance that a peer does; else it waits in vain
_LOST = 0.5  # the chance that what is on its way does not arrive
_LOOK_UP_S = 0.25
_KEYS = 2**48


class End:
    """One end of a connection.

    Args:
        stage: Where who waits here lets others go on.
        process: Whose it is.
        sends: What its process does that sends here,
        receives: and what it does that waits for the other end's bytes.
    """

    peer: End

    def __init__(self, stage: Stage, process: Process, sends: str, receives: str) -> None:
        self.stage, self.process = stage, process
        self._sends, self._receives = sends, receives
        self._inbox = bytearray()
        self._bell = Bell(stage)
        self._on_its_way: deque[tuple[float, bytes]] = deque()  # what this end has sent
        self._timeout_s: float | None = None
        self._why = ""  # it is broken, and this end knows
        self._no_more = self._said_all = self.closed = False

    # ---- what a socket can do

    def settimeout(self, seconds: float) -> None:
        self._timeout_s = seconds

    def setsockopt(self, *told: int) -> None:
        pass

    def sendall(self, data: bytes | memoryview) -> None:
        self.stage.wait(self.stage.world.between(*_SENDS_S), self._sends)
        if self._why or self._said_all:
            raise BrokenPipeError(self._why or "it is shut")
        self._send(bytes(data))

    def recv(self, size: int) -> bytes:
        if not self._bell.wait_for(self.readable, self._timeout_s, self._receives):
            raise TimeoutError("timed out")
        if self._inbox:
            found = bytes(self._inbox[:size])
            del self._inbox[:size]
            return found
        if self._why or self.closed:
            raise ConnectionResetError(self._why or "it is closed")
        return b""

    def recv_into(self, place: memoryview) -> int:
        found = self.recv(len(place))
        place[: len(found)] = found
        return len(found)

    def shutdown(self, how: int) -> None:
        if not self._said_all:
            self._said_all = True
            self._send(b"")
        if how == socket.SHUT_RDWR:
            self._no_more = True
            self._bell.ring()

    def close(self) -> None:
        self.shutdown(socket.SHUT_RDWR)
        self.closed = True

    def readable(self) -> bool:
        """Whether `recv` would not wait."""
        return bool(self._inbox or self._no_more or self._why or self.closed)

    def wait_readable(self, timeout_s: float) -> bool:
        return self._bell.wait_for(self.readable, timeout_s, self._receives)

    def on_its_way(self) -> int:
        """Bytes that it has sent and the other end has not."""
        return sum(len(data) for _, data in self._on_its_way)

    # ---- the way between

    def look(self) -> None:
        """Deliver in order what has travelled long enough."""
        world = self.stage.world
        while self._on_its_way and self._on_its_way[0][0] <= world.now_s:
            for process in (self.process, self.peer.process):
                if process.cut:
                    process.withheld.append(self.look)
                    return
            self.peer._take(self._on_its_way.popleft()[1])

    def reset(self, why: str) -> None:
        """This end learns that it is broken."""
        if not self.closed and self.process.alive:
            self._why = self._why or why
            self._bell.ring()

    def lose(self) -> None:
        """What is on its way does not arrive, and nothing will."""
        self._on_its_way.clear()
        self._said_all = True

    def hang_up(self) -> None:
        """Its process has ended: what is on its way arrives, and then its end."""
        if not self._said_all:
            self.shutdown(socket.SHUT_RDWR)

    def _send(self, data: bytes) -> None:
        world = self.stage.world
        before_s = self._on_its_way[-1][0] if self._on_its_way else 0.0
        there_s = max(before_s, world.now_s + world.between(*_TRAVELS_S))
        self._on_its_way.append((there_s, data))
        world.at(there_s, self.look)

    def _take(self, data: bytes) -> None:
        if not self.process.alive or (self.closed and data):
            self.peer.reset("connection reset by peer")
        elif data:
            self._inbox += data
        else:
            self._no_more = True
        self._bell.ring()


class Ear:
    """A socket that waits for connections."""

    def __init__(self, stage: Stage, process: Process, address: str, port: int) -> None:
        self.process, self._place = process, (address, port)
        self.closed = False
        self.bell = Bell(stage)
        self.backlog: deque[End] = deque()
        self._timeout_s: float | None = None

    def settimeout(self, seconds: float) -> None:
        self._timeout_s = seconds

    def getsockname(self) -> tuple[str, int]:
        return self._place

    def accept(self) -> tuple[End, tuple[str, int]]:
        if not self.bell.wait_for(lambda: self.backlog or self.closed, self._timeout_s):
            raise TimeoutError("timed out")
        if self.closed:
            raise OSError("it is closed")
        return self.backlog.popleft(), self._place

    def shutdown(self, how: int) -> None:
        self.close()

    def close(self) -> None:
        self.closed = True
        for end in self.backlog:
            end.peer.reset("connection reset by peer")
        self.backlog.clear()
        self.bell.ring()


class Streams:
    """All such connections of one start: `raycloud.net.stream.Sockets` of its members."""

    chunk_bytes = 256  # of a state on its way

    def __init__(self, stage: Stage) -> None:
        self._stage, self._world = stage, stage.world
        self._ears: dict[int, Ear] = {}
        self._ends: list[End] = []

    def listen(self, address: str) -> Ear:
        """Wait for connections, at a port that nobody else has."""
        port = 1024 + len(self._ears)
        self._ears[port] = Ear(self._stage, _process(), address, port)
        return self._ears[port]

    def connect(self, place: tuple[str, int], timeout_s: float) -> End:
        """A connection to who listens there."""
        process, world = _process(), self._world
        until_s, ear = world.now_s + timeout_s, self._ears[place[1]]
        self._stage.wait(world.between(*_TRAVELS_S), "send")
        while process.cut or ear.process.cut:
            if world.now_s >= until_s:
                raise TimeoutError("timed out")
            self._stage.wait(_LOOK_UP_S, "send")
        if ear.closed or not ear.process.alive:
            raise ConnectionRefusedError("connection refused")
        here_, there = (
            End(self._stage, process, "send", "sent"),
            End(self._stage, ear.process, "", "receive"),
        )
        here_.peer, there.peer = there, here_
        self._ends += [here_, there]
        ear.backlog.append(there)
        ear.bell.ring()
        return here_

    def readable(self, end: End, timeout_s: float) -> bool:
        return end.wait_readable(timeout_s)

    def unacknowledged(self, end: End) -> int:
        return end.on_its_way()

    def new_key(self) -> int:
        return self._world.below(_KEYS)

    def gone(self, process: Process) -> None:
        """A process has ended: peers hear of that at once, later or never."""
        for end in self._of(process):
            if self._world.likely(_LOST):
                end.lose()
                self._tell(end.peer, f"connection to {process} reset")
            else:
                end.hang_up()
        self._ends = [end for end in self._ends if end.process is not process]

    def cut(self, process: Process | None) -> None:
        """Connections are reset: everyone's, or one process's."""
        for end in self._of(process):
            end.lose()
            self._tell(end, "connection reset by peer")
            if process is not None:
                end.peer.lose()
                self._tell(end.peer, "connection reset by peer")

    def _of(self, process: Process | None) -> list[End]:
        self._ends = [end for end in self._ends if not (end.closed and end.peer.closed)]
        return [end for end in self._ends if process is None or end.process is process]

    def _tell(self, end: End, why: str) -> None:
        if self._world.likely(_HEARS):
            self._world.after(self._world.between(*_HEARS_S), partial(end.reset, why))


def _process() -> Process:
    strand = here()
    assert strand is not None, "only a member's thread connects"
    return strand.process
