"""Commit: from the exchanged gradients to the end of a step, the same on every member.

Where all is not well, which one number in the last message says, the members tell each other over
the control lane what they could not compute, and exchange the step once more by the weight that is
left. A step whose loss or gradient is not finite changes nothing: it ends the run, is passed over,
or lets all go back to a checkpoint and on without the step that made it so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from raycloud.errors import DivergedError, InternalError, TaskError
from raycloud.net.transport import Abandoned
from raycloud.order import ERROR, NAN, Skip
from raycloud.step.compute import skipped
from raycloud.step.device import tensors_in
from raycloud.step.stateful import Commit
from raycloud.step.tables import LostRowsError

if TYPE_CHECKING:
    from torch import nn

    from raycloud.net.lane import Lane
    from raycloud.order import MicroBatch, Round, StepSpan
    from raycloud.step.collate import Collate, StepWork
    from raycloud.step.replica import Replica
    from raycloud.sync.gradients import Exchanged

_MOST_IDS = 16  # samples that are named
REMEDY = "lower the learning rate, set clip_norm, or start from an earlier checkpoint"


class RollbackError(Exception):
    """This generation ends here: its members are to go back to a checkpoint, and meet anew.

    The `step` is not finite; `left_out` is not to change anything on the second way, if one is.
    """

    def __init__(self, step: int, why: str, left_out: int | None) -> None:
        super().__init__(why)
        self.step, self.why, self.left_out = step, why, left_out


@dataclass(frozen=True, kw_only=True, slots=True)
class Owed:
    """The loss of the step committed last, until the lane has told all members' sum.

    Attributes:
        loss: Sum of weight * loss over this member's own micro-batches, of `own_weight`.
        weight: Weight of the whole step.
    """

    loss: float
    own_weight: float
    weight: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What becomes of a step.

    Attributes:
        exchanged: What the exchange brought, the second one where there were two.
        weight: The weight of all that counts.
        owed: The part of the loss that is to be told; None: there is none.
        skips: What does not count.
        left_out: Indices of micro-batches that the others stand for.
        why: Why the step changes nothing, as a sentence; empty where it counts.
    """

    exchanged: Exchanged
    weight: float
    owed: Owed | None
    skips: tuple[Skip, ...] = ()
    left_out: tuple[int, ...] = ()
    why: str = ""


def find_outcome(
    replica: Replica,
    work: StepWork,
    weight: float,
    lane: Lane,
    collate: Collate,
    *,
    behind: bool,
) -> Outcome:
    """Wait for the exchange of a step that all have computed, whose whole weight is `weight`.

    Raises:
        DivergedError: Loss or gradient are not finite, and the job does not go on without them.
        RollbackError: They are not finite, and the job goes back then.
        TaskError: More was skipped than the job allows.
        TransportError: The exchange broke, or was abandoned; what is computed is kept.
    """
    span = work.span
    try:
        exchanged = collect(replica, span.step, lane.abandoned)
    except DivergedError as error:  # on every member, since all have the same sum
        raise _explained(error, work, lane, collate) from None
    left_out: tuple[int, ...] = ()
    skips: tuple[Skip, ...] = ()
    why = not_finite = ""
    if exchanged.astray:
        left_out, weight, loss, known = _ask_others(replica, span, lane)
        if known:
            why, skips = "the run has gone back because of it", _whole(span)
        elif not math.isfinite(loss):
            not_finite = f"the loss is {loss}"
        else:
            skips = _skips(replica, span, left_out)
            if weight > 0.0:
                replica.exchange_anew(1.0 / weight, behind=behind)
                exchanged = collect(replica, span.step, lane.abandoned)
                if exchanged.astray:
                    raise InternalError(f"step {span.step} is astray once more")
            else:
                why = "all of its micro-batches were skipped"
    if not (why or not_finite or math.isfinite(exchanged.norm)):
        not_finite = f"the gradient's norm is {exchanged.norm}"
    if not_finite:
        why, skips = not_finite, _not_finite(replica, span, not_finite)
    if why:
        return Outcome(exchanged=exchanged, weight=0.0, owed=None, skips=skips, why=why)
    loss = replica.loss_sum()
    if not math.isfinite(loss):
        raise DivergedError(
            f"the loss of step {span.step} is {loss}",
            hint="lower the learning rate, or look at the samples of this step",
        )
    own_weight = 0.0 if replica.kept is None else replica.kept.weight
    owed = Owed(loss=loss, own_weight=own_weight, weight=weight)
    return Outcome(exchanged=exchanged, weight=weight, owed=owed, skips=skips, left_out=left_out)


def collect(replica: Replica, step: int, abandoned: Callable[[], bool]) -> Exchanged:
    """Wait for the exchange; the mean gradients are then in place, clipped.

    They are not where it is `astray`, or its norm not finite and `errors.on_nan` not stop.

    Raises:
        DivergedError: A gradient is not finite, and that ends the run.
        TransportError: The exchange broke, or was abandoned; what is computed is kept.
    """
    if replica.broken is not None:
        raise replica.broken
    began_s = replica.clock.monotonic_s()
    if replica.following is not None:
        replica.following.catch_up(replica.gradients.arrived)
    replica.statistics.collect(abandoned)
    clipped = replica.tables if replica.clip_norm is not None else None
    exchanged = replica.gradients.collect(abandoned, clipped.norm if clipped else None)
    ended_s, begun_s = replica.clock.monotonic_s(), replica.gradients.begun_s
    overlap_s = replica.take_hidden_s() + (0.0 if begun_s is None else max(0.0, began_s - begun_s))
    exchanged = replace(exchanged, exchange_s=ended_s - began_s, overlap_s=overlap_s)
    finite = math.isfinite(exchanged.norm)
    if exchanged.astray or (not finite and replica.errors.on_nan != "stop"):
        return exchanged
    if not finite:
        what = "norm of a round's update" if replica.local else "gradient's norm"
        raise DivergedError(f"the {what} is {exchanged.norm} at step {step}", hint=REMEDY)
    if replica.clip_norm is not None and not replica.local:  # else each has clipped its own
        replica.gradients.clip(exchanged.norm, replica.clip_norm)
        if replica.tables is not None:
            replica.tables.clip(exchanged.norm, replica.clip_norm)
    return exchanged


def enter_tables(replica: Replica, generation: int, step: int, lane: Lane) -> None:
    """Agree with the others on the tables' servers, and say to these where all go on.

    Raises:
        RollbackError: They do not have the rows any more.
        TransportError: A shard has no server that all reach.
    """
    if replica.tables is None:
        return
    try:
        replica.tables.enter(generation, step, lane.gather)
    except LostRowsError as error:
        why = f"servers do not have the tables' rows any more ({error.message})"
        raise RollbackError(step, why, None) from error


def finish(replica: Replica, work: StepWork, outcome: Outcome, *, tells: bool) -> None:
    """Commit a step, or go past it, which one of the members `tells`."""
    if not outcome.why:
        commit(replica, work, outcome.left_out, outcome.skips)
        return
    step = work.span.step
    if replica.following is not None:
        replica.kept = None
        replica.following.keep_nothing(step, outcome.skips, len(work.span.spans))
    else:
        replica.discard()
        replica.history.skips += outcome.skips
        if replica.tables is not None:
            replica.tables.pass_over(step)
    if tells:
        replica.notice(f"step {step} was skipped: {outcome.why}", {"step": step})


def commit(
    replica: Replica,
    work: StepWork,
    left_out: tuple[int, ...] = (),
    skips: tuple[Skip, ...] = (),
) -> None:
    """The step counts, but for `left_out`, as `skips` say; without a state it is kept."""
    replica.kept = None
    replica.settle()
    replica.gradients.commit()
    span, count = work.span, len(work.span.micro_batches)
    done = Commit(
        step=span.step,
        count=count,
        steps=len(span.spans),
        local=replica.local,
        left_out=left_out,
        skips=skips,
    )
    if replica.following is not None:
        replica.following.keep(done)
    else:
        replica.commit_parts(done)


def all_hold(exchanged: Exchanged, lane: Lane, *, behind: bool) -> bool:
    """Whether all members hold the next change, once a step is committed.

    Each has said it with its last gradients. Where one was late and has told so, that was long ago
    for the others, and the change may be what was made of it: they say it once more.
    """
    if exchanged.agreed or not exchanged.late:
        return exchanged.agreed
    [lack] = lane.sum([float(behind)])
    return lack == 0.0


def _explained(error: DivergedError, work: StepWork, lane: Lane, collate: Collate) -> DivergedError:
    """The error, with the samples that are not finite, of which each member looks at its own."""
    every = work.span.micro_batches
    flags = [0.0] * len(every)
    for index in work.indices:
        flags[index] = float(bool(not_finite_ids(every[index], collate)))
    found: list[int] = []
    for index, flag in enumerate(lane.sum(flags)):
        if flag and len(found) < _MOST_IDS:
            found += not_finite_ids(every[index], collate)
    return name_samples(error, found)


def name_samples(error: DivergedError, found: Sequence[int]) -> DivergedError:
    """The error, with the samples that hold values that are not finite; itself where none does."""
    if not found:
        return error
    named = ", ".join(map(str, found[:_MOST_IDS])) + (", ..." if len(found) > _MOST_IDS else "")
    return DivergedError(
        f"{error.message}: the data holds values that are not finite, in samples {named}",
        hint="mend these samples, leave them out, or write errors.on_nan skip",
    )


def not_finite_ids(one: MicroBatch, collate: Collate) -> list[int]:
    """Samples of a micro-batch that have a value that is not finite; none where it has no batch."""
    try:
        batch = collate.one(one).batch
    except TaskError:  # it is looked at after the fact, and the fact is what is told
        return []
    rows = torch.zeros(one.samples, dtype=torch.bool)
    for tensor in tensors_in(batch):
        if tensor.is_floating_point() or tensor.is_complex():
            bad = ~tensor.isfinite()
            per_sample = bad.dim() > 0 and len(bad) == one.samples
            rows |= bad.reshape(one.samples, -1).any(1) if per_sample else bad.any()
    return [number for number, row in zip(collate.ids(one), rows.tolist(), strict=True) if row]


def _ask_others(
    replica: Replica, span: StepSpan | Round, lane: Lane
) -> tuple[tuple[int, ...], float, float, bool]:
    """What all could not compute, the weight left, a loss that is not finite, and who leaves it.

    Buffers that began to change on a member are averaged by all from here on.
    """
    kept, loss = replica.kept, replica.loss_sum()
    if kept is None:
        raise InternalError(f"step {span.step} was exchanged, but nothing is kept of it")
    own = [float(index in kept.skipped) for index in range(len(span.micro_batches))]
    begun = replica.statistics.begun
    buffers = [float(number in begun) for number in range(replica.statistics.others)]
    knows = float(replica.leaves_out(span.step))
    told = [*buffers, *own, kept.weight, 0.0 if math.isfinite(loss) else loss, knows]
    *flags, weight, loss, known = lane.sum(told)
    replica.average(number for number, flag in enumerate(flags[: len(buffers)]) if flag)
    left_out = tuple(k for k, flag in enumerate(flags[len(buffers) :]) if flag)
    return left_out, weight, loss, known > 0.0


def _skips(replica: Replica, span: StepSpan | Round, left_out: tuple[int, ...]) -> tuple[Skip, ...]:
    before, most = skipped(replica.history.skips), replica.errors.most_skipped
    if replica.following is None and before + len(left_out) > most:  # else the others know it
        raise TaskError(
            f"step {span.step} would skip {len(left_out)} micro-batches beside the {before} that "
            f"were skipped before, and errors.most_skipped is {most}",
            hint="mend the task or its data, or raise errors.most_skipped",
        )
    found = ((one.step, m) for one in span.spans for m in one.micro_batches if m.index in left_out)
    return tuple(
        Skip(step=step, epoch=m.epoch, start=m.start, stop=m.stop, why=ERROR) for step, m in found
    )


def _not_finite(replica: Replica, span: StepSpan | Round, why: str) -> tuple[Skip, ...]:
    errors, step = replica.errors, span.step
    if errors.on_nan == "stop":
        raise DivergedError(f"{why} at step {step}", hint=REMEDY)
    if errors.on_nan == "rollback" and replica.following is not None:
        raise Abandoned(f"{why} at step {step}: the others say so")
    known = replica.history.skips if replica.following is None else ()  # else the others know them
    before = {one.step for one in known if one.whole_step}
    in_a_row = 1
    while step - in_a_row in before:
        in_a_row += 1
    for many, most, field in (
        (in_a_row, errors.most_nan_in_a_row, "errors.most_nan_in_a_row"),
        (len(before) + 1, errors.most_skipped, "errors.most_skipped"),
    ):
        if many > most:
            raise DivergedError(
                f"{why} at step {step}, and {field} = {most} steps were skipped before",
                hint=f"{REMEDY}, or raise {field}",
            )
    if errors.on_nan == "rollback":
        raise give_up(replica, step, why)
    return _whole(span)


def _whole(span: StepSpan | Round) -> tuple[Skip, ...]:
    return tuple(
        Skip(step=one.step, epoch=one.epoch, start=one.start, stop=one.stop, why=NAN)
        for one in span.spans
    )


def give_up(replica: Replica, step: int, why: str) -> RollbackError:
    """Nothing remains of a step that is not finite; it is found out which one made it so.

    Where the parameters are finite before it, that was its own samples; else the last update did.
    `DivergedError`: no update was made before it, so that going back does not help.
    """
    replica.discard()
    if is_finite(replica.model):
        return RollbackError(step, f"{why} at step {step}", step)
    made_by = newest_update(step, replica.history.skips)
    if made_by < 0:
        raise DivergedError(
            f"the parameters are not finite before step {step}, the first that could change them",
            hint="look at Task.model",
        )
    why = f"{why} at step {step}, and the parameters are not finite before it"
    return RollbackError(step, why, made_by)


def newest_update(step: int, skips: tuple[Skip, ...]) -> int:
    """The newest step before this one that was not skipped as a whole; -1: there is none.

    >>> newest_update(7, ())
    6
    """
    without = {skip.step for skip in skips if skip.whole_step}
    step -= 1
    while step in without:
        step -= 1
    return step


def check_restored(model: nn.Module, step: int) -> None:
    """`RollbackError`: the checkpoint of `step`, which is loaded, is not finite."""
    if not is_finite(model):
        raise RollbackError(step, f"the checkpoint of step {step} is not finite", None)


def check_end(replica: Replica, step: int) -> None:
    """`RollbackError`: the run may not end here, where no step follows that would tell."""
    goes_back = replica.errors.on_nan == "rollback" and replica.following is None
    if goes_back and not is_finite(replica.model):
        raise give_up(replica, step, "the run would end")


def is_finite(model: nn.Module) -> bool:
    """Whether all parameters are; each is read once."""
    return all(bool(p.detach().isfinite().all()) for p in model.parameters())
