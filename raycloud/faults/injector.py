"""Fault injection into a run: kills, freezes and cuts its workers as its events make them due.

A descriptor of a process is taken as soon as its worker has said which one it is, so that a signal
never reaches another process that has got the same number later.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from raycloud.events import (
    ExchangeBroken,
    GenerationFormed,
    MemberLost,
    MemberReady,
    Recovered,
    StepsCommitted,
)
from raycloud.faults.schedule import Action, Fault

if TYPE_CHECKING:
    from raycloud.clock import Clock
    from raycloud.events import Observed

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


class Processes(Protocol):
    """The processes of a run's workers, to be harmed."""

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


class LocalProcesses:
    """Workers of this machine: signals through descriptors, and connections that are shut."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[int, int]] = {}  # member: its process, and a descriptor of it

    def hold(self, member: int, node: str, pid: int) -> None:  # noqa: ARG002 - all are here
        """See `Processes.hold`."""
        descriptor = os.pidfd_open(pid)
        try:
            if not Path(f"/proc/{pid}/cmdline").read_bytes().startswith(_TITLE):
                raise ProcessLookupError(f"process {pid} of this machine is not a worker")
        except OSError:
            os.close(descriptor)
            raise
        self._held[member] = pid, descriptor

    def harm(self, member: int, action: Action) -> None:
        """See `Processes.harm`."""
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
        """See `Processes.thaw`."""
        if member in self._held:
            try:
                signal.pidfd_send_signal(self._held[member][1], signal.SIGCONT)
            except ProcessLookupError:
                return

    def close(self) -> None:
        """See `Processes.close`."""
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

    False: its process has closed it since it was found; the descriptor may be another's now.
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


class Group:
    """The fold of a run's events that its faults are chosen by."""

    def __init__(self) -> None:
        self.step = 0  # steps that a member has said to be committed
        self.recovering = False  # a generation broke, and no step was committed since
        self._generation = -1
        self._sound = -1  # the newest one that followed a broken one
        self._ranks: tuple[int, ...] = ()
        self._have_state: set[int] = set()
        self._lost: set[int] = set()

    def see(self, event: Observed) -> None:
        """Take in what happened."""
        match event:
            case GenerationFormed() if event.generation >= self._generation:
                self._generation, self._ranks = event.generation, event.members
            case StepsCommitted():
                self.step = max(self.step, event.last_step)
                if event.last_step > event.first_step:
                    self._have_state.add(event.member)
            case MemberLost():
                self._lost.add(event.member)
                self.recovering |= event.member in self._ranks
            case ExchangeBroken():
                self.recovering |= event.generation >= self._sound
            case Recovered():
                self.recovering, self._sound = False, event.generation
            case _:
                pass

    def computing(self) -> list[int]:
        """The members, by rank, that have committed steps in this process's time and are there."""
        return [m for m in self._ranks if m in self._have_state and m not in self._lost]


_LOOK_S = 0.05
_FOR_EVER = float("inf")


@dataclass(frozen=True, kw_only=True, slots=True)
class Hit:
    """What was done to one worker, as which fault, at unix second `t`, after so many steps.

    `why` it could not be done is empty where it was.
    """

    fault: Fault
    member: int
    t: float
    step: int
    why: str = ""


class Injector:
    """Takes a run's events, and lets faults happen when they are due; `say` is told of each.

    A fault waits until there are others who have the state and are unharmed: what is left can then
    always go on. A cut waits for connections, which there are none of while the workers meet anew.
    One that waits to the end of the run does not happen. Where several are due, they come in order.
    """

    def __init__(
        self,
        faults: Sequence[Fault],
        processes: Processes,
        clock: Clock,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.hits: list[Hit] = []
        self._waiting = list(faults)
        self._processes, self._clock, self._say = processes, clock, say
        self._group = Group()
        self._began_s: float | None = None
        self._harmed: dict[int, float] = {}  # member: until when
        self._turn = threading.RLock()

    @property
    def left(self) -> tuple[Fault, ...]:
        """Faults that have not happened."""
        return tuple(self._waiting)

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Look at the clock, too, in a thread, while this lasts; then nobody stays frozen."""
        over = threading.Event()

        def look() -> None:
            while not over.wait(_LOOK_S):
                self.look()

        thread = threading.Thread(target=look, name="faults", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            self._processes.close()

    def see(self, event: Observed) -> None:
        """Take in what happened, and do what is due with it."""
        with self._turn:
            self._group.see(event)
            if isinstance(event, MemberReady):
                self._hold(event)
            if isinstance(event, StepsCommitted) and self._began_s is None:
                self._began_s = self._clock.monotonic_s()
            self.look()

    def look(self) -> None:
        """Do what is due by now."""
        with self._turn:
            now_s = self._clock.monotonic_s()
            for member, until_s in list(self._harmed.items()):
                if until_s <= now_s:
                    self._processes.thaw(member)
                    del self._harmed[member]
            for fault in [fault for fault in self._waiting if self._due(fault, now_s)]:
                hit = [self._hit(fault, member, now_s) for member in self._victims(fault)]
                if any(hit):
                    self._waiting.remove(fault)

    def _due(self, fault: Fault, now_s: float) -> bool:
        if self._began_s is None or (fault.recovering and not self._group.recovering):
            return False
        if fault.at_step is not None:
            return self._group.step >= fault.at_step
        return now_s - self._began_s >= (fault.at_s or 0.0)

    def _victims(self, fault: Fault) -> list[int]:
        """Whom it hits now; nobody where too few would be left."""
        unharmed = [m for m in self._group.computing() if m not in self._harmed]
        if len(unharmed) <= fault.many:
            return []
        at = fault.rank % len(unharmed)
        return [*unharmed[at:], *unharmed[:at]][: fault.many]

    def _hit(self, fault: Fault, member: int, now_s: float) -> bool:
        """Harm it, or try to; false where the fault has to wait."""
        why = ""
        try:
            self._processes.harm(member, fault.action)
        except NoConnectionError:
            return False
        except OSError as error:
            why = error.strerror or str(error)
        else:
            if fault.action is Action.FREEZE:
                self._harmed[member] = now_s + fault.seconds
            elif fault.action is not Action.CUT:
                self._harmed[member] = _FOR_EVER
        hit = Hit(
            fault=fault, member=member, t=self._clock.unix_s(), step=self._group.step, why=why
        )
        self.hits.append(hit)
        self._say(f"fault: {fault}: member {member}{f', but {why}' if why else ''}")
        return True

    def _hold(self, event: MemberReady) -> None:
        try:
            self._processes.hold(event.member, event.node, event.pid)
        except OSError as error:
            why = error.strerror or str(error)
            self._say(f"note: no fault can reach member {event.member}: {why}")
