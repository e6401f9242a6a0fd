"""Speculative execution: a worker that finishes early re-executes a straggler's last micro-batches.

Off unless `elastic.backup_micro_batches` says so (backup tasks: J. Dean, S. Ghemawat, MapReduce,
OSDI 2004). Each member, the *primary*, offers the last passes of its share, its *tail*, to one
other, its *backup*. What the primary has begun counts there, since it cannot be called back; what
it has not begun counts where it was done first. One lock in the primary's process decides, in a
thread that answers at once, so there is nothing to be agreed on. `compute.Share` goes by this.
"""

from __future__ import annotations

import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

from raycloud.errors import TransportError

if TYPE_CHECKING:
    from raycloud.clock import Clock
    from raycloud.net.stream import Stream

_NOTE = struct.Struct(">BQIId")  # kind, step, index, count, seconds
LOOK_UP_S = 0.05
_PATIENCE = 2.0  # times what the backup is likely to take
_WORTH = 1.5  # times what the backup takes itself: less is gained than was expected, mostly


class Kind(IntEnum):
    """What a note says. The first two, and the last two, come from the primary."""

    OFFERED = 1  # a pass of `count` micro-batches, `index` the first, may be computed there as well
    BEGUN = 2  # a pass is begun; before, each micro-batch took `seconds`
    STARTED = 3  # the backup computes this one, and is likely to take `seconds`
    DONE = 4  # it has the result
    TAKEN = 5  # the backup's result counts
    REFUSED = 6  # it does not: the primary has begun, or had, it itself


@dataclass(frozen=True, slots=True)
class Note:
    """What primary and backup tell each other of a step's pass, named by its first micro-batch."""

    kind: Kind
    step: int
    index: int
    count: int = 0
    seconds: float = 0.0


class Notes:
    """One end of a connection, its own from now on, that carries notes of fixed length.

    Several threads may `say`, one may `hear`; both raise `TransportError` where it broke.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._turn = threading.Lock()
        self._rest = b""
        self.close = stream.close

    def say(self, *notes: Note) -> None:
        """Send these, in this order."""
        told = (_NOTE.pack(n.kind, n.step, n.index, n.count, n.seconds) for n in notes)
        with self._turn:
            self._stream.give(b"".join(told))

    def hear(self, timeout_s: float = 0.0) -> list[Note]:
        """What has come, in order, waited for so long; `TransportError`: what came is no note."""
        come = self._rest + self._stream.some(timeout_s)
        whole = len(come) - len(come) % _NOTE.size
        self._rest = come[whole:]
        notes = []
        for kind, *fields in _NOTE.iter_unpack(come[:whole]):
            if kind not in iter(Kind):
                raise TransportError(f"a note of kind {kind} came, which is none")
            notes.append(Note(Kind(kind), *fields))
        return notes


class Tail:
    """What of a primary's step its backup may compute as well, and whose result counts.

    Two threads call it: the one that computes, and one that hears the backup. `waited_s` are the
    seconds that `begin` has waited, all together.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._step = -1
        self._open: set[int] = set()
        self._elsewhere: set[int] = set()
        self._started: dict[int, tuple[float, float]] = {}  # when, and how long it likely takes
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
        """Whether the primary is to compute `index`, of the tail or not, which then counts there.

        Where the backup is at it, and likely to have it before the primary would in `own_s` (None:
        not known), it is waited for, until the generation is `abandoned` or that takes twice as
        long as it is likely to. Then both compute it.
        """
        with self._changed:
            began_s = until_s = self._clock.monotonic_s()
            if index in self._started:
                started_s, likely_s = self._started[index]
                if own_s is None or started_s + likely_s < began_s + own_s:
                    until_s = started_s + _PATIENCE * likely_s
            while index in self._started and index in self._open:
                left_s = until_s - self._clock.monotonic_s()
                if left_s <= 0.0 or abandoned():
                    break
                self._changed.wait(min(left_s, LOOK_UP_S))
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


def ring(nodes: Sequence[str], size: int) -> tuple[int, ...]:
    """For each rank the one that it backs up: on another node, unless one has more than half.

    A machine that is slow is slow for all that run on it. All know it by arithmetic: in the order
    of `nodes` (by rank; empty where unknown), as many further as the largest node has members.

    >>> ring((), 3), ring(("a", "a", "b", "b"), 4), ring((), 1)
    ((1, 2, 0), (2, 3, 0, 1), (0,))
    """
    order = sorted(range(size), key=lambda rank: (nodes[rank] if nodes else "", rank))
    most = max(Counter(nodes).values(), default=1)
    further = 1 if most == size else most
    after = {rank: order[(at + further) % size] for at, rank in enumerate(order)}
    return tuple(after[rank] for rank in range(size))


class Primary:
    """What a backup knows of its primary: how far that is in its step, and when it will be done."""

    def __init__(self) -> None:
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

        That is where here, after `busy` other micro-batches of `own_s` each (None: not known), it
        is there before. Returns its first micro-batch, and how many it has.
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


class Backing:
    """A member's two roles in a generation: the primary of its backup, the backup of its primary.

    Attributes:
        most: Micro-batches of its tail.
        backup: The way to its backup; None: nobody is there.
        primary: The way to whom it backs up; None: likewise.
        own_s: What a micro-batch took it last; None: not known.
    """

    def __init__(self, *, most: int, clock: Clock, abandoned: Callable[[], bool]) -> None:
        self.most, self.clock, self.abandoned = most, clock, abandoned
        self.backup: Notes | None = None
        self.primary: Notes | None = None
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
        """The backup has said these, as its thread hears; `TransportError`: it cannot be told."""
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

        Like `start` and `done`, raises `TransportError` where the primary is gone.
        """
        answers: dict[int, bool] = {}
        for note in self._connected().hear(timeout_s):
            if note.kind in {Kind.TAKEN, Kind.REFUSED}:
                answers[note.index] = note.kind is Kind.TAKEN
            else:
                self._far.heard(note, self.clock.monotonic_s())
        return answers

    def late(self, step: int, *, busy: int = 0) -> tuple[int, int] | None:
        """What of the primary's step is to be computed here as well; see `Primary.next`."""
        return self._far.next(step, self.own_s, self.clock.monotonic_s(), busy=busy)

    def start(self, step: int, index: int, count: int) -> None:
        """A pass of so many micro-batches is computed now, `index` its first."""
        self._far.started(index)
        likely_s = count * (self.own_s or 0.0)
        self._connected().say(Note(Kind.STARTED, step, index, count, likely_s))

    def done(self, step: int, index: int) -> None:
        """Its result is there."""
        self._connected().say(Note(Kind.DONE, step, index))

    def _connected(self) -> Notes:
        if self.primary is None:
            raise TransportError("the member that is backed up is not connected")
        return self.primary
