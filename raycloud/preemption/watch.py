"""Listens to the cloud that this machine is in, beside the training and never in its way."""

from __future__ import annotations

import hashlib
import socket
import threading
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from raycloud.errors import MachineError, SpecError
from raycloud.events import Noticed
from raycloud.preemption.cloud import DMI, cloud_here

if TYPE_CHECKING:
    from raycloud.clock import Clock
    from raycloud.preemption.cloud import Cloud
    from raycloud.preemption.leaving import Leaving

NEAR_S = 180.0  # a machine that leaves later computes until then
_TURN_S = 5.0  # between two looks whether it is this process's turn
_SLOWEST_S = 60.0  # between two questions to a server that gives no answer
_SILENT_S = 180.0  # before that is told: Azure's first answer may take two minutes


class Watch:
    """Asks the cloud now and then, in a thread of its own; one process of a node does.

    All methods return at once. Where there is no cloud there is no thread.

    Args:
        member: Who tells what it has noticed.
        key: Names the node and the run: of all processes with the same one, one asks. When it ends,
            another does.
        cloud: Whom to ask; None: nobody.
        clock: To see how long there was no answer.
    """

    def __init__(self, member: int, key: str, cloud: Cloud | None, clock: Clock) -> None:
        """Nobody is asked before the first `fetch`."""
        self.member, self._key = member, key
        self._cloud, self._clock = cloud, clock
        self._told: deque[Leaving | Noticed] = deque()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._turn_s = float("-inf")
        self._answered_s = 0.0
        self._missed = 0
        self._silent = False
        self._last: Leaving | None = None
        self._announced = False

    def fetch(self) -> list[Leaving | Noticed]:
        """What came since the last call; begins to ask once it is this process's turn.

        To be called from one thread at a time.
        """
        if self._cloud is not None and self._thread is None and not self._stop.is_set():
            self._begin(self._cloud)
        found = []
        while self._told:
            found.append(self._told.popleft())
        return found

    def add(self, told: Leaving | Noticed) -> None:
        """Let `fetch` return this, too; from any thread."""
        self._told.append(told)

    def close(self) -> None:
        """Ask no more; a question that is under way ends within seconds."""
        self._stop.set()

    def look(self, cloud: Cloud) -> float:
        """Ask once, and tell what is new. Returns the seconds until the next time."""
        began_s = self._clock.monotonic_s()
        try:
            self._hear(cloud.leaving())
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
            self._notice("the cloud is asked no more whether this machine will leave", repr(error))
        finally:
            turn.close()

    def _hear(self, leaving: Leaving | None) -> None:
        if leaving is None:  # or it was taken back
            self._last, self._announced = None, False
        elif leaving.deadline_s is not None and leaving.deadline_s > NEAR_S:
            if not self._announced:
                self._announced = True
                what = "the cloud announces that this machine will leave"
                self._notice(what, leaving.reason, in_s=round(leaving.deadline_s))
        elif self._last is None or _word(leaving) != _word(self._last):
            self._last = leaving
            self.add(leaving)

    def _miss(self, cloud: Cloud, error: MachineError) -> float:
        """No answer: later and later, and told once."""
        self._missed += 1
        if self._clock.monotonic_s() - self._answered_s >= _SILENT_S and not self._silent:
            self._silent = True
            what = "the cloud cannot be asked whether this machine will leave"
            self._notice(what, error.message, cloud=cloud.name)
        return float(min(_SLOWEST_S, cloud.every_s * 2 ** min(self._missed, 10)))

    def _notice(self, what: str, why: str, **detail: object) -> None:
        self.add(Noticed(what=what, member=self.member, detail={"why": why, **detail}))


def watch_here(
    member: int, key: str, clock: Clock, asked: str | None = None, *, dmi: Path = DMI
) -> Watch:
    """The watch for the cloud that this machine is in.

    Args:
        member: Who tells what it has noticed.
        key: Names the node and the run: see `Watch`.
        clock: For all of it.
        asked: What `RAYCLOUD_CLOUD` says; a word that is no cloud is told, and nobody asked.
        dmi: Where the firmware's words are.
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


def _word(leaving: Leaving) -> tuple[str, bool]:
    return leaving.reason, leaving.certain
