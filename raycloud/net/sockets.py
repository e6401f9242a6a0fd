"""Sockets of this process, also those that gloo opened in it: finding, ending and calming them.

gloo gives no access to its connections, and has no time-out for a peer that is gone. Where an
operation failed, it does not read any more what came for it. The kernel goes on saying that there
is something to read, or that the connection has ended, and gloo's thread goes on asking: half of a
core, taken from what the member computes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import socket
import struct
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from threading import Event, Lock, Thread
from typing import NamedTuple, TypeVar

Place = tuple[str, int]  # address and port
_Opened = TypeVar("_Opened")

HUNG_S = 6  # a connection ends whose other machine has acknowledged nothing for so long
_IDLE_S, _PROBE_S = 3, 1  # who has nothing to say asks after so long, and then so often

_LOOK_S = 0.5  # connecting takes less

_DESCRIPTORS = Path("/proc/self/fd")
_TABLES = Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6")
_CONNECTING = "02"  # SYN_SENT, as these tables have it
_ASKED = re.compile(  # a line of what an epoll instance looks at
    r"tfd:\s*(?P<descriptor>\d+) events:\s*(?P<events>[0-9a-f]+) data:\s*(?P<data>[0-9a-f]+)"
    r".* ino:(?P<inode>[0-9a-f]+)"
)
_MODIFY = 3  # EPOLL_CTL_MOD
_READABLE, _ONCE = 0x1, 1 << 30  # EPOLLIN, EPOLLONESHOT
_TURN = Lock()
_INFO_BYTES = 104
_AWAITED = struct.Struct("=I"), 24  # tcpi_unacked, in the kernel's `struct tcp_info`
_HEARD_MS = struct.Struct("=I"), 56  # tcpi_last_ack_recv
_TRIED, _PROBED = 2, 3  # tcpi_retransmits, tcpi_probes
_TRIES = 2


class Answered(NamedTuple):
    """What the kernel knows of a connection's other machine.

    Attributes:
        awaited: How many packets it has not acknowledged.
        heard_s: Seconds since it has acknowledged one.
        tries: How often in a row it was asked again, in vain; none while it only does not read.
    """

    awaited: int
    heard_s: float
    tries: int

    @property
    def is_silent(self) -> bool:
        """It owes an answer for more than half a second: it was asked at 0, 0.2 and 0.6 s."""
        return self.tries >= _TRIES


def answers(connection: socket.socket) -> Answered:
    """Whether a connection's other machine answers; on Linux. `OSError`: it has ended."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    (awaited,), (heard_ms,) = (one.unpack_from(info, at) for one, at in (_AWAITED, _HEARD_MS))
    return Answered(awaited, heard_ms / 1000.0, max(info[_TRIED], info[_PROBED]))


def listening(open_one: Callable[[], _Opened]) -> tuple[_Opened, list[Place]]:
    """What `open_one` returns, and where this process listens since then, and did not before."""
    with _TURN:
        before = set(_listeners())
        return open_one(), [place for place in _listeners() if place not in before]


def shut(connection: socket.socket) -> None:
    """End a connection, or a socket that listens: who waits for it is told, and closes it."""
    with contextlib.suppress(OSError):  # it is not connected any more
        connection.shutdown(socket.SHUT_RDWR)


def hang_up(own: Collection[Place], others: Collection[Place]) -> None:
    """End all connections to places of one's own, and to those of others.

    What was sent before still arrives. Listening sockets stay as they are: gloo does not survive it
    where those are shut.
    """
    for connection in _connections(own, others):
        shut(connection)


def end_all_if_hung(own: Collection[Place], others: Collection[Place]) -> set[int]:
    """See `end_if_hung`, for all connections to places of one's own, and to those of others.

    Returns:
        Their sockets, by the numbers that the kernel gives them.
    """
    found = set[int]()
    for connection in _connections(own, others):
        end_if_hung(connection)
        found.add(os.fstat(connection.fileno()).st_ino)
    return found


def end_if_hung(connection: socket.socket) -> None:
    """From now on this connection ends by itself where its path lets nothing through any more.

    Otherwise who waits for the peer would wait without end, since no packet says that it is gone.
    The peer's process need not answer: its kernel does. Where that is no Linux, less is promised.
    """
    asked = {
        "TCP_KEEPIDLE": _IDLE_S,
        "TCP_KEEPINTVL": _PROBE_S,
        "TCP_KEEPCNT": (HUNG_S - _IDLE_S) // _PROBE_S,
        "TCP_USER_TIMEOUT": HUNG_S * 1000,
    }
    with contextlib.suppress(OSError):  # it is not connected any more
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in asked.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


@contextlib.contextmanager
def connecting(others: Collection[Place]) -> Iterator[None]:
    """See `end_if_hung`, for connections to these places that are not there yet.

    The system by itself would go on asking for two minutes.
    """
    over = Event()

    def look() -> None:
        while not over.wait(_LOOK_S):
            for connection in _unanswered(others):
                end_if_hung(connection)

    Thread(target=look, name="connecting", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _unanswered(others: Collection[Place]) -> Iterator[socket.socket]:
    """Those that are to connect to a place of others, and were not answered; see `_connections`."""
    asked = set[str]()
    for table in _TABLES:
        for line in table.read_text(encoding="ascii").splitlines()[1:] if table.is_file() else ():
            fields = line.split()
            if fields[3] == _CONNECTING and _place(fields[2]) in others:
                asked.add(f"socket:[{fields[9]}]")
    for one in _sockets(asked) if asked else ():
        with one:
            yield one


def _place(text: str) -> Place:
    """An address and port as the kernel's tables have them: 32-bit words in the machine's order."""
    address, port = text.split(":")
    raw = bytes.fromhex(address)
    words = [raw[at : at + 4] for at in range(0, len(raw), 4)]
    whole = b"".join(word[::-1] if sys.byteorder == "little" else word for word in words)
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    return socket.inet_ntop(family, whole), int(port, 16)


def _connections(own: Collection[Place], others: Collection[Place]) -> Iterator[socket.socket]:
    """Those to places of one's own, and to those of others; open until the next one."""
    for one in _sockets():
        with one, contextlib.suppress(OSError):  # it listens, or is not connected any more
            here, there = one.getsockname()[:2], one.getpeername()[:2]
            if here in own or there in others:
                yield one


def _listeners() -> Iterator[Place]:
    for one in _sockets():
        with one, contextlib.suppress(OSError):
            if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                address, port = one.getsockname()[:2]
                yield address, port


def _sockets(names: Collection[str] = ()) -> Iterator[socket.socket]:
    """All TCP sockets of this process, or these, by descriptors of our own; none without Linux."""
    for copy in _descriptors(lambda n: n in names if names else n.startswith("socket:")):
        try:
            found = socket.socket(fileno=copy)
        except OSError:  # closed meanwhile, and its number given to something else
            os.close(copy)
            continue
        if found.family in {socket.AF_INET, socket.AF_INET6} and found.type == socket.SOCK_STREAM:
            yield found
        else:
            found.close()


class _Asked(ctypes.Structure):
    """The kernel's `struct epoll_event`, which only x86-64 packs."""

    if platform.machine() == "x86_64":
        _pack_ = 1
    _fields_ = (("events", ctypes.c_uint32), ("data", ctypes.c_uint64))


def look_once_more(inodes: Collection[int]) -> int:
    """Whoever looks at these sockets of this process is told once more how they are, then not.

    Who asks anew is told again: call this from time to time, until it does not matter any more.
    Sockets are named by the numbers (inodes) that the kernel gives them. Returns how many there
    were; 0 without Linux.

    Between the look and the change the descriptor may be closed, and its number be that of another
    connection. Nothing is changed where it is a socket of another inode by then, and where the same
    epoll instance does not look at it. That leaves an instant in which gloo closes one and takes in
    another for the same group, which a group that has met does not, but for strangers.
    """
    told = 0
    for own in _descriptors(lambda name: name == "anon_inode:[eventpoll]"):
        try:
            for descriptor, data, inode in _armed(own, inodes):
                told += _ask_once(own, descriptor, data, inode)
        finally:
            os.close(own)
    return told


def _descriptors(wanted: Callable[[str], bool]) -> Iterator[int]:
    """Copies of descriptors of such names, each to be closed; none without Linux."""
    for entry in _DESCRIPTORS.iterdir() if _DESCRIPTORS.is_dir() else ():
        try:
            found = os.dup(int(entry.name)) if wanted(str(entry.readlink())) else None
        except OSError:  # closed meanwhile
            continue
        if found is not None:
            yield found


def _armed(poller: int, inodes: Collection[int]) -> Iterator[tuple[int, int, int]]:
    """Which of these sockets an epoll instance looks at, what it tells then, and their numbers."""
    text = Path(f"/proc/self/fdinfo/{poller}").read_text(encoding="ascii")
    for found in _ASKED.finditer(text):
        idle = int(found["events"], 16) & ~_ONCE == 0
        inode = int(found["inode"], 16)
        if not idle and inode in inodes:
            yield int(found["descriptor"]), int(found["data"], 16), inode


def _ask_once(poller: int, descriptor: int, data: int, inode: int) -> bool:
    asked = _Asked(_READABLE | _ONCE, data)
    epoll_ctl = ctypes.CDLL(None, use_errno=True).epoll_ctl
    try:
        same = os.fstat(descriptor).st_ino == inode
    except OSError:  # closed meanwhile
        return False
    return same and bool(epoll_ctl(poller, _MODIFY, descriptor, ctypes.byref(asked)) == 0)
