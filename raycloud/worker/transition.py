"""A member's way from one generation to the next, and its loop from there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, replace
from typing import TYPE_CHECKING, Any

from raycloud.events import Noticed, RoundsRefused
from raycloud.net.lane import Lane
from raycloud.order import Position, Round
from raycloud.recovery.backups import Backups
from raycloud.recovery.catch_up import Newcomers
from raycloud.recovery.poison import Suspects, leave_out
from raycloud.recovery.quorum import (
    NOBODY,
    MemberStatus,
    ResumePoint,
    adopt,
    align,
    find_keepers,
    find_resume_point,
    gather_statuses,
    known_loss,
    take_state,
)
from raycloud.step.commit import enter_tables
from raycloud.step.forward import Fusing
from raycloud.step.rounds import average_moments
from raycloud.sync.period import Choice
from raycloud.worker.context import Membership
from raycloud.worker.loop import Loop

if TYPE_CHECKING:
    from raycloud.checkpoint import Manifest
    from raycloud.net.probing import Exchanged
    from raycloud.net.transport import Transport
    from raycloud.order import StepSpan
    from raycloud.recovery.rendezvous import Meeting
    from raycloud.recovery.restore import Restore
    from raycloud.step.feed import Adopted, Held
    from raycloud.worker.context import LoopContext


class Transition:
    """Takes a member from one generation to the next.

    Args:
        context: What its loop works with.
        manifest: The checkpoint that it begins with; None: there is none.
        last_step: One past the last step, as it is known at the start.
        held: The bytes of each lane that this member's node has, by the nodes of all ranks and its
            own rank.
        address: This node's, that other members can reach.
        restore: Loads the checkpoint that all begin from, if they do.

    Attributes:
        loop: Its loop; None before its first generation.
        seat: Its place in the newest generation that it has entered; None before.
    """

    def __init__(
        self,
        context: LoopContext,
        manifest: Manifest | None,
        last_step: int,
        *,
        held: Callable[[tuple[str, ...], int], tuple[float, ...]],
        address: str,
        restore: Restore,
    ) -> None:
        self._last_step, self._held = last_step, held
        self._address, self._restore = address, restore
        self._start(context, manifest)

    def _start(self, context: LoopContext, manifest: Manifest | None) -> None:
        job = context.job
        self._context = context
        self._position = Position() if manifest is None else manifest.position
        # What is known of passes, and by rank their sizes.
        self._values: Mapping[str, Any] = {} if manifest is None else manifest.values
        self._suspects = Suspects(job.errors.on_error)
        self._newcomers = Newcomers(
            context.replica,
            self._address,
            host=context.host,
            reserved_bytes=job.resources.worker.memory_bytes,
            report=context.report,
        )
        self._backups: Backups | None = None
        self._begun_with = 0  # micro-batches of the step under way that members have
        self._begins = False  # nobody has computed before this generation
        self.loop: Loop | None = None
        self.seat: Membership | None = None

    @property
    def lacking(self) -> bool:
        """It has no state but the one that it was built with, or is about to take another's."""
        return self._newcomers.lacking

    def go_back(self, manifest: Manifest) -> None:
        """Begin where the checkpoint stands; whatever the member has done counts no more."""
        self.leave()
        self._start(replace(self._context, first_step=manifest.step), manifest)

    def enter(
        self,
        meeting: Meeting,
        control: Transport,
        abandoned: Callable[[], bool],
        probe: Callable[[Lane], Exchanged],
    ) -> Loop:
        """Enter a generation: agree with the others where all go on, and have the state of that.

        Where members on several nodes begin, they measure their links by `probe`.

        Returns the loop, ready to run there.

        Raises:
            TransportError: The meeting broke, or was abandoned.
            CheckpointError: What all begin from cannot be loaded.
            TaskError: It is of another model, optimizer or schedule.
            RollbackError: It is not finite, and the job goes back then.
        """
        lane = Lane(control, abandoned)
        self._context.changes.settle(meeting.settled)
        point, adopted = self._agree(meeting, lane)
        seat = self._seat(meeting, point.step, point.position)
        seat = replace(seat, held=gathered(self._held(meeting.nodes, meeting.rank), lane))
        if seat.rank not in point.followers:
            self._newcomers.lacking = False
        if point.followers:
            self._newcomers.begin(meeting, seat.step, point.followers, lane)
        self._back_up(meeting, lane)
        enter_tables(self._context.replica, meeting.generation, seat.step, lane)
        begins = self._begins and len(set(meeting.nodes)) > 1
        exchanged = probe(lane) if begins else ()
        if meeting.rank == 0:  # it has met all others
            formed = replace(seat.formed, kept=self._begun_with, exchanged=exchanged)
            self._context.report(formed)
        loop = self.loop = self.loop or Loop(self._context, seat)
        self.seat = seat
        loop.enter(seat, lane, adopted, planned=meeting.planned, unlike=point.unlike)
        if seat.part is None and seat.rank not in point.followers:
            # It has the state all the same; told after the last word of the generation before.
            self._newcomers.done(meeting, seat.step, point.step)
        return loop

    def leave(self) -> None:
        """The generation is over, and with it what is on its way to newcomers."""
        self._newcomers.end()
        if self._backups is not None:
            self._backups.close()
            self._backups = None

    def _back_up(self, meeting: Meeting, lane: Lane) -> None:
        context, most = self._context, self._context.job.elastic.backup_micro_batches
        if most and len(meeting.members) > 1:
            self._backups = Backups(
                context.replica, self._address, lane, most=most, clock=context.clock
            )
            self._backups.begin(meeting)

    def _agree(self, meeting: Meeting, lane: Lane) -> tuple[ResumePoint, Adopted | None]:
        """Where all go on, and what each rank computes of that step; None: its share."""
        context, loop, replica = self._context, self.loop, self._context.replica
        idle = () if loop is None else loop.seat.following
        gone = self._suspects.meet(meeting.members, idle, planned=meeting.planned)
        if gone:
            replica.forward.size.lost()
        own = self._status()
        everyone = gather_statuses(lane, own)
        fusing = Fusing(min(one.fusing for one in everyone))
        replica.may_fuse(fusing)
        context.collate.joins = fusing is Fusing.JOINED
        self._begins = not any(one.begun for one in everyone)
        if self._begins:
            self._begin(meeting, lane, [one.step for one in everyone])
        self._agree_on_rounds(meeting, lane, everyone)
        newest = max(everyone, key=lambda one: one.agreed)
        if loop is not None and newest.agreed > own.agreed:
            loop.take_growth(newest.due_step)
        may_follow = [meeting.members.index(member) for member in meeting.following]
        if meeting.rank in may_follow and not self._newcomers.may_follow:
            self._newcomers.take_in_meeting()
        point = find_resume_point(everyone, may_follow)
        self._agree_on_fragments(lane, own.step, point)
        self._average_moments(meeting, point, lane)
        if take_state(replica, point, lane, self._address, context.host):
            self._catch_up(meeting, point)
        if (of := replica.asynchronous) is not None:
            planned = meeting.planned and own.begun == 1
            claim = of.enter(meeting.generation, point.step, lane, planned=planned)
            if not context.round_ends().alone(point.step):
                replica.reclaim(*claim)
        adopted = self._deal(meeting, point, lane, gone)
        if self._suspects.pressing:
            replica.forward.size.be_careful()
        if self.loop is not None:
            self.loop.learn_loss(point.loss)
        statistics = replica.statistics
        if statistics.others:
            changing = (*statistics.averaged, *statistics.begun)
            replica.average(lane.any_of(changing, statistics.others))
        return point, adopted

    def _average_moments(self, meeting: Meeting, point: ResumePoint, lane: Lane) -> None:
        """Those that have the state hand over the same, and may have been in a round."""
        replica = self._context.replica
        if replica.rounds is not None and (point.takers or point.followers):
            has = meeting.rank in point.holders
            average_moments(replica.rounds, replica.trains, lane, has=has)

    def _agree_on_rounds(
        self, meeting: Meeting, lane: Lane, everyone: Sequence[MemberStatus]
    ) -> None:
        """Some may have begun a round, or chosen how long rounds are, where others have not.

        One that the others have left behind may have made another choice than they since. Where the
        driver has said by which point updates travel, they have no choice.
        """
        rounds, pinned = self._context.replica.rounds, meeting.sync
        if rounds is None:
            return
        unaveraged = bool(pinned) and bool(rounds.unaveraged)  # as known since the first step
        rows = lane.gather((*astuple(rounds.choice), rounds.unlike, unaveraged))
        counts = [row for row, one in zip(rows, everyone, strict=True) if one.begun] or rows
        newest = Choice(*map(int, max(counts)[:3]))
        if pinned is not None:
            refused = pinned.period > 1 and any(row[4] for row in rows)
            period = 1 if refused else pinned.period
            if refused and rounds.unaveraged:
                member = meeting.members[meeting.rank]
                self._context.report(RoundsRefused(member=member, why=rounds.unaveraged))
            only = Choice(newest.number + 1, period, period)
            newest = newest if (newest.period, newest.most) == (only.period, only.most) else only
        rounds.take(newest)
        rounds.choice = newest
        rounds.unlike = any(row[3] for row in rows)
        if self.loop is not None:
            self.loop.take_period()

    def _agree_on_fragments(self, lane: Lane, own_step: int, point: ResumePoint) -> None:
        """Whether fragments travel in this generation, and where a round under way ends.

        Who follows keeps what each exchange of a round brings, and there is room for one.
        """
        if (fragments := self._context.replica.fragments) is not None:
            changes = self._context.changes
            fragments.enter(
                lane,
                point.step,
                mine=own_step == point.step,
                travels=not point.followers,
                behind=lambda: not changes.next_at_hand,
            )
            if self.loop is not None:
                self.loop.take_period()

    def _status(self) -> MemberStatus:
        context, loop = self._context, self.loop
        own = MemberStatus(
            context.first_step,
            begun=0,
            agreed=context.changes.agreed,
            due_step=context.changes.due_step(),
            follows=int(self._newcomers.may_follow and context.replica.has_sums),
            processor=context.replica.processor_number,
            fusing=min(context.replica.forward.fusing, self._values.get("fusing", Fusing.UNKNOWN)),
        )
        at = self._position
        if loop is not None and not self._newcomers.lacking:
            at = loop.position
            own = replace(own, step=loop.step, begun=1, **known_loss(loop.owed, loop.loss))
        return replace(own, epoch=at.epoch, offset=at.offset)

    def _begin(self, meeting: Meeting, lane: Lane, steps: Sequence[int]) -> None:
        """Nobody has computed yet: all begin from the same parameters."""
        replica, newest = self._context.replica, max(steps)
        if min(steps) < newest:  # some have not been told of a checkpoint, and take the state
            if steps[meeting.rank] == newest:
                self._restore.load(None, lane.abandoned)
            return
        self._restore.load(lane.transport, lane.abandoned)
        if not align(replica, lane):
            what = "members began from different parameters; rank 0's were taken"
            self._context.report(Noticed(what=what, member=meeting.members[meeting.rank]))
        fuses = self._values.get("fuses", ())
        if len(fuses) == len(meeting.shares):  # round as this rank did
            replica.fuse = min(replica.forward.size.most, fuses[meeting.rank])
            sizes = self._values.get("pass_sizes", fuses)  # an older checkpoint has none
            replica.forward.size.resume(sizes[meeting.rank])

    def _catch_up(self, meeting: Meeting, point: ResumePoint) -> None:
        """This member was behind; one that had left has no part in what was done since."""
        residual = self._context.replica.residual
        if residual is not None and meeting.rank not in point.followers:
            residual.forget()
        if self.loop is None:
            self.loop = Loop(self._context, self._seat(meeting, point.step, point.position))
        elif self._newcomers.lacking or self.loop.next or not self.loop.has_computed_to(point.step):
            self.loop.begin_anew()
        else:
            self.loop.take_step()

    def _deal(
        self, meeting: Meeting, point: ResumePoint, lane: Lane, gone: Sequence[int]
    ) -> Adopted | None:
        """Deal what nobody has of the step, but for micro-batches that all go on without."""
        context, kept, self._begun_with = self._context, self._context.replica.kept, 0
        if self.loop is not None:
            span = self.loop.span(point.step, point.position)
        else:
            ends = context.round_ends()
            span = ends.at(point.step, context.steps, point.position, self._last_step)
        if span is None:  # no step is left
            return None
        every = span.micro_batches
        keepers = find_keepers(lane, () if kept is None else kept.micro_batches, len(every))
        missing = [k for k, rank in enumerate(keepers) if rank == NOBODY]
        self._begun_with = len(every) - len(missing)
        lost = (len(every),) if gone else ()  # one past the last: somebody is
        owners = None
        if self.loop is not None and isinstance(span, Round):  # it may have ended in the midst
            owners = self.loop.owners(span)
        own = self._suspects.found(point.step, missing, gone, owners)
        named = lane.any_of((*own, *lost), len(every) + 1)
        if len(missing) == len(every) and not named:
            return None
        suspects = [k for k in named if k < len(every)]
        for k in suspects:
            keepers[k] = 0
        adopted = _dealt(span, keepers, meeting.shares)
        if suspects and meeting.rank not in point.followers:
            some = [every[k] for k in suspects]
            leave_out(context.replica, point.step, some, context.collate, tells=meeting.rank == 0)
        self._suspects.deal(adopted)
        return adopted

    def _seat(self, meeting: Meeting, step: int, position: Position) -> Membership:
        return Membership(
            members=meeting.members,
            rank=meeting.rank,
            generation=meeting.generation,
            shares=meeting.shares,
            step=step,
            position=position,
            last_step=self._last_step,
            following=meeting.following,
            keys=meeting.keys,
            measured=0 if self._context.replica.by_measured else meeting.measured,
        )


def _dealt(span: StepSpan | Round, keepers: Sequence[int], shares: Sequence[float]) -> Adopted:
    """What each rank computes of what nobody has, step by step: of each its share."""
    found: list[list[int]] = [[] for _ in shares]
    for one in span.spans:
        stop = one.first + len(one.micro_batches)
        for rank, some in enumerate(adopt(keepers[one.first : stop], shares)):
            found[rank] += [one.first + k for k in some]
    return tuple(map(tuple, found))


def gathered(own: Sequence[float], lane: Lane) -> Held:
    """What each rank's node has of each lane, as each says: all deal by the same.

    Members may have got their index at different times, with blocks on other nodes, and have copied
    some since.
    """
    return tuple(zip(*map(tuple, lane.gather(own)), strict=True)) if own else ()
