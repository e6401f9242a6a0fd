"""A run that is being watched: what a terminal page says of it, from its log alone."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raycloud.events import (
    DataPrepared,
    DataPreparing,
    GenerationFormed,
    MemberDone,
    MemberFailed,
    MemberLeaving,
    MemberLost,
    MemberReady,
    MemberSpawned,
    RunFinished,
    RunStarted,
    StepsCommitted,
)
from raycloud.report.figures import printable_line
from raycloud.report.follow import total_steps
from raycloud.report.progress import note
from raycloud.report.standing import Card, Identity, card_of
from raycloud.report.tally import Tally

if TYPE_CHECKING:
    from pathlib import Path

    from raycloud.events import Event
    from raycloud.spec.job import Job

_MOST_NOTES = 200


@dataclass(slots=True)
class Member:
    """One member as it was last heard of.

    Attributes:
        state: `starting`, `waiting for data`, `ready`, `training`, `done`, `lost` or `failed`.
        share: Its micro-batches per step in the newest generation; None outside of it.
        step: The step after the last one that it reported.
        compute_s: Seconds of computing per step in its newest report.
        exchange_s: Seconds of waiting for the exchange per step in it.
        heard_t: Unix seconds of its newest word.
    """

    state: str = "starting"
    node: str = ""
    share: int | None = None
    step: int | None = None
    compute_s: float | None = None
    exchange_s: float | None = None
    heard_t: float = 0.0


class Watched:
    """The fold of a log for a page; knows no clock and no terminal.

    Args:
        directory: The run directory.
    """

    def __init__(self, directory: Path) -> None:
        """Nothing has happened."""
        self.directory = directory
        self.tally = Tally()
        self.members: dict[int, Member] = {}
        self.notes: deque[tuple[float, str]] = deque(maxlen=_MOST_NOTES)
        self.job: Job | None = None  # once its file is there; it says how many steps there are
        self.last_t: float | None = None
        self._prepared: set[tuple[str, int]] = set()

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
        self.tally.add(t, event)
        self.last_t = t
        self._member(t, event)
        text = ended_text(event) if isinstance(event, RunFinished) else note(event)
        if text is None or self._known(event):
            return None
        self.notes.append((t, text))
        return text

    def _known(self, event: Event) -> bool:
        """Every member tells how the data was prepared; one of them is enough."""
        if not isinstance(event, DataPrepared):
            return False
        told = (event.split, event.version)
        known = told in self._prepared
        self._prepared.add(told)
        return known

    def _member(self, t: float, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._start(event)
            return
        if isinstance(event, GenerationFormed):
            self._form(event)
            return
        number = getattr(event, "member", None)
        if not isinstance(number, int):
            return
        member = self.members.setdefault(number, Member())
        member.heard_t = t
        match event:
            case MemberSpawned():
                member.node = event.node or member.node
            case DataPreparing():
                member.state = "waiting for data"
            case MemberReady():
                member.state, member.node = "ready", event.node or member.node
            case StepsCommitted():
                steps = max(1, event.last_step - event.first_step)
                member.state, member.step = "training", event.last_step
                member.compute_s = event.compute_s / steps
                member.exchange_s = event.exchange_s / steps
            case MemberDone():
                member.state, member.step = "done", event.step
            case MemberLeaving():
                member.state = "leaving"
            case MemberLost():
                member.state, member.share = "lost", None
            case MemberFailed():
                member.state, member.share = "failed", None
            case _:
                pass

    def _start(self, event: RunStarted) -> None:
        """Members are new, unless they have outlived their driver."""
        if not event.taken_over:
            self.members.clear()
            self._prepared.clear()

    def _form(self, event: GenerationFormed) -> None:
        for member in self.members.values():
            member.share = None
        for number, share in zip(event.members, event.shares, strict=False):
            member = self.members.setdefault(number, Member())
            member.state, member.share = "training", share


def ended_text(event: RunFinished) -> str:
    """The note on the end of a run."""
    text = f"{event.status} after step {event.steps}"
    return printable_line(f"{text}: {event.error}" if event.error else text)


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
