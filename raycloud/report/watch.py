"""A run that is being watched: what a terminal page says of it, from its log alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from rich.text import Text

from raycloud.report.figures import byte_count, duration, figure, printable_line, sparkline
from raycloud.report.notes import metrics_text
from raycloud.report.run_status import Identity, RunStatus, status_of, total_steps
from raycloud.report.state import RunState
from raycloud.report.summary import rate_curve

if TYPE_CHECKING:
    from pathlib import Path

    from raycloud.events import Event
    from raycloud.report.state import Member, Tally
    from raycloud.spec.job import Job


class Watched:
    """The fold of a log for a page; knows no clock and no terminal.

    Args:
        directory: The run directory.
        state: What has been read of its log; None: nothing.
    """

    def __init__(self, directory: Path, state: RunState | None = None) -> None:
        """Nothing has happened."""
        self.directory = directory
        self.state = RunState() if state is None else state
        self.job: Job | None = None  # once its file is there; it says how many steps there are

    @property
    def tally(self) -> Tally:
        """See `RunState`."""
        return self.state.tally

    @property
    def last_t(self) -> float | None:
        """See `RunState`."""
        return self.state.last_t

    @property
    def ended(self) -> bool:
        """Whether the run has said its last word."""
        return self.tally.status != "unfinished"

    @property
    def steps(self) -> int | None:
        """Steps of the whole job; None where that is not known."""
        return total_steps(self.job, self.tally.epoch_samples) if self.job else None

    def card(self, now_t: float) -> RunStatus:
        """How the run stands at `now_t` unix seconds; one that has ended stands still."""
        if self.ended and self.last_t is not None:
            now_t = self.last_t
        name = self.directory.name or str(self.directory)
        identity = Identity(run=name, directory=str(self.directory))
        return status_of(self.tally, now_t=now_t, steps=self.steps, identity=identity)

    def see(self, t: float, event: Event) -> str | None:
        """Take in what happened at `t` unix seconds; the note that it deserves, if any."""
        return self.state.apply(t, event)[1]


class Lines:
    """A run that is watched as lines that stay: notes, and now and then how it stands.

    Args:
        watched: The run; its events come through `see`.
        line: How it stands, as a line.
        every_s: Least seconds between two such lines, by the log's own time: a log that is there
            already is told as it happened.
        notes: Whether notes are told, too.
    """

    def __init__(
        self, watched: Watched, *, line: Callable[[RunStatus], str], every_s: float, notes: bool
    ) -> None:
        """Nothing has been told."""
        self._watched, self._line = watched, line
        self._every_s, self._notes = every_s, notes
        self._told_t = -math.inf
        self._told = (0, "")  # steps and status that the newest line told of

    def see(self, t: float, event: Event) -> list[str]:
        """Take in what happened at `t` unix seconds; the lines to show."""
        text = self._watched.see(t, event)
        lines = [text] if text is not None and self._notes else []
        first_step = self._watched.tally.steps > 0 and self._told[0] == 0
        if self._watched.ended or first_step or t - self._told_t >= self._every_s:
            lines += self._standing(t)
        return lines

    def gone(self) -> list[str]:
        """The lines to show once the driver is gone without a last word."""
        card = self._watched.card(self._watched.last_t or 0.0).after_end()
        text = f"{card.status} after step {card.step}: its driver is gone without a last word"
        return [*([text] if self._notes else []), self._line(card)]

    def _standing(self, t: float) -> list[str]:
        card = self._watched.card(t)
        if (card.step, card.status) == self._told or not (card.step or self._watched.ended):
            return []
        self._told_t, self._told = t, (card.step, card.status)
        return [self._line(card)]


_QUIET_S = 30.0  # without a word from a run that has not ended: it may be stuck, or dead
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


def page_lines(watched: Watched, *, now_t: float, width: int, height: int) -> list[Text]:
    """The page, exactly as many lines as the terminal has; each is cut where that ends.

    Args:
        watched: The run.
        now_t: The present, in unix seconds.
        width: Characters in a line.
        height: Lines.
    """
    card = watched.card(now_t)
    lines = [_title(card, width), *_bar(card), Text(), *_facts(watched, card)]
    members = _members(watched, most=max(3, (height - len(lines) - _LEAST_NOTES) // 2))
    if members:
        lines += [Text(), *members]
    room = height - len(lines) - 2  # a blank line above, the last line below
    if room > 0:
        lines += [Text(), *_notes(watched, room)]
    lines = lines[: max(0, height - 1)]
    lines += [Text()] * (height - 1 - len(lines))
    lines.append(_foot(watched, now_t))
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
        line.truncate(width, overflow="ellipsis")
    return lines


def _title(card: RunStatus, width: int) -> Text:
    line = Text()
    line.append(printable_line(card.job or card.run), style="bold")
    line.append(f"  {card.status}", style=f"bold {_STYLES.get(card.status, '')}".strip())
    where = printable_line(card.directory)
    line.append(where.rjust(max(len(where) + 2, width - line.cell_len)), style=_DIM)
    return line


def _bar(card: RunStatus) -> list[Text]:
    line = Text(f"step {card.step}" + (f"/{card.steps}" if card.steps else ""))
    if card.steps:
        done = max(0, min(_BAR_CELLS, _BAR_CELLS * card.step // card.steps))
        line.append("  " + "━" * done, style="green")
        line.append("━" * (_BAR_CELLS - done), style=_DIM)
        line.append(f"  {100 * card.step // card.steps}%")
    if card.left_s is not None and card.status in {"running", "stopping"}:
        line.append(f"  {duration(card.left_s)} left")
    return [line]


def _facts(watched: Watched, card: RunStatus) -> list[Text]:
    tally = watched.tally
    losses = [point.loss for point in tally.points]
    rates = [rate for _, rate in rate_curve(tally, _CURVE_PLACES)]
    facts = [("error", printable_line(card.error or ""))]
    if card.loss is not None:
        facts.append(("loss", f"{sparkline(losses, width=_CURVE_CELLS)} {figure(card.loss)}"))
    if card.samples_per_s is not None:
        # From zero: a rate that hardly changes looks like one.
        curve = sparkline(rates, width=_CURVE_CELLS, low=0.0)
        facts.append(("samples/s", f"{curve} {figure(card.samples_per_s)}"))
    if tally.metrics:
        facts.append(
            ("held out", f"{metrics_text(tally.metrics)} (after step {tally.metrics_step})")
        )
    if card.checkpoint_step is not None and card.checkpoint_t is not None:
        age_s = max(0.0, card.t - card.checkpoint_t)
        age = "" if watched.ended else f", {duration(age_s)} ago"
        facts.append(("checkpoint", f"step {card.checkpoint_step}{age}"))
    if card.generation is not None:
        facts.append(("generation", _generation(card)))
    return [
        Text.assemble(
            (f"  {label:<{_LABEL_CELLS}}", _DIM), (text, "red" if label == "error" else "")
        )
        for label, text in facts
        if text
    ]


def _generation(card: RunStatus) -> str:
    parts = [f"{card.generation}", "1 worker" if card.workers == 1 else f"{card.workers} workers"]
    parts.append(f"recoveries: {card.recoveries_text}")
    parts.append(f"{byte_count(card.bytes_sent)} sent")
    if card.cost is not None:
        parts.append(f"cost {figure(card.cost)}")
    return " · ".join(parts)


def _members(watched: Watched, *, most: int) -> list[Text]:
    if not watched.state.members:
        return []
    head = "  member  state             share    step    computing     exchange  node"
    rows = [_member(number, member) for number, member in sorted(watched.state.members.items())]
    lines = [Text(head, style=_DIM), *rows[:most]]
    if len(rows) > most:
        lines.append(Text(f"  … and {len(rows) - most} more", style=_DIM))
    return lines


def _member(number: int, member: Member) -> Text:
    share = "-" if member.share is None else str(member.share)
    step = "-" if member.step is None else str(member.step)
    compute, exchange = (
        "-" if seconds is None else f"{figure(seconds)} s"
        for seconds in (member.compute_s, member.exchange_s)
    )
    line = Text(f"  {number:>6}  ")
    line.append(f"{member.state:<16}", style=_STYLES.get(member.state, ""))
    line.append(f"  {share:>5}  {step:>6}  {compute:>11}  {exchange:>11}")
    line.append(f"  {printable_line(member.node)[:_NODE_CELLS]}", style=_DIM)
    return line


def _notes(watched: Watched, room: int) -> list[Text]:
    return [
        Text.assemble((f"  {_time_of_day(t)}  ", _DIM), text)
        for t, text in list(watched.state.notes)[-room:]
    ]


def _time_of_day(t: float) -> str:
    return datetime.fromtimestamp(t, tz=UTC).astimezone().strftime("%H:%M:%S")


def _foot(watched: Watched, now_t: float) -> Text:
    line = Text("q ends this page, not the run", style=_DIM)
    if watched.last_t is None:
        line.append("   nothing was logged yet", style="yellow")
    elif not watched.ended and now_t - watched.last_t >= _QUIET_S:
        line.append(f"   no word for {duration(now_t - watched.last_t)}", style="yellow")
    return line
