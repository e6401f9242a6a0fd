"""Links between machines: round trip and rate over a TCP socket, and the offset of clocks.

The one who listens takes one caller, who must know its key; what arrives is counted and dropped.

    caller                      listener
    key (16 bytes)  ->
    a byte          ->          the same byte back, `PINGS` times
    blocks          ->          until the caller closes its side
                    <-          how many bytes arrived (8 bytes)
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raycloud.clock import Clock

KEY_BYTES = 16
QUESTIONS = 5  # to find out how far a clock is ahead
PINGS = 5
BLOCK_BYTES = 1 << 20
MEASURED_S = 1.0
LIMIT_S = 10.0
_SETTINGS = 4  # type of an HTTP/2 frame, the fourth of its nine first bytes
_FRAME_HEAD_BYTES = 9
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, _SETTINGS, 0, 0, 0, 0, 0))


class Ear:
    """Listens on a free port for one caller, in a thread of its own.

    It waits `limit_s` for the caller, and for each thing that the caller sends.
    """

    def __init__(self, host: str, *, limit_s: float = LIMIT_S) -> None:
        self.host = host
        self.key = secrets.token_bytes(KEY_BYTES)
        self._limit_s = limit_s
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=1)
        self._socket.settimeout(limit_s)
        self.port = int(self._socket.getsockname()[1])
        self._thread = threading.Thread(target=self._hear, name="raycloud-link", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait for the thread; it ends with its caller, or at its time limit."""
        self._thread.join(2 * self._limit_s + MEASURED_S)

    def _hear(self) -> None:
        # A caller that goes away, or is none of ours, ends the attempt; the caller's side says so.
        with self._socket, contextlib.suppress(OSError):
            caller, _ = self._socket.accept()
            with caller:
                caller.settimeout(self._limit_s)
                if not hmac.compare_digest(_exactly(caller, KEY_BYTES), self.key):
                    return
                for _ in range(PINGS):
                    caller.sendall(_exactly(caller, 1))
                count, room = 0, bytearray(BLOCK_BYTES)
                while got := caller.recv_into(room):
                    count += got
                caller.sendall(count.to_bytes(8, "big"))


def call(
    host: str, port: int, key: bytes, clock: Clock, *, lasts_s: float = 0.0
) -> tuple[float, float | None]:
    """Call an `Ear`: seconds of the quickest round trip, and bytes per second if any are sent.

    They are for `lasts_s`.

    Raises:
        OSError: It was not reached, or did not answer as it should.
    """
    with socket.create_connection((host, port), timeout=LIMIT_S) as ear:
        ear.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ear.sendall(key)
        trips = []
        for _ in range(PINGS):
            began_s = clock.monotonic_s()
            ear.sendall(b".")
            _exactly(ear, 1)
            trips.append(clock.monotonic_s() - began_s)
        began_s, sent, block = clock.monotonic_s(), 0, bytes(BLOCK_BYTES)
        while lasts_s > 0.0 and clock.monotonic_s() - began_s < lasts_s:
            ear.sendall(block)
            sent += len(block)
        ear.shutdown(socket.SHUT_WR)
        arrived = int.from_bytes(_exactly(ear, 8), "big")
        took_s = clock.monotonic_s() - began_s
    if arrived != sent:
        raise ConnectionError(f"{sent} bytes were sent, {arrived} arrived")
    return min(trips), sent / took_s if sent else None


class LinkEnds:
    """One node's ends of links: it listens for callers, and calls."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ears: list[Ear] = []

    def listen(self, host: str) -> tuple[int, bytes]:
        """Listen for one caller; the port, and the key that it has to know."""
        ear = Ear(host)
        self._ears.append(ear)  # kept until this is forgotten
        return ear.port, ear.key

    def call(
        self, host: str, port: int, key: bytes, lasts_s: float = 0.0
    ) -> tuple[float, float | None]:
        """Call another node; see `call`."""
        return call(host, port, key, self._clock, lasts_s=lasts_s)


def greet(host: str, port: int, *, tls: bool = False) -> None:
    """See whether a gRPC server listens there, by how it answers HTTP/2's first bytes.

    It sends a SETTINGS frame (RFC 9113, section 3.4). With TLS only the port is tried.

    Raises:
        OSError: Nobody listens, or somebody else.
    """
    with socket.create_connection((host, port), timeout=LIMIT_S) as server:
        if tls:
            return
        server.sendall(_PREFACE)
        try:
            frame = _exactly(server, _FRAME_HEAD_BYTES)
        except OSError as error:
            raise ConnectionError(f"what listens there is not Ray: {error}") from error
    if frame[3] != _SETTINGS:
        raise ConnectionError("what listens there is not Ray (its dashboard has another port)")


def _exactly(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        more = connection.recv(size - len(found))
        if not more:
            raise ConnectionError("the other side closed the connection")
        found += more
    return found


def ahead(clock: Clock, ask: Callable[[], float]) -> tuple[float, float]:
    """Seconds by which another clock is ahead, and how wrong that may be.

    The answer is taken to be from the middle of the quickest round trip, as in NTP (RFC 5905,
    section 8); it is wrong by at most half of that trip.
    `ask` gets the other's unix time.

    >>> from raycloud.clock import VirtualClock
    >>> clock = VirtualClock(100.0)
    >>> def ask():
    ...     clock.advance(0.5)  # on its way
    ...     answer = clock.unix_s() + 3.0
    ...     clock.advance(0.5)  # on its way back
    ...     return answer
    >>> ahead(clock, ask)
    (3.0, 0.5)
    """
    best = (0.0, float("inf"))
    for _ in range(QUESTIONS):
        asked_s, began_s = clock.unix_s(), clock.monotonic_s()
        answer_s = ask()
        half_s = (clock.monotonic_s() - began_s) / 2
        if half_s < best[1]:
            best = (answer_s - asked_s - half_s, half_s)
    return best
