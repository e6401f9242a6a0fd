"""What members do together: they compute, report, save, and apply changes that were sent ahead.

How a generation begins and ends stands in `generations`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from raycloud.commands import Change, Extend, Halt, Meet, Prepare, Reshare, Save
from raycloud.events import (
    ChangeApplied,
    GenerationFormed,
    MemberCaughtUp,
    MemberDone,
    PartFailed,
    PartWritten,
)
from raycloud.order import EpochSizes, Position, Steps
from raycloud.simulate.fleet import SimulatedMember, committed
from raycloud.simulate.history import NOTHING
from raycloud.simulate.lockstep import Lockstep

if TYPE_CHECKING:
    from raycloud.commands import Form
    from raycloud.simulate.fleet import Fleet, Messages
    from raycloud.simulate.history import Kept
    from raycloud.simulate.scenario import Scenario
    from raycloud.simulate.world import World

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
    """The change that was sent ahead; there is one at a time, and none once it is in force."""

    def __init__(self, computing: Computing) -> None:
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
        computing, seats = self._computing, self._computing.fleet.seats
        elsewhere = computing.called > change.generation  # they were called there meanwhile
        if elsewhere or any(n not in seats or not seats[n].alive for n in change.members):
            computing.stopped_s = computing.world.now_s
            return
        group = computing.begin(change, before.step, before.at, before.value)
        if any(seats[n].frozen for n in change.members):
            group.stalled_s = computing.stopped_s = computing.world.now_s
        computing.follow(group)
        if group.stalled_s is None:
            computing.announce(group)
            computing.go_on(group)


_MANY = 64  # of so many members, each reports in every round
_WRITE_S = 0.05  # as members tell of their parts
_FAR = 1 << 62


class Computing:
    """The generations of one start of a run, one after the other."""

    def __init__(
        self, scenario: Scenario, world: World, fleet: Fleet, words: Messages, kept: Kept | None
    ) -> None:
        self.scenario, self.world, self.fleet, self.words = scenario, world, fleet, words
        self.begin_from(kept)
        sizes = EpochSizes(fleet.samples)
        if kept is not None:  # an epoch that is begun ends as it began
            sizes = EpochSizes.from_state(kept.ledger)
            sizes = sizes.grown(kept.position.next_epoch, fleet.samples)
        self.cut = Steps(
            samples=sizes.samples,
            global_batch=scenario.global_batch,
            micro_batch=scenario.micro_batch,
            drop_last=scenario.drop_last,
            later=sizes.later,
        )
        self.last_step = scenario.steps or _FAR
        self.exchange_s = scenario.exchange_s  # of the present step, that nothing hides
        self.group: Lockstep | None = None  # that computes
        self.called = -1  # the newest generation that the driver has called for
        self.gather: Callable[[], None] = lambda: None  # `Meetings` knows how
        self.changes = Changes(self)
        self.full = False  # there is no room on the disk of the checkpoints
        self.stopped_s: float | None = None  # since when nobody computes, who had begun to
        self.pauses_s: list[float] = []
        self.wrong = ""  # what cannot be: the simulation or the run is broken
        self.stop: Callable[[], object] = lambda: None  # `Ending` knows how
        self._counted = ((0, 0), 0)
        self.saved_s: dict[int, tuple[float, float]] = {}  # by the step of a checkpoint: `so_far_s`

    def position(self, step: int) -> Position:
        """Where the sequence stands before `step`."""
        return self.cut.position_after(step - self.origin.step, self.origin.position)

    def micro_batches(self, first_step: int, last_step: int) -> int:
        """Of steps [first_step, last_step), of all members."""
        asked = first_step, last_step
        if self._counted[0] != asked:  # members tell of the same steps, one after the other
            at = self.position(first_step)
            self._counted = asked, self.cut.micro_batches(last_step - first_step, at)
        return self._counted[1]

    def begin_from(self, kept: Kept | None) -> None:
        """The checkpoint is what counts; None: nothing does."""
        self.origin = kept or NOTHING
        self.reached = self.origin.step  # one past the newest step that anyone has committed
        self.useful_s = self.origin.useful_s  # in which steps were computed
        self.busy_s = self.origin.busy_s  # that members computed, together

    def go_back(self, kept: Kept | None) -> None:
        """Nobody has the state any more: whoever meets next begins where the checkpoint stands."""
        self.stop()
        for body in self.fleet.seats.values():
            body.begun, body.kept, body.owes, body.owes_s = False, (), 0, 0.0
        self.begin_from(kept)

    def grow(self, group: Lockstep, samples: int) -> None:
        """So many has each epoch that begins before the group's present step, or later."""
        epoch = self.position(group.step).next_epoch
        group.cut = self.cut = self.cut.grown(epoch, samples)
        self._counted = ((0, 0), 0)

    def bodies(self, group: Lockstep) -> list[SimulatedMember | None]:
        """Its members by rank, as far as the driver still holds them."""
        return [self.fleet.seats.get(number) for number in group.members]

    def look(self) -> None:
        """Someone can be reached again."""
        self.gather()
        self.changes.look()

    def absent(self, members: Sequence[int] | set[int]) -> bool:
        """Whether one of them does not live, or cannot be reached or compute."""
        seats = self.fleet.seats
        return any(number not in seats or not seats[number].well for number in members)

    def calls_s(self, number: int) -> tuple[float, float]:
        """When the first and the last of so many calls arrive."""
        calls_s = self.world.chance.random(number) * self.scenario.delay_s
        return float(calls_s.min()), float(calls_s.max())

    def tell(self, body: SimulatedMember, step: int, at: Position | None = None) -> None:
        """It tells of all steps before `step`, where the sequence stands `at`, if it has not."""
        at = self.position(step) if at is None else at
        computed = self.micro_batches(body.told, step)
        self.words.say(body, committed(body, step, at, computed))
        body.told, body.owes, body.owes_s = step, 0, 0.0

    def catch_up(self, body: SimulatedMember, step: int, value: int) -> None:
        """It stands at `step` from now on, and has told of all before."""
        if not body.begun:
            body.told = step
        elif body.told < step:
            self.tell(body, step)
        body.begun, body.step, body.value, body.kept = True, step, value, ()

    def announce(self, group: Lockstep) -> None:
        """Its first member says that it has formed."""
        first = self.fleet.seats.get(group.members[0])
        if first is not None:
            word = GenerationFormed(
                generation=group.generation,
                members=group.members,
                shares=group.shares,
                first_step=group.step,
                kept=group.kept,
            )
            self.words.say(first, word)

    def begin(self, told: Form | Meet, step: int, at: Position, value: int) -> Lockstep:
        """Those that have met compute from `step` on; some follow."""
        following = (self.fleet.seats[number] for number in told.following)
        self.group = Lockstep(
            cut=self.cut,
            members=told.members,
            shares=told.shares,
            formed_as=told.generation,
            generation=told.generation,
            first_step=step,
            step=step,
            at=at,
            value=value,
            begun_s=self.world.now_s,
            step_s=self.step_s(told.members, told.shares),
            newcomers=frozenset(body.number for body in following if not body.begun),
            idle=frozenset(told.following),
            saved_step=self.origin.step,
        )
        self._time(self.group)
        return self.group

    def so_far_s(self, group: Lockstep | None) -> tuple[float, float]:
        """In how many seconds steps were computed, and for how many members computed, together."""
        if group is None:
            return self.useful_s, self.busy_s
        return self.useful_s + group.useful_s, self.busy_s + float(group.computed_s.sum())

    def resumed(self) -> None:
        """They compute, again."""
        if self.stopped_s is not None:
            self.pauses_s.append(self.world.now_s - self.stopped_s)
            self.stopped_s = None

    def follow(self, group: Lockstep) -> None:
        """Its newcomers take the state while the others compute."""
        first_step = group.step

        def caught_up() -> None:
            if group is not self.group or self.fleet.over:
                return
            group.advance(self.world.now_s)
            known, group.newcomers = group.newcomers, frozenset()
            for number in sorted(group.idle):
                if (body := self.fleet.seats.get(number)) is None:
                    continue
                if number in known:
                    self.catch_up(body, group.step, group.value)
                word = MemberCaughtUp(
                    member=number,
                    generation=group.formed_as,
                    first_step=first_step,
                    step=group.step,
                )
                self.words.say(body, word)

        if group.idle:
            self.fleet.later(self.scenario.follow_s if group.newcomers else 0.0, caught_up)

    # ---- steps

    def step_s(self, members: Sequence[int], shares: Sequence[float]) -> float:
        """How long a step takes these members with these shares."""
        fleet, costing = self.fleet, self.scenario.costing
        bodies = [fleet.seats[number] for number in members]
        if costing is not None:
            nodes = [fleet.node_of(body) for body in bodies]
            speeds = [fleet.speed(body) for body in bodies]
            step_s, self.exchange_s = costing.step_s(nodes, speeds, shares)
            return step_s
        longest_s = max(
            fleet.seconds(body, share) for body, share in zip(bodies, shares, strict=True)
        )
        return longest_s + self.exchange_s

    def _time(self, group: Lockstep) -> None:
        """Its members compute as fast as they do now."""
        speeds = [self.fleet.speed(self.fleet.seats[number]) for number in group.members]
        group.fixed_s = np.array([speed.fixed_s for speed in speeds])
        group.micro_s = np.array([speed.micro_batch_s for speed in speeds])

    def _turn(self, group: Lockstep) -> None:
        """Each step has the speeds of its row of a trace."""
        if not (rows := self.scenario.rows):
            return
        machines = self.fleet.machines
        for node, slow in enumerate(rows[group.step % len(rows)]):
            machines.slow[node] = slow
        if all(body is not None for body in self.bodies(group)):
            group.step_s = self.step_s(group.members, group.shares)
            self._time(group)

    def retime(self) -> None:
        """A machine has another speed."""
        group = self.group
        if group is None or any(body is None for body in self.bodies(group)):
            return
        now_s = self.world.now_s if group.stalled_s is None else group.stalled_s
        group.advance(now_s)
        step_s = self.step_s(group.members, group.shares)
        if now_s > group.begun_s:  # what of the step is done stays done
            group.begun_s = now_s - (now_s - group.begun_s) / group.step_s * step_s
        group.step_s = step_s
        self._time(group)
        self.plan(group)

    def plan(self, group: Lockstep) -> None:
        """Think of the next step before which something is due."""
        if group is not self.group or group.stalled_s is not None:
            return
        group.ticket += 1
        ticket = group.ticket
        stops = [self.last_step]
        if group.step <= group.first_step or self.scenario.rows:
            stops.append(group.step + 1)
        if (every := self.scenario.every) is not None:
            stops.append((group.step // every + 1) * every)
        if self.changes.ahead is not None and self.changes.ahead.due is not None:
            stops.append(self.changes.ahead.due)
        group.barrier = min(stop for stop in stops if stop > group.step)
        self.world.at(group.barrier_s, lambda: self._arrive(group, ticket))

    def _arrive(self, group: Lockstep, ticket: int) -> None:
        if group is not self.group or ticket != group.ticket or self.fleet.over:
            return
        group.advance(self.world.now_s)
        if group.step < group.barrier:  # rounding
            self.plan(group)
            return
        self.between(group, range(len(group.members)))
        self.go_on(group)

    def go_on(self, group: Lockstep) -> None:
        """What is due before the present step."""
        self.reached = max(self.reached, group.step)
        change, ended = self.take_due(group, range(len(group.members)))
        if change is not None:
            self.changes.ahead = None
        if ended or isinstance(change, Meet):
            self.end(group)
            if isinstance(change, Meet):
                self.changes.become(group, change)
            return
        self.changes.agree(group)
        self._turn(group)
        self.plan(group)

    def take_due(self, group: Lockstep, ranks: Sequence[int]) -> tuple[Change | None, bool]:
        """These ranks apply what is due before the present step; and whether they have ended."""
        change, ahead, over = None, self.changes.ahead, group.step >= self.last_step
        if not over and ahead is not None and ahead.due == group.step:
            change = ahead.told.change
            self.changes.apply(group, ahead, ranks)
        if ended := over or isinstance(change, Halt):
            self.finish(group, ranks)
        return change, ended

    def between(self, group: Lockstep, ranks: Sequence[int]) -> None:
        """What these ranks do after a step, by arithmetic: report, save."""
        every, step = self.scenario.every, group.step
        if step in {group.first_step + 1, self.last_step}:
            self.report(group, ranks)
        if step == self.last_step or (every is not None and step % every == 0):
            self.save(group, ranks)

    def finish(self, group: Lockstep, ranks: Sequence[int]) -> None:
        """These ranks have nothing left to do."""
        bodies = self.bodies(group)
        for rank in ranks:
            if (body := bodies[rank]) is not None:
                done = MemberDone(member=body.number, step=group.step, generation=group.formed_as)
                self.words.say(body, done)

    def end(self, group: Lockstep) -> None:
        """It is over, in order: all of its members stand where it does."""
        self.useful_s, self.busy_s = self.so_far_s(group)
        self.group = None
        for body in self.bodies(group):
            if body is not None and body.number not in group.newcomers:
                body.step, body.value, body.kept = group.step, group.value, ()

    def report(self, group: Lockstep, ranks: Sequence[int]) -> None:
        """These ranks tell of the steps that they have not told of."""
        done, bodies = (group.micro - group.told).tolist(), self.bodies(group)
        took_s = (group.computed_s - group.told_s).tolist()
        at, telling = self.position(group.step), []
        for rank in ranks:
            body = bodies[rank]
            if body is None or body.told >= group.step or body.number in group.newcomers:
                continue
            telling.append(rank)
            body.owes += done[rank]
            body.owes_s += took_s[rank]
            body.generation = group.generation
            self.tell(body, group.step, at)
        group.told[telling] = group.micro[telling]
        group.told_s[telling] = group.computed_s[telling]

    def round(self, *, everyone: bool) -> None:
        """Members tell of their steps, as they do about once a second."""
        group = self.group
        if group is None:
            return
        group.advance(self.world.now_s)
        self.reached = max(self.reached, group.step)
        ranks = range(len(group.members))
        if everyone or len(ranks) > _MANY:
            self.report(group, ranks)
        else:
            self.report(group, [rank for rank in ranks if self.world.likely(0.7)])

    def save(self, group: Lockstep, ranks: Sequence[int]) -> None:
        """These ranks write their parts of the checkpoint before the present step, once."""
        if group.saved_step == group.step:
            return
        group.saved_step = group.step
        self.saved_s[group.step] = self.so_far_s(group)
        self.report(group, ranks)
        bodies, delay_s = self.bodies(group), self.scenario.delay_s
        for rank in ranks:
            if (body := bodies[rank]) is None or body.number in group.idle:
                continue
            number, step, generation = body.number, group.step, group.generation
            word: PartWritten | PartFailed = PartWritten(
                member=number,
                step=step,
                part={"value": group.value},
                blocked_s=0.0,
                write_s=_WRITE_S,
                generation=generation,
                replica=rank,
            )
            if self.full:
                why = "no space left on device"
                word = PartFailed(member=number, step=step, why=why, generation=generation)
            self.words.say(body, word, self.world.between(0.0, delay_s))
