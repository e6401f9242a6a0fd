"""Retry: a member's part of a step, computed again after a pass of it failed.

A fault of the machine does not come twice, an error of the task does. So all is computed from the
start, each micro-batch alone, and one that fails once more is named, and skipped where the job
allows that. Where memory ran out, passes become smaller instead; a micro-batch is never cut.
"""

from __future__ import annotations

import gc
import traceback
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from raycloud.errors import InternalError, TaskError
from raycloud.step.contract import DrawnError, RaisedError
from raycloud.step.device import failure

if TYPE_CHECKING:
    from raycloud.order import MicroBatch, Skip, StepSpan
    from raycloud.step.collate import Collate, Pass
    from raycloud.step.replica import Replica

_TWICE = 2
_MOST_IDS = 16  # of a micro-batch's samples that are named
_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC")


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


def compute_again(replica: Replica, span: StepSpan, collate: Collate, first: FailedPass) -> None:
    """Compute this member's part of the step from the start, after `first`.

    `TaskError`: a micro-batch failed twice, and may not be skipped; it names its samples.
    """
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
            if many == 1 and failed[mine[0].index] >= _TWICE:
                skip(replica, span.step, (mine[0], trouble.error), collate)
        trouble = _compute_anew(replica, span, collate, size)


def _compute_anew(
    replica: Replica, span: StepSpan, collate: Collate, size: int
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
