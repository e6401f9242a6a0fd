"""Members that join those that compute: in the place of lost ones, or because there is room.

Each function changes the state that it is given and yields commands; nothing happens until it is
iterated.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from raycloud.commands import Command, LeaveOut, Notice, Readmit, Release, Spawn, Vacancy
from raycloud.control.membership import Member
from raycloud.control.shares import speed
from raycloud.control.tables import FINAL, MemberState, Phase

if TYPE_CHECKING:
    from raycloud.control.state import JobState
    from raycloud.events import (
        MemberLeaving,
        MemberLost,
        MemberReady,
        MemberReturned,
        StepsCommitted,
    )

_FIRST_WAIT_S = 1.0  # after a member that could not join; doubled with each further one
_LONGEST_WAIT_S = 60.0
MOST_MISSES = 6  # in a row
_NOT_WITHOUT = frozenset({Phase.WAITING, Phase.RESTORING})  # the job cannot go on without others
_GROWS = frozenset({Phase.REGROUPING, Phase.TRAINING, *_NOT_WITHOUT})


def grow(state: JobState, now_s: float) -> Iterator[Command]:
    """Ask for as many members as there is room for; where there is less, give some up again.

    A member that joins learns the data as the run has found it at its start: where that has grown
    since, nobody joins.
    """
    if state.progress is None or state.phase not in _GROWS:
        return
    back = state.recovery.back if state.recovery is not None else None
    if state.phase is Phase.RESTORING and back is None:
        return  # it is found before long, and members then load it while others come
    coming = [m for m in state.joining() if not m.leaving]
    surplus = _surplus(state, coming) if state.outstanding is None else []
    unplaced = [m for m in coming if not m.placed]
    room = min(state.workers[1], state.capacity)
    if state.phase is Phase.RESTORING:  # whoever adds machines sees that they are wanted
        room = max(state.workers[0], room)
    lacking = room - state.staying
    if state.data_version:
        yield from _none_joins(state, now_s)
    elif surplus:
        yield from _let_go(surplus, now_s)
    elif lacking < 0 and unplaced:
        yield from _let_go(unplaced[lacking:], now_s)
    elif lacking > 0 and _may_ask(state, now_s):
        numbers = tuple(range(state.next_member, state.next_member + lacking))
        state.next_member += lacking
        for number, slot in zip(numbers, free_slots(state), strict=False):
            member = Member(
                number=number,
                state=MemberState.SPAWNING,
                since_s=now_s,
                heard_s=now_s,
                slot=slot,
                placed=False,
                joined=False,
                turns=state.turns,
            )
            state.members[number] = member
        alone = state.phase is Phase.RESTORING
        yield Spawn(
            members=numbers,
            joins=True,
            back=back.step if back and alone else None,
            vacancies=tuple(_vacancies(state, len(numbers))),
        )


def _vacancies(state: JobState, most: int) -> Iterator[Vacancy]:
    """The places of those that were lost just now, for as many others."""
    vacant = state.away.vacant
    taken, vacant[:most] = vacant[:most], []
    for number in taken:
        ready = state.members[number].ready
        if ready is not None:
            known = speed(ready) if state.resharing is None else state.resharing.speed_of(number)
            yield Vacancy(member=number, fixed_s=known.fixed_s, micro_batch_s=known.micro_batch_s)


def missed(state: JobState, member: Member, why: str, now_s: float) -> Iterator[Command]:
    """A member that was to join is gone before it did: the others go on, and it is tried again."""
    if member.number not in state.away:
        yield Release(members=(member.number,))
    if now_s < state.ask_again_s:  # one incident may cost several
        return
    state.misses += 1
    wait_s = pause_s(state.misses)
    state.ask_again_s = now_s + wait_s
    last = state.misses >= MOST_MISSES and state.phase not in _NOT_WITHOUT
    then = "no other is asked for" if last else f"another is asked for in {wait_s:g} s"
    what = f"a member could not join, {then}"
    yield Notice(what=what, member=member.number, detail={"why": why})


def pause_s(times: int) -> float:
    """Seconds until another is asked for, after so many attempts in a row that came to nothing.

    >>> [pause_s(times) for times in (1, 2, 3, 9)]
    [1.0, 2.0, 4.0, 60.0]
    """
    return float(min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2.0 ** (times - 1)))


def prepare_for_leave(state: JobState, event: MemberLeaving, now_s: float) -> Iterator[Command]:
    """Members are going to be gone: the others get along without them, or keep what there is.

    Those that were to join are given up. Where fewer than the job must run with would be left, they
    go on computing as long as they are there, but a checkpoint is made now.
    """
    going = [state.members[event.member]]
    if event.node:
        going = [m for m in state.present() if m.number == event.member or m.node == event.node]
    going = [m for m in going if not m.leaving]
    for member in going:
        member.leave()
    yield from _let_go([m for m in going if state.spare(m.number)], now_s)
    if going and state.progress is not None and not who_may_stay(state):
        state.save_asked = True


def who_may_stay(state: JobState) -> list[int]:
    """Members of the group without those that are going to be gone, if they can do without them."""
    present, leaving = state.turns.present, state.turns.leaving
    left = [number for number in state.group if number in present and number not in leaving]
    new = [] if state.data_version else [m for m in spares(state) if not m.leaving]
    enough = len(left) + len(new) >= state.workers[0]
    return left if enough and any(state.members[number].joined for number in left) else []


def _none_joins(state: JobState, now_s: float) -> Iterator[Command]:
    """Said once, where there could be more members, or some are on their way."""
    coming = state.joining()
    lacking = min(state.workers[1], state.capacity) > len(state.group)
    if (coming or lacking) and not state.told_that_none_joins:
        state.told_that_none_joins = True
        yield Notice(
            what="the data has grown in this run: no worker joins, and none is replaced, until it "
            "is resumed"
        )
    yield from _let_go(coming, now_s)


def unfit_to_join(state: JobState, member: Member) -> str:
    """Why a member that is ready cannot join; empty if it can."""
    known, ready = state.formed().steps.sizes.most, member.ready
    if ready is None:
        return ""
    if ready.samples != known:
        return f"it sees {ready.samples} samples, the others {known}"
    differing = "" if state.first is None else other_samples(state.first, ready)
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


def spares(state: JobState) -> list[Member]:
    """Members that are ready and do not take part yet."""
    return [m for m in state.joining() if m.state is MemberState.READY]


def dismiss(state: JobState, now_s: float) -> Iterator[Command]:
    """Nobody is going to join any more, and who leaves owes nothing that counts."""
    group = set(state.group)
    yield from _let_go([m for m in state.present() if m.number not in group], now_s)


def _let_go(members: Iterable[Member], now_s: float) -> Iterator[Command]:
    numbers = []
    for member in members:
        member.enter(MemberState.RELEASED, now_s)
        numbers.append(member.number)
    if numbers:
        yield Release(members=tuple(numbers))


def _surplus(state: JobState, coming: list[Member]) -> list[Member]:
    """Those of the newcomers for whom there is no room; who is ready comes before all others.

    Where a process has come back while another one is built in its place, the first that is ready
    has it.
    """
    room = max(0, state.workers[1] - (state.staying - len(coming)))
    first = sorted(coming, key=lambda m: m.state is not MemberState.READY)
    building = [m for m in coming if m.state is not MemberState.READY]
    racing = any(m.number in state.away.returns for m in building)
    return [] if racing and len(coming) - len(building) < room else first[room:]


def _may_ask(state: JobState, now_s: float) -> bool:
    """Where the others cannot go on without more, as often as it takes."""
    if state.phase in _NOT_WITHOUT:
        return now_s >= state.ask_again_s
    return now_s >= state.ask_again_s and state.misses < MOST_MISSES and not state.any_done()


def free_slots(state: JobState) -> Iterator[int]:
    """Without end, the lowest first."""
    taken = {m.slot for m in state.present()}
    return (slot for slot in itertools.count() if slot not in taken)


_WHILE = frozenset({Phase.TRAINING, Phase.REGROUPING, Phase.WAITING, Phase.RESTORING})
_MOST_RETURNS = 3  # of one process: a link that comes and goes costs the others each time


def leave_out(state: JobState, event: MemberLost, now_s: float) -> Iterator[Command]:
    """Keep the process of a member that is lost, if it may come back and would be wanted."""
    number = event.member
    often = state.away.returns.get(number, 0) >= _MOST_RETURNS
    leaving = state.members[number].leaving
    if not event.silent or often or leaving or number not in state.within() or not _wanted(state):
        return
    state.away.since_s[number] = now_s
    yield LeaveOut(member=number)


def come_back(state: JobState, event: MemberReturned, now_s: float) -> Iterator[Command]:
    """It answers again: it joins as another member, beside others that may be on their way."""
    before, number = state.members[event.member], state.next_member
    del state.away.since_s[before.number]
    if not (_wanted(state) and _seats(state) > 0):
        yield Release(members=(before.number,))
        return
    state.next_member += 1
    state.away.returns[number] = state.away.returns.pop(before.number, 0) + 1
    state.members[number] = Member(
        number=number,
        state=MemberState.SPAWNING,
        since_s=now_s,
        heard_s=now_s,
        node=before.node,
        slot=_slot(state, before.slot),
        joined=False,
        turns=state.turns,
    )
    if state.resharing is not None:
        state.resharing.rename(before.number, number)
    yield Readmit(member=number, process=before.number)
    yield Notice(
        what=f"it was silent and is back: its process goes on as member {number}",
        member=before.number,
        detail={"late_s": round(event.late_s, 1)},
    )


def give_up(state: JobState, now_s: float) -> Iterator[Command]:
    """Who is away for too long, or is not needed any more, ends: its place may be another's."""
    if not state.away.since_s or state.phase in FINAL:
        return
    seats, away = _seats(state) if _wanted(state) else 0, state.away.since_s
    newest = sorted(away, key=away.__getitem__, reverse=True)
    kept = [n for n in newest[:seats] if now_s - away[n] < state.settings.return_s]
    ends = tuple(sorted(set(away).difference(kept)))
    for number in ends:
        del away[number]
    if ends:
        yield Release(members=ends)


def _wanted(state: JobState) -> bool:
    """Whether such members may join at all: not where all begin, since they are not new."""
    begin = state.recovery is not None and state.recovery.begins
    joins = state.phase in _WHILE and not state.data_version and not begin
    return joins and not state.stop_requests and state.progress is not None


def _seats(state: JobState) -> int:
    """How many members the job lacks beside those that compute, or follow."""
    present, leaving = state.turns.present, state.turns.leaving
    there = sum(number in present and number not in leaving for number in state.group)
    return max(0, state.workers[1] - there)


def _slot(state: JobState, before: int) -> int:
    """The slot that it had; a newcomer that was to have it gets another."""
    free = next(free_slots(state))
    holder = next((m for m in state.present() if m.slot == before), None)
    if holder is None:
        return before
    if holder.joined:
        return free
    holder.slot = free
    return before


_FORGETS = 1.25  # with each report: what was the best once need not hold any more
_FOLLOWS = 3  # steps at least
_PER_PARAMETER = 2  # values that an optimizer keeps beside each, as Adam does


def note_pace(state: JobState, event: StepsCommitted) -> None:
    """Take in how fast a member's last messages went, as far as their seconds show it.

    They waited for slower members, too, and for messages before them: no byte takes longer, and the
    least of the last few reports counts.
    """
    if event.bytes_last:
        member, last_s = state.members[event.member], event.exchange_s / event.bytes_last
        member.pace_s = min(last_s, _FORGETS * member.pace_s)


def at_once(state: JobState, new: int) -> bool:
    """Whether all would wait but a moment for `new` members to take the state from them.

    It goes once over the link of each newcomer, at a time; from those who have it, together, it
    goes once for each, so that their links are the bound where newcomers are more than they are.
    Up to twice that is worth it where these would compute as long in three steps: they would be
    idle for as many at least. Of the members' paces the best is the nearest to that of their links:
    the others waited. Where they have exchanged nothing yet, those before them tell of their links.
    """
    moment_s, group = state.settings.hand_over_s, state.holders()
    ready = next((m.ready for m in group if m.ready is not None), None)
    if ready is None:
        return False
    size = ready.state_bytes + _PER_PARAMETER * ready.gradient_bytes
    pace_s = min(m.pace_s for m in group)
    if pace_s == float("inf"):
        pace_s = min(m.pace_s for m in state.members.values())
    takes_s = size * pace_s * max(1.0, new / len(group))
    idle_s = _FOLLOWS * state.formed().took.usual_s * new / (len(group) + new)
    return takes_s < min(max(idle_s, moment_s), 2 * moment_s)
