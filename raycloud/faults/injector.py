"""Does to a run what a schedule says, as the run's events come."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raycloud.events import MemberReady, StepsCommitted
from raycloud.faults.group import Group
from raycloud.faults.processes import NoConnectionError
from raycloud.faults.schedule import Action, Fault

if TYPE_CHECKING:
    from raycloud.clock import Clock
    from raycloud.events import Observed
    from raycloud.faults.processes import Hands

_LOOK_S = 0.05
_FOR_EVER = float("inf")


@dataclass(frozen=True, kw_only=True, slots=True)
class Hit:
    """What was done to one worker.

    Attributes:
        fault: As which fault.
        member: To whom.
        t: When, in unix seconds.
        step: Steps committed by then.
        why: Why it could not be done; empty: it was.
    """

    fault: Fault
    member: int
    t: float
    step: int
    why: str = ""


class Injector:
    """Takes a run's events, and lets faults happen when they are due.

    A fault waits until there are others who have the state and are unharmed: what is left can then
    always go on. A cut waits for connections, which there are none of while the workers meet anew.
    One that waits to the end of the run does not happen.

    Args:
        faults: In the order in which they are to come, where several are due.
        hands: What reaches the workers.
        clock: For moments.
        say: Told of each.

    Attributes:
        hits: What was done so far.
    """

    def __init__(
        self,
        faults: Sequence[Fault],
        hands: Hands,
        clock: Clock,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Nothing has happened."""
        self.hits: list[Hit] = []
        self._waiting = list(faults)
        self._hands, self._clock, self._say = hands, clock, say
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
            self._hands.close()

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
                    self._hands.thaw(member)
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
            self._hands.harm(member, fault.action)
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
            self._hands.hold(event.member, event.node, event.pid)
        except OSError as error:
            why = error.strerror or str(error)
            self._say(f"note: no fault can reach member {event.member}: {why}")
