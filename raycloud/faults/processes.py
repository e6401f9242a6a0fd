"""Faults on processes of this machine: signals through descriptors, and connections that end.

A descriptor of a process is taken as soon as its worker has said which one it is, so that a signal
never reaches another process that has got the same number later.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

from raycloud.faults.schedule import Action

_PIDFD_GETFD = 438  # the same on every architecture of Linux
_ESTABLISHED = "01"
_TITLE = b"ray::MemberActor"
_SIGNALS: Mapping[Action, signal.Signals] = {
    Action.KILL: signal.SIGKILL,
    Action.FREEZE: signal.SIGSTOP,
    Action.TERMINATE: signal.SIGTERM,
}


class Hands(Protocol):
    """What reaches the processes of a run's workers."""

    def hold(self, member: int, node: str, pid: int) -> None:
        """From now on it may be asked to harm this worker.

        Raises:
            OSError: The process is gone, or is none of a worker.
        """
        ...

    def harm(self, member: int, action: Action) -> None:
        """Do it.

        Raises:
            OSError: The process is gone or not held, or this system does not allow it.
        """
        ...

    def thaw(self, member: int) -> None:
        """Let a frozen process go on; without effect where it is gone."""
        ...

    def close(self) -> None:
        """Let all go on that are frozen, and let go of them."""
        ...


class LocalHands:
    """Reaches the workers of this machine."""

    def __init__(self) -> None:
        """Holds nobody."""
        self._held: dict[int, tuple[int, int]] = {}  # member: its process, and a descriptor of it

    def hold(self, member: int, node: str, pid: int) -> None:  # noqa: ARG002 - all are here
        """See `Hands.hold`."""
        descriptor = os.pidfd_open(pid)
        title = Path(f"/proc/{pid}/cmdline").read_bytes()
        if not title.startswith(_TITLE):
            os.close(descriptor)
            raise ProcessLookupError(f"process {pid} of this machine is not a worker")
        self._held[member] = pid, descriptor

    def harm(self, member: int, action: Action) -> None:
        """See `Hands.harm`."""
        if member not in self._held:
            raise ProcessLookupError("its process is not on this machine")
        pid, descriptor = self._held[member]
        if action is not Action.CUT:
            signal.pidfd_send_signal(descriptor, _SIGNALS[action])
            return
        ends = list(connections(pid, [other for other, _ in self._held.values() if other != pid]))
        if not ends:
            raise ProcessLookupError("it has no connection to another worker now")
        for end in ends:
            _shut(descriptor, end)

    def thaw(self, member: int) -> None:
        """See `Hands.thaw`."""
        if member in self._held:
            try:
                signal.pidfd_send_signal(self._held[member][1], signal.SIGCONT)
            except ProcessLookupError:
                return

    def close(self) -> None:
        """See `Hands.close`."""
        for member, (_, descriptor) in list(self._held.items()):
            self.thaw(member)
            os.close(descriptor)
        self._held.clear()


def connections(pid: int, others: list[int]) -> Iterator[int]:
    """Descriptors of a process that are TCP connections to one of the others, of this machine."""
    here = dict(_sockets_of(pid))
    there = {inode for other in others for inode, _ in _sockets_of(other)}
    ours: dict[tuple[str, str], int] = {}
    theirs: set[tuple[str, str]] = set()
    for name in ("tcp", "tcp6"):
        for line in Path("/proc/net", name).read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            local, remote, state, inode = fields[1], fields[2], fields[3], fields[9]
            if state == _ESTABLISHED and inode in here:
                ours[local, remote] = here[inode]
            elif state == _ESTABLISHED and inode in there:
                theirs.add((remote, local))
    yield from (end for ends, end in ours.items() if ends in theirs)


def _shut(process: int, descriptor: int) -> None:
    """End both directions of a connection of another process, as a router that forgets it does."""
    libc = ctypes.CDLL(None, use_errno=True)
    copy = libc.syscall(_PIDFD_GETFD, process, descriptor, 0)
    if copy < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    with socket.socket(fileno=copy) as connection:
        connection.shutdown(socket.SHUT_RDWR)


def _sockets_of(pid: int) -> Iterator[tuple[str, int]]:
    try:
        entries = list(Path(f"/proc/{pid}/fd").iterdir())
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return
    for entry in entries:
        try:
            name = str(entry.readlink())
        except OSError:  # closed meanwhile
            continue
        if name.startswith("socket:["):
            yield name[8:-1], int(entry.name)
