"""How runs stand, for people and for programs: one run as a page, several as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raycloud.report.figures import byte_count, duration, figure, printable_line

if TYPE_CHECKING:
    from raycloud.report.standing import Card

FORMAT = 1

_HEAD = (
    "run", "status", "step", "loss", "samples/s", "left", "workers", "recoveries", "checkpoint",
    "cost",
)  # fmt: skip
_MINUTE_S = 60.0
_WORDS = 2  # columns that are words, and stand to the left


@dataclass(frozen=True, kw_only=True, slots=True)
class Listed:
    """A run in a list.

    Attributes:
        id: What it is called in `raycloud status`, `logs` and `stop`.
        card: How it stands.
        place: Where its driver is, for people.
    """

    id: str
    card: Card
    place: str = ""

    def to_record(self) -> dict[str, Any]:
        """JSON-ready values."""
        return {"id": self.id, "place": self.place, **self.card.to_record()}


def record_of(runs: Sequence[Listed], place: str) -> dict[str, Any]:
    """The list as JSON-ready values; `place` says whose it is."""
    return {"format": FORMAT, "place": place, "runs": [run.to_record() for run in runs]}


def listed_text(runs: Sequence[Listed], place: str, now_t: float) -> str:
    """A line for each run."""
    if not runs:
        return f"{printable_line(place)}: no runs"
    rows = [_HEAD, *(_row(run, now_t) for run in runs)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [printable_line(place), ""]
    for row in rows:
        cells = [
            cell.ljust(width) if at < _WORDS else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(("  " + "  ".join(cells)).rstrip())
    return "\n".join(lines)


def standing_text(run: Listed, now_t: float) -> str:
    """How one run stands."""
    card = run.card
    rows = [
        ("error", card.error or ""),
        ("job", card.job),
        ("run", card.run if card.run != run.id else ""),
        ("loss", "" if card.loss is None else figure(card.loss)),
        ("speed", _speed(card)),
        ("workers", _workers(card)),
        ("recoveries", card.recoveries_text),
        ("checkpoint", _checkpoint(card, now_t)),
        ("exchanged", f"{byte_count(card.bytes_sent)} sent" if card.bytes_sent else ""),
        ("cost so far", "" if card.cost is None else figure(card.cost)),
        ("run directory", card.directory + (f" on {run.place}" if run.place else "")),
        ("as of", "" if card.has_ended else ago(now_t - card.t)),
    ]
    shown = [(label, printable_line(text)) for label, text in rows if text]
    width = max(len(label) for label, _ in shown) + 2
    title = printable_line(f"{run.id} {card.status}: step {_step(card)}")
    return "\n".join([title, "", *(f"  {label:<{width}}{text}" for label, text in shown)])


def ago(seconds: float) -> str:
    """How long ago something was.

    >>> ago(0.4), ago(12.3), ago(3725.0), ago(2.6 * 86400)
    ('just now', '12 s ago', '1:02:05 ago', '2 d ago')
    """
    if seconds < 1:
        return "just now"
    days = int(seconds // 86_400)
    if days > 1:
        return f"{days} d ago"
    return f"{duration(seconds) if seconds >= _MINUTE_S else f'{seconds:.0f} s'} ago"


def _row(run: Listed, now_t: float) -> tuple[str, ...]:
    card = run.card
    saved = "-"
    if card.checkpoint_t is not None:
        saved = f"{card.checkpoint_step}, {ago(now_t - card.checkpoint_t)}"
    name = run.id if run.id.endswith(card.run) else f"{run.id} ({card.run})"
    return tuple(
        printable_line(cell)
        for cell in (
            name,
            card.status,
            _step(card),
            figure(card.loss),
            figure(card.samples_per_s),
            "-" if card.left_s is None else duration(card.left_s),
            str(card.workers),
            card.recoveries_text,
            saved,
            figure(card.cost),
        )
    )


def _step(card: Card) -> str:
    return f"{card.step}/{card.steps}" if card.steps else str(card.step)


def _speed(card: Card) -> str:
    parts = []
    if card.samples_per_s is not None:
        parts.append(f"{figure(card.samples_per_s)} samples/s")
    if card.left_s is not None:
        parts.append(f"{duration(card.left_s)} left")
    return " · ".join(parts)


def _workers(card: Card) -> str:
    if not card.members:
        return f"{card.ready} of {card.workers} ready" if card.workers else ""
    numbers = " ".join(map(str, card.members))
    shares = " ".join(map(str, card.shares))
    return f"{card.workers} (members {numbers}, shares {shares}) · generation {card.generation}"


def _checkpoint(card: Card, now_t: float) -> str:
    if card.checkpoint_t is None:
        return "none"
    return f"after step {card.checkpoint_step}, {ago(now_t - card.checkpoint_t)}"
