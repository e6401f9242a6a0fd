"""Changes that are sent ahead, and the step at which each takes effect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from raycloud.commands import Change, Extend, Halt, Meet, Prepare, Reshare, Save
from raycloud.events import ChangeApplied
from raycloud.simulate.lockstep import Lockstep

if TYPE_CHECKING:
    from raycloud.simulate.computing import Computing


_FEED = 3  # steps of which a feed may have asked already: grown data comes after them


@dataclass(eq=False, slots=True)
class Ahead:
    """A change that was sent ahead."""

    told: Prepare
    called: bool = False
    held: bool = False  # by all that compute
    due: int | None = None
    applied: set[int] = field(default_factory=set)

    @property
    def everyone(self) -> set[int]:
        """Whose word it takes until all hold it."""
        coming = self.told.change.members if isinstance(self.told.change, Meet) else ()
        return {*self.told.members, *coming}


class Changes:
    """The change that was sent ahead; there is one at a time.

    Args:
        computing: What members do together.

    Attributes:
        ahead: The newest; None: all are in force or withdrawn.
    """

    def __init__(self, computing: Computing) -> None:
        """None was sent."""
        self._computing = computing
        self.ahead: Ahead | None = None

    def prepare(self, told: Prepare) -> None:
        """Members are told, one by one, of a change; to a planned meeting they come at once."""
        ahead = self.ahead = Ahead(told)
        self._computing.fleet.later(
            self._computing.calls_s(len(ahead.everyone))[1], lambda: self._hold(ahead)
        )

    def settle(self, number: int, members: Sequence[int]) -> None:
        """Changes up to this number are over: in force, or withdrawn by the driver.

        Growth of the data is not: it concerns those that meet now, who have all heard of it.
        """
        ahead = self.ahead
        if ahead is None:
            return
        told = ahead.told
        if told.number <= number:
            self.ahead = None
        elif set(members) <= set(told.members):
            ahead.told = replace(told, members=tuple(members))
            self.look()
        else:
            late = sorted(set(members).difference(told.members))
            self._computing.wrong = f"members {late} have not heard that the data has grown"

    def look(self) -> None:
        """Someone can be reached again."""
        if self.ahead is not None and self.ahead.called:
            self._hold(self.ahead)

    def _hold(self, ahead: Ahead) -> None:
        ahead.called = True
        if ahead is not self.ahead or ahead.held or self._computing.absent(ahead.everyone):
            return
        ahead.held = True
        group = self._computing.group
        if group is not None:
            group.advance(self._computing.world.now_s)
            self.agree(group)
            self._computing.plan(group)

    def agree(self, group: Lockstep) -> None:
        """All hold it: it is in force at the next step, or told one step later."""
        ahead = self.ahead
        if ahead is None or not ahead.held or ahead.due is not None:
            return
        if ahead.told.members == group.members:
            feed = _FEED if isinstance(ahead.told.change, Extend) else 0
            ahead.due = group.step + 1 + feed + self._computing.world.below(2)

    def apply(self, group: Lockstep, ahead: Ahead, ranks: Sequence[int]) -> None:
        """These ranks switch to a change before the present step."""
        self._computing.report(group, ranks)
        change: Change = ahead.told.change
        if isinstance(change, Reshare):
            step_s = group.step_s
            if len(ranks) == len(group.members):
                step_s = self._computing.step_s(group.members, change.shares)
            group.reshare(change.generation, change.shares, step_s)
            group.idle = group.idle.difference(change.caught_up)
            if 0 in ranks:
                self._computing.announce(group)
        elif isinstance(change, Halt | Save):
            self._computing.save(group, ranks)
        elif isinstance(change, Extend):
            self._computing.grow(group, change.samples)
        bodies = self._computing.bodies(group)
        for rank in ranks:
            body = bodies[rank]
            if body is not None and body.number not in ahead.applied:
                ahead.applied.add(body.number)
                number = ahead.told.number
                word = ChangeApplied(member=body.number, change=number, step=group.step)
                self._computing.words.say(body, word)

    def become(self, before: Lockstep, change: Meet) -> None:
        """Those that have met ahead are another generation; newcomers follow it."""
        called = self._computing.meetings.coming
        if called is not None and called.told.generation > change.generation:
            self._computing.stopped_s = self._computing.world.now_s
            return  # they were called elsewhere meanwhile
        seats = self._computing.fleet.seats
        if any(n not in seats or not seats[n].alive for n in change.members):
            self._computing.stopped_s = self._computing.world.now_s
            return
        newcomers = frozenset(n for n in change.following if not seats[n].begun)
        self._computing.group = group = Lockstep(
            cut=self._computing.cut,
            members=change.members,
            shares=change.shares,
            formed_as=change.generation,
            generation=change.generation,
            first_step=before.step,
            step=before.step,
            at=before.at,
            value=before.value,
            begun_s=self._computing.world.now_s,
            step_s=self._computing.step_s(change.members, change.shares),
            newcomers=newcomers,
            idle=frozenset(change.following),
            saved_step=self._computing.origin.step,
        )
        if any(seats[n].frozen for n in change.members):
            group.stalled_s = self._computing.world.now_s
            self._computing.stopped_s = self._computing.world.now_s
        self._computing.follow(group)
        if group.stalled_s is None:
            self._computing.announce(group)
            self._computing.go_on(group)
