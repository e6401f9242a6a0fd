"""TCP connections between processes of this machine, and how to break one from outside."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

_PIDFD_GETFD = 438  # the same on every architecture of Linux
_ESTABLISHED = "01"


def between(pids: Sequence[int]) -> list[tuple[int, int]]:
    """Descriptors, with the process that has each, of connections between these processes."""
    owner = {inode: (pid, fd) for pid in pids for inode, fd in _sockets_of(pid)}
    ends = {}
    for name in ("tcp", "tcp6"):
        for line in Path("/proc/net", name).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _ESTABLISHED and fields[9] in owner:
                ends[fields[1], fields[2]] = owner[fields[9]]
    return [
        here
        for (local, remote), here in ends.items()
        if (there := ends.get((remote, local))) and there[0] != here[0]
    ]


def shut(pid: int, descriptor: int) -> None:
    """End both directions of a connection of another process, as a router that forgets it does."""
    process = os.pidfd_open(pid)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        copy = libc.syscall(_PIDFD_GETFD, process, descriptor, 0)
        if copy < 0:
            raise OSError(ctypes.get_errno(), f"descriptor {descriptor} of process {pid}")
        with socket.socket(fileno=copy) as connection:
            connection.shutdown(socket.SHUT_RDWR)
    finally:
        os.close(process)


def _sockets_of(pid: int) -> Iterator[tuple[str, int]]:
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            name = str(entry.readlink())
        except OSError:  # closed meanwhile
            continue
        if name.startswith("socket:["):
            yield name[8:-1], int(entry.name)
