"""Compute: a member's share of a step, without what its backup has done, with what it does as one.

Forward passes, and all backward ones but the last; then that one, whose gradients travel bucket by
bucket as soon as they are there. A fault of the machine does not come twice, an error of the task
does. So what fails is computed from the start, each micro-batch alone, and one that fails once more
is named, and skipped where the job allows that. Where memory ran out, passes become smaller.
"""

from __future__ import annotations

import gc
import math
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from raycloud.errors import InternalError, TaskError, TransportError
from raycloud.net.transport import Abandoned
from raycloud.step.collate import PartialStep
from raycloud.step.contract import DrawnError, RaisedError, call
from raycloud.step.device import failure
from raycloud.step.forward import PassQueue
from raycloud.step.speculation import LOOK_UP_S, Kind, Note

if TYPE_CHECKING:
    from raycloud.order import MicroBatch, Round, Skip, StepSpan
    from raycloud.step.collate import Collate, Pass, StepWork
    from raycloud.step.replica import Replica
    from raycloud.step.speculation import Backing
    from raycloud.sync.gradients import Gradients

_MOST_IDS = 16  # of a micro-batch's samples that are named
_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC")


def compute(replica: Replica, work: StepWork, collate: Collate) -> StepWork:
    """Forward passes of this member's part of a step, and all backward passes but the last.

    That is `work`, beside what is kept of the same step; `collate` makes smaller passes, where one
    fails or turns out not exact. Returns what it has computed in the end: `work`, but for what
    counts where it is backed up. `TaskError`: the task fails on a micro-batch each time, and none
    is skipped.
    """
    span, forward = work.span, replica.forward
    replica.local = False
    kept = (replica.kept or PartialStep(step=span.step)).and_also(work)
    if leaves_out := replica.leaves_out(span.step):
        work = replace(work, passes=(), failed=())
    share = Share(replica, work, collate)
    if replica.kept is None:
        replica.told = False
        replica.stage()
    else:
        replica.state.resume()
    if replica.tables is not None:
        replica.tables.read_as_of(span.step)
    replica.kept, replica.last = kept, None
    if leaves_out:
        forward.loss.fill_(math.nan)  # so that all hear of it, also who does not know
    try:
        for failed in work.failed:
            skip(replica, span.step, failed, collate)
        try:
            replica.last = forward.all_but_last(share, collate, len(span.micro_batches))
            work = share.settle()
        except RaisedError as error:
            trouble = failed_pass(forward.at, error)
            work = share.settle(whole=False)
            compute_again(replica, span, collate, trouble)
    except BaseException as error:
        forward.randomness.release()
        if isinstance(error, TransportError):  # a server's: what is computed is not known
            replica.discard()
        raise
    replica.broken = share.broken
    return work


def backward(
    replica: Replica, span: StepSpan | Round, collate: Collate, scale: float | None
) -> None:
    """The step's last backward pass: each bucket of gradients travels once it is full.

    What breaks meanwhile `commit.collect` raises: what is begun is computed. `TaskError`: see
    `compute`. The `scale` is one over the step's weight; None: nothing travels.
    """
    last, replica.last = replica.last, None
    if scale is not None:
        replica.begin_exchange(scale)
    try:
        if last is not None:
            call("the backward pass", (last[1] * last[0].weight).backward)
    except RaisedError as error:
        last = None  # its graph, which may be what memory ran out for
        compute_again(replica, span, collate, failed_pass(replica.forward.at, error))
    finally:
        replica.forward.randomness.release()


@dataclass(frozen=True, slots=True)
class _Extra:
    """What was computed of a step apart from the rest, for another member: it may not count."""

    passes: tuple[Pass, ...]
    gradients: Gradients
    terms: Sequence[torch.Tensor]
    loss: torch.Tensor
    seconds: float = 0.0


class Share(PassQueue):
    """A member's share of a step: without what its backup has done, with what it does as a backup.

    Only a step that nothing is kept of is backed up: after a loss it goes by what was dealt. Nor is
    a model's whose other buffers change, since they cannot be kept apart. A backup computes apart
    from its own sum, and adds what its owner has answered that it counts: its own gradients would
    be waited for anyway.

    Attributes:
        broken: It is not known whether something that was computed here counts: there is no sum.
    """

    def __init__(self, replica: Replica, work: StepWork, collate: Collate) -> None:
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

        Unless all of its own, the `whole`, is computed, something has failed, and it helps nobody.
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
        extras: dict[int, _Extra] = {}
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
                self._answered(backing, extras, LOOK_UP_S)
            self._idle_s += backing.clock.monotonic_s() - began_s
        except TransportError as error:
            self.broken = error if extras else None
            self._lose(backing, error)

    def _answered(self, backing: Backing, extras: dict[int, _Extra], timeout_s: float) -> None:
        """Add what counts here, forget what does not."""
        for index, counts in backing.hear(timeout_s).items():
            if (extra := extras.pop(index, None)) is None:
                continue
            if counts:
                self._taken += extra.passes
                _add(self._replica, extra)
            else:
                self._idle_s += extra.seconds  # it was for nothing

    def _extra(self, backing: Backing, some: tuple[MicroBatch, ...]) -> _Extra | None:
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

    def _computed(self, some: tuple[MicroBatch, ...]) -> _Extra:
        """In a frame of its own, which a failure leaves, with all memory that it holds."""
        replica = self._replica
        passes = self._collate.passes(some, replica.fuse)
        replica.forward.compute(passes, self._collate, len(self._work.span.micro_batches))
        replica.synchronize()
        return _take(replica, passes)


def _take(replica: Replica, passes: tuple[Pass, ...]) -> _Extra:
    """What has been computed of a step, which is then forgotten."""
    terms = [term.clone() for term in replica.statistics.terms]
    taken = _Extra(passes, replica.gradients.take(), terms, replica.forward.loss.clone())
    for term in (*replica.statistics.terms, replica.forward.loss):
        term.zero_()
    return taken


def _add(replica: Replica, extra: _Extra) -> None:
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


@dataclass(frozen=True, slots=True)
class FailedPass:
    """A pass that failed; the error holds no memory of it any more."""

    micro_batches: tuple[MicroBatch, ...]
    error: RaisedError

    @property
    def memory(self) -> bool:
        """Whether there was not enough of it."""
        cause = self.error.__cause__
        if isinstance(cause, MemoryError | torch.OutOfMemoryError):
            return True
        return isinstance(cause, RuntimeError) and any(word in str(cause) for word in _MEMORY)


def failed_pass(micro_batches: tuple[MicroBatch, ...], error: RaisedError) -> FailedPass:
    """What failed; the tensors that the failing code held are let go of.

    `RaisedError`: the device itself is of no use any more, no sample is to blame.
    """
    one: BaseException | None = error
    while one is not None:
        traceback.clear_frames(one.__traceback__)
        one = one.__cause__
    found = FailedPass(micro_batches, error)
    if found.memory:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    elif failure(error):
        raise error
    return found


def compute_again(
    replica: Replica,
    span: StepSpan | Round,
    collate: Collate,
    first: FailedPass,
    again: Callable[[int], FailedPass | None] | None = None,
) -> None:
    """Compute this member's part of the step from the start, after `first`.

    `again` does that, in passes of so many micro-batches at most; None: the step is no part of a
    round. `TaskError`: a micro-batch failed twice, and may not be skipped; it names its samples.
    """
    again = again or partial(_compute_anew, replica, span, collate)
    failed: Counter[int] = Counter()
    trouble: FailedPass | None = first
    while trouble is not None:
        mine, size = trouble.micro_batches, 1
        many, detail = len(mine), {"step": span.step}
        if isinstance(trouble.error, DrawnError):
            what = "numpy's or Python's random generator was drawn from by a pass: it is seeded "
            what += "for each micro-batch from now on, and passes are not fused"
            replica.notice(what, detail)
        elif trouble.memory and many > 1:
            replica.fuse = size = many // 2
            what = f"memory ran out: passes are of at most {size} micro-batches from now on"
            replica.notice(what, {**detail, "was": many, "error": str(trouble.error)})
        else:
            failed.update(m.index for m in mine)
            if many == 1 and failed[mine[0].index] > 1:
                skip(replica, span.step, (mine[0], trouble.error), collate)
        trouble = again(size)


def _compute_anew(
    replica: Replica, span: StepSpan | Round, collate: Collate, size: int
) -> FailedPass | None:
    """Compute all that is kept, and not skipped, in passes of at most `size`; what failed."""
    kept, forward = replica.kept, replica.forward
    if kept is None:
        raise InternalError(f"nothing of step {span.step} is to be computed again")
    replica.state.discard()
    replica.stage()
    replica.gradients.restart()
    mine = set(kept.micro_batches) - set(kept.skipped)
    todo = tuple(m for m in span.micro_batches if m.index in mine)
    passes: list[Pass] = []
    try:
        for at in range(0, len(todo), size):
            forward.at = todo[at : at + size]
            passes += collate.passes(forward.at, size)
        forward.compute(passes, collate, len(span.micro_batches))
    except RaisedError as error:
        return failed_pass(forward.at, error)
    replica.kept = replace(kept, weight=sum(one.weight for one in passes))
    return None


def skip(
    replica: Replica, step: int, failed: tuple[MicroBatch, RaisedError], collate: Collate
) -> None:
    """Leave a micro-batch that has failed each time out of the step, where the job allows that.

    `TaskError`: it does not, or too many were skipped already; it names the samples.
    """
    one, error = failed
    where, errors = described(one, step, collate), replica.errors
    if errors.on_error == "stop":
        raise TaskError(
            f"{error.message}, each time, on {where}",
            hint="mend the task or these samples, or write errors.on_error skip",
        ) from error.__cause__
    assert replica.kept is not None  # noqa: S101 - it is being computed
    replica.kept = replica.kept.without(one.index)
    many = skipped(replica.history.skips) + len(replica.kept.skipped)
    if many > errors.most_skipped:
        raise TaskError(
            f"{error.message}, each time, on {where}: errors.most_skipped = {errors.most_skipped} "
            "micro-batches were skipped before",
            hint="mend the task or its data, or raise errors.most_skipped",
        ) from error.__cause__
    detail = {"step": step, "ids": list(collate.ids(one))}
    replica.notice(f"skipped {where}: {error.message}", detail)


def skipped(skips: tuple[Skip, ...]) -> int:
    """How many micro-batches were skipped."""
    return sum(not one.whole_step for one in skips)


def described(one: MicroBatch, step: int, collate: Collate) -> str:
    """A micro-batch with its samples, as people read it."""
    ids = collate.ids(one)
    named = ", ".join(map(str, ids[:_MOST_IDS]))
    more = f" and {len(ids) - _MOST_IDS} more" if len(ids) > _MOST_IDS else ""
    return (
        f"micro-batch {one.index} of step {step} (epoch {one.epoch}, samples [{one.start}, "
        f"{one.stop}) of the sequence; ids {named}{more})"
    )
