"""Membership: the members of a job, the present generation, and the change that is on its way.

What is remembered here changes here alone: others ask, and call what names the change.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from raycloud.commands import Change, Extend, Meet, Reshare
from raycloud.control.member import Member, Roster
from raycloud.control.tables import MemberState

if TYPE_CHECKING:
    from raycloud.events import MemberReady, WorkerKey

WORKER = "worker"
_FIRST_WAIT_S = 1.0  # after a member that could not join; doubled with each further one
_LONGEST_WAIT_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Adoption:
    """Members that have outlived their driver, and what the run's files say of them.

    Attributes:
        readies: What they said when they could compute, by rank.
        steps: One past the last step that each has reported, by member, as far as the log has it;
            also of those that are gone.
        skips: What each has reported that did not count, as records, by member.
        lost: Members of their generation that are not there any more.
        changes: The highest number of a change that was sent to any of them.
        published: Step of the newest checkpoint; None where there is none.
        began_s: When what drives them now was started.
    """

    readies: tuple[MemberReady, ...]
    steps: dict[int, int]
    skips: Mapping[int, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    lost: tuple[int, ...] = ()
    changes: int = 0
    published: int | None = None
    began_s: float = 0.0


@dataclass(kw_only=True, slots=True)
class Outstanding:
    """A change that was sent ahead and is not yet in force everywhere.

    Attributes:
        waits_for: Those of `members` that have not switched.
        step: At whose start the others did, all alike; None: nobody has.
        in_force: Somebody has, or computes already as it says: so will all others.
    """

    number: int
    members: tuple[int, ...]
    change: Change
    waits_for: set[int]
    step: int | None = None
    in_force: bool = False

    def concerns(self, number: int) -> bool:
        """It was sent to this member."""
        return number in self.waits_for or number in self.members

    def take_effect(self) -> bool:
        """It is in force from now on; False: it was already."""
        known, self.in_force = self.in_force, True
        return not known

    def apply(self, number: int, step: int) -> None:
        """A member has switched before `step`."""
        self.waits_for.discard(number)
        self.step = step

    def send_to(self, members: tuple[int, ...]) -> None:
        """These are to switch, if they have not: others than before."""
        done = set(self.members) - self.waits_for
        self.members, self.waits_for = members, set(members) - done


# Of a group, and those that follow: past which step so many of the first ranks are known to be.
_Past = tuple[tuple[int, ...], frozenset[int], int, int]


class _Known(NamedTuple):
    """What holds over all members, as long as none turns and the generation is the same."""

    of: tuple[int, tuple[int, ...], tuple[int, ...]]
    within: frozenset[int]
    joining: Sequence[Member]
    gone: bool
    broken: bool


@dataclass(kw_only=True, slots=True)
class Membership:
    """Who there is, who computes as which generation, and what they are told to change to.

    Attributes:
        workers: The elastic range last asked for: fewest and most members.
        capacity: How many members the machines hold, as far as is known.
        generation: The generation that is forming or in force.
        next_member: The number of the next member that is asked for.
        members: Every member there ever was, by number.
        roster: What has become of all of them together.
        group: Members of the present generation, in order of rank.
        shares: Their micro-batches per step.
        following: Those of them that had no state then, nor a share yet; caught up: `joined`.
        formed_as: The generation as which the present group met first.
        groups: By generation, for `keys_of`: all that met and had the state, with their keys.
        sound_from: Words of older generations do not count any more: they broke.
        met: It is known to have met.
        ended: Whose process has ended when it was done: its work is kept, it does not meet again.
        outstanding: The change that is on its way.
        changes: How many were sent.
        halted: A member has applied the halt: the run ends before its last step.
        ready_s: When the last one became ready.
        late: Those of the first that were not ready when the others began.
        absent_since_s: By member that was lost by silence alone, and whose process is kept.
        returns: By member that is what a process has come back as: how often it has come back.
        vacant: Who was lost since the last tick by its end, so that its place may be another's.
        misses: How many members in a row were lost before they had joined.
        ask_again_s: Not before is another one asked for.
    """

    workers: tuple[int, int]
    capacity: int
    generation: int
    next_member: int
    members: dict[int, Member] = field(default_factory=dict)
    roster: Roster = field(default_factory=Roster)
    group: tuple[int, ...] = ()
    shares: tuple[float, ...] = ()
    following: frozenset[int] = frozenset()
    formed_as: int = 0
    groups: dict[int, dict[int, WorkerKey]] = field(default_factory=dict)
    sound_from: int = 0
    met: bool = False
    ended: set[int] = field(default_factory=set)
    outstanding: Outstanding | None = None
    changes: int = 0
    halted: bool = False
    ready_s: float = 0.0
    late: frozenset[int] = frozenset()
    absent_since_s: dict[int, float] = field(default_factory=dict)
    returns: dict[int, int] = field(default_factory=dict)
    vacant: list[int] = field(default_factory=list)
    misses: int = 0
    ask_again_s: float = 0.0
    _known: _Known | None = None
    _past: _Past = ((), frozenset(), 0, 0)

    # ---- who there is

    def present(self) -> Sequence[Member]:
        """Members that are not gone, in order of number."""
        return [self.members[number] for number in self.roster.present]

    def look_who_was_heard(self, now_s: float) -> None:
        """When all were heard last, or later, as it is now."""
        self.roster.heard_s = min((m.heard_s for m in self.present()), default=now_s)

    @property
    def staying(self) -> int:
        """How many members are not gone and are not going to be."""
        return len(self.roster.present) - len(self.roster.leaving)

    def joining(self) -> Sequence[Member]:
        """Those that are to join those that compute, and do not yet: see `is_spare`."""
        return self._now().joining

    def is_spare(self, number: int) -> bool:
        """Whether this member is to join those that compute, and does not yet."""
        return not self.members[number].joined and number not in self.within()

    def spares(self) -> list[Member]:
        """Members that are ready and do not take part yet."""
        return [m for m in self.joining() if m.state is MemberState.READY]

    def _free_slots(self) -> Iterator[int]:
        """Without end, the lowest first."""
        taken = {m.slot for m in self.present()}
        return (slot for slot in itertools.count() if slot not in taken)

    # ---- who computes

    @property
    def keys(self) -> tuple[WorkerKey, ...]:
        """What identifies the work of each of the group, by rank."""
        return one_worker_each(len(self.group))

    def within(self) -> frozenset[int]:
        """The members of the present generation, in no order."""
        return self._now().within

    def in_group(self) -> list[Member]:
        """Members of the present generation, in order of rank."""
        return [self.members[number] for number in self.group]

    def holders(self) -> list[Member]:
        """Those of them that do not follow: a step counts that all of these have committed."""
        return [self.members[number] for number in self.group if number not in self.following]

    def left(self) -> list[int]:
        """Who is left of the group, by rank, and then of those that leave it just now."""
        sent, there = self.outstanding, list(self.group)
        if sent is not None and sent.in_force and isinstance(sent.change, Meet):
            stays = set(self.group)
            there += [number for number in sent.members if number not in stays]
        present, ended = self.roster.present, self.ended
        return [number for number in there if number in present and number not in ended]

    def who_follows(self, numbers: Iterable[int]) -> frozenset[int]:
        """Those of these members that followed, and are not known to have caught up."""
        follow = self.following.intersection(numbers) if self.following else ()
        return frozenset(number for number in follow if not self.members[number].joined)

    def is_to_follow(self, number: int) -> bool:
        """Whether this member follows without the state, or is about to."""
        coming = self.coming.following if self.coming is not None else ()
        return not self.members[number].joined and (number in self.following or number in coming)

    def is_to_meet(self, number: int) -> bool:
        """Whether this member is one of the present generation, or of the one to come."""
        coming = self.coming.members if self.coming is not None else ()
        return number in self.within() or number in coming

    @property
    def coming(self) -> Meet | None:
        """The meeting that was sent ahead, in force or not."""
        change = self.outstanding.change if self.outstanding is not None else None
        return change if isinstance(change, Meet) else None

    @property
    def is_in_force(self) -> bool:
        """Somebody has made the change that was sent ahead: so will all others."""
        return self.outstanding is not None and self.outstanding.in_force

    def any_gone(self) -> bool:
        """Whether a member of the present generation is gone."""
        return self._now().gone

    def any_missing(self) -> bool:
        """The same, or one of the generation to come."""
        return self._now().broken

    def any_done(self) -> bool:
        """Whether a member of the present generation has nothing left to do."""
        return self.roster.states[MemberState.DONE] > 0 and any(
            m.state is MemberState.DONE for m in self.in_group()
        )

    def all_past(self, step: int) -> bool:
        """Whether all of the group that do not follow have committed `step`; steps only rise."""
        group, follow, at, ranks = self._past
        if group is not self.group or follow is not self.following or at != step:
            group, follow, ranks = self.group, self.following, 0
        while ranks < len(group) and (
            self.members[group[ranks]].step > step or group[ranks] in follow
        ):
            ranks += 1
        self._past = group, follow, step, ranks
        return ranks == len(group)

    def keys_of(self, generation: int) -> Mapping[int, WorkerKey]:
        """Who divided what was written as `generation`, which may be newer than their meeting."""
        met = max((g for g in self.groups if g <= generation), default=self.formed_as)
        return self.groups.get(met, {})

    def held_keys(self) -> dict[int, WorkerKey]:
        """The keys of those that do not follow, by member in order of rank."""
        follow = self.following
        return {n: key for n, key in zip(self.group, self.keys, strict=True) if n not in follow}

    def _now(self) -> _Known:
        """What holds over all members, looked up again where one has turned."""
        coming = self.coming.members if self.coming is not None else ()
        of, known = (self.roster.count, self.group, coming), self._known
        if known is None or known.of != of:
            within, present = frozenset(self.group), self.roster.present.keys()
            gone = not within <= present
            known = self._known = _Known(
                of=of,
                within=within,
                joining=[self.members[n] for n in self.roster.new if n not in within],
                gone=gone,
                broken=gone or not present >= set(coming),
            )
        return known

    # ---- members come and go

    def spawn(self, count: int, now_s: float, *, joins: bool) -> tuple[int, ...]:
        """Add members whose processes are asked for; who `joins` has no place yet, and no state."""
        numbers = tuple(range(self.next_member, self.next_member + count))
        self.next_member += count
        for number, slot in zip(numbers, self._free_slots(), strict=False):
            self._add(number, now_s, slot=slot, joined=not joins).placed = not joins
        return numbers

    def introduce(self, ready: MemberReady, now_s: float) -> None:
        """A member is ready, and has measured itself."""
        self.members[ready.member].introduce(ready)
        self.ready_s = now_s

    def begin_without(self, late: Sequence[Member]) -> None:
        """The others begin: these are new from now on, and join."""
        self.late = frozenset(member.number for member in late)
        for member in late:
            member.forget_state()

    def _add(self, number: int, now_s: float, *, slot: int, joined: bool) -> Member:
        member = self.members[number] = Member(
            number=number, role=WORKER, heard_s=now_s, roster=self.roster, slot=slot, joined=joined
        )
        return member

    def take_over(self, adoption: Adoption, step: int, now_s: float) -> None:
        """Members met as the generation before, and compute already, or begin at `step`."""
        readies, steps = adoption.readies, adoption.steps
        self.sound_from, self.changes = self.generation, adoption.changes
        self.generation -= 1
        for slot, ready in enumerate(readies):
            # One that has reported nothing may have come just then, unless nobody has.
            joined = ready.member in steps or not steps
            member = self._add(ready.member, now_s, slot=slot, joined=joined)
            member.introduce(ready)
            member.enter(MemberState.ACTIVE)
            member.come_to(steps.get(ready.member, step))
            if member.step < step:  # it was away, and is called back
                member.recall(0, step)
        self.group = tuple(ready.member for ready in readies)

    def readmit(self, before: Member, now_s: float) -> int:
        """Add what the process of a member that was absent goes on as; its number."""
        number = self.next_member
        self.next_member += 1
        self.returns[number] = self.returns.pop(before.number, 0) + 1
        member = self._add(number, now_s, slot=self._slot_of_returned(before.slot), joined=False)
        member.role, member.node = before.role, before.node
        return number

    def _slot_of_returned(self, before: int) -> int:
        """The slot that it had; a newcomer that was to have it gets another."""
        free = next(self._free_slots())
        holder = next((m for m in self.present() if m.slot == before), None)
        if holder is None:
            return before
        if holder.joined:
            return free
        holder.slot = free
        return before

    def leave_out(self, number: int, now_s: float) -> None:
        """Keep the process and the place of a member that does not answer."""
        self.absent_since_s[number] = now_s

    def give_up(self, numbers: Iterable[int]) -> None:
        """These do not come back, or have."""
        for number in numbers:
            self.absent_since_s.pop(number, None)

    def vacate(self, number: int) -> None:
        """This one was lost by its end: its place may be another's until the next tick."""
        self.vacant.append(number)

    def take_vacancies(self, most: int) -> list[int]:
        """Who left these places: they are not vacant any more."""
        taken, self.vacant = self.vacant[:most], self.vacant[most:]
        return taken

    def note_ended(self, number: int) -> None:
        """Its process has ended when it was done."""
        self.ended.add(number)

    def miss(self, now_s: float) -> float:
        """A member could not join: another is asked for after so many seconds."""
        self.misses += 1
        wait_s = pause_s(self.misses)
        self.ask_again_s = now_s + wait_s
        return wait_s

    def ask_not_before(self, when_s: float) -> None:
        """Others are asked for then, or later."""
        self.ask_again_s = max(self.ask_again_s, when_s)

    def forget_misses(self) -> None:
        """A member has joined, or there is another machine, which may do."""
        self.misses = 0

    def set_range(self, fewest: int, most: int) -> None:
        """The elastic range is another one."""
        self.workers = fewest, most

    def set_capacity(self, workers: int) -> None:
        """The machines hold so many."""
        if workers > self.capacity:
            self.forget_misses()
        self.capacity = workers

    # ---- generations

    def form(
        self,
        group: tuple[int, ...],
        shares: tuple[float, ...],
        generation: int,
        following: frozenset[int] = frozenset(),
    ) -> None:
        """These are told to meet, as a generation after which nothing of older ones counts."""
        self.group, self.shares, self.following = group, shares, following
        self.generation = self.formed_as = self.sound_from = generation
        self.groups = {generation: self.held_keys()}
        self.halted = self.met = False

    def note_met(self) -> None:
        """The present group is known to have met."""
        self.met = True

    # ---- changes

    @property
    def settled(self) -> int:
        """Number of the last change that is over, in force or withdrawn."""
        return self.changes - (self.outstanding is not None)

    def send(self, change: Change) -> Outstanding:
        """Send a change ahead to the group."""
        self.changes += 1
        self.outstanding = Outstanding(
            number=self.changes, members=self.group, change=change, waits_for=set(self.group)
        )
        return self.outstanding

    def settle(self) -> None:
        """The outstanding change is over: in force, withdrawn, or the run ends before it is."""
        self.outstanding = None

    def withdraw(self, group: tuple[int, ...]) -> int:
        """Take back the outstanding change; the newest generation that anybody may know of.

        Growth of the data is not taken back, since some of `group` may have taken it in.
        """
        outstanding, newest = self.outstanding, self.generation
        if outstanding is None:
            return newest
        outstanding.send_to(group)
        if isinstance(outstanding.change, Reshare | Meet):
            newest = max(newest, outstanding.change.generation)
        if not isinstance(outstanding.change, Extend) or not outstanding.waits_for:
            self.settle()
        return newest

    def strike(self, number: int) -> bool:
        """Nobody waits for this member to switch; whether all others have."""
        sent = self.outstanding
        if sent is None or number not in sent.members:
            return False
        sent.send_to(tuple(m for m in sent.members if m != number))
        return not sent.waits_for

    def halt(self) -> None:
        """A member has halted: the run ends before its last step."""
        self.halted = True

    def become(self, meeting: Meet, step: int, now_s: float) -> None:
        """One member has changed to this generation at `step`: so will all others."""
        before_it = self.within()
        for number in meeting.members:
            member = self.members[number]
            if number not in before_it:
                member.step = max(member.step, step)  # it may be done already
            if member.state is MemberState.READY:
                member.enter(MemberState.ACTIVE)
            member.heard_s = now_s
        self.group, self.shares = meeting.members, meeting.shares
        self.following = frozenset(meeting.following)
        self.groups[meeting.generation] = self.held_keys()
        self.generation = self.formed_as = meeting.generation

    def promote(self, change: Reshare) -> None:
        """One member has changed to these shares: who caught up is as all others from there on."""
        if change.caught_up:
            self.following = self.following.difference(change.caught_up)
            self.groups[change.generation] = self.held_keys()

    def reshare(self, change: Reshare) -> None:
        """All have changed to these shares."""
        self.generation, self.shares = change.generation, change.shares


def one_worker_each(replicas: int) -> tuple[WorkerKey, ...]:
    """The keys of so many replicas of one worker, by rank."""
    return tuple((replica, 0) for replica in range(replicas))


def pause_s(times: int) -> float:
    """Seconds until another is asked for, after so many attempts in a row that came to nothing.

    >>> [pause_s(times) for times in (1, 2, 3, 9)]
    [1.0, 2.0, 4.0, 60.0]
    """
    return float(min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2.0 ** (times - 1)))
