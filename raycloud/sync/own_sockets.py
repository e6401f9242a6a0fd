"""Sockets of this process that others opened in it, as gloo does: finding and ending them."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from threading import Lock

Place = tuple[str, int]  # address and port

_DESCRIPTORS = Path("/proc/self/fd")
_TURN = Lock()


def listening(open_one: Callable[[], None]) -> list[Place]:
    """Where this process listens since `open_one` was called, and did not before."""
    with _TURN:
        before = set(_listeners())
        open_one()
        return [place for place in _listeners() if place not in before]


def hang_up(own: Collection[Place], others: Collection[Place]) -> set[int]:
    """End all connections to places of one's own, and to those of others.

    What was sent before still arrives. Listening sockets stay as they are: gloo does not survive it
    where those are shut.

    Returns:
        Their sockets, by the numbers that the kernel gives them.
    """
    ended = set[int]()
    for connection in _sockets():
        with connection, contextlib.suppress(OSError):  # it listens, or is not connected any more
            peer = connection.getpeername()[:2]
            if connection.getsockname()[:2] in own or peer in others:
                ended.add(os.fstat(connection.fileno()).st_ino)
                connection.shutdown(socket.SHUT_RDWR)
    return ended


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
