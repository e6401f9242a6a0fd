"""Who has been silent for too long."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raycloud.control.tables import MemberState, Phase
from raycloud.events import MemberLost

if TYPE_CHECKING:
    from raycloud.control.state import JobState, Member


def overdue(state: JobState, now_s: float) -> MemberLost | None:
    """The member to take for lost now, with the reason; None if all are in time.

    When one member freezes, all others soon have nothing to report either. The one heard least
    recently is named, and the reason lists all.
    """
    late = [m for m in state.members.values() if now_s - m.heard_s > _limit_s(state, m)]
    if not late:
        return None
    first = min(late, key=lambda m: (m.heard_s, m.number))
    limit_s = _limit_s(state, first)
    if first.state is MemberState.SPAWNING:
        reason = f"not ready after {limit_s:g} s"
    elif first.state is MemberState.READY:
        reason = f"generation {state.generation} was not formed after {limit_s:g} s"
    else:
        reason = f"no progress for {limit_s:g} s"
    if len(late) > 1:
        reason += f" (silent are members {', '.join(str(m.number) for m in late)})"
    return MemberLost(member=first.number, reason=reason)


def _limit_s(state: JobState, member: Member) -> float:
    if member.state is MemberState.SPAWNING:
        return state.settings.spawn_s
    if member.state is MemberState.READY and state.phase in {Phase.FORMING, Phase.REGROUPING}:
        return state.settings.form_s
    if member.state in {MemberState.ACTIVE, MemberState.DRAINING}:
        return state.settings.silence_s
    return float("inf")
