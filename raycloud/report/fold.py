"""The fold of a run's log: events in, one after another, and out comes how the run stands.

There is this one only: what `status`, `report`, `compare`, `audit` and `watch` say of a run, and
what a start that goes on with it has to know, are views of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

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
from raycloud.report.progress import note
from raycloud.report.tally import Tally

if TYPE_CHECKING:
    from raycloud.events import Event
    from raycloud.report.tally import Point

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


@dataclass(eq=False)
class Fold:
    """What a log comes to.

    Attributes:
        tally: Steps, losses, seconds, bytes, recoveries.
        members: Each as it was last heard of, since the last start.
        notes: The newest lines for people, with unix seconds.
        last_t: Unix seconds of the newest event.
        words: By member, the number of its newest word.
        skips: By member, what it has reported that did not count, since the last start.
    """

    tally: Tally = field(default_factory=Tally)
    members: dict[int, Member] = field(default_factory=dict)
    notes: deque[tuple[float, str]] = field(default_factory=deque)
    last_t: float | None = None
    words: dict[int, int] = field(default_factory=dict)
    skips: dict[int, list[Mapping[str, Any]]] = field(default_factory=dict)
    _prepared: set[tuple[str, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Of one that was read back, too, the notes are bounded."""
        self.notes = deque(self.notes, maxlen=_MOST_NOTES)

    def add(
        self, t: float, event: Event, word: tuple[int, int] | None = None
    ) -> tuple[Point | None, str | None]:
        """Take in an entry of the log.

        Returns:
            The new point of the loss curve, and the note that the event deserves, if any.
        """
        self.last_t = t
        if word is not None:
            self.words[word[0]] = word[1]
        point = self.tally.add(t, event)
        if isinstance(event, StepsCommitted):  # most are
            self._computes(t, event)
            return point, None
        self._member(t, event)
        text = ended_text(event) if isinstance(event, RunFinished) else note(event)
        if text is None or self._known(event):
            return point, None
        self.notes.append((t, text))
        return point, text

    def _known(self, event: Event) -> bool:
        """Every member tells how the data was prepared; one of them is enough."""
        if not isinstance(event, DataPrepared):
            return False
        told = (event.split, event.version)
        known = told in self._prepared
        self._prepared.add(told)
        return known

    def _computes(self, t: float, event: StepsCommitted) -> None:
        member = self.members.get(event.member)
        if member is None:
            member = self.members[event.member] = Member()
        steps = max(1, event.last_step - event.first_step)
        member.heard_t, member.state, member.step = t, "training", event.last_step
        member.compute_s = event.compute_s / steps
        member.exchange_s = event.exchange_s / steps
        if event.skips:
            self.skips.setdefault(event.member, []).extend(event.skips)

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
            self.skips.clear()
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
