"""Heartbeats: whether members' machines are there, asked twenty times a second.

Four times, where all are on the driver's own machine, which is there.

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
import math
import socket
import sys
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from raycloud.errors import TransportError
from raycloud.net.sockets import answers, end_if_hung
from raycloud.net.stream import (
    BACKLOG,
    GREETING_BYTES,
    SILENT_S,
    Place,
    Stream,
    connect,
    listen,
    rank_of,
)

if TYPE_CHECKING:
    from raycloud.clock import Clock

EVERY_S = 0.05
_HERE_S = 0.25  # ... where all connections are of this machine
_DOUBT_S = 0.025  # ... while one has not answered as soon as usual
_MEMBER_S = 0.0005  # between two turns, per member: thousands are asked less often
_TURNS = 2.5  # so many without an answer, and
_USUAL = 2.0  # so many times the longest silence that is known of, are too long
_LEAST_S, _FIRST_S = 0.05, 0.1  # what is taken for that silence at least, and at first
_FORGETS = 0.9975  # of it, with each turn: half of it in 14 s, at twenty turns a second
_LATE = 2.0  # so many turns late, and this process or its machine stood still itself
_TRY_S = 1.0  # between two connections of a member that come to nothing
_STRANGERS = 64  # connections at once that have not said yet whose they are
_BACK_S = 0.5  # ... and so much more
_WAITS = 2.0  # so many turns for others that may be cut off with the first

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
    """The driver's end of all connections, which one thread looks after.

    Attributes:
        place: Where members are to connect, each by its number; None where this system does not
            tell what was acknowledged, or the address is not one of this machine's own.
        reach: As of the last turn, at most a twentieth of a second ago where members are few, or a
            quarter where all are on this machine.
    """

    def __init__(self, address: str, clock: Clock) -> None:
        self._clock, self._over = clock, threading.Event()
        self._strangers: list[tuple[float, socket.socket]] = []  # since when
        self._lines: dict[int, _Line] = {}
        self._forgotten: deque[int] = deque()
        self.place: Place | None = None
        self.reach = Reach()
        self._thread: threading.Thread | None = None
        if sys.platform == "linux":
            with contextlib.suppress(OSError):  # a network translates it
                door, self.place = listen(address)
                door.settimeout(0.0)
                self._thread = threading.Thread(
                    target=self._live, args=(door,), name="probes", daemon=True
                )
                self._thread.start()

    def forget(self, member: int) -> None:
        """Ask its machine no more, until it connects again."""
        self._forgotten.append(member)

    def close(self) -> None:
        """Ask nobody any more."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _live(self, door: socket.socket) -> None:
        asked_s, usual_s, every_s = self._clock.monotonic_s(), EVERY_S, EVERY_S
        nobody_since_s, waits_until_s = math.inf, -math.inf
        while not self._over.wait(every_s):
            now_s = self._clock.monotonic_s()
            late_s = now_s - asked_s - usual_s
            stood_s = late_s if late_s > _LATE * usual_s else 0.0
            while self._forgotten:
                self._end(self._forgotten.popleft())
            self._take_in(door, now_s)
            for member, line in list(self._lines.items()):
                if not line.ask(now_s, stood_s):
                    self._end(member)
            usual_s = self._usual_s()
            found = _reach(self._lines, usual_s)
            if self._lines and not found.reached:
                if nobody_since_s == math.inf:
                    nobody_since_s = now_s - max(found.cut_s.values(), default=0.0)
                waits_until_s = now_s + (now_s - nobody_since_s) + _BACK_S
            else:
                nobody_since_s = math.inf
            # Until then who does not answer is still waited for by TCP, and not cut off.
            self.reach = found if now_s >= waits_until_s else replace(found, cut_s={})
            asked_s = now_s
            every_s = max(_DOUBT_S, usual_s / 2.0) if self.reach.doubtful else usual_s
        door.close()
        for _, connection in self._strangers:
            connection.close()
        for member in list(self._lines):
            self._end(member)

    def _usual_s(self) -> float:
        """Seconds to the next turn."""
        here = all(line.here for line in self._lines.values()) and not self._strangers
        return max(_HERE_S if here else EVERY_S, _MEMBER_S * len(self._lines))

    def _take_in(self, door: socket.socket, now_s: float) -> None:
        """Let in who connects, and know who has said whose it is."""
        for _ in range(BACKLOG):
            try:
                connection, _ = door.accept()
            except OSError:  # there is no other one; or it has gone again
                break
            connection.settimeout(0.0)
            end_if_hung(connection)
            self._strangers.append((now_s, connection))
        self._strangers = [one for one in self._strangers if not self._known(*one, now_s)]
        while len(self._strangers) > _STRANGERS:
            self._strangers.pop(0)[1].close()  # a member tries again

    def _known(self, since_s: float, connection: socket.socket, now_s: float) -> bool:
        """Whether it is a member's, or has been ended: else it may still say whose it is."""
        try:
            said = connection.recv(GREETING_BYTES, socket.MSG_PEEK)
            waits = 0 < len(said) < GREETING_BYTES
        except OSError as error:
            said, waits = b"", isinstance(error, BlockingIOError)
        if waits and now_s - since_s < SILENT_S:
            return False
        member = rank_of(said, self.place) if len(said) == GREETING_BYTES and self.place else None
        if member is None:
            connection.close()
        else:
            self._end(member)
            self._lines[member] = _Line(connection, now_s)
        return True

    def _end(self, member: int) -> None:
        if (line := self._lines.pop(member, None)) is not None:
            line.close()


class _Line:
    """One member's connection, as this end's kernel knows it.

    For `silent_s` nothing was answered: 0 while nothing is awaited. `usual_s` is the longest such
    silence that is known of. `here`: the member is on this machine.
    """

    def __init__(self, connection: socket.socket, now_s: float) -> None:
        self._socket, self.close = connection, connection.close
        with contextlib.suppress(OSError):  # it has ended: `ask` finds that
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.here = False
        with contextlib.suppress(OSError):
            self.here = connection.getpeername()[0] == connection.getsockname()[0]
        self._since_s = now_s
        self.silent_s, self.usual_s = 0.0, _FIRST_S

    def ask(self, now_s: float, stood_s: float) -> bool:
        """Look what was answered, and send the next byte; False where it has ended.

        For `stood_s` nobody has asked, and so nobody was silent.
        """
        try:
            answered = answers(self._socket)
            self._socket.send(_BYTE)
        except BlockingIOError:
            pass  # it is not there, or does not read: the bytes before are awaited
        except OSError:  # which says nothing about the machine
            return False
        heard_s = now_s - answered.heard_s
        self.usual_s = max(_LEAST_S, self.usual_s * _FORGETS)
        self._since_s += stood_s
        if heard_s > self._since_s:
            self.usual_s = max(self.usual_s, heard_s - self._since_s)
            self._since_s = heard_s
        if not answered.awaited:
            self._since_s = now_s
        self.silent_s = now_s - self._since_s
        return True


def _reach(lines: Mapping[int, _Line], every_s: float) -> Reach:
    """Who is cut off is told once it is known of the others whether they are, too."""
    least_s = {m: _TURNS * every_s + _USUAL * line.usual_s for m, line in lines.items()}
    cut = {m: line.silent_s for m, line in lines.items() if line.silent_s >= least_s[m]}
    late = {m for m, line in lines.items() if line.silent_s > every_s + line.usual_s}
    doubtful = late - cut.keys()
    if doubtful and all(cut[m] < least_s[m] + _WAITS * every_s for m in cut):
        told: dict[int, float] = {}
    else:
        told = cut
    reached = frozenset(lines.keys() - cut.keys() - doubtful)
    return Reach(reached=reached, cut_s=told, doubtful=bool(late))


class HeartbeatPeer:
    """A member's end; `clock` is for seconds."""

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
        args = place, member
        threading.Thread(target=self._connect, args=args, name="probed", daemon=True).start()

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
        try:
            return self._stream is not None and self._stream.some(0.0) is not None
        except TransportError:
            self._end()
            return False

    def _end(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None
