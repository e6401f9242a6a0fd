"""Watches for preemption beside the training: the cloud is polled, and SIGTERM is a notice."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

from raycloud.errors import MachineError, SpecError
from raycloud.events import Noticed
from raycloud.preemption.clouds import DMI, PreemptionNotice, cloud_here

if TYPE_CHECKING:
    from raycloud.clock import Clock
    from raycloud.preemption.clouds import Cloud

DEADLINE_S = 25.0  # Kubernetes and Slurm kill what is left 30 s after SIGTERM
NEAR_S = 180.0  # a machine that leaves later computes until then
_TURN_S = 5.0  # between two looks whether it is this process's turn
_SLOWEST_S = 60.0  # between two questions to a server that gives no answer
_SILENT_S = 180.0  # before that is told: Azure's first answer may take two minutes


class Watch:
    """Polls the cloud for notices in a thread of its own; one process of a node does.

    All methods return at once. Where there is no cloud there is no thread. `key` names the node and
    the run: of all processes with the same one, one asks. When it ends, another does.
    """

    def __init__(self, member: int, key: str, cloud: Cloud | None, clock: Clock) -> None:
        self.member, self._key = member, key
        self._cloud, self._clock = cloud, clock
        self._told: deque[PreemptionNotice | Noticed] = deque()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._turn_s = float("-inf")
        self._answered_s = 0.0
        self._missed = 0
        self._silent = False
        self._last: PreemptionNotice | None = None
        self._announced = False

    def fetch(self) -> list[PreemptionNotice | Noticed]:
        """What came since the last call; begins to ask once it is this process's turn.

        To be called from one thread at a time.
        """
        if self._cloud is not None and self._thread is None and not self._stop.is_set():
            self._begin(self._cloud)
        return [self._told.popleft() for _ in range(len(self._told))]

    def add(self, told: PreemptionNotice | Noticed) -> None:
        """Let `fetch` return this, too; from any thread."""
        self._told.append(told)

    def close(self) -> None:
        """Ask no more; a question that is under way ends within seconds."""
        self._stop.set()

    def look(self, cloud: Cloud) -> float:
        """Ask once, and tell what is new. Returns the seconds until the next time."""
        began_s = self._clock.monotonic_s()
        try:
            self._hear(cloud.notice())
        except MachineError as error:
            return self._miss(cloud, error)
        self._answered_s, self._missed = self._clock.monotonic_s(), 0
        return max(0.0, cloud.every_s - (self._answered_s - began_s))

    def _begin(self, cloud: Cloud) -> None:
        """Start the thread, unless another process on this node has done so."""
        now_s = self._clock.monotonic_s()
        if now_s - self._turn_s < _TURN_S:
            return
        self._turn_s = self._answered_s = now_s
        turn = turn_of(self._key)
        if turn is not None:
            self._thread = threading.Thread(
                target=self._work, args=(cloud, turn), name="watch", daemon=True
            )
            self._thread.start()

    def _work(self, cloud: Cloud, turn: socket.socket) -> None:
        wait_s = 0.0
        try:
            while not self._stop.wait(wait_s):
                wait_s = self.look(cloud)
        except Exception as error:  # noqa: BLE001 - the last line before the thread's end
            self._note("the cloud is asked no more whether this machine will leave", repr(error))
        finally:
            turn.close()

    def _hear(self, notice: PreemptionNotice | None) -> None:
        if notice is None:  # or it was taken back
            self._last, self._announced = None, False
        elif notice.deadline_s is not None and notice.deadline_s > NEAR_S:
            if not self._announced:
                self._announced = True
                what = "the cloud announces that this machine will leave"
                self._note(what, notice.reason, in_s=round(notice.deadline_s))
        elif self._last is None or _word(notice) != _word(self._last):
            self._last = notice
            self.add(notice)

    def _miss(self, cloud: Cloud, error: MachineError) -> float:
        """No answer: later and later, and told once."""
        self._missed += 1
        if self._clock.monotonic_s() - self._answered_s >= _SILENT_S and not self._silent:
            self._silent = True
            what = "the cloud cannot be asked whether this machine will leave"
            self._note(what, error.message, cloud=cloud.name)
        return float(min(_SLOWEST_S, cloud.every_s * 2 ** min(self._missed, 10)))

    def _note(self, what: str, why: str, **detail: object) -> None:
        self.add(Noticed(what=what, member=self.member, detail={"why": why, **detail}))


def watch_here(
    member: int, key: str, clock: Clock, asked: str | None = None, *, dmi: Path = DMI
) -> Watch:
    """The watch for the cloud that this machine is in.

    Where `asked`, what `RAYCLOUD_CLOUD` says, is no cloud, that is told, and nobody is asked.
    """
    try:
        return Watch(member, key, cloud_here(clock, asked, dmi), clock)
    except SpecError as error:
        watch = Watch(member, key, None, clock)
        told = {"why": error.message, "hint": error.hint}
        what = "nobody is asked whether this machine will leave"
        watch.add(Noticed(what=what, member=member, detail=told))
        return watch


def turn_of(key: str) -> socket.socket | None:
    """This process's turn, until it is closed or the process ends; None: another has it.

    A name in Linux's abstract space of Unix sockets: nothing listens on it, and no file is left.
    """
    name = hashlib.sha256(key.encode()).hexdigest()
    turn = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        turn.bind(f"\0raycloud-watch-{name}")
    except OSError:
        turn.close()
        return None
    return turn


def _word(notice: PreemptionNotice) -> tuple[str, bool]:
    return notice.reason, notice.certain


def on_sigterm(tell: Callable[[PreemptionNotice], None], deadline_s: float = DEADLINE_S) -> None:
    """Let the first SIGTERM to this process be a notice, once, and the second end it as before.

    To be called in the main thread. Whoever was to be called before is called by the second
    SIGTERM, and by one that this process sends to itself at the deadline. A child that is forked
    later ends as before with the first one.

    A worker of Ray 2.60 sets a handler that raises SystemExit before it takes its first task, runs
    an actor's constructor in its main thread, and there lets Python's handlers run every 10 ms
    while the methods of an actor with `max_concurrency` run in other threads. So a handler that the
    constructor sets takes the place of Ray's, and is heard at once. Its raylet sends SIGTERM, too,
    and SIGKILL 0.1 s later, where it ends a worker itself.

    `tell` is called in a thread of its own, so it may wait for locks.

    Raises:
        ValueError: This is not the main thread.
    """
    before, process = signal.getsignal(signal.SIGTERM), os.getpid()
    # Its `put` may interrupt whatever the main thread is at; starting a thread may not.
    came: SimpleQueue[int] = SimpleQueue()

    def end() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    def on_signal(number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_DFL if before is None else before)
        if os.getpid() == process:
            came.put(number)
        else:
            end()

    def wait() -> None:
        came.get()
        try:
            reason = "its process got SIGTERM"
            tell(PreemptionNotice(reason=reason, deadline_s=deadline_s, node=False))
            threading.Event().wait(deadline_s)
        finally:
            end()

    signal.signal(signal.SIGTERM, on_signal)
    threading.Thread(target=wait, name="sigterm", daemon=True).start()
