"""Notes: the line for people that an event of a run deserves."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from raycloud.events import (
    CheckpointPublished,
    DataPrepared,
    DataPreparing,
    Evaluated,
    ExchangeBroken,
    GenerationFormed,
    MemberFailed,
    MemberLeaving,
    MemberLost,
    Noticed,
    Printed,
    Recovered,
    RolledBack,
    RunStarted,
    StepNotFinite,
    StopRequested,
    SyncChanged,
    SyncMeasured,
    SyncPoint,
)
from raycloud.report.figures import byte_count, counted, figure, printable_line

if TYPE_CHECKING:
    from raycloud.events import Observed, RunFinished

MOST_LINES = 18  # of the cause of an error; with the hint they fit a terminal of 24
_WIDEST = 600  # letters of one of them

_TRACE = "Traceback (most recent call last):\n"
_FRAME = re.compile(
    r'^ *File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>.+)(?:\n {4}(?P<code>.*))?', re.M
)
_NOT_THEIRS = (
    "/site-packages/",
    "/dist-packages/",
    "/lib/python",
    "<frozen ",
    str(Path(__file__).parents[1]),
)


def note(event: Observed) -> str | None:
    """The line that stays on the screen after an event; None for an event without one."""
    match event:
        case RunStarted(taken_over=(_, *_)):
            text = f"going on with {counted(len(event.taken_over), 'worker')} that outlived "
            text += "their driver"
        case RunStarted(resumed_from_step=int(step)):
            text = f"going on from the checkpoint of step {step}"
        case DataPreparing() if event.member == 0:  # every member waits for the same
            text = f"preparing the data, for {event.seconds:.0f} s by now"
        case DataPrepared():
            text = _prepared_text(event)
        case GenerationFormed():
            text = f"generation {event.generation} from step {event.first_step}: "
            text += f"{counted(len(event.members), 'worker')}, "
            text += f"shares {' '.join(map(figure, event.shares))}"
        case CheckpointPublished():
            text = f"checkpoint of step {event.step} ({byte_count(event.state_bytes)})"
        case Evaluated() if event.metrics:
            text = f"held out after step {event.step}: {metrics_text(event.metrics)}"
        case StopRequested():
            text = f"stopping after a checkpoint: {event.reason}"
        case Noticed():
            who = "" if event.member is None else f"member {event.member}: "
            detail = ", ".join(f"{name} {value}" for name, value in event.detail.items())
            text = f"note: {who}{event.what}" + (f" ({detail})" if detail else "")
        case Printed():
            text = f"member {event.member} prints: {event.text}"
        case _:
            text = _trouble_text(event)
    return printable_line(text) if text else None


def ended_text(event: RunFinished) -> str:
    """The note on the end of a run."""
    text = f"{event.status} after step {event.steps}"
    return printable_line(f"{text}: {event.error}" if event.error else text)


def metrics_text(metrics: Mapping[str, float] | Mapping[str, float | None]) -> str:
    """Metrics by name in one line."""
    return printable_line(" · ".join(f"{name} {figure(x)}" for name, x in metrics.items()))


def bad_rows_text(event: DataPrepared) -> str:
    """How many bad rows were left out of a split, and the first of them."""
    rows = "1 bad row was" if event.bad_rows == 1 else f"{event.bad_rows} bad rows were"
    first = f", the first: {event.bad[0]}" if event.bad else ""
    return f"{rows} left out of {event.split.replace('_', ' ')}{first}"


def _trouble_text(event: Observed) -> str:
    match event:
        case MemberLost():
            return f"lost member {event.member}: {event.reason}"
        case MemberLeaving():
            when = "" if event.deadline_s is None else f" in {event.deadline_s:.0f} s"
            return f"member {event.member} is going to leave{when}: {event.reason}"
        case ExchangeBroken():
            return f"member {event.member} cannot reach a peer"
        case StepNotFinite():
            return f"member {event.member} is to go back: {event.why}"
        case MemberFailed():
            return f"member {event.member} failed: {event.error}: {brief(event.message)}"
        case RolledBack():
            there = f"the checkpoint of step {event.step}" if event.step else "the beginning"
            return f"no sound state is left: going back to {there}"
        case Recovered():
            return f"went on after {event.seconds:.1f} s, {event.lost_steps} steps lost"
        case _:
            return _sync_text(event)


def _sync_text(event: Observed) -> str:
    match event:
        case SyncMeasured():
            return f"a step takes {figure(event.step_s)} s by {SyncPoint(**event.point)}"
        case SyncChanged():
            by = SyncPoint(**event.point)
            return f"updates travel by {by} from step {event.step} on: {event.why}"
        case _:
            return ""


def _prepared_text(event: DataPrepared) -> str:
    made = event.blocks - event.cached_blocks
    how = [f"{event.cached_blocks} from the cache"] if event.cached_blocks else []
    how += [f"{made} made in {event.seconds:.1f} s"] if made else []
    verb = "has grown to" if event.version else "has"
    text = f"data: {event.split.replace('_', ' ')} {verb} {event.rows} rows in "
    text += f"{counted(event.blocks, 'block')} ({', '.join(how)})"
    return f"{text}; {bad_rows_text(event)}" if event.bad_rows else text


def brief(message: str) -> str:
    """A message that fits one screen: without a member's traceback, and not too long."""
    head, trace, frames = message.partition(_TRACE)
    if trace:
        message = head.rstrip()
        if not message or message.endswith(":"):  # an error of ours: nothing but a traceback
            last = (line for line in reversed(frames.splitlines()) if line[:1].strip())
            message = f"{message} {next(last, '')}".strip()
        if (place := _place(frames)) is not None:
            message += f"\n  at {place}"
    lines = [
        line if len(line) <= _WIDEST else f"{line[:_WIDEST]} …" for line in message.split("\n")
    ]
    if len(lines) > MOST_LINES:
        more = len(lines) - MOST_LINES + 1
        lines = [*lines[: MOST_LINES - 1], f"… and {more} more lines: --debug shows them"]
    return "\n".join(lines)


def _place(frames: str) -> str | None:
    """The last line of the user's own code in a traceback, else the last of all."""
    found = list(_FRAME.finditer(frames))
    theirs = [f for f in found if not any(part in f["file"] for part in _NOT_THEIRS)]
    if not found:
        return None
    last = (theirs or found)[-1]
    code = f": {last['code']}" if last["code"] else ""
    return f"{last['file']}:{last['line']} in {last['name']}{code}"
