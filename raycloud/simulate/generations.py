"""Generations: members meet and find out where they go on, until one dies or a link breaks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raycloud.commands import Meet
from raycloud.events import ExchangeBroken, MemberFailed
from raycloud.order import deal

if TYPE_CHECKING:
    from raycloud.commands import Form
    from raycloud.simulate.computing import Computing
    from raycloud.simulate.fleet import SimulatedMember
    from raycloud.simulate.lockstep import Lockstep

_MEET_S = 0.1


@dataclass(eq=False, slots=True)
class Meeting:
    """A generation that was told to meet."""

    told: Form
    called: bool = False  # everyone has heard of it
    begun: bool = False


class Meetings:
    """The meetings that the driver calls for; only the newest counts."""

    def __init__(self, computing: Computing) -> None:
        self._computing = computing
        self.coming: Meeting | None = None
        computing.gather = self.look

    def form(self, told: Form) -> None:
        """Members are told, one by one, to leave what they do and to meet."""
        meeting = self.coming = Meeting(told)
        self._computing.called = told.generation
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
        told, computing = meeting.told, self._computing
        if meeting is not self.coming or meeting.begun or computing.absent(told.members):
            return
        meeting.begun = True
        computing.changes.settle(told.settled, told.members)
        bodies = [computing.fleet.seats[number] for number in told.members]
        step, value = self._ground(bodies)
        adopted, fresh = self._adopt(bodies, told.shares, step)
        group = computing.begin(told, step, computing.position(step), value)
        group.adopted, group.fresh = adopted, fresh
        for body in bodies:
            if body.number not in group.newcomers:
                computing.catch_up(body, step, value)
        computing.announce(group)
        computing.follow(group)
        computing.resumed()
        if step > computing.origin.step:
            computing.between(group, range(len(group.members)))
        computing.go_on(group)

    def _ground(self, bodies: Sequence[SimulatedMember]) -> tuple[int, int]:
        """The step where all go on, and the parameters before it."""
        begun = [body for body in bodies if body.begun]
        if not begun:
            return self._computing.origin.step, self._computing.origin.value
        step = max(body.step for body in begun)
        values = {body.value for body in begun if body.step == step}
        if len(values) > 1:
            self._computing.wrong = f"members before step {step} have different parameters"
        return step, min(values)

    def _adopt(
        self, bodies: Sequence[SimulatedMember], shares: Sequence[float], step: int
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


_HEARD_OF = 16  # members that tell that their exchange broke; control needs one


class Ending:
    """What befalls the members of a start."""

    def __init__(self, computing: Computing) -> None:
        self._computing, self._world = computing, computing.world
        self._fleet, self._words = computing.fleet, computing.words
        computing.stop = self.stop
        computing.fleet.die = self.die

    def stop(self) -> list[SimulatedMember]:
        """The generation stops in the midst of its step; those wait for another meeting now."""
        computing, world = self._computing, self._world
        group = computing.group
        if group is None:
            return []
        group.advance(world.now_s)
        computing.reached = max(computing.reached, group.step)
        computing.useful_s, computing.busy_s = computing.so_far_s(group)
        computing.group = None
        at_s = world.now_s if group.stalled_s is None else group.stalled_s
        if computing.stopped_s is None:
            computing.stopped_s = at_s
        over = self._over(group, at_s)
        twin = group.once_more() if over else group
        done, bodies = (group.micro - group.told).tolist(), computing.bodies(group)
        took_s = (group.computed_s - group.told_s).tolist()
        owned = group.owned() if group.step < computing.last_step else [()] * len(bodies)
        for rank, body in enumerate(bodies):
            if body is None or body.number in group.newcomers:
                continue
            body.generation = group.generation
            if rank in over:
                body.step, body.value, body.kept = twin.step, twin.value, ()
            else:
                body.step, body.value = group.step, group.value
                body.kept = self._kept(group, rank, owned[rank], at_s)
                body.owes += done[rank]
                body.owes_s += took_s[rank]
        waiting = self._pass_on(twin, sorted(over)) if over else True
        for rank, body in enumerate(bodies):
            if body is not None and rank not in over and world.likely(0.5):
                self._tell(body)
        return [
            body
            for rank, body in enumerate(bodies)
            if body is not None and (waiting or rank not in over)
        ]

    def _tell(self, body: SimulatedMember) -> None:
        if body.begun and body.told < body.step:
            self._computing.tell(body, body.step)

    def _over(self, group: Lockstep, at_s: float) -> frozenset[int]:
        """Ranks that have committed the present step all the same: all of it had reached them."""
        late = at_s - group.begun_s >= group.step_s - self._computing.exchange_s
        if not late or group.step >= self._computing.last_step or not self._world.likely(0.7):
            return frozenset()
        number = len(group.members)
        return frozenset(self._world.some(self._world.below(number + 1), number))

    def _kept(
        self, group: Lockstep, rank: int, owned: Sequence[int], at_s: float
    ) -> tuple[int, ...]:
        """The micro-batches of the present step that a rank has by then."""
        before = len(owned) - group.fresh[rank] if group.adopted is not None else 0
        if at_s < group.begun_s:
            return tuple(owned[:before])
        new = len(owned) - before
        number = (0, new, self._world.below(new + 1))[self._world.below(3)]
        return tuple(owned[: before + number])

    def _pass_on(self, twin: Lockstep, ranks: list[int]) -> bool:
        """Those that have committed the step do what is due then; False: and have ended."""
        computing = self._computing
        computing.reached = max(computing.reached, twin.step)
        twin.told, twin.told_s = twin.told.copy(), twin.told_s.copy()
        computing.between(twin, ranks)
        computing.report(twin, ranks)
        return not computing.take_due(twin, ranks)[1]

    # ---- what befalls members

    def die(self, body: SimulatedMember) -> None:
        """A member's process ends; its peers' connections to it do, too."""
        if not body.alive:
            return
        group = self._computing.group
        waiting: list[SimulatedMember] = []
        generation = -1
        if group is not None and body.number in group.members:
            generation = group.formed_as
            waiting = self.stop()
        self._fleet.kill(body)
        self._complain(waiting, generation, "connection reset by peer")
        self._miss(body)

    def _miss(self, body: SimulatedMember) -> None:
        """Some hear of the death of one whom they were to meet ahead."""
        ahead = self._computing.changes.ahead
        if ahead is None or ahead.held or not self._world.likely(0.3):
            return
        change = ahead.told.change
        if isinstance(change, Meet) and body.number in change.members:
            others = [self._fleet.seats.get(number) for number in ahead.told.members]
            peers = [other for other in others if other is not None]
            self._complain(peers, change.generation, "it cannot be met")

    def breaks(self) -> None:
        """Connections are reset: nobody is gone, and nobody can go on."""
        if (group := self._computing.group) is not None:
            self._complain(self.stop(), group.formed_as, "connection reset", all_of_them=True)

    def _complain(
        self,
        bodies: Sequence[SimulatedMember],
        generation: int,
        why: str,
        *,
        all_of_them: bool = False,
    ) -> None:
        told = 0
        for body in bodies:
            if not body.alive or told >= _HEARD_OF:
                continue
            if all_of_them or self._world.likely(0.8):
                told += 1
                self._tell(body)
                word = ExchangeBroken(member=body.number, generation=generation, why=why)
                self._words.say(body, word, self._world.between(0.04, 1.0))

    def fail(self, body: SimulatedMember) -> None:
        """Its task raises; its process goes on answering, and does nothing any more.

        Not where it stands still: then it would not be heard.
        """
        if body.frozen:
            return
        word = MemberFailed(member=body.number, error="TaskError", message="the task raised")
        self._words.say(body, word)
        self._freeze(body)

    def freeze(self, body: SimulatedMember) -> None:
        """It stands still, and does not answer."""
        self._fleet.hush(body)
        self._freeze(body)

    def _freeze(self, body: SimulatedMember) -> None:
        body.frozen += 1
        group, now_s = self._computing.group, self._world.now_s
        if group is None or body.number not in group.members or group.stalled_s is not None:
            return
        group.advance(now_s)
        group.stalled_s = now_s
        group.ticket += 1
        if self._computing.stopped_s is None:
            self._computing.stopped_s = now_s

    def thaw(self, body: SimulatedMember) -> None:
        """It goes on where it stood still."""
        body.frozen -= 1
        self._fleet.unhush(body)
        group, computing = self._computing.group, self._computing
        if group is not None and group.stalled_s is not None:
            seats = self._fleet.seats
            if not any(n in seats and seats[n].frozen for n in group.members):
                group.begun_s += self._world.now_s - group.stalled_s
                group.stalled_s = None
                computing.resumed()
                computing.plan(group)
        computing.look()

    def lose_sight(self, body: SimulatedMember) -> None:
        """The driver cannot reach it; its peers can."""
        self._fleet.hush(body)
        body.unheard += 1

    def see_again(self, body: SimulatedMember) -> None:
        """The driver can reach it."""
        body.unheard -= 1
        self._fleet.unhush(body)
        self._computing.look()

    def leave_out(self, member: int) -> None:
        """The driver lets the others go on without this member, and keeps its process."""
        group = self._computing.group
        if group is not None and member in group.members:
            self.stop()
        self._fleet.leave_out(member)

    def release(self, members: Sequence[int]) -> None:
        """The driver ends these members' processes."""
        group = self._computing.group
        if group is not None and not set(members).isdisjoint(group.members):
            self.stop()
        for number in members:
            self._fleet.drop(number)
