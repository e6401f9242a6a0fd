"""Watching a run from its log alone: lines for a pipe, and a page for a terminal."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Self

from rich.text import Text

from raycloud.errors import RunDirectoryError, SpecError
from raycloud.events import Event, RunStarted
from raycloud.report.figures import (
    byte_count,
    counted,
    duration,
    figure,
    printable_line,
    sparkline,
)
from raycloud.report.log import Entry, Tail
from raycloud.report.notes import metrics_text
from raycloud.report.progress import bar
from raycloud.report.run_status import RunStatus, status_of, total_steps
from raycloud.report.state import RunState
from raycloud.report.summary import rate_curve
from raycloud.spec.rundir import RunDirectory

if TYPE_CHECKING:
    from raycloud.report.state import Member, Tally
    from raycloud.spec.job import Job

_QUIET_S = 30.0  # without an event of a run that has not ended: it may be stuck, or dead
_CURVE_CELLS = 40
_CURVE_PLACES = 120
_BAR_CELLS = 30
_LEAST_NOTES = 4
_LABEL_CELLS = 12
_NODE_CELLS = 12  # of a node's id
_DIM = "bright_black"
_STYLES = {
    "running": "green",
    "finished": "green",
    "starting": "cyan",
    "stopping": "yellow",
    "stopped": "yellow",
    "failed": "red",
    "lost": "red",
}


class Watched:
    """The state of the run in a directory, read from its log as that grows.

    Attributes:
        job: Once its file is there: it says how many steps there are.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tail = Tail(RunDirectory(directory).events_jsonl)
        self.state = RunState()
        self.job: Job | None = None

    @classmethod
    def of(cls, directory: Path) -> Self:
        """The run in a directory, which may be still empty.

        Raises:
            RunDirectoryError: There is none, and will be none.
        """
        run = RunDirectory(directory)
        if not directory.is_dir() or (
            not run.job_yaml.exists() and not run.events_jsonl.exists() and any(directory.iterdir())
        ):
            raise RunDirectoryError(
                f"{directory} holds no run", hint="name the directory of a run, such as runs/gpt-1"
            )
        return cls(directory)

    @property
    def tally(self) -> Tally:
        """See `RunState`."""
        return self.state.tally

    @property
    def ended(self) -> bool:
        """Whether the run has logged its end."""
        return self.tally.status != "unfinished"

    def status(self, now_t: float) -> RunStatus:
        """How the run stands at `now_t` unix seconds; one that has ended stands still."""
        if self.ended and self.state.last_t is not None:
            now_t = self.state.last_t
        steps = total_steps(self.job, self.tally.epoch_samples) if self.job else None
        return status_of(self.tally, now_t=now_t, steps=steps, directory=self.directory)

    def read(self) -> list[Entry]:
        """The entries that were logged since the last call, for `see`; also reads the job anew.

        Raises:
            RunDirectoryError: As `Tail.read`.
        """
        entries, run = self.tail.read(), RunDirectory(self.directory)
        started = [t for t, event, _ in entries if isinstance(event, RunStarted)]
        if started and run.job_yaml.is_file():  # a resumed run may have changed it
            try:
                self.job = run.job()
            except SpecError as error:
                note = f"how many steps there are is not known: {error}"
                self.state.notes.append((started[-1], note))
        return entries

    def see(self, t: float, event: Event) -> str | None:
        """Take in what happened at `t` unix seconds; the note that it deserves, if any."""
        return self.state.apply(t, event)[1]


class Lines:
    """A run that is watched as lines that stay: notes, and now and then its status.

    Args:
        watched: The run; its events come through `see`.
        line: A status as a line.
        every_s: Least seconds between two such lines, by the log's own time: a log that is there
            already is shown as it happened.
        notes: Whether notes are shown, too.
    """

    def __init__(
        self, watched: Watched, *, line: Callable[[RunStatus], str], every_s: float, notes: bool
    ) -> None:
        self._watched, self._line = watched, line
        self._every_s, self._notes = every_s, notes
        self._shown_t = -math.inf
        self._shown = (0, "")  # steps and status in the newest line

    def see(self, t: float, event: Event) -> list[str]:
        """Take in what happened at `t` unix seconds; the lines to show."""
        text = self._watched.see(t, event)
        lines = [text] if text is not None and self._notes else []
        first_step = self._watched.tally.steps > 0 and self._shown[0] == 0
        if self._watched.ended or first_step or t - self._shown_t >= self._every_s:
            status = self._watched.status(t)
            shown = (status.step, status.status)
            if shown != self._shown and (status.step or self._watched.ended):
                self._shown_t, self._shown = t, shown
                lines.append(self._line(status))
        return lines

    def gone(self) -> list[str]:
        """The lines to show once the driver is gone and has logged no end."""
        status = self._watched.status(self._watched.state.last_t or 0.0).after_end()
        text = f"{status.status} after step {status.step}: its driver is gone without a last word"
        return [*([text] if self._notes else []), self._line(status)]


def page_lines(watched: Watched, *, now_t: float, width: int, height: int) -> list[Text]:
    """The page at `now_t` unix seconds: `height` lines of `width` characters at most."""
    status = watched.status(now_t)
    lines = [_title(status, width), _bar(status), Text(), *_facts(watched, status)]
    members = _members(watched, most=max(3, (height - len(lines) - _LEAST_NOTES) // 2))
    if members:
        lines += [Text(), *members]
    room = height - len(lines) - 2  # a blank line above, the last line below
    if room > 0:
        lines.append(Text())
        for t, text in list(watched.state.notes)[-room:]:
            at = datetime.fromtimestamp(t, tz=UTC).astimezone().strftime("%H:%M:%S")
            lines.append(Text.assemble((f"  {at}  ", _DIM), text))
    lines = lines[: max(0, height - 1)]
    lines += [Text()] * (height - 1 - len(lines))
    lines.append(_foot(watched, now_t))
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
        line.truncate(width, overflow="ellipsis")
    return lines


def _title(status: RunStatus, width: int) -> Text:
    line = Text()
    line.append(printable_line(status.job or status.run), style="bold")
    line.append(f"  {status.status}", style=f"bold {_STYLES.get(status.status, '')}".strip())
    where = printable_line(status.directory)
    line.append(where.rjust(max(len(where) + 2, width - line.cell_len)), style=_DIM)
    return line


def _bar(status: RunStatus) -> Text:
    line = Text(f"step {status.step}" + (f"/{status.steps}" if status.steps else ""))
    if status.steps:
        line.append_text(bar("  ", status.step, status.steps, _BAR_CELLS))
        line.append(f"  {100 * status.step // status.steps}%")
    if status.left_s is not None and status.status in {"running", "stopping"}:
        line.append(f"  {duration(status.left_s)} left")
    return line


def _facts(watched: Watched, status: RunStatus) -> list[Text]:
    tally = watched.tally
    facts = {"error": printable_line(status.error or "")}
    if status.loss is not None:
        curve = sparkline([point.loss for point in tally.points], width=_CURVE_CELLS)
        facts["loss"] = f"{curve} {figure(status.loss)}"
    if status.samples_per_s is not None:
        # From zero: a rate that hardly changes looks like one.
        rates = [rate for _, rate in rate_curve(tally, _CURVE_PLACES)]
        curve = sparkline(rates, width=_CURVE_CELLS, low=0.0)
        facts["samples/s"] = f"{curve} {figure(status.samples_per_s)}"
    if tally.metrics:
        facts["held out"] = f"{metrics_text(tally.metrics)} (after step {tally.metrics_step})"
    if status.checkpoint_step is not None and status.checkpoint_t is not None:
        age_s = max(0.0, status.t - status.checkpoint_t)
        age = "" if watched.ended else f", {duration(age_s)} ago"
        facts["checkpoint"] = f"step {status.checkpoint_step}{age}"
    if status.generation is not None:
        parts = [str(status.generation), counted(status.workers, "worker")]
        parts.append(f"recoveries: {status.recoveries_text}")
        parts.append(f"{byte_count(status.bytes_sent)} sent")
        parts += [] if status.cost is None else [f"cost {figure(status.cost)}"]
        facts["generation"] = " · ".join(parts)
    styles = {"error": "red"}
    return [
        Text.assemble((f"  {label:<{_LABEL_CELLS}}", _DIM), (text, styles.get(label, "")))
        for label, text in facts.items()
        if text
    ]


def _members(watched: Watched, *, most: int) -> list[Text]:
    rows = [_member(number, member) for number, member in sorted(watched.state.members.items())]
    if not rows:
        return []
    head = "  member  state             share    step    computing     exchange  node"
    more = [Text(f"  … and {len(rows) - most} more", style=_DIM)] if len(rows) > most else []
    return [Text(head, style=_DIM), *rows[:most], *more]


def _member(number: int, member: Member) -> Text:
    share, step = (
        "-" if n is None else f"{n:.4g}" if n % 1 else str(n) for n in (member.share, member.step)
    )
    times = (member.compute_s, member.exchange_s)
    compute, exchange = ("-" if s is None else f"{figure(s)} s" for s in times)
    line = Text(f"  {number:>6}  ")
    line.append(f"{member.state:<16}", style=_STYLES.get(member.state, ""))
    line.append(f"  {share:>5}  {step:>6}  {compute:>11}  {exchange:>11}")
    line.append(f"  {printable_line(member.node)[:_NODE_CELLS]}", style=_DIM)
    return line


def _foot(watched: Watched, now_t: float) -> Text:
    line, last_t = Text("q ends this page, not the run", style=_DIM), watched.state.last_t
    if last_t is None:
        line.append("   nothing was logged yet", style="yellow")
    elif not watched.ended and now_t - last_t >= _QUIET_S:
        line.append(f"   no word for {duration(now_t - last_t)}", style="yellow")
    return line
