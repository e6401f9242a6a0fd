"""Notes between two members, of which one backs up the other: small, of fixed length, at once.

A note says what it is, of which step and of which pass, by its first micro-batch. Nothing that
arrives is unpickled.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol

from raycloud.errors import TransportError

if TYPE_CHECKING:
    from raycloud.clock import Clock
    from raycloud.net.stream import Stream

_NOTE = struct.Struct(">BQIId")  # kind, step, index, count, seconds


class Kind(IntEnum):
    """What a note says. The first two, and the last two, come from the member that is backed up."""

    OFFERED = 1  # a pass of `count` micro-batches, `index` the first, may be computed there as well
    BEGUN = 2  # a pass is begun; before, each micro-batch took `seconds`
    STARTED = 3  # the backup computes this one, and is likely to take `seconds`
    DONE = 4  # it has the result
    TAKEN = 5  # the backup's result counts
    REFUSED = 6  # it does not: the member has begun, or had, it itself


@dataclass(frozen=True, slots=True)
class Note:
    """One of them."""

    kind: Kind
    step: int
    index: int
    count: int = 0
    seconds: float = 0.0


class Notes:
    """One end of a connection that carries them. Several threads may `say`, one may `hear`.

    Args:
        stream: It is this one's from now on.
    """

    def __init__(self, stream: Stream) -> None:
        """Nothing was said yet."""
        self._stream = stream
        self._stream.send_at_once()
        self._turn = threading.Lock()
        self._rest = b""

    def say(self, *notes: Note) -> None:
        """Send these, in this order.

        Raises:
            TransportError: The connection broke.
        """
        with self._turn:
            self._stream.give(
                b"".join(
                    _NOTE.pack(one.kind, one.step, one.index, one.count, one.seconds)
                    for one in notes
                )
            )

    def hear(self, timeout_s: float = 0.0) -> list[Note]:
        """What has come, in order; waits at most `timeout_s` for it.

        Raises:
            TransportError: The connection broke, or what came is no note.
        """
        come = self._rest + self._stream.some(timeout_s)
        whole = len(come) - len(come) % _NOTE.size
        self._rest = come[whole:]
        return [_note(*fields) for fields in _NOTE.iter_unpack(come[:whole])]

    def hang_up(self) -> None:
        """End the connection, which another thread hears and then closes."""
        self._stream.hang_up()

    def close(self) -> None:
        """End the connection; nobody hears it."""
        self._stream.close()


def _note(kind: int, step: int, index: int, count: int, seconds: float) -> Note:
    try:
        return Note(Kind(kind), step, index, count, seconds)
    except ValueError:
        raise TransportError(f"a note of kind {kind} came, which is none") from None


_LOOK_UP_S = 0.05
_PATIENCE = 2.0  # times what the backup is likely to take


class Tail:
    """What of a step its backup may compute as well.

    Two threads call it: the one that computes, and one that hears the backup.

    Args:
        clock: For the seconds that are waited.

    Attributes:
        waited_s: Seconds that `begin` has waited, all together.
    """

    def __init__(self, clock: Clock) -> None:
        """Nothing may be computed by anyone else."""
        self._clock = clock
        self._changed = threading.Condition()
        self._step = -1
        self._open: set[int] = set()
        self._elsewhere: set[int] = set()
        self._started: dict[
            int, tuple[float, float]
        ] = {}  # when, and how long it is likely to take
        self.waited_s = 0.0

    def offer(self, step: int, indices: Iterable[int]) -> None:
        """A step begins, of which these are the tail."""
        with self._changed:
            self._step, self._open = step, set(indices)
            self._elsewhere, self._started = set(), {}

    def started(self, step: int, index: int, seconds: float) -> None:
        """The backup computes `index`, and is likely to take `seconds`."""
        with self._changed:
            if step == self._step and index in self._open:
                self._started[index] = self._clock.monotonic_s(), seconds

    def done(self, step: int, index: int) -> bool:
        """The backup has computed `index`; whether that counts, and then it counts nowhere else."""
        with self._changed:
            counts = step == self._step and index in self._open
            if counts:
                self._open.discard(index)
                self._elsewhere.add(index)
            self._started.pop(index, None)
            self._changed.notify_all()
            return counts

    def forsaken(self) -> None:
        """The backup is gone: nothing that it has started is waited for."""
        with self._changed:
            self._started.clear()
            self._changed.notify_all()

    def begin(self, index: int, own_s: float | None, abandoned: Callable[[], bool]) -> bool:
        """Whether this member is to compute `index`, which then counts here.

        Where the backup is at it, and likely to have it before this member would, it is waited for:
        not longer than twice what it is likely to take. Then both compute it.

        Args:
            index: Of the tail or not.
            own_s: What this member is likely to take; None: it does not know.
            abandoned: Says that the generation is over.
        """
        with self._changed:
            began_s = self._clock.monotonic_s()
            until_s = self._worth_waiting(index, began_s, own_s)
            while index in self._started and index in self._open:
                left_s = until_s - self._clock.monotonic_s()
                if left_s <= 0.0 or abandoned():
                    break
                self._changed.wait(min(left_s, _LOOK_UP_S))
            self.waited_s += self._clock.monotonic_s() - began_s
            self._open.discard(index)
            return index not in self._elsewhere

    def all_elsewhere(self, indices: Iterable[int]) -> bool:
        """Whether all of these were done elsewhere; then nothing of the step is open any more."""
        with self._changed:
            over = self._elsewhere.issuperset(indices)
            if over:
                self._open.clear()
            return over

    def close(self) -> frozenset[int]:
        """Nothing of the step is open any more; which were done elsewhere."""
        with self._changed:
            self._open.clear()
            return frozenset(self._elsewhere)

    def _worth_waiting(self, index: int, now_s: float, own_s: float | None) -> float:
        """Until when the backup is waited for."""
        if index not in self._started:
            return now_s
        started_s, likely_s = self._started[index]
        if own_s is not None and started_s + likely_s >= now_s + own_s:
            return now_s
        return started_s + _PATIENCE * likely_s


_WORTH = 1.5  # times what the backup takes itself: less is gained than was expected, mostly


class Primary:
    """The member that is backed up, in the newest step of which it has told."""

    def __init__(self) -> None:
        """It has told nothing."""
        self._step = -1
        self._left: dict[int, int] = {}  # how many micro-batches a pass has, by its first one
        self._count, self._seconds, self._begun_s = 0, 0.0, 0.0

    def heard(self, note: Note, now_s: float) -> None:
        """It has told this."""
        if note.step != self._step:
            self._step, self._left, self._count = note.step, {}, 0
        if note.kind is Kind.OFFERED:
            self._left[note.index] = note.count
        elif note.kind is Kind.BEGUN:
            self._left.pop(note.index, None)
            self._count, self._seconds, self._begun_s = note.count, note.seconds, now_s

    def next(
        self, step: int, own_s: float | None, now_s: float, *, busy: int = 0
    ) -> tuple[int, int] | None:
        """The last pass that it has not begun, if it is worth while to compute that as well.

        Args:
            step: The present one.
            own_s: What a micro-batch takes here; None: not known.
            now_s: The present moment.
            busy: Micro-batches that are to be computed here before that.

        Returns:
            Its first micro-batch, and how many it has.
        """
        if own_s is None or step != self._step or not self._left:
            return None
        index, count = max(self._left.items())
        needed_s = own_s * (_WORTH * count + busy)
        return (index, count) if self.rest_s(now_s) > needed_s else None

    def started(self, index: int) -> None:
        """The backup computes this pass."""
        self._left.pop(index, None)

    def rest_s(self, now_s: float) -> float:
        """Seconds until it will have done all that the backup has not started.

        What it has begun shows how slow it is only once it takes longer than what was before.
        """
        if not self._count:
            return 0.0
        since_s = now_s - self._begun_s
        one_s = max(self._seconds, since_s / self._count)
        return max(self._count * one_s - since_s, 0.0) + sum(self._left.values()) * one_s


class Link(Protocol):
    """What carries notes; see `step.speculation.Notes`."""

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
