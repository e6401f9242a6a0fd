"""Speculative execution: a worker that finishes early re-executes a straggler's last micro-batches.

Off unless `elastic.backup_micro_batches` says so (backup tasks: J. Dean, S. Ghemawat, MapReduce,
OSDI 2004). Each member, the *primary*, offers the last passes of its share, its *tail*, to one
other, its *backup*. Whose result counts: the first one's, and once. What the primary has begun
counts there, since it cannot be called back; what it has not begun counts where it was done first.
So one lock in the primary's process decides, and there is nothing to be agreed on.

A backup computes apart from its own sum, and adds what its owner has answered that it counts: that
answers at once, in a thread of its own, and its own gradients would be waited for anyway.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol

from raycloud.errors import TransportError
from raycloud.net.transport import Abandoned
from raycloud.step.collate import PartialStep
from raycloud.step.contract import RaisedError, call_backward
from raycloud.step.forward import PassQueue
from raycloud.step.retry import Computing, failed_pass

if TYPE_CHECKING:
    import torch

    from raycloud.clock import Clock
    from raycloud.net.stream import Stream
    from raycloud.order import MicroBatch
    from raycloud.step.collate import Collate, Pass, StepWork
    from raycloud.step.stateful import CatchingUp
    from raycloud.step.statistics import RunningStatistics
    from raycloud.sync.gradients import Gradients

_NOTE = struct.Struct(">BQIId")  # kind, step, index, count, seconds
_LOOK_UP_S = 0.05
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
    """One end of a connection that carries notes. Several threads may `say`, one may `hear`.

    Notes are of fixed length, and nothing that arrives is unpickled.

    Args:
        stream: It is this one's from now on.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._stream.send_at_once()
        self._turn = threading.Lock()
        self._rest = b""

    def say(self, *notes: Note) -> None:
        """Send these, in this order; `TransportError`: the connection broke."""
        told = (_NOTE.pack(n.kind, n.step, n.index, n.count, n.seconds) for n in notes)
        with self._turn:
            self._stream.give(b"".join(told))

    def hear(self, timeout_s: float = 0.0) -> list[Note]:
        """What has come, in order; waits at most `timeout_s` for it.

        Raises:
            TransportError: The connection broke, or what came is no note.
        """
        come = self._rest + self._stream.some(timeout_s)
        whole = len(come) - len(come) % _NOTE.size
        self._rest = come[whole:]
        notes = []
        for kind, *fields in _NOTE.iter_unpack(come[:whole]):
            if kind not in iter(Kind):
                raise TransportError(f"a note of kind {kind} came, which is none")
            notes.append(Note(Kind(kind), *fields))
        return notes

    def hang_up(self) -> None:
        """End the connection, which another thread hears and then closes."""
        self._stream.hang_up()

    def close(self) -> None:
        """End the connection; nobody hears it."""
        self._stream.close()


class Tail:
    """What of a primary's step its backup may compute as well, and whose result counts.

    Two threads call it: the one that computes, and one that hears the backup.

    Args:
        clock: For the seconds that are waited.

    Attributes:
        waited_s: Seconds that `begin` has waited, all together.
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
        """Whether the primary is to compute `index`, which then counts there.

        Where the backup is at it, and likely to have it before the primary would, it is waited for:
        not longer than twice what it is likely to take. Then both compute it.

        Args:
            index: Of the tail or not.
            own_s: What the primary is likely to take; None: it does not know.
            abandoned: Says that the generation is over.
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


class Backing:
    """A member's two roles in a generation: the primary of its backup, the backup of its primary.

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
        """A pass of so many micro-batches is computed now, `index` its first.

        Raises:
            TransportError: The primary cannot be told.
        """
        self._far.started(index)
        likely_s = count * (self.own_s or 0.0)
        self._connected().say(Note(Kind.STARTED, step, index, count, likely_s))

    def done(self, step: int, index: int) -> None:
        """Its result is there; `TransportError`: the primary cannot be told."""
        self._connected().say(Note(Kind.DONE, step, index))

    def _connected(self) -> Notes:
        if self.primary is None:
            raise TransportError("the member that is backed up is not connected")
        return self.primary


@dataclass(frozen=True, slots=True)
class Extra:
    """A pass of another member's: it is computed, and does not count yet."""

    passes: tuple[Pass, ...]
    gradients: Gradients
    terms: Sequence[torch.Tensor]
    loss: torch.Tensor
    seconds: float = 0.0


class Speculating(Computing, Protocol):
    """The same of one that may have a backup, or be one."""

    statistics: RunningStatistics
    backing: Backing | None
    following: CatchingUp | None

    def synchronize(self) -> None:
        """Wait until all that was asked of the device is done."""


class Share(PassQueue):
    """A member's share of a step: without what its backup has done, with what it does as a backup.

    Only a step that nothing is kept of is backed up: after a loss it goes by what was dealt. Nor is
    a model's whose other buffers change, since they cannot be kept apart.

    Args:
        replica: What computes it.
        work: The part that is its own.
        collate: Makes what it computes beside that.

    Attributes:
        broken: It is not known whether something that was computed here counts: there is no sum.
    """

    def __init__(self, replica: Speculating, work: StepWork, collate: Collate) -> None:
        every = replica.forward.worth_computing(work.passes)
        super().__init__(every)
        self._replica, self._work, self._collate = replica, work, collate
        self._step, self._before = work.span.step, replica.kept
        self.broken: TransportError | None = None
        self._at: tuple[int, float] | None = None  # the pass begun: its micro-batches, since when
        self._taken: list[Pass] = []
        self._idle_s = 0.0
        self._last = False  # the last of this member's own is begun, and nothing follows
        self._notes: list[Note] = []
        self._waited_s = 0.0
        self._apart = replica.kept is None and not replica.statistics.changing
        self._backing = backing = replica.backing
        if backing is None:
            return
        offered = _tail(every, backing.most) if self._apart else {}
        self._notes = [Note(Kind.OFFERED, self._step, *one) for one in offered.items()]
        backing.tail.offer(self._step, offered)
        self._waited_s = backing.tail.waited_s
        self._listen(backing)

    def begin(self) -> Pass | None:
        """The next one that is to be computed here, and counts here."""
        if (backing := self._backing) is None:
            return super().begin()
        if self._at is not None:  # the pass that was begun is computed
            count, began_s = self._at
            backing.own_s = (backing.clock.monotonic_s() - began_s) / count
            self._at = None
        self._listen(backing)
        while (one := super().begin()) is not None:
            index, count = one.micro_batches[0].index, len(one.micro_batches)
            own_s = None if backing.own_s is None else count * backing.own_s
            if backing.tail.begin(index, own_s, backing.abandoned):
                begun = Note(Kind.BEGUN, self._step, index, count, backing.own_s or 0.0)
                backing.tell([*self._notes, begun])
                self._notes, self._at = [], (count, backing.clock.monotonic_s())
                return one
        return None

    def instead(self, passes: Iterable[Pass]) -> None:
        """See `PassQueue.instead`."""
        self._at = None
        super().instead(passes)

    def more(self) -> bool:
        """Whether something may follow, of this member's own or of another's."""
        if (backing := self._backing) is None:
            return super().more()
        if not backing.tail.all_elsewhere(one.micro_batches[0].index for one in self._left):
            return True
        self._listen(backing)
        if self._late(backing, busy=1 if self._at is None else self._at[0]) is not None:
            return True
        self._left.clear()
        self._at, self._last = None, True  # its backward pass is still to come: it is not timed
        return False

    def settle(self, *, whole: bool = True) -> StepWork:
        """What of the step is this member's in the end; called once.

        Args:
            whole: All of its own is computed; else something has failed, and it helps nobody.
        """
        backing, replica = self._backing, self._replica
        if backing is None:
            return self._work
        if whole and not self._last:
            self._back_up(backing)
        elsewhere = backing.tail.close()
        own = [p for p in self._work.passes if p.micro_batches[0].index not in elsewhere]
        idle_s = self._idle_s + backing.tail.waited_s - self._waited_s
        settled = replace(self._work, passes=(*own, *self._taken), idle_s=idle_s)
        if elsewhere or self._taken:
            skipped = () if replica.kept is None else replica.kept.skipped
            kept = (self._before or PartialStep(step=self._step)).and_also(settled)
            replica.kept = replace(kept, skipped=skipped)
        return settled

    def _listen(self, backing: Backing) -> None:
        """Take what the primary has told: nothing that it answers is waited for here."""
        if backing.primary is None:
            return
        try:
            backing.hear()
        except TransportError as error:
            self._lose(backing, error)

    def _lose(self, backing: Backing, error: TransportError) -> None:
        backing.primary = None
        what = "the member that this one backs up is not heard any more"
        self._replica.notice(what, {"step": self._step, "error": str(error)})

    def _late(self, backing: Backing, *, busy: int = 0) -> tuple[int, int] | None:
        """The pass that this member had better compute of another's share; None: there is none."""
        if backing.primary is None or not self._apart or self._replica.following is not None:
            return None
        return backing.late(self._step, busy=busy)

    def _back_up(self, backing: Backing) -> None:
        """Compute what is late elsewhere, and wait for the word which of it counts."""
        extras: dict[int, Extra] = {}
        every = self._work.span.micro_batches
        try:
            while (late := self._late(backing)) is not None:
                index, count = late
                backing.start(self._step, index, count)
                extra = self._extra(backing, every[index : index + count])
                if extra is None:
                    break
                extras[index] = extra
                backing.done(self._step, index)
                self._answered(backing, extras, 0.0)
            began_s = backing.clock.monotonic_s()
            while extras:
                if backing.abandoned():
                    raise Abandoned("the generation was abandoned before it was known what counts")
                self._answered(backing, extras, _LOOK_UP_S)
            self._idle_s += backing.clock.monotonic_s() - began_s
        except TransportError as error:
            self.broken = error if extras else None
            self._lose(backing, error)

    def _answered(self, backing: Backing, extras: dict[int, Extra], timeout_s: float) -> None:
        """Add what counts here, forget what does not."""
        for index, counts in backing.hear(timeout_s).items():
            if (extra := extras.pop(index, None)) is None:
                continue
            if counts:
                self._taken += extra.passes
                _add(self._replica, extra)
            else:
                self._idle_s += extra.seconds  # it was for nothing

    def _extra(self, backing: Backing, some: tuple[MicroBatch, ...]) -> Extra | None:
        """Compute them, apart; None: that fails here, and is left to their owner."""
        replica, began_s = self._replica, backing.clock.monotonic_s()
        own = _take(replica, ())
        try:
            extra = self._computed(some)
        except RaisedError as error:
            failed_pass(some, error)
            what = f"a backup could not compute micro-batch {some[0].index}, left to its owner"
            replica.notice(what, {"step": self._step, "error": str(error)})
            return None
        finally:
            _take(replica, ())  # what a failure has left
            _add(replica, own)
        seconds = backing.clock.monotonic_s() - began_s
        backing.own_s = seconds / len(some)
        return replace(extra, seconds=seconds)

    def _computed(self, some: tuple[MicroBatch, ...]) -> Extra:
        """In a frame of its own, which a failure leaves, with all memory that it holds."""
        replica = self._replica
        passes = self._collate.passes(some, replica.fuse)
        todo = PassQueue(replica.forward.worth_computing(passes))
        last = replica.forward.all_but_last(todo, self._collate, len(self._work.span.micro_batches))
        if last is not None:
            call_backward(last[1] * last[0].weight)
        replica.synchronize()
        return _take(replica, passes)


def _take(replica: Speculating, passes: tuple[Pass, ...]) -> Extra:
    """What has been computed of a step, which is then forgotten."""
    terms = [term.clone() for term in replica.statistics.terms]
    taken = Extra(passes, replica.gradients.take(), terms, replica.forward.loss.clone())
    for term in (*replica.statistics.terms, replica.forward.loss):
        term.zero_()
    return taken


def _add(replica: Speculating, extra: Extra) -> None:
    replica.gradients.add(extra.gradients)
    for term, more in zip(replica.statistics.terms, extra.terms, strict=True):
        term.add_(more)
    replica.forward.loss += extra.loss


def _tail(passes: Sequence[Pass], most: int) -> dict[int, int]:
    """The last of these with at most so many micro-batches: the first of each, and their number.

    Each weighs something, and has micro-batches that follow each other.
    """
    tail: dict[int, int] = {}
    for one in reversed(passes):
        first, last = one.micro_batches[0].index, one.micro_batches[-1].index
        count = len(one.micro_batches)
        if sum(tail.values()) + count > most or one.weight == 0.0 or last - first + 1 != count:
            break
        tail[first] = count
    return tail
