"""TCP connections between processes of this machine, and how to break one from outside."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

_PIDFD_GETFD = 438  # the same on every architecture of Linux
_ESTABLISHED = "01"
_ATTACH_FILTER, _DETACH_FILTER = 26, 27  # SO_ATTACH_FILTER and its end, unnamed in Python
_DROP = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # return 0: keep no byte


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


def ports_to(pid: int, address: str) -> list[tuple[int, int]]:
    """Of each connection of this process to an IPv4 address: its own port, and the other one."""
    own, found = dict(_sockets_of(pid)), []
    there = "".join(f"{int(part):02X}" for part in reversed(address.split(".")))
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        remote, _, port = fields[2].partition(":")
        if fields[3] == _ESTABLISHED and fields[9] in own and remote == there:
            found.append((int(fields[1].partition(":")[2], 16), int(port, 16)))
    return found


def shut(pid: int, descriptor: int) -> None:
    """End both directions of a connection of another process, as a router that forgets it does."""
    with _taken(pid, descriptor) as connection:
        connection.shutdown(socket.SHUT_RDWR)


def hang(pid: int, descriptor: int) -> None:
    """Let nothing arrive at a connection of another process any more, and tell nobody."""
    with _taken(pid, descriptor) as connection:
        deafen(connection)


def hear_again(pid: int, descriptor: int) -> None:
    """After `hang`: what was sent meanwhile arrives, once its sender has tried again."""
    with _taken(pid, descriptor) as connection:
        hearken(connection)


def deafen(connection: socket.socket) -> None:
    """Let nothing arrive at a connection any more, not even that something has arrived."""
    program = struct.pack("HP", 1, ctypes.addressof(_DROP))
    connection.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, program)


def hearken(connection: socket.socket) -> None:
    """After `deafen`."""
    connection.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)


def _taken(pid: int, descriptor: int) -> socket.socket:
    process = os.pidfd_open(pid)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        copy = libc.syscall(_PIDFD_GETFD, process, descriptor, 0)
        if copy < 0:
            raise OSError(ctypes.get_errno(), f"descriptor {descriptor} of process {pid}")
        return socket.socket(fileno=copy)
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
