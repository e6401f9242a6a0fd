"""A run that is being watched: what a terminal page says of it, from its log alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from raycloud.report.fold import Fold
from raycloud.report.follow import total_steps
from raycloud.report.standing import Card, Identity, card_of

if TYPE_CHECKING:
    from pathlib import Path

    from raycloud.events import Event
    from raycloud.report.tally import Tally
    from raycloud.spec.job import Job


class Watched:
    """The fold of a log for a page; knows no clock and no terminal.

    Args:
        directory: The run directory.
        fold: What has been read of its log; None: nothing.
    """

    def __init__(self, directory: Path, fold: Fold | None = None) -> None:
        """Nothing has happened."""
        self.directory = directory
        self.fold = Fold() if fold is None else fold
        self.job: Job | None = None  # once its file is there; it says how many steps there are

    @property
    def tally(self) -> Tally:
        """See `Fold`."""
        return self.fold.tally

    @property
    def last_t(self) -> float | None:
        """See `Fold`."""
        return self.fold.last_t

    @property
    def ended(self) -> bool:
        """Whether the run has said its last word."""
        return self.tally.status != "unfinished"

    @property
    def steps(self) -> int | None:
        """Steps of the whole job; None where that is not known."""
        return total_steps(self.job, self.tally.epoch_samples) if self.job else None

    def card(self, now_t: float) -> Card:
        """How the run stands at `now_t` unix seconds; one that has ended stands still."""
        if self.ended and self.last_t is not None:
            now_t = self.last_t
        name = self.directory.name or str(self.directory)
        identity = Identity(run=name, directory=str(self.directory))
        return card_of(self.tally, now_t=now_t, steps=self.steps, identity=identity)

    def see(self, t: float, event: Event) -> str | None:
        """Take in what happened at `t` unix seconds; the note that it deserves, if any."""
        return self.fold.add(t, event)[1]


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
        self, watched: Watched, *, line: Callable[[Card], str], every_s: float, notes: bool
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
