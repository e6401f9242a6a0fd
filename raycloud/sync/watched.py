"""Connections that ended, and that another thread of this process looks at for ever, as gloo does.

Where an operation failed, gloo does not read any more what came for it. The kernel goes on saying
that there is something to read, or that the connection has ended, and gloo's thread goes on asking:
half of a core, taken from what the member computes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
from collections.abc import Collection, Iterator
from pathlib import Path

_DESCRIPTORS = Path("/proc/self/fd")
_ASKED = re.compile(
    r"tfd:\s*(?P<descriptor>\d+) events:\s*(?P<events>[0-9a-f]+) data:\s*(?P<data>[0-9a-f]+)"
    r".* ino:(?P<inode>[0-9a-f]+)"
)
_MODIFY = 3  # EPOLL_CTL_MOD
_READABLE, _ONCE = 0x1, 1 << 30  # EPOLLIN, EPOLLONESHOT


class _Asked(ctypes.Structure):
    """The kernel's `struct epoll_event`, which only x86-64 packs."""

    if platform.machine() == "x86_64":
        _pack_ = 1
    _fields_ = (("events", ctypes.c_uint32), ("data", ctypes.c_uint64))


def look_once_more(inodes: Collection[int]) -> int:
    """Whoever looks at these sockets of this process is told once more how they are, then not.

    Who asks anew is told again: call this from time to time, until it does not matter any more.

    Between the look and the change the descriptor may be closed, and its number be that of another
    connection. Nothing is changed where it is a socket of another number by then, and where the
    same epoll instance does not look at it. That leaves an instant in which gloo closes one and
    takes in another for the same group, which a group that has met does not, but for strangers.

    Args:
        inodes: The sockets, by the numbers that the kernel gives them.

    Returns:
        How many there were; 0 where no Linux is.
    """
    told = 0
    for own in _pollers():
        try:
            for descriptor, data, inode in _armed(own, inodes):
                told += _ask_once(own, descriptor, data, inode)
        finally:
            os.close(own)
    return told


def _pollers() -> Iterator[int]:
    """The epoll instances of this process, each by a descriptor that is to be closed."""
    for entry in _DESCRIPTORS.iterdir() if _DESCRIPTORS.is_dir() else ():
        with contextlib.suppress(OSError):  # closed meanwhile
            if str(entry.readlink()) == "anon_inode:[eventpoll]":
                yield os.dup(int(entry.name))


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
