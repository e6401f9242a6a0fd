"""Scaling: members that join, leave, are lost, or come back.

A member that is lost by silence alone keeps process and place for a while, and may return. What
comes back is another member to all others: it has a number of its own, and joins as any newcomer
does. So nothing that the one before says, or has said, counts any more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from raycloud.commands import Command, LeaveOut, Readmit, Release, Spawn, Vacancy
from raycloud.control.tables import FINAL, MemberState, Phase
from raycloud.events import MemberFailed, Noticed

if TYPE_CHECKING:
    from raycloud.control.member import Member
    from raycloud.control.state import JobState
    from raycloud.events import (
        CapacityChanged,
        MemberLeaving,
        MemberLost,
        MemberReady,
        MemberReturned,
    )

MOST_MISSES = 6  # in a row
SAME_DATA = (
    "every worker calls Task.data, and all have to get the same from it: list files in sorted "
    "order, give random_split, shuffles and permutations a generator with a seed of their own, and "
    "leave what is random about a sample to Task.batch"
)
_NOT_WITHOUT = frozenset({Phase.WAITING, Phase.RESTORING})  # the job cannot go on without others
_GROWS = frozenset({Phase.REGROUPING, Phase.TRAINING, *_NOT_WITHOUT})
_MOST_RETURNS = 3  # of one process: a link that comes and goes costs the others each time
_FOLLOWS = 3  # steps at least
_PER_PARAMETER = 2  # values that an optimizer keeps beside each, as Adam does


# ---- members join


def grow(state: JobState) -> Iterator[Command]:
    """Ask for as many members as there is room for; where there is less, give some up again.

    A member that joins learns the data as the run has found it at its start: where that has grown
    since, nobody joins.
    """
    membership, back = state.membership, state.recovery.back
    if state.data.progress is None or state.phase not in _GROWS:
        return
    restoring = state.phase is Phase.RESTORING
    if restoring and back is None:
        return  # it is found before long, and members then load it while others come
    coming = [m for m in membership.joining() if not m.leaving]
    surplus = _surplus(state, coming) if membership.outstanding is None else []
    unplaced = [m for m in coming if not m.placed]
    room = min(membership.workers[1], membership.capacity)
    if restoring:  # whoever adds machines sees that they are wanted
        room = max(membership.workers[0], room)
    lacking = room - membership.staying
    if state.data.version:
        yield from _none_joins(state)
    elif surplus:
        yield from let_go(surplus)
    elif lacking < 0 and unplaced:
        yield from let_go(unplaced[lacking:])
    elif lacking > 0 and _may_ask(state):
        yield Spawn(
            members=membership.spawn(lacking, state.now_s, joins=True),
            joins=True,
            back=back.step if back and restoring else None,
            vacancies=tuple(_vacancies(state, lacking)),
        )


def _vacancies(state: JobState, most: int) -> Iterator[Vacancy]:
    """The places of those that were lost just now, for as many others."""
    for number in state.membership.take_vacancies(most):
        ready = state.membership.members[number].ready
        if ready is not None:
            known = state.resharing.speed_of(ready)
            yield Vacancy(member=number, fixed_s=known.fixed_s, micro_batch_s=known.micro_batch_s)


def _surplus(state: JobState, coming: list[Member]) -> list[Member]:
    """Those of the newcomers for whom there is no room; who is ready comes before all others.

    Where a process has come back while another one is built in its place, the first that is ready
    has it.
    """
    membership = state.membership
    room = max(0, membership.workers[1] - (membership.staying - len(coming)))
    first = sorted(coming, key=lambda m: m.state is not MemberState.READY)
    building = [m for m in coming if m.state is not MemberState.READY]
    racing = any(m.number in membership.returns for m in building)
    return [] if racing and len(coming) - len(building) < room else first[room:]


def _may_ask(state: JobState) -> bool:
    """Where the others cannot go on without more, as often as it takes."""
    membership = state.membership
    if state.now_s < membership.ask_again_s:
        return False
    again = membership.misses < MOST_MISSES and not membership.any_done()
    return again or state.phase in _NOT_WITHOUT


def _none_joins(state: JobState) -> Iterator[Command]:
    """Said once, where there could be more members, or some are on their way."""
    membership, coming = state.membership, state.membership.joining()
    room = min(membership.workers[1], membership.capacity)
    if (coming or room > len(membership.group)) and state.tell_that_none_joins():
        yield Noticed(
            what="the data has grown in this run: no worker joins, and none is replaced, until it "
            "is resumed"
        )
    yield from let_go(coming)


def look_at_newcomer(state: JobState, member: Member) -> Iterator[Command]:
    """One that is ready joins, unless it sees other data."""
    if member.ready is not None and (why := _unlike(state, member.ready)):
        member.enter(MemberState.RELEASED)
        yield from missed(state, member, why)


def checked(state: JobState, event: MemberReady) -> MemberReady | MemberFailed:
    """One of the first that sees other data fails the job, though the others have begun."""
    if event.member not in state.membership.late or not (why := _unlike(state, event)):
        return event
    return MemberFailed(member=event.member, error="JobError", message=why, hint=SAME_DATA)


def _unlike(state: JobState, ready: MemberReady) -> str:
    """What is other data for one that comes after the others have begun; empty: nothing."""
    known, first = state.data.formed().steps.sizes.most, state.data.first
    if first is None:
        return ""
    if ready.samples != known:
        return f"it sees {ready.samples} samples, the others {known}"
    differing = other_samples(first, ready)
    return f"Task.data gives it other samples than the others: {differing}" if differing else ""


def other_samples(one: MemberReady, other: MemberReady) -> str:
    """What two members see differently in the task's own samples; empty if nothing is known to be.

    >>> from raycloud.events import MemberReady
    >>> known = {"samples": 8, "parameters": 1, "state_bytes": 4, "gradient_bytes": 4}
    >>> known |= {"fixed_s": 0.0, "micro_batch_s": 1.0, "held_out": 2}
    >>> one = MemberReady(member=0, fingerprint={"train/7": "a", "train/3": "b"}, **known)
    >>> other = MemberReady(member=1, fingerprint={"train/7": "c", "held_out/1": "d"}, **known)
    >>> other_samples(one, other), other_samples(one, one)
    ('train/7', '')
    """
    if None not in (one.held_out, other.held_out) and one.held_out != other.held_out:
        return f"{one.held_out} and {other.held_out} are held out"
    seen = other.fingerprint
    return ", ".join(n for n, digest in one.fingerprint.items() if seen.get(n, digest) != digest)


def hand_over_at_once(state: JobState, new: int) -> bool:
    """Whether all would wait but a moment for `new` members to take the state from them.

    It goes once over the link of each newcomer, at a time; from those who have it, together, it
    goes once for each, so that their links are the bound where newcomers are more than they are.
    Up to twice that is worth it where these would compute as long in three steps: they would be
    idle for as many at least. Of the members' paces the best is the nearest to that of their links:
    the others waited. Where they have exchanged nothing yet, those before them tell of their links.
    """
    moment_s, group = state.settings.hand_over_s, state.membership.holders()
    ready = next((m.ready for m in group if m.ready is not None), None)
    if ready is None:
        return False
    size = ready.state_bytes + _PER_PARAMETER * ready.gradient_bytes
    pace_s = min(m.pace_s for m in group)
    if pace_s == float("inf"):
        pace_s = min(m.pace_s for m in state.membership.members.values())
    takes_s = size * pace_s * max(1.0, new / len(group))
    idle_s = _FOLLOWS * state.data.formed().step_s * new / (len(group) + new)
    return takes_s < min(max(idle_s, moment_s), 2 * moment_s)


# ---- members leave


def prepare_for_leave(state: JobState, event: MemberLeaving) -> Iterator[Command]:
    """Members are going to be gone: the others get along without them, or keep what there is.

    Those that were to join are given up. Where fewer than the job must run with would be left, they
    go on computing as long as they are there, but a checkpoint is made now.
    """
    membership, node = state.membership, event.node
    going = [membership.members[event.member]]
    if node:
        going = [m for m in membership.present() if m.number == event.member or m.node == node]
    going = [m for m in going if not m.leaving]
    for member in going:
        member.leave()
    yield from let_go([m for m in going if membership.is_spare(m.number)])
    if going and state.data.progress is not None and not who_may_stay(state):
        state.checkpoints.ask()


def who_may_stay(state: JobState) -> list[int]:
    """Members of the group without those that are going to be gone, if they can do without them."""
    membership = state.membership
    present, leaving = membership.roster.present, membership.roster.leaving
    left = [number for number in membership.group if number in present and number not in leaving]
    new = [] if state.data.version else [m for m in membership.spares() if not m.leaving]
    enough = len(left) + len(new) >= membership.workers[0]
    return left if enough and any(membership.members[number].joined for number in left) else []


def dismiss(state: JobState) -> Iterator[Command]:
    """Nobody is going to join any more, and who leaves owes nothing that counts."""
    within = state.membership.within()
    others = [m for m in state.membership.present() if m.number not in within]
    yield from let_go(others)


def let_go(members: Sequence[Member]) -> Iterator[Command]:
    """End these members, if there are any."""
    for member in members:
        member.enter(MemberState.RELEASED)
    if members:
        yield Release(members=tuple(member.number for member in members))


# ---- members are lost


def missed(state: JobState, member: Member, why: str) -> Iterator[Command]:
    """A member that was to join is gone before it did: the others go on, and it is tried again."""
    membership = state.membership
    if member.number not in membership.absent_since_s:
        yield Release(members=(member.number,))
    if state.now_s < membership.ask_again_s:  # one incident may cost several
        return
    wait_s = membership.miss(state.now_s)
    last = membership.misses >= MOST_MISSES and state.phase not in _NOT_WITHOUT
    then = "no other is asked for" if last else f"another is asked for in {wait_s:g} s"
    what = f"a member could not join, {then}"
    yield Noticed(what=what, member=member.number, detail={"why": why})


def hold(state: JobState, event: CapacityChanged) -> None:
    """The machines hold so many; where that is more, another machine may do."""
    if event.workers > state.membership.capacity:
        state.recovery.forgive_failures()
    state.membership.set_capacity(event.workers)


# ---- members come back


def leave_out(state: JobState, event: MemberLost) -> Iterator[Command]:
    """Keep the process of a member that is lost, if it may come back and would be wanted."""
    membership, number = state.membership, event.member
    often = membership.returns.get(number, 0) >= _MOST_RETURNS
    if not event.silent or often or membership.members[number].leaving:
        return
    if number in membership.within() and _wanted(state):
        membership.leave_out(number, state.now_s)
        yield LeaveOut(member=number)


def come_back(state: JobState, event: MemberReturned) -> Iterator[Command]:
    """It answers again: it joins as another member, beside others that may be on their way."""
    membership = state.membership
    before = membership.members[event.member]
    membership.give_up([before.number])
    if not (_wanted(state) and _seats(state) > 0):
        yield Release(members=(before.number,))
        return
    number = membership.readmit(before, state.now_s)
    state.resharing.rename(before.number, number)
    yield Readmit(member=number, process=before.number)
    yield Noticed(
        what=f"it was silent and is back: its process goes on as member {number}",
        member=before.number,
        detail={"late_s": round(event.late_s, 1)},
    )


def give_up(state: JobState) -> Iterator[Command]:
    """Who is away for too long, or is not needed any more, ends: its place may be another's."""
    away = state.membership.absent_since_s
    if not away or state.phase in FINAL:
        return
    seats = _seats(state) if _wanted(state) else 0
    newest = sorted(away, key=away.__getitem__, reverse=True)
    kept = [n for n in newest[:seats] if state.now_s - away[n] < state.settings.return_s]
    ends = tuple(sorted(set(away).difference(kept)))
    state.membership.give_up(ends)
    if ends:
        yield Release(members=ends)


def _wanted(state: JobState) -> bool:
    """Whether such members may join at all: not where all begin, since they are not new."""
    begin = state.recovery.incident is not None and state.recovery.incident.begins
    joins = state.phase in _GROWS and not state.data.version and not begin
    return joins and not state.stop_requests and state.data.progress is not None


def _seats(state: JobState) -> int:
    """How many members the job lacks beside those that compute, or follow."""
    membership = state.membership
    present, leaving = membership.roster.present, membership.roster.leaving
    there = sum(number in present and number not in leaving for number in membership.group)
    return max(0, membership.workers[1] - there)
