"""Where a member stands when it meets the others of a generation, and its loop from there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from raycloud.events import Noticed
from raycloud.net.lane import Lane
from raycloud.net.transport import take_from
from raycloud.order import Position
from raycloud.recovery.backups import Backups
from raycloud.recovery.catch_up import Newcomers
from raycloud.recovery.poison import leave_out, suspects_of
from raycloud.recovery.quorum import (
    Ground,
    Own,
    Standing,
    Talk,
    alike,
    find_ground,
    known_loss,
)
from raycloud.step.forward import Fusing
from raycloud.worker.context import Membership
from raycloud.worker.loop import Loop

if TYPE_CHECKING:
    from raycloud.checkpoint import Manifest
    from raycloud.net.transport import Transport
    from raycloud.order import StepSpan
    from raycloud.recovery.rendezvous import Meeting
    from raycloud.step.feed import Held
    from raycloud.worker.context import LoopContext


class Transition:
    """Takes a member from one generation to the next.

    Args:
        parts: What its loop works with.
        manifest: The checkpoint that it begins with; None: there is none.
        last_step: One past the last step, as it is known at the start.
        held: Which bytes of the rows the nodes hold, by rank.
        address: This node's, that other members can reach.
        restore: `Restoring.load`: of the checkpoint that all begin from, if they do.

    Attributes:
        loop: Its loop; None before it has stood anywhere.
        seat: Its place in the newest generation in which it has stood; None before.
    """

    def __init__(
        self,
        parts: LoopContext,
        manifest: Manifest | None,
        last_step: int,
        *,
        held: Callable[[tuple[str, ...]], Held],
        address: str,
        restore: Callable[[Transport | None, Callable[[], bool]], None],
    ) -> None:
        """It stands at the start."""
        self._parts = parts
        self._position = Position() if manifest is None else manifest.position
        self._last_step = last_step
        # What is known of passes, and by rank their sizes.
        self._values: Mapping[str, Any] = {} if manifest is None else manifest.values
        self._held = held
        self._address = address
        self._restore = restore
        self._restart()
        self.loop: Loop | None = None
        self.seat: Membership | None = None

    def _restart(self) -> None:
        """Nothing is known of losses, nothing on its way to others."""
        parts, job = self._parts, self._parts.job
        self._suspects = suspects_of(job.errors.on_error)
        self._newcomers = Newcomers(
            parts.replica,
            self._address,
            host=parts.host,
            reserved_bytes=job.resources.worker.memory_bytes,
            report=parts.report,
        )
        self._backups = Backups(
            parts.replica,
            self._address,
            most=job.elastic.backup_micro_batches,
            clock=parts.clock,
        )

    @property
    def lacking(self) -> bool:
        """It has no state but the one that it was built with, or is about to take another's."""
        return self._newcomers.lacking

    def go_back(self, manifest: Manifest) -> None:
        """Whatever it has done counts no more: it begins where the checkpoint stands."""
        self.let_go()
        self._parts = replace(self._parts, first_step=manifest.step)
        self._position = manifest.position
        self._values = manifest.values
        self._restart()
        self.loop = self.seat = None

    def stand(
        self,
        meeting: Meeting,
        gradients: Transport,
        lane: Transport,
        abandoned: Callable[[], bool],
    ) -> Loop:
        """Find out with the others where all go on; this member's state is then everyone's.

        Returns:
            The loop, ready to run there.

        Raises:
            TransportError: The meeting broke, or was abandoned.
            CheckpointError: What all begin from cannot be loaded.
            TaskError: It is of another model, optimizer or schedule.
            RollbackError: It is not finite, and the job goes back then.
        """
        self._parts.changes.settle(meeting.settled)
        ground = self._ground(meeting, gradients, lane, abandoned)
        seat = self._seat(meeting, ground.step, ground.position)
        seat = replace(seat, held=agreed(self._held(meeting.nodes), lane, abandoned))
        if seat.rank not in ground.following:
            self._newcomers.lacking = False
        if ground.following:
            self._newcomers.begin(meeting, seat.step, ground.following, Talk(lane, abandoned))
        self._backups.begin(meeting, Talk(lane, abandoned))
        if meeting.rank == 0:  # it has met all others
            self._parts.report(seat.formed)
        loop = self.loop = self.loop or Loop(self._parts, seat)
        self.seat = seat
        loop.enter(
            seat,
            Lane(lane),
            abandoned,
            ground.adopted,
            planned=meeting.planned,
            unlike=ground.unlike,
        )
        if seat.part is None and seat.rank not in ground.following:  # it has the state all the same
            # after the last word of the generation before
            self._newcomers.done(meeting, seat.step, ground.step)
        return loop

    def let_go(self) -> None:
        """The generation is over, and with it what is on its way to those that follow."""
        self._newcomers.end()
        self._backups.end()

    def _ground(
        self,
        meeting: Meeting,
        gradients: Transport,
        lane: Transport,
        abandoned: Callable[[], bool],
    ) -> Ground:
        parts, loop = self._parts, self.loop
        own = Standing(parts.first_step, 0, parts.changes.agreed, parts.changes.due_step())
        stands = None if self._newcomers.lacking else loop
        if stands is not None:
            own = replace(own, step=stands.step, begun=1, **known_loss(stands.owed, stands.loss))
        idle = () if loop is None else loop.seat.following
        gone = self._suspects.meet(meeting.members, idle, planned=meeting.planned)
        if gone:
            parts.replica.forward.size.lost()
        brought = Own(
            replica=parts.replica,
            position=self._position if stands is None else stands.position,
            span=self._span if loop is None else loop.span,
            took=partial(self._took, meeting),
            address=self._address,
            suspects=partial(self._suspects.found, gone=gone),
            gone=bool(gone),
            host=parts.host,
        )
        at, talk = brought.position, Talk(lane, abandoned)
        fusing = min(parts.replica.forward.fusing, self._values.get("fusing", Fusing.UNKNOWN))
        own = replace(
            own,
            epoch=at.epoch,
            offset=at.offset,
            follows=int(self._newcomers.may_follow),
            processor=parts.replica.processor_number,
            fusing=fusing,
        )
        everyone = talk.standings(own)
        fusing = Fusing(min(one.fusing for one in everyone))
        parts.replica.may_fuse(fusing)
        parts.collate.joins = fusing is Fusing.JOINED
        if not any(one.begun for one in everyone):
            self._begin(meeting, gradients, talk, [one.step for one in everyone])
        newest = max(everyone, key=lambda one: one.agreed)
        if loop is not None and newest.agreed > own.agreed:
            loop.take_growth(newest.due_step)
        may_follow = [meeting.members.index(member) for member in meeting.following]
        if meeting.rank in may_follow and not self._newcomers.may_follow:
            self._newcomers.take_in_meeting()
        ground = find_ground(
            everyone, brought, shares=meeting.shares, talk=talk, may_follow=may_follow
        )
        if ground.suspects and meeting.rank not in ground.following:
            tells = meeting.rank == 0
            leave_out(parts.replica, ground.step, ground.suspects, parts.collate, tells=tells)
        if ground.adopted is not None:
            self._suspects.deal(ground.adopted)
        if self._suspects.pressing:
            parts.replica.forward.size.be_careful()
        if self.loop is not None:
            self.loop.learn_loss(ground.loss)
        statistics = parts.replica.statistics
        if statistics.others:
            changing = (*statistics.averaged, *statistics.begun)
            parts.replica.average(talk.any_of(changing, statistics.others))
        return ground

    def _begin(
        self,
        meeting: Meeting,
        gradients: Transport,
        talk: Talk,
        steps: Sequence[int],
    ) -> None:
        """Nobody has computed yet: all begin from the same parameters."""
        replica, lane, abandoned = self._parts.replica, talk.transport, talk.abandoned
        newest = max(steps)
        if min(steps) < newest:  # some have not been told of a checkpoint, and take the state
            if steps[meeting.rank] == newest:
                self._restore(None, abandoned)
            return
        self._restore(lane, abandoned)
        if not alike(replica, gradients, lane, abandoned):
            what = "members began from different parameters; rank 0's were taken"
            self._parts.report(Noticed(what=what, member=meeting.members[meeting.rank]))
        fuses = self._values.get("fuses", ())
        if len(fuses) == len(meeting.shares):  # round as this rank did
            replica.fuse = min(replica.forward.size.most, fuses[meeting.rank])
            sizes = self._values.get("pass_sizes", fuses)  # an older checkpoint has none
            replica.forward.size.resume(sizes[meeting.rank])

    def _took(self, meeting: Meeting, step: int, position: Position) -> None:
        """Another one stands at `step`, whose state is this member's, now or soon.

        One that had left, or was about to, has no part in what the others did since.
        """
        if self.loop is None:
            self.loop = Loop(self._parts, self._seat(meeting, step, position))
        elif self._newcomers.lacking or self.loop.next or self.loop.step < step - 1:
            self.loop.begin_anew()
        else:
            self.loop.take_step()

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
        )

    def _span(self, step: int, position: Position) -> StepSpan | None:
        """What `Loop.span` says, before there is one."""
        return self._parts.steps.span(step, position) if step < self._last_step else None


def agreed(own: Held, lane: Transport, abandoned: Callable[[], bool]) -> Held:
    """What rank 0 says is held where: all ranks must deal alike, or samples are lost or doubled.

    Members may have got their index at different times, with blocks on other nodes.

    Args:
        own: What this member would say; of the same shape on all members.
        lane: Any transport of the generation for tensors on the CPU.
        abandoned: Says that the generation is over.
    """
    if not own:
        return ()
    values = torch.tensor(own, dtype=torch.float64)
    take_from(0, {"held": values}, lane, abandoned)
    return tuple(tuple(row) for row in values.tolist())
