"""Local steps: what a member computes of a round, step by step, without a word to the others.

What fails is computed again as in any step (`step.compute`), but from where its own step began:
what was computed of the round before that stays.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from raycloud.errors import DivergedError, InternalError
from raycloud.step.collate import PartialStep
from raycloud.step.commit import REMEDY, name_samples, not_finite_ids
from raycloud.step.compute import FailedPass, compute_again, failed_pass, skip
from raycloud.step.contract import RaisedError

if TYPE_CHECKING:
    from raycloud.order import Round, StepSpan
    from raycloud.step.collate import Collate, Pass, StepWork
    from raycloud.step.replica import Replica


def begin_round(replica: Replica, whole: Round) -> None:
    """Begin to compute a round, or go on with what is kept of it."""
    if replica.rounds is None:
        raise InternalError(f"step {whole.step} was to begin a round, and there are none")
    replica.broken, replica.local = None, True
    if replica.kept is None:
        replica.told = False
        replica.stage()
        replica.kept = PartialStep(step=whole.step)
    else:
        replica.settle()  # what is kept moves the parameters at once
        replica.state.resume()
    replica.rounds.start()


def compute_step(
    replica: Replica, work: StepWork, at: int, whole: Round, collate: Collate
) -> float:
    """Compute this member's part of step number `at` of a round, and take that step by it.

    Returns the norm of its own gradient; a member without the state takes no step.

    Raises:
        DivergedError: That is not finite.
        TaskError: The task fails on a micro-batch each time, and none is skipped.
    """
    span = whole.spans[at]
    kept, rounds = replica.kept, replica.rounds
    if kept is None or rounds is None:
        raise InternalError(f"step {span.step} was to be computed in no round")
    if replica.following is None:
        rounds.foretell(at, whole, kept.weight + work.weight)
        with replica.waiting():
            rounds.before_step(at, kept, replica.forward.loss)
    replica.kept = kept.and_also(work, within=whole)
    own = _OwnStep(replica, work, kept.weight, span, len(whole.micro_batches), collate)
    try:
        own.compute()
    finally:
        replica.forward.randomness.release()
    replica.synchronize()
    if replica.following is not None:
        return float("nan")
    weight = replica.kept.weight - kept.weight
    norm = rounds.mean_gradient(weight, replica.clip_norm)
    if weight > 0.0 and not math.isfinite(norm):
        error = DivergedError(
            f"the norm of a worker's own gradient is {norm} at step {span.step}", hint=REMEDY
        )
        some = [whole.micro_batches[index] for index in work.indices]
        raise name_samples(error, [i for one in some for i in not_finite_ids(one, collate)])
    replica.settle()
    rounds.take_step(span.step, at)
    with replica.waiting():
        rounds.after_step(at, whole, replica.kept, replica.forward.loss)
    return norm


class _OwnStep:
    """A step of a round as one member computes it, from where it began as often as it fails."""

    def __init__(
        self,
        replica: Replica,
        work: StepWork,
        weight: float,
        span: StepSpan,
        count: int,
        collate: Collate,
    ) -> None:
        self._replica, self._work, self._collate = replica, work, collate
        self._weight, self._span, self._count = weight, span, count
        self._terms = [t.clone() for t in (*replica.statistics.terms, replica.forward.loss)]

    def compute(self) -> None:
        """All of it; see `compute.compute_again` for what fails."""
        replica, span = self._replica, self._span
        for failed in self._work.failed:
            skip(replica, span.step, failed, self._collate)
        if (trouble := self._try(self._work.passes)) is not None:
            compute_again(replica, span, self._collate, trouble, self._again)

    def _try(self, passes: tuple[Pass, ...]) -> FailedPass | None:
        replica = self._replica
        try:
            replica.forward.compute(passes, self._collate, self._count)
        except RaisedError as error:
            return failed_pass(replica.forward.at, error)
        assert replica.kept is not None  # noqa: S101 - it is being computed
        replica.kept = replace(
            replica.kept, weight=self._weight + sum(one.weight for one in passes)
        )
        return None

    def _again(self, size: int) -> FailedPass | None:
        replica, forward = self._replica, self._replica.forward
        replica.gradients.take()
        for term, before in zip(
            (*replica.statistics.terms, forward.loss), self._terms, strict=True
        ):
            term.copy_(before)
        skipped = () if replica.kept is None else replica.kept.skipped
        todo = [m for one in self._work.passes for m in one.micro_batches]
        todo = [m for m in todo if m.index not in skipped]
        passes: list[Pass] = []
        try:
            for start in range(0, len(todo), size):
                forward.at = tuple(todo[start : start + size])
                passes += self._collate.passes(forward.at, size)
        except RaisedError as error:
            return failed_pass(forward.at, error)
        return self._try(tuple(passes))
