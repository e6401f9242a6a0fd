"""Follows a run as it goes on: which notes to show, and when to draw the progress line again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from raycloud.events import DataPrepared, MemberFailed, Printed
from raycloud.order import Steps
from raycloud.report.progress import note
from raycloud.report.tally import Tally
from raycloud.report.told import brief

_MOST_PRINTED = 1000  # lines that are remembered

if TYPE_CHECKING:
    from raycloud.clock import Clock
    from raycloud.events import Observed
    from raycloud.spec.job import Job


class Follower:
    """Takes a run's events and calls back; prints nothing itself.

    Args:
        job: What runs; it says how many steps there are.
        clock: Where seconds come from.
        say: Shows a note that stays.
        draw: Shows the progress line of a tally, given also the number of steps of the whole job.
        every_s: Least seconds between two drawings; the first committed step is drawn at once.
        only_steps: Draw only when steps were committed since: for lines that stay.
    """

    def __init__(
        self,
        job: Job,
        clock: Clock,
        *,
        say: Callable[[str], None],
        draw: Callable[[Tally, int | None], None],
        every_s: float,
        only_steps: bool,
    ) -> None:
        """Nothing has been seen yet."""
        self._job, self._clock, self._say, self._draw = job, clock, say, draw
        self._every_s, self._only_steps = every_s, only_steps
        self._tally = Tally()
        self._drawn_s: float | None = None
        self._drawn_steps = 0
        self._told: set[tuple[object, ...]] = set()
        self._printed: dict[str, dict[int, int]] = {}  # how often by whom; the newest lines last

    def see(self, event: Observed) -> None:
        """Take in what happened."""
        now_s = self._clock.monotonic_s()
        text = note(event)
        if text is not None and not self._known(event):
            self._say(text)
        if isinstance(event, Printed):
            return
        self._tally.add(now_s, event)
        early = self._drawn_s is not None and now_s - self._drawn_s < self._every_s
        first_step = self._tally.steps > 0 and self._drawn_steps == 0
        if (not early or first_step) and (self._new_steps or not self._only_steps):
            self._show(now_s)

    def end(self, *, always: bool = False) -> None:
        """Draw what was left out since the last drawing; `always`: how it ended, too."""
        if self._new_steps or always:
            self._show(self._clock.monotonic_s())

    def _known(self, event: Observed) -> bool:
        """Members tell the same of the data, print the same, and fail alike: one is enough."""
        match event:
            case DataPrepared():
                told: tuple[object, ...] = event.split, event.version
            case MemberFailed():
                told = event.error, brief(event.message)
            case Printed():
                return not self._first_to_print(event)
            case _:
                return False
        known = told in self._told
        self._told.add(told)
        return known

    def _first_to_print(self, event: Printed) -> bool:
        """Whether no member has printed this line as often as this one has now."""
        counts = self._printed.pop(event.text, {})
        most, own = max(counts.values(), default=0), counts.get(event.member, 0) + 1
        self._printed[event.text] = counts | {event.member: own}
        if len(self._printed) > _MOST_PRINTED:
            del self._printed[next(iter(self._printed))]
        return own > most

    @property
    def _new_steps(self) -> bool:
        return self._tally.steps > self._drawn_steps

    def _show(self, now_s: float) -> None:
        self._drawn_s, self._drawn_steps = now_s, self._tally.steps
        self._draw(self._tally, total_steps(self._job, self._tally.epoch_samples))


def total_steps(job: Job, epoch_samples: int) -> int | None:
    """Steps of the whole job; None while the number of samples in an epoch is not known (0)."""
    if job.steps is not None or job.epochs is None or not epoch_samples:
        return job.steps
    steps = Steps(
        samples=epoch_samples,
        global_batch=job.global_batch,
        micro_batch=job.micro_batch,
        drop_last=job.drop_last,
    )
    return job.epochs * steps.per_epoch()
