"""How members meet as a generation, and find out where they go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raycloud.order import deal
from raycloud.simulate.lockstep import Lockstep

if TYPE_CHECKING:
    from raycloud.commands import Form
    from raycloud.simulate.computing import Computing
    from raycloud.simulate.words import Body

_MEET_S = 0.1


@dataclass(eq=False, slots=True)
class Meeting:
    """A generation that was told to meet."""

    told: Form
    called: bool = False  # everyone has heard of it
    begun: bool = False


class Meetings:
    """The meetings that the driver calls for; only the newest counts.

    Args:
        computing: What members do together.

    Attributes:
        coming: The newest.
    """

    def __init__(self, computing: Computing) -> None:
        """None was called for."""
        self._computing = computing
        self.coming: Meeting | None = None

    def form(self, told: Form) -> None:
        """Members are told, one by one, to leave what they do and to meet."""
        meeting = self.coming = Meeting(told)
        first_s, last_s = self._computing.calls_s(len(told.members))
        self._computing.fleet.later(first_s, lambda: self._leave_for(meeting))
        self._computing.fleet.later(last_s, lambda: self._call(meeting))

    def look(self) -> None:
        """Someone can be reached again."""
        if self.coming is not None and self.coming.called:
            self._gather(self.coming)

    def _leave_for(self, meeting: Meeting) -> None:
        group = self._computing.group
        if meeting is not self.coming or group is None:
            return
        if group.formed_as < meeting.told.generation:
            self._computing.stop()

    def _call(self, meeting: Meeting) -> None:
        meeting.called = True
        self._gather(meeting)

    def _gather(self, meeting: Meeting) -> None:
        if (
            meeting is not self.coming
            or meeting.begun
            or self._computing.absent(meeting.told.members)
        ):
            return
        self._leave_for(meeting)
        self._computing.fleet.later(_MEET_S, lambda: self._begin(meeting))

    def _begin(self, meeting: Meeting) -> None:
        """They have met: whoever is behind takes the state, and all go on from there."""
        told = meeting.told
        if meeting is not self.coming or meeting.begun or self._computing.absent(told.members):
            return
        meeting.begun = True
        self._computing.changes.settle(told.settled, told.members)
        bodies = [self._computing.fleet.seats[number] for number in told.members]
        step, value = self._ground(bodies)
        adopted, fresh = self._adopt(bodies, told.shares, step)
        newcomers = frozenset(
            b.number for b in bodies if b.number in told.following and not b.begun
        )
        for body in bodies:
            if body.number not in newcomers:
                self._computing.catch_up(body, step, value)
        self._computing.group = group = Lockstep(
            cut=self._computing.cut,
            members=told.members,
            shares=told.shares,
            formed_as=told.generation,
            generation=told.generation,
            first_step=step,
            step=step,
            at=self._computing.position(step),
            value=value,
            begun_s=self._computing.world.now_s,
            step_s=self._computing.step_s(told.members, told.shares),
            adopted=adopted,
            fresh=fresh,
            newcomers=newcomers,
            idle=frozenset(told.following),
            saved_step=self._computing.origin.step,
        )
        self._computing.announce(group)
        self._computing.follow(group)
        self._computing.resumed()
        if step > self._computing.origin.step:
            self._computing.between(group, range(len(group.members)))
        self._computing.go_on(group)

    def _ground(self, bodies: Sequence[Body]) -> tuple[int, int]:
        """The step where all go on, and the parameters before it."""
        begun = [body for body in bodies if body.begun]
        if not begun:
            return self._computing.origin.step, self._computing.origin.value
        step = max(body.step for body in begun)
        values = {body.value for body in begun if body.step == step}
        if len(values) > 1:
            self._computing.wrong = (
                f"members that stand before step {step} have different parameters"
            )
        return step, min(values)

    def _adopt(
        self, bodies: Sequence[Body], shares: Sequence[int], step: int
    ) -> tuple[list[list[int]] | None, list[int]]:
        """What each has kept of the step, and what of it nobody has, dealt by shares."""
        kept = [list(b.kept) if b.begun and b.step == step else [] for b in bodies]
        if not any(kept) or step >= self._computing.last_step:
            return None, []
        samples = self._computing.cut.span(step, self._computing.position(step)).samples
        have = {k for mine in kept for k in mine}
        if sum(map(len, kept)) != len(have):
            self._computing.wrong = f"a micro-batch of step {step} was computed by two members"
        count = -(-samples // self._computing.cut.micro_batch)
        missing = [k for k in range(count) if k not in have]
        fresh, at = list(deal(shares, len(missing))), 0
        for mine, number in zip(kept, fresh, strict=True):
            mine.extend(missing[at : at + number])
            at += number
        return kept, fresh
