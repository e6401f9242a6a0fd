"""One member: lives in a thread of its own, is told what is next, and tells what happened."""

from __future__ import annotations

import queue
import threading
import traceback
from collections import deque
from typing import TYPE_CHECKING

from raycloud.commands import Extend
from raycloud.errors import InternalError, RaycloudError, TaskError, TransportError, public_name
from raycloud.events import Event, MemberFailed, Noticed
from raycloud.redact import redacted
from raycloud.sync.transport import Abandoned
from raycloud.training.changes import Changes
from raycloud.training.config import MemberConfig
from raycloud.training.life import Life
from raycloud.training.meeting import Meeting

if TYPE_CHECKING:
    from raycloud.clock import Clock
    from raycloud.commands import Change
    from raycloud.data.provide import Provider

__all__ = ["BROKEN_EXCHANGE", "Meeting", "Member", "MemberConfig"]

BROKEN_EXCHANGE = "exchange broke"  # the notice of a member whose peers are gone or cut off


class Member:
    """A member's life, seen from outside: every method returns at once.

    Events come out of `poll`, in order.

    Args:
        config: What it is told.
        clock: For the seconds reported.
        provider: Prepares the data of a task that returns a `Source`; None: there can be none.
    """

    def __init__(
        self, config: MemberConfig, clock: Clock, provider: Provider | None = None
    ) -> None:
        """Start to build."""
        self._config = config
        self._provider = provider
        self._life: Life | None = None
        self._clock = clock
        self._events: deque[Event] = deque()
        self._wake = threading.Condition()
        self._meetings: queue.Queue[Meeting] = queue.Queue()
        self._changes = Changes(feed_depth=config.job.data.prefetch_steps)
        self._newest = -1  # the generation that was called last, or one past one given up
        self._thread = threading.Thread(target=self._live, name="member", daemon=True)
        self._thread.start()

    def poll(self, timeout_s: float) -> list[Event]:
        """Events since the last call; waits at most `timeout_s` for the first one."""
        with self._wake:
            self._wake.wait_for(lambda: bool(self._events), timeout_s)
            found = list(self._events)
            self._events.clear()
        return found

    @property
    def step(self) -> int | None:
        """The step being computed; None before the first."""
        return None if self._life is None else self._life.step

    def form(self, meeting: Meeting) -> None:
        """Meet the others and compute, once built; the generation before, if any, is over."""
        self._newest = max(self._newest, meeting.generation)
        self._meetings.put(meeting)

    def prepare(self, number: int, change: Change) -> None:
        """Hold a change at hand; it takes effect where all members hold it.

        Grown data is at hand once it can be read here.
        """
        if isinstance(change, Extend):
            grow = threading.Thread(
                target=self._fetch, args=(number, change), name="grow", daemon=True
            )
            grow.start()
        else:
            self._changes.prepare(number, change)

    def abandon(self, generation: int) -> None:
        """Give up this generation, and with it the exchange under way, if any."""
        self._newest = max(self._newest, generation + 1)

    def _report(self, event: Event) -> None:
        if isinstance(event, MemberFailed | Noticed):  # the secrets of this node are known here
            event = redacted(event)
        with self._wake:
            self._events.append(event)
            self._wake.notify_all()

    def _live(self) -> None:
        try:
            life = Life(self._config, self._clock, self._changes, self._report, self._provider)
            self._life = life
            life.measure()
            while True:
                self._compute(life, self._meetings.get())
        except Exception as error:  # noqa: BLE001 - the last line before the thread's end
            self._report(self._failed(error))

    def _compute(self, life: Life, meeting: Meeting) -> None:
        """One generation, until it ends or breaks; the driver says what is next."""
        generation = meeting.generation
        try:
            if self._newest == generation:
                life.train(meeting, lambda: self._newest != generation)
        except Abandoned:
            pass  # on the driver's word
        except TransportError as error:  # a peer's end: the driver knows whose
            why = {"why": str(error), "generation": generation}
            member = self._config.member
            self._report(Noticed(what=BROKEN_EXCHANGE, member=member, detail=why))

    def _fetch(self, number: int, change: Extend) -> None:
        try:
            self._built().fetch(change)
            self._changes.prepare(number, change)
        except Exception as error:  # noqa: BLE001 - the last line before the thread's end
            self._report(self._failed(error))

    def _built(self) -> Life:
        if self._life is None:
            raise InternalError("the data was to grow before there was any")
        return self._life

    def _failed(self, error: Exception) -> MemberFailed:
        member = self._config.member
        if not isinstance(error, RaycloudError):
            text = "".join(traceback.format_exception(error))
            return MemberFailed(member=member, error="InternalError", message=text)
        return MemberFailed(
            member=member,
            error=public_name(error),
            message=error.message + _cause(error),
            hint=error.hint,
        )


def _cause(error: BaseException) -> str:
    """The lines of the user's code that raised, where an error wraps another."""
    if error.__cause__ is None or not isinstance(error, TaskError):
        return ""
    frames = traceback.format_exception(error.__cause__)
    return "\n" + "".join(frames).rstrip()
