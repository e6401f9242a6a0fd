"""The loop of one member: step after step, and what happens between steps. It asks nobody."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raycloud.commands import Halt, Reshare, Save
from raycloud.errors import DivergedError, TaskError
from raycloud.events import ChangeApplied, Event, GenerationFormed
from raycloud.spec.sizes import ring_bytes
from raycloud.sync.lane import Lane, LaneReport
from raycloud.training.feed import Collate, Feed
from raycloud.training.schedule import Piece, Schedule
from raycloud.training.tally import Counted, Tally

if TYPE_CHECKING:
    from raycloud.clock import Clock
    from raycloud.order import Position, Steps, StepSpan
    from raycloud.spec import Job
    from raycloud.training.changes import Changes, Due
    from raycloud.training.replica import Replica
    from raycloud.training.saver import Saver

_REPORT_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """This member's place in a generation, and where the generation starts."""

    members: tuple[int, ...]
    rank: int
    generation: int
    shares: tuple[int, ...]
    step: int
    position: Position
    last_step: int

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.members)

    @property
    def member(self) -> int:
        """This member's number."""
        return self.members[self.rank]


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """What a loop works with; made once in a member's life."""

    job: Job
    steps: Steps
    replica: Replica
    collate: Collate
    saver: Saver
    changes: Changes
    clock: Clock
    report: Callable[[Event], None]
    evaluate: Callable[[int, Seat], None]


class Loop:
    """Computes the steps of one generation.

    Args:
        parts: What it works with.
        seat: Who this member is, and from which step to which.
        lane: The control lane of the generation.
        abandoned: Says that the driver has given the generation up.
    """

    def __init__(self, parts: Parts, seat: Seat, lane: Lane, abandoned: Callable[[], bool]) -> None:
        """Start collating the first steps."""
        self._parts = parts
        self._seat = seat
        self._lane = lane
        self._abandoned = abandoned
        self.step = seat.step
        self.position = seat.position
        self._generation = seat.generation
        self._schedule = Schedule(
            Piece(step=seat.step, generation=seat.generation, shares=seat.shares)
        )
        self._tally = Tally(member=seat.member, clock=parts.clock)
        self._feed = Feed(
            parts.collate,
            lambda span: self._schedule.micro_batches(span, seat.rank),
            self._spans(),
            fuse=lambda: parts.replica.fuse,
            depth=parts.job.data.prefetch_steps,
            clock=parts.clock,
        )
        self._saved_step = seat.step
        self._loss_owed: tuple[float, float] | None = None  # (own sum, global weight) of a step
        self._compute_s = 0.0
        self._lane_s = 0.0
        self._sums: LaneReport | None = None

    def run(self) -> bool:
        """Compute until the last step, or until told to halt.

        Returns:
            True when the last step is committed, False when halted before.
        """
        try:
            if self.step >= self._seat.last_step:  # resumed at its end: the result is asked for
                self._parts.evaluate(self.step, self._seat)
            while self.step < self._seat.last_step:
                for due in self._parts.changes.due(self.step):
                    if self._apply(due):
                        return False
                self._one_step()
                self._between_steps()
        finally:
            self._feed.close()
        return True

    def save(self) -> None:
        """Checkpoint the state before the next step, unless that is done already."""
        if self._saved_step == self.step:
            return
        self._saved_step = self.step
        self._report()
        replica = self._parts.replica
        values = {
            "step": self.step,
            "epoch": self.position.epoch,
            "offset": self.position.offset,
            "generation": self._generation,
            "fuse": replica.fuse,
            **(replica.state.values() if self._seat.rank == 0 else {}),
        }
        self._parts.saver.save(
            step=self.step,
            rank=self._seat.rank,
            parts=self._seat.size,
            tensors=replica.state.tensors(),
            values=values,
        )

    def settle(self) -> None:
        """Learn the loss of the last step at once; all members call this after the same step."""
        self._send_lane(weight=0.0, prepared=False)
        self._read_lane()

    def _spans(self) -> Iterator[StepSpan]:
        walk = self._parts.steps.walk(self._seat.step, self._seat.position)
        for span in walk:
            if span.step >= self._seat.last_step:
                return
            yield span

    def _one_step(self) -> None:
        parts, clock = self._parts, self._parts.clock
        waited_s = self._feed.waited_s
        work = self._feed.take()
        began_s = clock.monotonic_s()
        self._lane_s = 0.0
        self._send_lane(weight=work.weight, prepared=parts.changes.next_at_hand)
        parts.replica.compute(work, parts.collate, self._scale)
        sums = self._weighed()
        parts.replica.synchronize()
        self._compute_s = clock.monotonic_s() - began_s - self._lane_s
        result = parts.replica.collect(self.step, self._abandoned)
        loss = self._finite(parts.replica.loss_sum())
        rate = parts.replica.learning_rate
        parts.replica.commit(work)
        self._sums = None
        self._loss_owed = (loss, sums.weight)
        self.position = parts.steps.after(work.span)
        self._tally.add(
            Counted(
                step=self.step,
                generation=self._generation,
                after=self.position,
                weight=sums.weight,
                samples=work.span.samples,
                micro_batches=work.micro_batches,
                norm=result.norm,
                learning_rate=rate,
                compute_s=self._compute_s,
                data_s=self._feed.waited_s - waited_s,
                exchange_s=result.exchange_s + self._lane_s,
                bytes_sent=result.bytes_sent,
                bytes_dense=ring_bytes(parts.replica.gradients.gradient_bytes, self._seat.size),
            )
        )
        if self._seat.size == round(sums.prepared):
            self._agree()
        self.step += 1

    def _scale(self) -> float:
        return 1.0 / self._weighed().weight

    def _weighed(self) -> LaneReport:
        """What the lane says of this step, read once."""
        if self._sums is None:
            self._sums = self._read_lane()
        if self._sums.weight <= 0.0:
            raise TaskError(
                f"the samples of step {self.step} weigh nothing together",
                hint="Task.weight must be positive for at least one micro-batch of each step",
            )
        return self._sums

    def _finite(self, loss: float) -> float:
        if not math.isfinite(loss):
            raise DivergedError(
                f"the loss of step {self.step} is {loss}",
                hint="lower the learning rate, or look at the samples of this step",
            )
        return loss

    def _send_lane(self, *, weight: float, prepared: bool) -> None:
        loss = self._loss_owed[0] if self._loss_owed is not None else 0.0
        self._lane.send(
            LaneReport(
                weight=weight,
                loss=loss,
                prepared=1.0 if prepared else 0.0,
            )
        )

    def _read_lane(self) -> LaneReport:
        began_s = self._parts.clock.monotonic_s()
        sums = self._lane.read(self._abandoned)
        self._lane_s += self._parts.clock.monotonic_s() - began_s
        if self._loss_owed is not None:
            weight = self._loss_owed[1]
            self._tally.add_loss(sums.loss / weight, weight)
            self._loss_owed = None
        return sums

    def _agree(self) -> None:
        due = self._parts.changes.agree(self.step)
        if isinstance(due.change, Reshare):
            self._schedule.add(
                Piece(step=due.step, generation=due.change.generation, shares=due.change.shares)
            )

    def _apply(self, due: Due) -> bool:
        """Switch to a change; True when it says to end."""
        halt = isinstance(due.change, Halt)
        if halt:
            self.settle()
        self._report()
        match due.change:
            case Reshare(generation=generation, shares=shares):
                self._generation = generation
                if self._seat.rank == 0:
                    self._parts.report(
                        GenerationFormed(
                            generation=generation,
                            members=self._seat.members,
                            shares=shares,
                            first_step=self.step,
                        )
                    )
            case Save() | Halt():
                self.save()
        self._report()
        self._parts.report(
            ChangeApplied(member=self._seat.member, change=due.number, step=self.step)
        )
        return halt

    def _between_steps(self) -> None:
        """What is due after `self.step` steps: the same on every member, by arithmetic."""
        job, seat = self._parts.job, self._seat
        done = self.step
        if done in (seat.step + 1, seat.last_step):
            self.settle()
        if done in (seat.step + 1, seat.last_step) or self._tally.age_s >= _REPORT_S:
            self._report()
        every = job.checkpoint.every_steps
        if done == seat.last_step or (every is not None and done % every == 0):
            self.save()
        measure = job.evaluate.every_steps
        if done == seat.last_step or (measure is not None and done % measure == 0):
            self._report()
            self._parts.evaluate(done, seat)

    def _report(self) -> None:
        made = self._tally.report()
        if made is not None:
            self._parts.report(made)
