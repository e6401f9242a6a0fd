"""Progress of a run while it goes on: notes that stay, and one line or log line of its status.

Displays are observers: they take a run's events and print through what they are given.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from raycloud.events import MemberFailed, Printed, RunFinished
from raycloud.redact import redact_text
from raycloud.report.figures import byte_count, counted, duration, figure, printable
from raycloud.report.notes import brief, note
from raycloud.report.run_status import RunStatus, parse_line, status_of, to_line, total_steps
from raycloud.report.state import RunState

if TYPE_CHECKING:
    from pathlib import Path

    from rich.text import Text

    from raycloud.clock import Clock
    from raycloud.events import Observed
    from raycloud.spec.job import Job

    Observer = Callable[[Observed], None]

_BAR_CELLS = 12
_MOST_PRINTED = 1000  # lines that are remembered
_REDRAW_S = 0.2
_LINE_S = 5.0  # between lines that stay


def status_text(status: RunStatus) -> str:
    """The status in one plain line: step, loss, samples/s, time left, workers, bytes."""
    return " · ".join([_where(status), *_details(status)])


def status_renderable(status: RunStatus) -> Text:
    """The same line with a bar, for a terminal; cut where the terminal ends, never wrapped."""
    from rich.text import Text  # noqa: PLC0415 - only a terminal needs it

    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(_where(status), style="bold")
    if status.steps and status.step:
        line.append_text(bar(" ", status.step, status.steps, _BAR_CELLS))
    for detail in _details(status):
        line.append(" · ", style="bright_black")
        line.append(detail)
    return line


def bar(before: str, step: int, steps: int, cells: int) -> Text:
    """How far a run has come, as a bar of so many cells."""
    from rich.text import Text  # noqa: PLC0415 - only a terminal needs it

    done = max(0, min(cells, cells * step // steps))
    return Text.assemble((before + "━" * done, "green"), ("━" * (cells - done), "bright_black"))


class Follower:
    """Takes a run's events and calls back; prints nothing itself.

    Args:
        job: What runs; it says how many steps there are.
        clock: Where seconds come from.
        say: Shows a note that stays.
        draw: Shows how the run stands.
        every_s: Least seconds between two drawings; the first committed step is drawn at once.
        only_steps: Draw only when steps were committed since: for lines that stay.
    """

    def __init__(
        self,
        job: Job,
        clock: Clock,
        *,
        say: Callable[[str], None],
        draw: Callable[[RunStatus], None],
        every_s: float,
        only_steps: bool,
    ) -> None:
        self._job, self._clock, self._say, self._draw = job, clock, say, draw
        self._every_s, self._only_steps = every_s, only_steps
        self._state = RunState()
        self._drawn_s: float | None = None
        self._drawn_steps = 0
        self._failures: set[tuple[str, str]] = set()
        self._printed: dict[str, dict[int, int]] = {}  # how often by whom; the newest lines last

    def see(self, event: Observed) -> None:
        """Take in what happened."""
        if isinstance(event, Printed):
            if self._is_first_to_print(event):
                self._say(note(event) or "")
            return
        now_s = self._clock.monotonic_s()
        _, text = self._state.apply(now_s, event)
        if text is not None and not isinstance(event, RunFinished) and not self._is_known(event):
            self._say(text)
        due = self._drawn_s is None or now_s - self._drawn_s >= self._every_s
        first_step = self._has_new_steps and self._drawn_steps == 0
        if (due or first_step) and (self._has_new_steps or not self._only_steps):
            self._show()

    def end(self, *, always: bool = False) -> None:
        """Draw what was left out since the last drawing; `always`: how it ended, too."""
        if self._has_new_steps or always:
            self._show()

    def _is_known(self, event: Observed) -> bool:
        """Whether another member has failed alike: one of them is enough."""
        if not isinstance(event, MemberFailed):
            return False
        failure = event.error, brief(event.message)
        known = failure in self._failures
        self._failures.add(failure)
        return known

    def _is_first_to_print(self, event: Printed) -> bool:
        """Whether no member has printed this line as often as this one has now."""
        counts = self._printed.pop(event.text, {})
        most, own = max(counts.values(), default=0), counts.get(event.member, 0) + 1
        self._printed[event.text] = counts | {event.member: own}
        if len(self._printed) > _MOST_PRINTED:
            del self._printed[next(iter(self._printed))]
        return own > most

    @property
    def _has_new_steps(self) -> bool:
        return self._state.tally.steps > self._drawn_steps

    def _show(self) -> None:
        tally, now_s = self._state.tally, self._clock.monotonic_s()
        self._drawn_s, self._drawn_steps = now_s, tally.steps
        steps = total_steps(self._job, tally.epoch_samples)
        self._draw(status_of(tally, now_t=now_s, unix_s=self._clock.unix_s(), steps=steps))


@contextmanager
def shown_plainly(job: Job, clock: Clock, say: Callable[[str], None]) -> Iterator[Observer]:
    """An observer that shows a run as lines that stay, one every 5 s; `say` prints a line."""

    def draw(status: RunStatus) -> None:
        say(status_text(status))

    follower = Follower(job, clock, say=say, draw=draw, every_s=_LINE_S, only_steps=True)
    try:
        yield follower.see
    finally:
        follower.end()


@contextmanager
def shown_live(job: Job, clock: Clock) -> Iterator[Observer]:
    """An observer that shows a run as a line that changes, on stderr's terminal, below notes."""
    with _live_line() as (say, draw):
        yield Follower(job, clock, say=say, draw=draw, every_s=_REDRAW_S, only_steps=False).see


@contextmanager
def shown_as_cards(
    job: Job,
    clock: Clock,
    say: Callable[[str], None],
    *,
    note: Callable[[str], None],
    directory: Path | None,
) -> Iterator[Observer]:
    """An observer that makes status lines for a log, one every 5 s at most, and a last one.

    Args:
        job: What runs, in `directory`.
        clock: Where seconds come from.
        say: Prints a status line.
        note: Prints a note for people.
        directory: The run directory.
    """
    where: dict[str, Any] = {}
    if directory is not None:
        where = {"run": directory.name, "directory": str(directory)}

    def draw(status: RunStatus) -> None:
        say(to_line(replace(status, **where)))

    follower = Follower(job, clock, say=note, draw=draw, every_s=_LINE_S, only_steps=False)
    try:
        yield follower.see
    finally:
        follower.end(always=True)


def show_log(lines: Iterable[str], *, plain: bool, say: Callable[[str], None]) -> RunStatus | None:
    """Show a log as it comes, to its end, without secrets; the last status in it.

    Args:
        lines: Of the log. A status with nothing new is not drawn.
        plain: The status becomes lines that stay, printed by `say` as the others; else one line
            that changes, on the terminal behind stderr, below the lines that stay.
        say: Prints a line, where it is plain.
    """

    def draw(status: RunStatus) -> None:
        say(status_text(status))

    last: RunStatus | None = None
    with contextlib.nullcontext((say, draw)) if plain else _live_line() as (told, drawn):
        for line in lines:
            status = parse_line(line)
            if status is None:
                told(printable(redact_text(line.rstrip("\r\n"))))
                continue
            if last is None or status_text(last) != status_text(status):
                drawn(status)
            last = status
    return last


@contextmanager
def _live_line() -> Iterator[tuple[Callable[[str], None], Callable[[RunStatus], None]]]:
    """What shows a line that stays, and what draws the line below, on the terminal of stderr."""
    from rich.console import Console  # noqa: PLC0415 - only a terminal needs it
    from rich.live import Live  # noqa: PLC0415

    console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield console.print, lambda status: live.update(status_renderable(status), refresh=True)


def _where(status: RunStatus) -> str:
    if status.step or status.members:
        return f"step {status.step}/{status.steps}" if status.steps else f"step {status.step}"
    if status.workers:
        return f"starting: {status.ready} of {counted(status.workers, 'worker')} ready"
    return "starting"


def _details(status: RunStatus) -> list[str]:
    if not status.step and status.loss is None:
        return []
    parts = [] if status.loss is None else [f"loss {figure(status.loss)}"]
    if status.samples_per_s is not None:
        parts.append(f"{figure(status.samples_per_s)} samples/s")
    if status.left_s is not None:
        parts.append(f"{duration(status.left_s)} left")
    parts.append(counted(status.workers, "worker"))
    parts.append(f"{byte_count(status.bytes_sent)} sent")
    if status.generation is not None:
        parts.append(f"generation {status.generation}")
    if status.cost is not None:
        parts.append(f"cost {figure(status.cost)}")
    return parts
