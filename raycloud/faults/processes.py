"""Faults on processes of this machine: signals through descriptors, and connections that end.

A descriptor of a process is taken as soon as its worker has said which one it is, so that a signal
never reaches another process that has got the same number later.
"""

from __future__ import annotations

import ctypes
import errno
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


Ends = tuple[str, str]  # of a connection: address and port, here and there, in the kernel's words
Socket = tuple[str, int]  # its inode, and its descriptor
NO_CONNECTION = "it has no connection to another worker now"


class NoConnectionError(OSError):
    """A worker has no connection to another one at this moment: they are meeting anew."""


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
            NoConnectionError: There is none to cut; the next moment may be better.
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
        try:
            if not Path(f"/proc/{pid}/cmdline").read_bytes().startswith(_TITLE):
                raise ProcessLookupError(f"process {pid} of this machine is not a worker")
        except OSError:
            os.close(descriptor)
            raise
        self._held[member] = pid, descriptor

    def harm(self, member: int, action: Action) -> None:
        """See `Hands.harm`."""
        if action is Action.CUT:
            others = [other for other in self._held if other != member]
            self.cut(member, {ends for other in others for ends in self.ends(other)})
        else:
            signal.pidfd_send_signal(self._process(member)[1], _SIGNALS[action])

    def ends(self, member: int) -> list[Ends]:
        """The TCP connections of a worker, none where it is gone."""
        return list(connections(self._process(member)[0]))

    def cut(self, member: int, others: set[Ends]) -> None:
        """End the connections of a worker to those whose connections these are.

        Raises:
            NoConnectionError: There is none.
            OSError: The process is gone, or this system does not allow it.
        """
        pid, process = self._process(member)
        found = [end for ends, end in connections(pid).items() if (ends[1], ends[0]) in others]
        if not sum([_shut(process, end) for end in found]):
            raise NoConnectionError(NO_CONNECTION)

    def _process(self, member: int) -> tuple[int, int]:
        if member not in self._held:
            raise ProcessLookupError("its process is not on this machine")
        return self._held[member]

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


def connections(pid: int) -> dict[Ends, Socket]:
    """The TCP connections of a process by their ends: each one's inode, and its descriptor."""
    here, found = dict(_sockets_of(pid)), dict[Ends, Socket]()
    for name in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/{pid}/net/{name}").read_text(encoding="ascii").splitlines()
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            break
        for line in lines[1:]:
            local, remote, state, inode = (line.split()[n] for n in (1, 2, 3, 9))
            if state == _ESTABLISHED and inode in here:
                found[local, remote] = inode, here[inode]
    return found


def _shut(process: int, end: Socket) -> bool:
    """End both directions of a connection of another process, as a router that forgets it does.

    Returns:
        Whether it was still there: its process may have closed it since it was found, and its
        descriptor may be that of another one now.
    """
    inode, descriptor = end
    libc = ctypes.CDLL(None, use_errno=True)
    copy = libc.syscall(_PIDFD_GETFD, process, descriptor, 0)
    if copy < 0:
        number = ctypes.get_errno()
        if number == errno.EBADF:
            return False
        raise OSError(number, os.strerror(number))
    try:
        if os.fstat(copy).st_ino != int(inode):
            return False
        with socket.socket(fileno=os.dup(copy)) as connection:
            connection.shutdown(socket.SHUT_RDWR)
    except OSError as error:  # the other side ended it meanwhile
        if error.errno != errno.ENOTCONN:
            raise
        return False
    finally:
        os.close(copy)
    return True


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
