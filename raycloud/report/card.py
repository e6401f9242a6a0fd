"""How a run stands, as a line in its log; and such a log turned back into the progress display.

A submitted job's log is text that anything may be printed to. A line `raycloud-card {json}` in it
is a `Card`; all other lines are for people, and pass through without secrets.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from raycloud.redact import redact_text
from raycloud.report.figures import printable
from raycloud.report.follow import Follower
from raycloud.report.progress import card_renderable, card_text
from raycloud.report.standing import FORMAT, Card, Identity, card_of

if TYPE_CHECKING:
    from raycloud.clock import Clock
    from raycloud.events import Observed
    from raycloud.report.tally import Tally
    from raycloud.spec.job import Job

__all__ = [
    "FORMAT",
    "PREFIX",
    "Card",
    "CardDisplay",
    "Identity",
    "card_of",
    "carded",
    "cards_shown",
    "followed",
    "parse_line",
    "to_line",
]

PREFIX = "raycloud-card "

_EVERY_S = 5.0
_MOST_LINE = 1 << 16  # characters: a longer line is no card


def to_line(card: Card) -> str:
    """The card as a line, without its newline; `parse_line` is its inverse."""
    text = json.dumps(card.to_record(), separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return PREFIX + text


def parse_line(line: str) -> Card | None:
    """The card in a line of a log; None if the line is no card that this version reads."""
    line = line.rstrip("\r\n")
    if not line.startswith(PREFIX) or len(line) > _MOST_LINE:
        return None
    try:
        record = json.loads(line.removeprefix(PREFIX))
        return Card.from_record(record) if isinstance(record, dict) else None
    except (ValueError, RecursionError):
        return None


@contextmanager
def carded(
    job: Job,
    clock: Clock,
    say: Callable[[str], None],
    *,
    note: Callable[[str], None] = lambda _: None,
    identity: Identity | None = None,
) -> Iterator[Callable[[Observed], None]]:
    """An observer that makes cards of a run's events, one every 5 s at most, and a last one.

    Args:
        job: What runs.
        clock: Where seconds come from.
        say: Prints a card's line.
        note: Prints a note for people.
        identity: Whose card it is.
    """

    def draw(tally: Tally, steps: int | None) -> None:
        now_t, unix_s = clock.monotonic_s(), clock.unix_s()
        say(to_line(card_of(tally, now_t=now_t, unix_s=unix_s, steps=steps, identity=identity)))

    follower = Follower(job, clock, say=note, draw=draw, every_s=_EVERY_S, only_steps=False)
    try:
        yield follower.see
    finally:
        follower.end(always=True)


class CardDisplay:
    """Takes a log's lines: cards become the progress display, other lines pass without secrets.

    Args:
        say: Shows a line that stays.
        draw: Shows how the run stands.
    """

    def __init__(self, *, say: Callable[[str], None], draw: Callable[[Card], None]) -> None:
        """Nothing has been seen yet."""
        self._say, self._draw = say, draw
        self.last: Card | None = None

    def see(self, line: str) -> None:
        """Take in a line, with or without its newline; a card with nothing new is not drawn."""
        card = parse_line(line)
        if card is None:
            self._say(printable(redact_text(line.rstrip("\r\n"))))
            return
        told, self.last = self.last, card
        if told is None or card_text(told) != card_text(card):
            self._draw(card)

    @property
    def ended(self) -> bool:
        """Whether the newest card is that of a run that has ended."""
        return self.last is not None and self.last.has_ended


@contextmanager
def cards_shown(*, plain: bool, say: Callable[[str], None]) -> Iterator[CardDisplay]:
    """A display for a log's lines.

    Args:
        plain: Cards become lines that stay; else one line that changes, on the terminal behind
            stderr, below the lines that stay.
        say: Prints a line, where it is plain.
    """
    if plain:
        yield CardDisplay(say=say, draw=lambda card: say(card_text(card)))
        return
    from rich.console import Console  # noqa: PLC0415 - only a terminal needs it
    from rich.live import Live  # noqa: PLC0415

    console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield CardDisplay(
            say=console.print,
            draw=lambda card: live.update(card_renderable(card), refresh=True),
        )


def followed(lines: Iterable[str], *, plain: bool, say: Callable[[str], None]) -> Card | None:
    """Show a log as it comes, to its end; the last card in it."""
    with cards_shown(plain=plain, say=say) as display:
        for line in lines:
            display.see(line)
        return display.last
