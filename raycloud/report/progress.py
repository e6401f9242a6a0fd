"""How a run is going, in one line: plain, or a rich renderable with a bar. Prints nothing."""

from __future__ import annotations

from collections.abc import Mapping
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
    Observed,
    Printed,
    Recovered,
    RolledBack,
    RunStarted,
    StepNotFinite,
    StopRequested,
)
from raycloud.report.data import prepared_text
from raycloud.report.figures import byte_count, duration, figure, printable_line
from raycloud.report.standing import card_of
from raycloud.report.told import brief

if TYPE_CHECKING:
    from rich.text import Text

    from raycloud.report.standing import Card
    from raycloud.report.tally import Tally

_BAR_CELLS = 12


def progress_text(tally: Tally, total_steps: int | None = None) -> str:
    """One plain line: step, loss, samples/s, time left, members, bytes, generation."""
    return card_text(_now(tally, total_steps))


def progress_renderable(tally: Tally, total_steps: int | None = None) -> Text:
    """The same line with a bar, for a terminal; cut where the terminal ends, never wrapped."""
    return card_renderable(_now(tally, total_steps))


def card_text(card: Card) -> str:
    """How a run stands as one plain line."""
    return " · ".join([_where(card), *_details(card)])


def card_renderable(card: Card) -> Text:
    """The same line with a bar, for a terminal; cut where the terminal ends, never wrapped."""
    from rich.text import Text  # noqa: PLC0415 - only a terminal needs it

    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(_where(card), style="bold")
    if card.steps and card.step:
        done = max(0, min(_BAR_CELLS, _BAR_CELLS * card.step // card.steps))
        line.append(" " + "━" * done, style="green")
        line.append("━" * (_BAR_CELLS - done), style="bright_black")
    for detail in _details(card):
        line.append(" · ", style="bright_black")
        line.append(detail)
    return line


def note(event: Observed) -> str | None:
    """The line that stays on the screen after an event, for the events that deserve one."""
    text = ""
    match event:
        case RunStarted(taken_over=(_, *_)):
            text = f"going on with {_workers(len(event.taken_over))} that outlived their driver"
        case RunStarted(resumed_from_step=int(step)):
            text = f"going on from the checkpoint of step {step}"
        case DataPreparing() if event.member == 0:  # every member waits for the same
            text = f"preparing the data, for {event.seconds:.0f} s by now"
        case DataPrepared():
            text = prepared_text(event)
        case GenerationFormed():
            text = f"generation {event.generation} from step {event.first_step}: "
            text += f"{_workers(len(event.members))}, shares {' '.join(map(str, event.shares))}"
        case MemberLost() | MemberLeaving() | ExchangeBroken() | StepNotFinite() | MemberFailed():
            text = _trouble(event)
        case RolledBack() | Recovered():
            text = _again(event)
        case CheckpointPublished():
            text = f"checkpoint of step {event.step} ({byte_count(event.state_bytes)})"
        case Evaluated() if event.metrics:
            text = f"held out after step {event.step}: {metrics_text(event.metrics)}"
        case StopRequested():
            text = f"stopping after a checkpoint: {event.reason}"
        case Noticed() | Printed():
            text = _said(event)
        case _:
            return None
    return printable_line(text)


def _said(event: Noticed | Printed) -> str:
    if isinstance(event, Printed):
        return f"member {event.member} prints: {event.text}"
    who = "" if event.member is None else f"member {event.member}: "
    detail = ", ".join(f"{name} {value}" for name, value in event.detail.items())
    return f"note: {who}{event.what}" + (f" ({detail})" if detail else "")


def _again(event: RolledBack | Recovered) -> str:
    if isinstance(event, RolledBack):
        there = f"the checkpoint of step {event.step}" if event.step else "the beginning"
        return f"no sound state is left: going back to {there}"
    seconds = event.resumed_s - event.detected_s
    return f"went on after {seconds:.1f} s, {event.lost_steps} steps lost"


def _trouble(
    event: MemberLost | MemberLeaving | ExchangeBroken | StepNotFinite | MemberFailed,
) -> str:
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


def metrics_text(metrics: Mapping[str, float] | Mapping[str, float | None]) -> str:
    """Metrics by name in one line."""
    return printable_line(" · ".join(f"{name} {figure(x)}" for name, x in metrics.items()))


def _now(tally: Tally, total_steps: int | None) -> Card:
    """The line says how it stood at the last event, not how long ago that was."""
    session = tally.session
    now_t = (session.ended_t or session.started_t) if session else 0.0
    return card_of(tally, now_t=now_t, steps=total_steps)


def _where(card: Card) -> str:
    if card.step or card.members:
        return f"step {card.step}/{card.steps}" if card.steps else f"step {card.step}"
    if card.workers:
        return f"starting: {card.ready} of {_workers(card.workers)} ready"
    return "starting"


def _details(card: Card) -> list[str]:
    if not card.step and card.loss is None:
        return []
    parts = [] if card.loss is None else [f"loss {figure(card.loss)}"]
    if card.samples_per_s is not None:
        parts.append(f"{figure(card.samples_per_s)} samples/s")
    if card.left_s is not None:
        parts.append(f"{duration(card.left_s)} left")
    parts.append(_workers(card.workers))
    parts.append(f"{byte_count(card.bytes_sent)} sent")
    if card.generation is not None:
        parts.append(f"generation {card.generation}")
    if card.cost is not None:
        parts.append(f"cost {figure(card.cost)}")
    return parts


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"
