"""A member: its worker lives in a thread, is told what is next, and tells what happened."""

from __future__ import annotations

import math
import queue
import threading
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from raycloud.commands import Extend, Meet
from raycloud.errors import (
    InternalError,
    PlacementError,
    RaycloudError,
    TaskError,
    TransportError,
    public_name,
)
from raycloud.events import Event, ExchangeBroken, MemberFailed, MemberLost, Noticed, StepNotFinite
from raycloud.net.served import LostServerError
from raycloud.net.transport import Abandoned
from raycloud.recovery.rendezvous import HOST, Meeting
from raycloud.redact import redacted
from raycloud.step.commit import RollbackError
from raycloud.step.contract import raised
from raycloud.step.device import failure
from raycloud.step.straggler import Stalled, StallWatch
from raycloud.worker.context import Changes, MemberConfig
from raycloud.worker.worker import Worker

if TYPE_CHECKING:
    from raycloud.commands import Change
    from raycloud.data.provider import Provider
    from raycloud.net.transport import Transport
    from raycloud.recovery.rendezvous import Host
    from raycloud.step.straggler import Straggling
    from raycloud.worker.outbox import Survivor

Transports = tuple["Transport", "Transport"]  # of gradients, and of the control lane

_OVER = 1 << 62  # newer than any generation
_END_S = 30.0  # for what is computed or measured just then
_WRITES_S = 25.0  # control waits for the others' parts a little longer
_ALONE_S = 5.0  # after a break; the driver calls to meet again before that, where it does


class Member:
    """Starts a worker in a thread and steers it: every method but `give_up_worker` returns at once.

    Events come out of `poll`, in order. `provider` prepares the data of a task that returns a
    `Source`; `before` is the member that this process was until now, if any.
    """

    def __init__(
        self,
        config: MemberConfig,
        host: Host = HOST,
        provider: Provider | None = None,
        before: Member | None = None,
    ) -> None:
        self._config = config
        self._provider = provider
        self._before = before
        self._worker: Worker | None = None
        self._host = host
        self._events: deque[Event] = deque()
        self._over = False  # it is another's turn
        self._wake = host.threads.condition()
        self._meetings: queue.Queue[Meeting | None] = host.threads.queue()
        self._planned: dict[int, tuple[Meeting, Transports]] = {}
        self._turn = threading.Lock()  # of `_newest`
        self._changes = Changes(feed_depth=config.job.data.prefetch_steps)
        self._coming = (-1, 0)  # the generation that was planned last, and the number of the change
        self._newest = -1  # the generation that was called last, or one past one given up
        self._broke: int | None = None  # the generation that did, until the next is begun
        self._goes_back = False  # its state is not to be gone on from
        self._thread = host.threads.thread(self._live, name="member")
        self._thread.start()
        self._watch = StallWatch(
            host.clock,
            self._thread.native_id or 0,
            lambda: self._worker.usual_s if self._worker else None,
        )

    def poll(self, timeout_s: float) -> list[Event]:
        """Events since the last call; waits at most `timeout_s` for the first one.

        It waits no longer than until a share becomes late: then `stalls` has it to tell.
        """
        worker = self._worker
        late_s = math.inf if worker is None else worker.pace.late_in_s()
        with self._wake:
            self._wake.wait_for(lambda: self._over or bool(self._events), min(timeout_s, late_s))
            found = list(self._events)
            self._events.clear()
        return found

    @property
    def step(self) -> int | None:
        """The step being computed; None before the first."""
        return None if self._worker is None else self._worker.step

    def survivor(self) -> Survivor | None:
        """What the next driver of the run is told; None: it has no state that is worth keeping."""
        found = None if self._worker is None else self._worker.survivor()
        if found is None or self._goes_back or not self._thread.is_alive():
            return None
        planned, number = self._coming
        newest = max(found.newest, self._newest, planned)
        return replace(found, newest=newest, changes=max(found.changes, number))

    def stalls(self) -> list[Stalled | Straggling]:
        """Whether it stands still, or is late, in the midst of computing; asked for each second."""
        worker = self._worker
        if worker is None or not self._thread.is_alive():
            return []
        return [*self._watch.look(), *worker.pace.look()]

    def rejoin_as(self, member: int) -> Member:
        """The same process as another member, that joins the others; this one is over."""
        config = replace(self._config, member=member, joins=True)
        return Member(config, self._host, self._provider, before=self)

    def give_up_worker(self) -> Worker:
        """End once what is under way lets it; what it has built is another's from then on."""
        self.abandon(_OVER)
        with self._wake:
            self._over = True
            self._wake.notify_all()
        self._meetings.put(None)
        self._thread.join(_END_S)
        worker, self._worker = self._worker, None
        if worker is None or self._thread.is_alive():
            what = "could not leave the generation that went on without it"
            raise InternalError(f"member {self._config.member} {what}")
        return worker

    def form(self, meeting: Meeting) -> None:
        """Meet the others and compute, once built; the generation before, if any, is over.

        To a planned one this member comes ahead, and goes on computing until it takes effect. What
        was said to the member that this process was before is passed over.
        """
        if meeting.members[meeting.rank] != self._config.member:
            return
        if meeting.ahead is not None:
            self._coming = meeting.generation, meeting.ahead
            self._start(partial(self._meet_ahead, meeting, meeting.ahead), "ahead")
        else:
            self.abandon(meeting.generation - 1)
            self._meetings.put(meeting)

    def prepare(self, number: int, change: Change) -> None:
        """Hold a change at hand (grown data, once it can be read); it takes effect where all do."""
        if isinstance(change, Extend):
            self._start(partial(self._fetch, number, change), "grow")
        else:
            self._changes.prepare(number, change)

    def abandon(self, generation: int) -> None:
        """Give up this generation, and older ones; with them the exchange under way, if any."""
        with self._turn:
            self._newest = max(self._newest, generation + 1)
            old = [self._planned.pop(g) for g in sorted(self._planned) if g <= generation]
        if self._worker is not None:
            self._worker.hang_up(generation)
        for _, met in old:
            self._host.leave(met)

    def _report(self, event: Event) -> None:
        if isinstance(event, MemberFailed | MemberLost | ExchangeBroken | Noticed):
            event = redacted(event)  # the secrets of this node are known here
        with self._wake:
            self._events.append(event)
            self._wake.notify_all()

    def _live(self) -> None:
        try:
            worker = self._begin()
            while (meeting := self._told()) is not None:
                following = self._compute(worker, meeting)
                while following is not None:
                    following = self._compute(worker, *following)
        except BaseException as error:  # noqa: BLE001 - the last line before the thread's end
            built, self._worker = self._worker, None
            if built is not None:
                built.finish_writing(_WRITES_S)  # what was committed is not lost with this
            self._report(self._failed(error))

    def _told(self) -> Meeting | None:
        """The next meeting; whose exchange broke hangs up where none comes for a while.

        There may be nobody to meet for hours, and gloo would look at what broke all the time.
        """
        if self._broke is not None:
            try:
                return self._meetings.get(timeout=_ALONE_S)
            except queue.Empty:
                if self._worker is not None:
                    self._worker.hang_up(self._broke)
        return self._meetings.get()

    def _begin(self) -> Worker:
        before, self._before = self._before, None
        if before is not None:
            worker = before.give_up_worker()
            ready = worker.begin_anew(self._config, self._changes, self._report)
            self._worker = worker
            self._report(ready)
            return worker
        worker = Worker(self._config, self._host, self._changes, self._report, self._provider)
        self._worker = worker
        worker.measure()
        return worker

    def _compute(
        self, worker: Worker, meeting: Meeting, met: Transports | None = None
    ) -> tuple[Meeting, Transports] | None:
        """One generation, until it ends or breaks; the one to follow, where that was planned."""
        generation, self._broke = meeting.generation, None
        told: dict[str, Any] = {"member": self._config.member, "generation": generation}
        self._goes_back = False
        try:
            if self._newest == generation:
                coming = worker.train(meeting, lambda: self._newest != generation, met)
                if coming is not None and self._config.member in coming.members:
                    return self._become(generation, coming.generation)
        except Abandoned:
            pass  # on the driver's word
        except TransportError as error:  # a peer's end: the driver knows whose
            self._broke = generation
            if self._newest == generation:  # else it was told already
                server = isinstance(error, LostServerError)
                self._report(ExchangeBroken(**told, why=str(error), server=server))
        except RollbackError as error:
            self._goes_back = True
            told |= {"step": error.step, "why": error.why, "left_out": error.left_out}
            self._report(StepNotFinite(**told))
        return None

    def _become(self, generation: int, coming: int) -> tuple[Meeting, Transports] | None:
        """A planned generation takes effect, unless the driver has called for another since."""
        with self._turn:
            if self._newest != generation:
                return None
            self._newest = coming
            return self._planned.pop(coming)

    def _meet_ahead(self, meeting: Meeting, number: int) -> None:
        """Meet while the generation before computes; then the change is at hand."""
        generation = meeting.generation
        try:
            met = self._built().meet(meeting, lambda: self._newest >= generation)
            with self._turn:
                over = self._newest >= generation
                if not over:
                    self._planned[generation] = meeting, met
            if over:  # it was withdrawn just then
                self._host.leave(met)
                return
            coming = Meet(generation=generation, members=meeting.members, shares=meeting.shares)
            self._changes.prepare(number, coming)
        except Abandoned:
            pass
        except (TransportError, PlacementError) as error:  # a newcomer's end: the others go on
            member = self._config.member
            self._report(ExchangeBroken(member=member, generation=generation, why=str(error)))

    def _fetch(self, number: int, change: Extend) -> None:
        self._built().fetch(change)
        self._changes.prepare(number, change)

    def _start(self, act: Callable[[], None], name: str) -> None:
        """Do something in a thread of its own; what that raises ends this member."""
        self._host.threads.thread(self._run, act, name=name).start()

    def _run(self, act: Callable[[], None]) -> None:
        try:
            act()
        except BaseException as error:  # noqa: BLE001 - the last line before the thread's end
            self._report(self._failed(error))

    def _built(self) -> Worker:
        if self._worker is None:
            raise InternalError("the data was to grow before there was any")
        return self._worker

    def _failed(self, error: BaseException) -> MemberFailed | MemberLost:
        member = self._config.member
        if why := failure(error):  # the machine's fault: another process may go on
            return MemberLost(member=member, reason=f"its GPU failed: {why}")
        if not isinstance(error, Exception):  # nothing of raycloud raises it in this thread
            cause, error = error, raised("the task's code", error)
            error.__cause__ = cause
        if not isinstance(error, RaycloudError):
            text = "".join(traceback.format_exception(error))
            return MemberFailed(member=member, error="InternalError", message=text)
        name, message = public_name(error), error.message + _cause(error)
        return MemberFailed(member=member, error=name, message=message, hint=error.hint)


def _cause(error: BaseException) -> str:
    """The lines of the user's code that raised, where an error wraps another."""
    if error.__cause__ is None or not isinstance(error, TaskError):
        return ""
    frames = traceback.format_exception(error.__cause__)
    return "\n" + "".join(frames).rstrip()
