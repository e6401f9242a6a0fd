"""How a run is going, in one line: plain, or a rich renderable with a bar. Prints nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from raycloud.events import (
    CheckpointPublished,
    DataPrepared,
    DataPreparing,
    Evaluated,
    Event,
    GenerationFormed,
    MemberFailed,
    MemberLost,
    Noticed,
    RunStarted,
    StopRequested,
)
from raycloud.report import rates
from raycloud.report.data import prepared_text
from raycloud.report.figures import byte_count, duration, figure, printable_line

if TYPE_CHECKING:
    from rich.text import Text

    from raycloud.report.tally import Tally

_BAR_CELLS = 12


def progress_text(tally: Tally, total_steps: int | None = None) -> str:
    """One plain line: step, loss, samples/s, time left, members, bytes, generation."""
    return " · ".join([_where(tally, total_steps), *_details(tally, total_steps)])


def progress_renderable(tally: Tally, total_steps: int | None = None) -> Text:
    """The same line with a bar, for a terminal; cut where the terminal ends, never wrapped."""
    from rich.text import Text  # noqa: PLC0415 - only a terminal needs it

    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(_where(tally, total_steps), style="bold")
    if total_steps and tally.steps:
        done = min(_BAR_CELLS, _BAR_CELLS * tally.steps // total_steps)
        line.append(" " + "━" * done, style="green")
        line.append("━" * (_BAR_CELLS - done), style="bright_black")
    for detail in _details(tally, total_steps):
        line.append(" · ", style="bright_black")
        line.append(detail)
    return line


def note(event: Event) -> str | None:
    """The line that stays on the screen after an event, for the events that deserve one."""
    text = ""
    match event:
        case RunStarted(resumed_from_step=int(step)):
            text = f"going on from the checkpoint of step {step}"
        case DataPreparing() if event.member == 0:  # every member waits for the same
            text = f"preparing the data, for {event.seconds:.0f} s by now"
        case DataPrepared():
            text = prepared_text(event)
        case GenerationFormed():
            text = f"generation {event.generation} from step {event.first_step}: "
            text += f"{_workers(len(event.members))}, shares {' '.join(map(str, event.shares))}"
        case MemberLost():
            text = f"lost member {event.member}: {event.reason}"
        case MemberFailed():
            text = f"member {event.member} failed: {event.error}: {event.message}"
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
        case _:
            return None
    return printable_line(text)


def metrics_text(metrics: Mapping[str, float] | Mapping[str, float | None]) -> str:
    """Metrics by name in one line."""
    return printable_line(" · ".join(f"{name} {figure(x)}" for name, x in metrics.items()))


def _where(tally: Tally, total_steps: int | None) -> str:
    if tally.steps or tally.members:
        return f"step {tally.steps}/{total_steps}" if total_steps else f"step {tally.steps}"
    if tally.awaited:
        return f"starting: {len(tally.ready)} of {_workers(len(tally.awaited))} ready"
    return "starting"


def _details(tally: Tally, total_steps: int | None) -> list[str]:
    if not tally.points:
        return []
    loss = tally.points[-1].loss
    parts = [] if math.isnan(loss) else [f"loss {figure(loss)}"]
    rate = rates.recent(tally)
    if rate is not None:
        parts.append(f"{figure(rate[1])} samples/s")
    if rate is not None and total_steps and rate[0] > 0 and total_steps > tally.steps:
        parts.append(f"{duration((total_steps - tally.steps) / rate[0])} left")
    parts.append(_workers(len(tally.members)))
    parts.append(f"{byte_count(tally.spent.bytes_sent)} sent")
    parts.append(f"generation {tally.generation}")
    return parts


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"
