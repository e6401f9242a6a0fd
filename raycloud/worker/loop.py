"""The loop of one member: step after step, and what happens between steps. It asks nobody."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from raycloud.commands import Extend, Halt, Meet, Reshare, Save
from raycloud.errors import InternalError, TaskError, TransportError
from raycloud.events import ChangeApplied, Noticed
from raycloud.net.lane import NO_PLACES, Lane, LaneReport, Places, all_places
from raycloud.net.transport import Abandoned
from raycloud.order import Round
from raycloud.spec.sizes import report_s, ring_bytes
from raycloud.step.collate import StepWork
from raycloud.step.commit import (
    Owed,
    RollbackError,
    all_hold,
    check_end,
    enter_tables,
    find_outcome,
    finish,
)
from raycloud.step.compute import backward, compute
from raycloud.step.consistency import Consistency
from raycloud.step.feed import Adopted, Course, Feed, Piece, Schedule, adopted_by_step
from raycloud.step.local import begin_round, compute_step
from raycloud.step.rounds import average_moments
from raycloud.worker.dataset import LAYOUT, layout_record
from raycloud.worker.evaluate import measured_value, merge_states
from raycloud.worker.period import PeriodLooks, Processors, Took
from raycloud.worker.tally import SampleAudit, StepCount, noise_and_signal

if TYPE_CHECKING:
    from collections.abc import Callable

    from raycloud.order import Position, StepSpan
    from raycloud.sync.gradients import Exchanged
    from raycloud.worker.context import Due, LoopContext, Membership


class Loop:
    """Computes the steps, or rounds, of one generation after the other.

    When an exchange breaks, `run` raises and what is computed is kept: `enter` takes this member
    into the next generation, and `run` goes on.

    Where the job's length is a number of epochs, data that grows makes it longer, but not the
    learning rate's schedule: it was made for the steps that were known at the start.
    """

    def __init__(self, context: LoopContext, seat: Membership) -> None:
        self._context, self.seat = context, seat
        self._course = Course(
            context.steps,
            step=seat.step,
            at=seat.position,
            last_step=seat.last_step,
            epochs=None if context.job.steps is not None else context.job.epochs or 1,
        )
        self._tally = context.tally(seat.member)
        self._consistency = Consistency(context.replica, context.clock)
        self._audit = SampleAudit(context.collate)
        self.owed: Owed | None = None
        self.loss = float("nan")  # the mean of the newest step of which it is known
        self.take_period()
        piece = Piece(step=seat.step, generation=seat.generation, shares=seat.shares)
        self._schedule = Schedule(piece)
        self._looks = PeriodLooks(context.replica.rounds, self._ends.warm_steps)
        self._computed: StepCount | None = None  # of the step under way
        self._lane_s = 0.0
        self.next: Meet | None = None
        self.step, self.position = seat.step, seat.position

    def enter(
        self,
        seat: Membership,
        lane: Lane,
        adopted: Adopted | None = None,
        *,
        planned: bool = False,
        unlike: bool = False,
    ) -> None:
        """Become a member of a generation, and start collating its first steps.

        Args:
            seat: Who this member is in it, and from which step it goes on.
            lane: Its control lane.
            adopted: What each rank computes of its first step, beside what it has kept of that.
            planned: The generation before has done all that was due before its first step.
            unlike: Not all members' processors are of one kind.
        """
        self._report()  # a step that was taken is one of the generation before
        context = self._context
        self.seat, self._lane, self._abandoned = seat, lane, lane.abandoned
        self._broke, self.next = not planned, None
        self.step, self.position = seat.step, seat.position
        piece = Piece(step=seat.step, generation=seat.generation, shares=seat.shares)
        whole = self.span(seat.step, seat.position)
        dealt = {} if whole is None else adopted_by_step(whole, adopted)
        self._schedule = Schedule(piece, seat.held, dealt)
        # Any other checkpoint may be one that the generation before did not come to write.
        self._saved_step = context.first_step
        self._feed = self._collating()
        self._consistency.enter(seat.members, seat.rank, seat.step, unlike=unlike)
        self._audit.enter(seat.rank, seat.size)
        self._looks.begin(seat.step)
        self._first_end = self._ends.after(seat.step, self.last_step)

    def _collating(self) -> Feed:
        """The steps from the present one on, under the shares that are known now."""
        context, schedule, rank = self._context, self._schedule, self.seat.rank
        return Feed(
            context.collate,
            lambda span: schedule.micro_batches(span, rank),
            self._course.walk(self.step, self.position),
            fuse=lambda: context.replica.fuse,
            depth=context.job.data.prefetch_steps,
            clock=context.clock,
        )

    def _collate_anew(self) -> None:
        """Nothing that was collated ahead is computed: passes are others from this step on."""
        self._feed.close()
        self._feed = self._collating()

    def take_period(self) -> None:
        """Rounds have as many steps as has been chosen."""
        self._ends = self._context.round_ends()

    @property
    def last_step(self) -> int:
        """One past the last step, as it is known now."""
        return self._course.last_step

    def span(self, step: int, position: Position) -> StepSpan | Round | None:
        """The step or round that begins with `step`, at `position`; None past the last."""
        return self._ends.at(step, self._course.steps, position, self.last_step)

    def owners(self, whole: Round) -> dict[int, int]:
        """The member that computes each micro-batch of a round, in the generation entered last."""
        return {
            m.index: member
            for rank, member in enumerate(self.seat.members)
            for span in whole.spans
            for m in self._schedule.micro_batches(span, rank)
        }

    def learn_loss(self, mean: float) -> None:
        """The mean loss of the step committed last; without effect where it is known."""
        if self.owed is not None:
            self._tally.add_loss(mean, self.owed.weight)
            self.loss, self.owed = mean, None

    def take_step(self) -> None:
        """Others have committed the step that this member computed, and it has their state now."""
        computed = self._computed
        if computed is None or computed.step != self.step or self.owed is not None:
            raise InternalError(f"step {self.step} is committed without this member's part of it")
        taken = range(self.step, self.step + computed.steps)
        computed.skips = tuple(s for s in self._context.replica.history.skips if s.step in taken)
        self._tally.add(computed)
        self._audit.add(self._begun, computed.rows)
        if not any(skip.whole_step for skip in computed.skips):
            self.owed = Owed(loss=0.0, own_weight=0.0, weight=computed.weight)
        self.step, self.position = taken.stop, computed.after

    def has_computed_to(self, step: int) -> bool:
        """Whether this member's part is computed of what leads from where it stands to `step`."""
        computed = self._computed
        return (
            computed is not None
            and computed.step == self.step
            and computed.step + computed.steps == step
        )

    def begin_anew(self) -> None:
        """Others have gone on without this member: what it knows of its steps counts no more."""
        self.owed, self.loss, self._computed = None, float("nan"), None
        self._audit.forget()

    def run(self) -> bool:
        """Compute until the last step, a halt, or the `next` generation.

        Returns:
            True when the last step is committed, False when it ended before.

        Raises:
            TransportError: The exchange broke, or the generation was abandoned.
            RollbackError: A step is not finite, and the job goes back then.
        """
        try:
            if self._broke and self.step > self._context.first_step:
                self._between_steps()
            elif self.step >= self._course.last_step or self._lacks_measured():
                self._evaluate()  # resumed at its end, or at what was its end
            if self._ends.alone(self.step):  # it may have been in rounds before it was resumed
                self._average_moments()
            while self.step < self._course.last_step:
                if self._abandoned():  # an exchange asks only while it waits
                    raise Abandoned(f"the generation was abandoned before step {self.step}")
                self._context.replica.check_servers()
                for due in self._context.changes.due(self.step):
                    if self._apply(due):
                        return False
                self._one_step()
                if self.step < self._course.last_step:
                    self._choose_period()
                self._between_steps()
        except (TransportError, RollbackError):
            self._context.replica.suspend()
            self._report()
            raise
        finally:
            self._feed.close()
        return True

    def save(self) -> None:
        """Checkpoint the state before the next step, unless that is done already."""
        if self._saved_step == self.step or self.seat.part is None:
            return
        self._consistency.look(self.step)
        self._saved_step = self.step
        self._report()
        replica, position = self._context.replica, self.position
        values: dict[str, Any] = {
            "step": self.step,
            "epoch": position.epoch,
            "offset": position.offset,
            "generation": self.seat.generation,
            "fuse": replica.forward.size.most,
            "pass_size": replica.fuse,
            "fusing": int(replica.forward.fusing),
        }
        first: Callable[[], None] | None = None
        if self.seat.part == 0:  # what is the same on every member; how an epoch goes on
            if replica.tables is not None:
                self._context.saver.wait()
                first = replica.tables.save(self.step)
            values |= replica.state.values()
            order = self._context.collate.order
            layout = order.layout_in(position.epoch) if position.offset else None
            values |= {} if layout is None else {LAYOUT: layout_record(layout)}
        self._context.saver.save(
            step=self.step,
            rank=self.seat.part,
            parts=len(self.seat.holders),
            tensors=replica.common_tensors(),
            own=replica.state.own_tensors(self.seat.part),
            values=values,
            generation=self.seat.generation,
            key=self.seat.key,
            first=first,
        )

    def _average_moments(self) -> None:
        """What the optimizer holds becomes the same on all members: others are to take it."""
        replica = self._context.replica
        if replica.rounds is not None:
            replica.settle()
            has = replica.following is None
            sent = average_moments(replica.rounds, replica.trains, self._lane, has=has)
            self._tally.add_bytes(sent)

    def settle(self) -> None:
        """Learn the loss of the last step at once; all members call this after the same step."""
        self._send_lane(0.0)
        self._read_lane()
        self._compare()

    def _compare(self) -> None:
        """Find out what differs, where the lane has said that something does."""
        last = self.step == self._course.last_step
        self._consistency.settle(self.step, self._lane, last=last)

    def _one_step(self) -> None:
        replica, clock = self._context.replica, self._context.clock
        waited_s, began_s, self._lane_s = self._feed.waited_s, clock.monotonic_s(), 0.0
        norm = None
        if self._ends.alone(self.step):
            work, sums = self._compute(self._feed.take())
        else:
            work, sums, norm = self._compute_round()
        replica.synchronize()
        data_s = self._feed.waited_s - waited_s
        *_, last = spans = work.span.spans
        self._computed = count = StepCount(
            step=work.span.step,
            steps=len(spans),
            period=1 if norm is None else self._ends.period,
            generation=self.seat.generation,
            after=self._course.steps.after(last),
            weight=sums.weight,
            samples=work.span.samples,
            micro_batches=work.micro_batches,
            learning_rate=replica.learning_rate,
            compute_s=clock.monotonic_s() - began_s - self._lane_s - work.idle_s - data_s,
            data_s=data_s,
            computed=int(sums.places[0]),
            rows=int(sums.rows),
            read_s=sum(one.read_s for one in work.passes),
            collate_s=sum(one.collate_s for one in work.passes),
        )
        lane, collate, behind = self._lane, self._context.collate, self._behind()
        found = find_outcome(replica, work, sums.weight, lane, collate, behind=behind)
        follows = replica.following is not None
        if replica.asynchronous is not None and replica.local:
            replica.asynchronous.meet(self.step + count.steps)
        finish(replica, work, found, tells=self.seat.rank == 0)
        self.position = count.after
        self._audit.add(work.span, count.rows)
        self.step += count.steps
        wall_s = clock.monotonic_s() - began_s
        if follows:  # it tells of no step that it has not committed with all others
            self._tally.begin()
        else:
            self.owed, count.weight, count.skips = found.owed, found.weight, found.skips
            count.norm = found.exchanged.norm if norm is None else norm
            count.exchange_s = found.exchanged.exchange_s + self._lane_s
            count.lane_s, count.overlap_s = self._lane_s, found.exchanged.overlap_s
            self._count_bytes(count, found.exchanged)
            self._tally.add(self._with_noise(count, found.exchanged))
            now = Processors(clock.cpu_s(), replica.courier_s)
            took = Took(wall_s, count.compute_s)
            self._looks.see(count.steps, found.exchanged, found.weight, took, now)
        if all_hold(found.exchanged, lane, behind=self._behind()):
            self._agree()
        self._compare()
        self._look_at_passes(work)
        if found.exchanged.moves and self.step < self.last_step:
            enter_tables(replica, self.seat.generation, self.step, lane)

    def _look_at_passes(self, work: StepWork) -> None:
        """See whether those that come may have another size."""
        first = work.span.spans[-1].first
        sizes = [len(p.micro_batches) for p in work.passes if p.micro_batches[0].index >= first]
        if self._context.replica.forward.size.committed(sizes):
            self._collate_anew()

    def _count_bytes(self, count: StepCount, exchanged: Exchanged) -> None:
        replica = self._context.replica
        rows, plain = replica.rows_bytes()
        gradients = replica.gradients
        dense = ring_bytes(gradients.gradient_bytes + gradients.sparse_bytes, self.seat.size)
        count.bytes_sent, count.bytes_last = exchanged.bytes_sent + rows, exchanged.bytes_last
        count.bytes_dense = count.steps * dense + plain

    def _with_noise(self, count: StepCount, exchanged: Exchanged) -> StepCount:
        """The count, with what its exchange tells of the gradients' noise, if it was looked at."""
        if not math.isfinite(exchanged.own * exchanged.norm):
            return count
        plain = not (self._context.replica.local or count.skips or not count.micro_batches)
        full = count.samples == self._context.job.global_batch  # else not all have a part of it
        if plain and full and (members := sum(share > 0 for share in self.seat.shares)) > 1:
            part = count.micro_batches / count.computed
            count.noise, count.signal = noise_and_signal(
                exchanged.own, exchanged.norm, part=part, samples=count.samples, members=members
            )
        return count

    def _choose_period(self) -> None:
        """See whether rounds should have another number of steps; all members do, and alike."""
        if self.seat.following:  # who has no state yet takes no mean of moments
            self._looks.begin(self.step)
            return
        before = self._ends.period
        if not self._looks.look(self.step, self._lane):
            return
        self.take_period()
        if self._ends.period == 1 < before:
            self._average_moments()
        if self.seat.rank == 0:
            self._context.report(self._looks.told(self.seat.member, self.seat.generation))

    def _compute(self, work: StepWork) -> tuple[StepWork, LaneReport]:
        """Compute and send this member's part of the step; returns it, and what the lane says."""
        replica, collate = self._context.replica, self._context.collate
        kept, self._begun = replica.kept, work.span
        if replica.residual is not None:
            replica.residual.encode(of_updates=False)
        self._send_lane(*work.told(kept))
        pace = replica.pace
        pace.begin(work.micro_batches if replica.foreseeable else 0)
        done = False
        try:
            mine = compute(replica, work, collate)
            try:
                with pace.waiting():
                    sums = self._read_weight()
            except TransportError:
                backward(replica, work.span, collate, None)
                raise
            except BaseException:
                replica.forward.randomness.release()
                raise
            backward(replica, work.span, collate, 1.0 / sums.weight)
            done = bool(work.passes)
        finally:
            pace.end(done=done)
        replica.send(behind=self._behind(), late=pace.told())
        return mine, sums

    def _compute_round(self) -> tuple[StepWork, LaneReport, float]:
        """Compute this member's part of a round, step by step, and send how far that has led.

        Returns what was computed, without its batches; what the lane says; and the norm of this
        member's gradient in the last step that had any.
        """
        replica, collate = self._context.replica, self._context.collate
        whole = self._round()
        if replica.residual is not None:
            replica.residual.encode(of_updates=True)
        pace, waited_s, late, norm = replica.pace, replica.waited_s, False, float("nan")
        begin_round(replica, whole)
        made: list[StepWork] = []
        while (at := len(made)) < len(whole.spans):
            span = whole.spans[at]
            if self._abandoned():
                raise Abandoned(f"the generation was abandoned before step {span.step}")
            work, left = self._feed.take().within(span), len(whole.spans) - at
            if left == 1:
                self._send_lane(*work.told(replica.kept))
            pace.begin(work.micro_batches if replica.foreseeable else 0, left)
            done = False
            try:
                found = compute_step(replica, work, at, whole, collate)
                done = bool(work.passes)
            finally:
                pace.end(done=done)
            late, norm = late or pace.told(), found if done else norm
            made.append(replace(work, passes=tuple(replace(p, batch=None) for p in work.passes)))
            if self._ends.stop != replica.stop:  # all have found that it ends earlier
                whole = self._round()
        sums = self._read_weight()
        replica.begin_exchange(1.0 / sums.weight)
        self._lane_s += replica.waited_s - waited_s  # no part of computing, either
        replica.send(behind=self._behind(), late=late)
        return StepWork.joined(whole, made), sums, norm

    def _round(self) -> Round:
        """The one that begins here, as it is known now."""
        self.take_period()
        whole = self.span(self.step, self.position)
        if not isinstance(whole, Round):
            raise InternalError(f"a round was to begin with step {self.step}, after the last")
        self._begun = whole
        return whole

    def _behind(self) -> bool:
        return not self._context.changes.next_at_hand

    def _read_weight(self) -> LaneReport:
        """What the lane says of this step, each micro-batch of which one member computes."""
        sums, span = self._read_lane(), self._begun
        many = sum(-(-one.samples // one.micro_batch) for one in span.spans)
        if sums.places != all_places(many):
            raise InternalError(
                f"members compute {sums.places[0]:.0f} of the {many} micro-batches of step "
                f"{span.step}, or not each of them once"
            )
        if sums.weight <= 0.0:
            raise TaskError(
                f"the samples of step {self.step} weigh nothing together",
                hint="Task.weight must be positive for at least one micro-batch of each step",
            )
        return sums

    def _send_lane(self, weight: float, places: Places = NO_PLACES, rows: float = 0.0) -> None:
        loss = self.owed.loss if self.owed is not None else 0.0
        digest = self._consistency.told(self.step)
        told = LaneReport(weight=weight, places=places, rows=rows, loss=loss, digest=digest)
        self._lane.send(told)

    def _read_lane(self) -> LaneReport:
        began_s = self._context.clock.monotonic_s()
        sums = self._lane.read()
        self._consistency.heard(sums)
        self._lane_s += self._context.clock.monotonic_s() - began_s
        if self.owed is not None:
            self.learn_loss(sums.loss / self.owed.weight)
        return sums

    def _agree(self) -> None:
        """All members hold the next change: what a feed must know of it ahead."""
        due = self._context.changes.agree(self.step - 1)
        match due.change:
            case Reshare(generation=generation, shares=shares):
                self._schedule.add(Piece(step=due.step, generation=generation, shares=shares))
            case Extend():
                self._extend(due.change, due.step)
            case Save() | Halt() | Meet():
                pass

    def take_growth(self, due_step: int) -> None:
        """Take in growth that others have found all to hold; between generations."""
        due = self._context.changes.agree_on(due_step)
        if not isinstance(due.change, Extend):
            raise InternalError(f"{due} was agreed on by a generation that broke")
        self._extend(due.change, due_step)

    def _extend(self, change: Extend, due_step: int) -> None:
        """From the next epoch on there is more data; no feed has asked for any of it yet."""
        epoch = self._course.growth_at(due_step)
        self._context.extend(change, epoch)
        if not self._course.grow(epoch, change.samples) and self.seat.rank == 0:
            what = f"the data has grown to {change.samples} samples, but the run ends before "
            what += f"epoch {epoch}, the first to have them: give more epochs or steps"
            self._context.report(Noticed(what=what, member=self.seat.member))

    def _apply(self, due: Due) -> bool:
        """Switch to a change; True when this generation ends with it."""
        ends = isinstance(due.change, Halt | Meet)
        if ends:
            self._consistency.look(self.step)
            self.settle()
        self._report()
        match due.change:
            case Reshare():
                self.seat = self.seat.reshared(due.change)
                self._collate_anew()  # what was collated ahead is for the old shares
                if self.seat.rank == 0:
                    self._context.report(replace(self.seat, step=self.step).formed)
            case Save() | Halt():
                self.save()
            case Meet():
                self.next = due.change
                if not {*due.change.members} <= {*self.seat.members}:
                    self._average_moments()
                left = [r for r, m in enumerate(self.seat.members) if m not in due.change.members]
                self._context.replica.hand_over_residual(left, self._abandoned)
                if self.seat.member not in due.change.members:
                    self._context.saver.wait()
            case Extend():
                pass  # done ahead, when it was agreed
        self._report()
        applied = ChangeApplied(member=self.seat.member, change=due.number, step=self.step)
        self._context.report(applied)
        return ends

    def _between_steps(self) -> None:
        """What is due after `self.step` steps: the same on every member, by arithmetic."""
        job, done = self._context.job, self.step
        first, last = self._first_end, self._course.last_step
        if done == last:
            check_end(self._context.replica, done)
            self._consistency.look(done)
        if done in (first, last):
            self.settle()
        if done in (first, last) or self._tally.age_s >= report_s(self.seat.size):
            self._report()
        every = job.checkpoint.every_steps
        saves = done == last or (isinstance(every, int) and done % every == 0)
        if saves and (done == last or not self._context.replica.by_measured):
            self.save()
        if done == last or self._measures(done):
            self._report()
            self._evaluate()
        if saves:  # a schedule that goes by what is measured has heard of it now
            self.save()

    def _measures(self, done: int) -> bool:
        every = self._context.job.evaluate.every_steps
        return every is not None and done > self.seat.measured and done % every == 0

    def _lacks_measured(self) -> bool:
        """Whether the run has ended here before, so that its schedule was stepped no more."""
        replica, at = self._context.replica, self.step
        if not replica.by_measured or not self._broke or not self._measures(at):
            return False
        measured = replica.history.measured
        known = replica.following is not None or (measured is not None and measured[0] >= at)
        return not all(row[0] for row in self._lane.gather([float(known)]))

    def _evaluate(self) -> None:
        seat = replace(self.seat, last_step=self._course.last_step)
        states = self._context.evaluate(self.step, seat)
        replica = self._context.replica
        if not replica.by_measured or self.step == seat.last_step:
            return
        value = replica.history.measured
        known = value[1] if value is not None and value[0] == self.step else None
        if replica.following is not None:
            known, states = None, {}
        told = json.dumps({"known": known, "states": dict(states)})
        heard = [json.loads(text) for text in self._lane.gather_text(told)]
        values = [one["known"] for one in heard if one["known"] is not None]
        if not values:
            values = [measured_value(merge_states([one["states"] for one in heard]))]
        replica.take_measured(self.step, values[0])

    def _report(self) -> None:
        self._audit.check()
        residual = self._context.replica.residual_norm
        if (made := self._tally.report(residual)) is not None:
            self._context.report(made)
