"""Heartbeats: whether members' machines are there, asked twenty times a second.

The driver holds one connection to each member and sends a byte along it. That the byte has arrived
says the member's kernel, not its process: it answers as fast where that is busy, starved of the
processor, or frozen. So what is not answered for a few tenths of a second is a machine that is
gone, or a path that is out, and no slow one. A process that is frozen is found by its own silence.

The silence after which a machine counts as cut off goes by the longest that its path is known for:
a link whose queue is full answers in bursts. Where nobody answers it is rather the driver that is
cut off. Once one does again, TCP may wait as long as that took before it tries the others.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from raycloud.errors import TransportError
from raycloud.net.stream import Listener, Place, Stream, connect

if TYPE_CHECKING:
    from raycloud.clock import Clock

EVERY_S = 0.05
_DOUBT_S = 0.025  # ... while one has not answered as soon as usual
_MEMBER_S = 0.0005  # between two turns, per member: thousands are asked less often
_TURNS = 2.5  # so many without an answer, and
_USUAL = 2.0  # so many times the longest silence that is known of, are too long
_LEAST_S, _FIRST_S = 0.05, 0.1  # what is taken for that silence at least, and at first
_FORGETS = 0.9975  # of it, with each turn: half of it in 14 s
_LATE = 2.0  # so many turns late, and this process or its machine stood still itself
_TRY_S = 1.0  # between two connections of a member that come to nothing
_STRANGERS = 64  # connections at once that have not said yet whose they are
_BACK_S = 0.5  # ... and so much more
_WAITS = 2.0  # so many turns for others that may be cut off with the first

_INFO_BYTES = 104
_AWAITED = struct.Struct("=I"), 24  # tcpi_unacked, in the kernel's `struct tcp_info`
_HEARD_MS = struct.Struct("=I"), 56  # tcpi_last_ack_recv
_BYTE = b"\0"


@dataclass(frozen=True, slots=True)
class Reach:
    """Which members' machines were there just now.

    Attributes:
        reached: They answer, or nothing is awaited of them.
        cut_s: They are cut off: by member, for how many seconds nothing was answered.
        doubtful: One has not answered as soon as usual, and may turn out to be cut off.
    """

    reached: frozenset[int] = frozenset()
    cut_s: Mapping[int, float] = field(default_factory=dict)
    doubtful: bool = False


class Heartbeats:
    """The driver's end of all connections.

    Args:
        address: This node's, that members can reach.
        clock: For seconds.

    Attributes:
        place: Where members are to connect, each by its number; None where this system does not
            tell what was acknowledged, or the address is not one of this machine's own.
    """

    def __init__(self, address: str, clock: Clock) -> None:
        self._clock, self._listener = clock, _listener(address)
        self.place = None if self._listener is None else self._listener.place
        self._turn, self._over = threading.Lock(), threading.Event()
        self._room = threading.BoundedSemaphore(_STRANGERS)
        self._lines: dict[int, _Line] = {}
        self._gone: list[_Line] = []  # of which the thread that asks lets go
        self._reach, self._outage = Reach(), _Outage()
        self._threads: list[threading.Thread] = []
        if self._listener is not None:
            into = partial(self._accept, self._listener)
            for name, work in (("probes-in", into), ("probes", self._ask)):
                self._threads.append(threading.Thread(target=work, name=name, daemon=True))
                self._threads[-1].start()

    @property
    def reach(self) -> Reach:
        """As of the last turn, at most a twentieth of a second ago where members are few."""
        return self._reach

    def forget(self, member: int) -> None:
        """Ask its machine no more, until it connects again."""
        with self._turn:
            line = self._lines.pop(member, None)
            self._gone += [] if line is None else [line]

    def close(self) -> None:
        """Ask nobody any more."""
        self._over.set()
        if self._listener is not None:
            self._listener.hang_up()
        for thread in self._threads:
            thread.join()
        with self._turn:
            lines = [*self._gone, *self._lines.values()]
            self._gone, self._lines = [], {}
        for line in lines:
            line.close()

    def _accept(self, listener: Listener) -> None:
        while not self._over.is_set():
            try:
                listener.accept(partial(self._welcome, listener))
            except TransportError:  # nobody is waited for any more; or who came has gone again
                self._over.wait(EVERY_S)
        listener.close()

    def _welcome(self, listener: Listener, connection: socket.socket) -> None:
        if not self._room.acquire(blocking=False):
            connection.close()  # a member tries again
            return
        work = partial(self._take, listener, connection)
        threading.Thread(target=work, name="probes-new", daemon=True).start()

    def _take(self, listener: Listener, connection: socket.socket) -> None:
        try:
            known = listener.welcome(connection)
        finally:
            self._room.release()
        if known is None:
            return
        member, stream = known
        line = _Line(stream, connection, self._clock.monotonic_s())
        with self._turn:
            over = self._over.is_set()
            if not over:
                self._gone += [self._lines[member]] if member in self._lines else []
                self._lines[member] = line
        if over:
            line.close()

    def _ask(self) -> None:
        asked_s, usual_s, every_s = self._clock.monotonic_s(), EVERY_S, EVERY_S
        while not self._over.wait(every_s):
            now_s = self._clock.monotonic_s()
            late_s = now_s - asked_s - usual_s
            stood_s = late_s if late_s > _LATE * usual_s else 0.0
            with self._turn:
                lines = dict(self._lines)
                gone, self._gone = self._gone, []
            for line in gone:
                line.close()
            for member, line in lines.items():
                if not line.ask(now_s, stood_s):
                    self._end(member, line)
            usual_s = max(EVERY_S, _MEMBER_S * len(lines))
            found = _reach(lines, usual_s)
            over = self._outage.over(now_s, found, nobody=bool(lines) and not found.reached)
            self._reach = found if over else replace(found, cut_s={})
            asked_s = now_s
            every_s = max(_DOUBT_S, usual_s / 2.0) if self._reach.doubtful else usual_s

    def _end(self, member: int, line: _Line) -> None:
        with self._turn:
            if self._lines.get(member) is line:
                self._gone.append(self._lines.pop(member))


def _listener(address: str) -> Listener | None:
    if sys.platform != "linux":
        return None
    try:
        return Listener(address, wait_s=None)
    except OSError:  # a network translates it
        return None


class _Outage:
    """A time in which nobody answers, and what comes after it."""

    def __init__(self) -> None:
        self._since_s: float | None = None
        self._until_s = float("-inf")

    def over(self, now_s: float, found: Reach, *, nobody: bool) -> bool:
        """Whether who does not answer now is cut off, and not still waited for by TCP."""
        if nobody:
            longest_s = max(found.cut_s.values(), default=0.0)
            self._since_s = now_s - longest_s if self._since_s is None else self._since_s
            self._until_s = now_s + (now_s - self._since_s) + _BACK_S
        else:
            self._since_s = None
        return now_s >= self._until_s


class _Line:
    """One member's connection, as this end's kernel knows it.

    Attributes:
        silent_s: For so long nothing was answered; 0 while nothing is awaited.
        usual_s: The longest silence that it is known for.
        ended: It is no connection any more, which says nothing about the machine.
    """

    def __init__(self, stream: Stream, connection: socket.socket, now_s: float) -> None:
        self._stream, self._socket = stream, connection
        stream.send_at_once()
        connection.settimeout(0.0)
        self._since_s = now_s
        self.silent_s, self.usual_s, self.ended = 0.0, _FIRST_S, False

    def ask(self, now_s: float, stood_s: float) -> bool:
        """Look what was answered, and send the next byte; False where it has ended.

        For `stood_s` nobody has asked, and so nobody was silent.
        """
        try:
            info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
            self._socket.send(_BYTE)
        except BlockingIOError:
            pass  # it is not there, or does not read: the bytes before are awaited
        except OSError:
            self.ended = True
            return False
        (awaited,), (heard_ms,) = (one.unpack_from(info, at) for one, at in (_AWAITED, _HEARD_MS))
        heard_s = now_s - heard_ms / 1000.0
        self.usual_s = max(_LEAST_S, self.usual_s * _FORGETS)
        self._since_s += stood_s
        if heard_s > self._since_s:
            self.usual_s = max(self.usual_s, heard_s - self._since_s)
            self._since_s = heard_s
        if not awaited:
            self._since_s = now_s
        self.silent_s = now_s - self._since_s
        return True

    def close(self) -> None:
        self._stream.close()


def _reach(lines: Mapping[int, _Line], every_s: float) -> Reach:
    """Who is cut off is told once it is known of the others whether they are, too."""
    there = {member: line for member, line in lines.items() if not line.ended}
    least_s = {m: _TURNS * every_s + _USUAL * line.usual_s for m, line in there.items()}
    cut = {m: line.silent_s for m, line in there.items() if line.silent_s >= least_s[m]}
    late = [m for m, line in there.items() if line.silent_s > every_s + line.usual_s]
    doubtful = [m for m in late if m not in cut]
    reached = frozenset(there.keys() - cut.keys() - set(doubtful))
    if doubtful and all(cut[m] < least_s[m] + _WAITS * every_s for m in cut):
        cut = {}
    return Reach(reached=reached, cut_s=cut, doubtful=bool(late))


class HeartbeatPeer:
    """A member's end.

    Args:
        clock: For seconds.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._turn = threading.Lock()
        self._stream: Stream | None = None
        self._asked: tuple[Place, int] | None = None
        self._connecting = False
        self._tried_s = float("-inf")

    def keep(self, place: Place, member: int) -> None:
        """Be there for who asks at this place; returns at once. Call it about once a second."""
        with self._turn:
            same = (place, member) == self._asked
            now_s = self._clock.monotonic_s()
            if self._connecting or (same and (self._there() or now_s - self._tried_s < _TRY_S)):
                return
            self._asked, self._tried_s, self._connecting = (place, member), now_s, True
            self._end()
        work = threading.Thread(
            target=self._connect, args=(place, member), name="probed", daemon=True
        )
        work.start()

    def close(self) -> None:
        """Be there no more."""
        with self._turn:
            self._asked = None
            self._end()

    def _connect(self, place: Place, member: int) -> None:
        stream = None
        with contextlib.suppress(TransportError):  # there are other ways to be heard
            stream = connect(place, member)
        with self._turn:
            self._stream, self._connecting = stream, False
            if self._asked is None:
                self._end()

    def _there(self) -> bool:
        """Whether it is connected; what came is taken out of the kernel's hands."""
        if self._stream is None:
            return False
        try:
            self._stream.some(0.0)
        except TransportError:
            self._end()
            return False
        return True

    def _end(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None
