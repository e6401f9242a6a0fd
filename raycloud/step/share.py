"""A member's share of a step: without what its backup has done, with what it does as a backup.

Who is done while the one that it backs up is late computes the last of that one's micro-batches,
apart from its own sum, and says so. They are added once their owner has answered that they count;
it answers at once, in a thread of its own, and its own gradients would be waited for anyway.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from raycloud.errors import TransportError
from raycloud.net.transport import Abandoned
from raycloud.step.contract import RaisedError, call_backward
from raycloud.step.partial import Kept, Todo
from raycloud.step.retry import trouble_of
from raycloud.step.speculation import Kind, Note

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

    from raycloud.order import MicroBatch
    from raycloud.step.collate import Collate, Pass, StepWork
    from raycloud.step.replica import Replica
    from raycloud.step.speculation import Backing
    from raycloud.sync.gradients import Gradients

_LOOK_UP_S = 0.05


@dataclass(frozen=True, slots=True)
class Extra:
    """A pass of another member's: it is computed, and does not count yet."""

    passes: tuple[Pass, ...]
    gradients: Gradients
    terms: Sequence[torch.Tensor]
    loss: torch.Tensor
    seconds: float = 0.0


class Share(Todo):
    """What a member computes of a step.

    Only a step that nothing is kept of is backed up: after a loss it goes by what was dealt. Nor is
    a model's whose other buffers change, since they cannot be kept apart.

    Args:
        replica: What computes it.
        work: The part that is its own.
        collate: Makes what it computes beside that.

    Attributes:
        broken: It is not known whether something that was computed here counts: there is no sum.
    """

    def __init__(self, replica: Replica, work: StepWork, collate: Collate) -> None:
        """Nothing is begun."""
        every = replica.forward.worth_computing(work.passes)
        super().__init__(every)
        self._replica, self._work, self._collate = replica, work, collate
        self._step, self._before = work.span.step, replica.kept
        self.broken: TransportError | None = None
        self._settled: StepWork | None = None
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
        self._measure(backing)
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
        """See `Todo.instead`."""
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
        """What of the step is this member's in the end.

        Args:
            whole: All of its own is computed; else something has failed, and it helps nobody.
        """
        backing, replica = self._backing, self._replica
        if backing is None or self._settled is not None:
            return self._settled or self._work
        if whole and not self._last:
            self._back_up(backing)
        elsewhere = backing.tail.close()
        own = [p for p in self._work.passes if p.micro_batches[0].index not in elsewhere]
        idle_s = self._idle_s + backing.tail.waited_s - self._waited_s
        self._settled = replace(self._work, passes=(*own, *self._taken), idle_s=idle_s)
        if elsewhere or self._taken:
            skipped = () if replica.kept is None else replica.kept.skipped
            kept = (self._before or Kept(step=self._step)).and_also(self._settled)
            replica.kept = replace(kept, skipped=skipped)
        return self._settled

    def _measure(self, backing: Backing) -> None:
        """The pass that was begun is computed."""
        if self._at is not None:
            count, began_s = self._at
            backing.own_s = (backing.clock.monotonic_s() - began_s) / count
            self._at = None

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
        try:
            passes = self._collate.passes(some, replica.fuse)
            count = len(self._work.span.micro_batches)
            extra = compute_apart(replica, passes, self._collate, count)
        except RaisedError as error:
            trouble_of(some, error)
            what = f"a backup could not compute micro-batch {some[0].index}, left to its owner"
            replica.notice(what, {"step": self._step, "error": str(error)})
            return None
        seconds = backing.clock.monotonic_s() - began_s
        backing.own_s = seconds / len(some)
        return replace(extra, seconds=seconds)


def compute_apart(
    replica: Replica, passes: tuple[Pass, ...], collate: Collate, count: int
) -> Extra:
    """Compute passes without adding them to what the replica has of the step.

    Args:
        replica: What computes; nothing of it travels yet.
        passes: Of one step.
        collate: Makes smaller ones.
        count: Micro-batches of the step.

    Raises:
        RaisedError: The task did; nothing of it remains.
    """
    own = _take(replica, ())
    try:
        todo = Todo(replica.forward.worth_computing(passes))
        last = replica.forward.all_but_last(todo, collate, count)
        if last is not None:
            call_backward(last[1] * last[0].weight)
        replica.synchronize()
        return _take(replica, passes)
    finally:
        _take(replica, ())  # what a failure has left
        _add(replica, own)


def _take(replica: Replica, passes: tuple[Pass, ...]) -> Extra:
    """What has been computed, which is then forgotten."""
    terms = [term.clone() for term in replica.statistics.terms]
    taken = Extra(passes, replica.gradients.take(), terms, replica.forward.loss.clone())
    for term in (*replica.statistics.terms, replica.forward.loss):
        term.zero_()
    return taken


def _add(replica: Replica, extra: Extra) -> None:
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
