"""The page of a run that is watched, as the lines of a terminal. Prints nothing."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from rich.text import Text

from raycloud.report.figures import byte_count, duration, figure, printable_line, sparkline
from raycloud.report.progress import metrics_text
from raycloud.report.rates import rate_curve

if TYPE_CHECKING:
    from raycloud.report.fold import Member
    from raycloud.report.standing import Card
    from raycloud.report.watched import Watched

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


def _title(card: Card, width: int) -> Text:
    line = Text()
    line.append(printable_line(card.job or card.run), style="bold")
    line.append(f"  {card.status}", style=f"bold {_STYLES.get(card.status, '')}".strip())
    where = printable_line(card.directory)
    line.append(where.rjust(max(len(where) + 2, width - line.cell_len)), style=_DIM)
    return line


def _bar(card: Card) -> list[Text]:
    line = Text(f"step {card.step}" + (f"/{card.steps}" if card.steps else ""))
    if card.steps:
        done = max(0, min(_BAR_CELLS, _BAR_CELLS * card.step // card.steps))
        line.append("  " + "━" * done, style="green")
        line.append("━" * (_BAR_CELLS - done), style=_DIM)
        line.append(f"  {100 * card.step // card.steps}%")
    if card.left_s is not None and card.status in {"running", "stopping"}:
        line.append(f"  {duration(card.left_s)} left")
    return [line]


def _facts(watched: Watched, card: Card) -> list[Text]:
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


def _generation(card: Card) -> str:
    parts = [f"{card.generation}", "1 worker" if card.workers == 1 else f"{card.workers} workers"]
    parts.append(f"recoveries: {card.recoveries_text}")
    parts.append(f"{byte_count(card.bytes_sent)} sent")
    if card.cost is not None:
        parts.append(f"cost {figure(card.cost)}")
    return " · ".join(parts)


def _members(watched: Watched, *, most: int) -> list[Text]:
    if not watched.fold.members:
        return []
    head = "  member  state             share    step    computing     exchange  node"
    rows = [_member(number, member) for number, member in sorted(watched.fold.members.items())]
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
        for t, text in list(watched.fold.notes)[-room:]
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
