"""Members that are lost by silence alone: they keep process and place for a while, and may return.

What comes back is another member to all others: it has a number of its own, and joins as any
newcomer does. So nothing that the one before says, or has said, counts any more.

Each function changes the state that it is given and yields commands; nothing happens until it is
iterated.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from raycloud.commands import Command, LeaveOut, Notice, Readmit, Release
from raycloud.control.growing import free_slots
from raycloud.control.member import Member
from raycloud.control.tables import FINAL, MemberState, Phase

if TYPE_CHECKING:
    from raycloud.control.state import JobState
    from raycloud.events import MemberLost, MemberReturned

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
