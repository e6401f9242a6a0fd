"""Connections of this process, also those that gloo opened in it: finding and ending them."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from threading import Lock

Place = tuple[str, int]  # address and port

HUNG_S = 6  # a connection ends whose other machine has acknowledged nothing for so long
_IDLE_S, _PROBE_S = 3, 1  # who has nothing to say asks after so long, and then so often

_DESCRIPTORS = Path("/proc/self/fd")
_TURN = Lock()


def listening(open_one: Callable[[], None]) -> list[Place]:
    """Where this process listens since `open_one` was called, and did not before."""
    with _TURN:
        before = set(_listeners())
        open_one()
        return [place for place in _listeners() if place not in before]


def hang_up(own: Collection[Place], others: Collection[Place]) -> None:
    """End all connections to places of one's own, and to those of others.

    What was sent before still arrives. Listening sockets stay as they are: gloo does not survive it
    where those are shut.
    """
    for connection in _connections(own, others):
        with contextlib.suppress(OSError):  # it is not connected any more
            connection.shutdown(socket.SHUT_RDWR)


def end_all_if_hung(own: Collection[Place], others: Collection[Place]) -> None:
    """See `end_if_hung`, for all connections to places of one's own, and to those of others."""
    for connection in _connections(own, others):
        end_if_hung(connection)


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


def _sockets() -> Iterator[socket.socket]:
    """All TCP sockets of this process, under descriptors of our own; none where no Linux is."""
    for entry in _DESCRIPTORS.iterdir() if _DESCRIPTORS.is_dir() else ():
        try:
            if not str(entry.readlink()).startswith("socket:"):
                continue
            found = socket.socket(fileno=os.dup(int(entry.name)))
        except OSError:  # closed meanwhile
            continue
        if found.family in {socket.AF_INET, socket.AF_INET6} and found.type == socket.SOCK_STREAM:
            yield found
        else:
            found.close()
