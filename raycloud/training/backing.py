"""Whom a member backs up, and who backs it up: what they tell each other during a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from raycloud.errors import TransportError
from raycloud.sync.notes import Kind, Note
from raycloud.training.primary import Primary
from raycloud.training.tail import Tail

if TYPE_CHECKING:
    from raycloud.clock import Clock


class Link(Protocol):
    """What carries notes; see `sync.notes.Notes`."""

    def say(self, *notes: Note) -> None:
        """Send these, in this order."""
        ...

    def hear(self, timeout_s: float = 0.0) -> list[Note]:
        """What has come, in order."""
        ...


class Backing:
    """Whom a member of a generation backs up, and who backs it up.

    Args:
        most: Micro-batches of its tail.
        clock: For the seconds.
        abandoned: Says that the generation is over.

    Attributes:
        backup: The way to its backup; None: nobody is there.
        primary: The way to whom it backs up; None: likewise.
        own_s: What a micro-batch took it last; None: not known.
        tail: Its own.
    """

    def __init__(self, *, most: int, clock: Clock, abandoned: Callable[[], bool]) -> None:
        """Nobody is there yet."""
        self.most, self.clock, self.abandoned = most, clock, abandoned
        self.backup: Link | None = None
        self.primary: Link | None = None
        self.own_s: float | None = None
        self.tail = Tail(clock)
        self._far = Primary()

    def tell(self, notes: Sequence[Note]) -> None:
        """Tell the backup, if it is there."""
        if (backup := self.backup) is None:
            return
        try:
            backup.say(*notes)
        except TransportError:  # who hears it finds that out, too, and forsakes the tail
            self.backup = None

    def answer(self, notes: Sequence[Note]) -> None:
        """The backup has said these: called in the thread that hears it.

        Raises:
            TransportError: It cannot be answered.
        """
        for note in notes:
            if note.kind is Kind.STARTED:
                self.tail.started(note.step, note.index, note.seconds)
            elif note.kind is Kind.DONE:
                counts = self.tail.done(note.step, note.index)
                kind = Kind.TAKEN if counts else Kind.REFUSED
                if (backup := self.backup) is not None:  # another thread may forsake it
                    backup.say(Note(kind, note.step, note.index))

    def hear(self, timeout_s: float = 0.0) -> dict[int, bool]:
        """What the primary has said; of each that it has answered, whether it counts here.

        Raises:
            TransportError: It is gone.
        """
        if self.primary is None:
            raise TransportError("the member that is backed up is not connected")
        answers: dict[int, bool] = {}
        for note in self.primary.hear(timeout_s):
            if note.kind in {Kind.TAKEN, Kind.REFUSED}:
                answers[note.index] = note.kind is Kind.TAKEN
            else:
                self._far.heard(note, self.clock.monotonic_s())
        return answers

    def late(self, step: int, *, busy: int = 0) -> tuple[int, int] | None:
        """What of the primary's step is to be computed here as well; see `Primary.next`."""
        return self._far.next(step, self.own_s, self.clock.monotonic_s(), busy=busy)

    def start(self, step: int, index: int, count: int) -> None:
        """A pass of so many micro-batches is computed now, `index` its first.

        Raises:
            TransportError: The primary cannot be told.
        """
        self._far.started(index)
        self._say(Note(Kind.STARTED, step, index, count, count * (self.own_s or 0.0)))

    def done(self, step: int, index: int) -> None:
        """Its result is there.

        Raises:
            TransportError: The primary cannot be told.
        """
        self._say(Note(Kind.DONE, step, index))

    def _say(self, note: Note) -> None:
        if self.primary is None:
            raise TransportError("the member that is backed up is not connected")
        self.primary.say(note)
