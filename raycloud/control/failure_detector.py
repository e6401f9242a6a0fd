"""Failure detector: which member is to be taken for lost now, and why.

`heartbeats` has the evidence; here it is weighed against what the job needs. Nothing here changes
anything, but when all were heard last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raycloud.control.rollback import going_back
from raycloud.control.shares import speed
from raycloud.control.tables import MemberState, Phase
from raycloud.events import MemberLost

if TYPE_CHECKING:
    from collections.abc import Mapping

    from raycloud.control.member import Member
    from raycloud.control.state import JobState

_COMPUTING = frozenset({Phase.TRAINING, Phase.STOPPING, Phase.REGROUPING})
_NOBODY_COMPUTES = frozenset({Phase.WAITING, Phase.RESTORING})


def overdue(state: JobState) -> MemberLost | None:
    """The member to take for lost now, with the reason; None if all are in time."""
    return _mute(state) or _still(state) or _apart(state) or _idle(state)


def _mute(state: JobState) -> MemberLost | None:
    """A process that is frozen or cut off does not answer, while others do."""
    membership = state.membership
    late = state.heartbeats.late()
    if state.phase not in _COMPUTING or not late:
        return None
    present, new = membership.roster.present, membership.roster.new
    numbers = [number for number in membership.group if number in present]
    numbers += [member.number for member in membership.spares()]
    joined = sum(number not in new for number in numbers)
    reached = state.heartbeats.reached(numbers) > 0  # else it is rather the driver that is cut off
    missing = {}
    for member in (membership.members[number] for number in numbers if number in late):
        late_s = state.heartbeats.cut_off_s(member.number) if reached else None
        if late_s is None:
            late_s = state.heartbeats.missing_s(member.number, numbers)
        if late_s is None or member.state is MemberState.DONE:
            continue
        others = joined - member.joined
        if others >= membership.workers[0] or late_s >= _needed_s(state, member, others):
            missing[member.number] = late_s
    if not missing:
        return None
    first = max(missing, key=missing.__getitem__)
    if missing[first] < _patience_s(state, missing):
        return None
    reason = f"frozen, or cut off: its answer is {missing[first]:.1f} s overdue"
    if state.heartbeats.cut_off(first):
        reason = f"gone, or cut off: its machine acknowledges nothing since {missing[first]:.1f} s"
    return MemberLost(member=first, reason=reason, silent=True)


def _needed_s(state: JobState, member: Member, others: int) -> float:
    """For how many seconds of silence a member is waited for since the others need it: it may thaw.

    Where nobody else has the state, they could go on from a checkpoint: it is waited for as long as
    what they would compute again takes, which costs at most twice what the better one would.

    Args:
        state: Of the job.
        member: Who is silent.
        others: How many others have the state: fewer than the job needs.
    """
    membership = state.membership
    if member.number not in membership.within():
        return 0.0
    late = state.heartbeats.late()
    takes_part = (*membership.in_group(), *membership.spares())
    new = sum(not (m.joined or m.gone or m.number in late) for m in takes_part)
    if others + new < membership.workers[0] or state.stop_requests or state.data.version:
        return float("inf")
    if others:
        return 0.0
    progress = state.data.formed()
    again = max(0, progress.committed_step - (state.checkpoints.last_published or 0))
    step_s = progress.step_s or _expected_s(state)
    return state.settings.restore_s + (again + 1) * step_s  # with the one under way


def _expected_s(state: JobState) -> float:
    """A step, by what its members have measured, where nobody has reported any to this driver."""
    membership = state.membership
    # There are no shares where they have never met.
    dealt = zip(membership.in_group(), membership.shares, strict=False)
    readies = ((member.ready, share) for member, share in dealt)
    return max((speed(r).seconds(share) for r, share in readies if r is not None), default=0.0)


def _patience_s(state: JobState, missing: Mapping[int, float]) -> float:
    """How long those are waited for: several machines at once may be behind a network that is out.

    Where most do not answer, also of those that are to join, it may be the driver's own network.
    Whose machine is known to be cut off is not waited for on its own: that is told when it is sure.
    """
    membership = state.membership
    settings, heartbeats = state.settings, state.heartbeats
    cut = all(map(heartbeats.cut_off, missing))
    if len({membership.members[number].node for number in missing}) == 1:
        return 0.0 if cut else settings.late_s
    others = [number for number in membership.roster.present if number not in missing]
    if cut and heartbeats.reached(others) >= len(missing):
        return settings.several_cut_s
    heard = heartbeats.heard_since(state.now_s - max(missing.values()), others)
    return settings.several_s if heard >= len(missing) else settings.outage_s


def _still(state: JobState) -> MemberLost | None:
    """A process answers, but what it computes does not go on."""
    membership = state.membership
    if state.phase not in _COMPUTING or not state.heartbeats.still_s:
        return None
    for member in membership.in_group():
        seconds = state.heartbeats.still_s.get(member.number, 0.0)
        if member.gone or seconds < state.settings.still_s:
            continue
        if any(m is not member and not m.gone and m.joined for m in membership.in_group()):
            reason = f"it stands still: no processor time for {seconds:.1f} s while it computes"
            return MemberLost(member=member.number, reason=reason)
    return None


def _apart(state: JobState) -> MemberLost | None:
    """Members answer, and can yet not exchange, however often they meet.

    Those that the others came to meet ahead are given up at once: nobody needs them yet.
    """
    membership = state.membership
    broken, settings = state.recovery.broken, state.settings
    if state.phase in _NOBODY_COMPUTES:
        return None
    sent, coming = membership.outstanding, membership.coming
    if sent is None or sent.in_force:
        coming = None
    if broken is not None and coming is not None and broken.generation == coming.generation:
        present = membership.roster.present
        new = [n for n in coming.members if not membership.members[n].joined and n in present]
        if new:
            return MemberLost(member=new[0], reason=f"the others could not meet it: {broken.why}")
    if (
        broken is None
        or state.now_s - state.recovery.broken_s < settings.broken_s
        or state.recovery.meetings < settings.meetings
        or broken.server  # which is nobody's fault here
        or membership.members[broken.member].gone
    ):
        return None
    reason = f"its exchange broke {state.recovery.meetings} times in a row: {broken.why}"
    return MemberLost(member=broken.member, reason=reason)


def _idle(state: JobState) -> MemberLost | None:
    """When one member hangs, all others soon have nothing to report either.

    The one heard least recently is named, and the reason lists all. One that is new is named first,
    until it is rather one of the others with whom no meeting comes about.
    """
    membership = state.membership
    least_s = _shortest_s(state)
    if state.now_s - membership.roster.heard_s <= least_s:
        return None
    membership.look_who_was_heard(state.now_s)
    silent = [m for m in membership.present() if state.now_s - m.heard_s > least_s]
    late = [m for m in silent if state.now_s - m.heard_s > _limit_s(state, m)]
    if not late:
        return None
    trusted = state.recovery.unmet < state.settings.meetings
    first = min(late, key=lambda m: (m.joined and trusted, m.heard_s, m.number))
    limit_s = _limit_s(state, first)
    if first.state is MemberState.SPAWNING:
        reason = f"not ready after {limit_s:g} s"
    elif first.state is MemberState.READY:
        reason = f"generation {membership.generation} was not formed after {limit_s:g} s"
    else:
        reason = f"no progress for {limit_s:g} s"
    if len(late) > 1:
        reason += f" (silent are members {', '.join(str(m.number) for m in late)})"
    return MemberLost(member=first.number, reason=reason)


def _shortest_s(state: JobState) -> float:
    """No member has a shorter limit now."""
    settings, states = state.settings, state.membership.roster.states
    limits_s = {
        MemberState.SPAWNING: settings.spawn_s,
        MemberState.READY: min(settings.form_s, settings.silence_s),
        MemberState.ACTIVE: settings.silence_s,
        MemberState.DRAINING: settings.silence_s,
    }
    return min((limits_s[s] for s in limits_s if states[s]), default=float("inf"))


def _limit_s(state: JobState, member: Member) -> float:
    membership = state.membership
    if member.state is MemberState.SPAWNING:
        return state.settings.spawn_s if member.placed else float("inf")
    if state.phase in _NOBODY_COMPUTES:  # there is nothing to do, and nothing to say
        return float("inf")
    if member.state in {MemberState.ACTIVE, MemberState.DRAINING}:
        return state.settings.silence_s
    coming = membership.coming
    if coming is not None and member.number in coming.members and member in membership.spares():
        return state.settings.silence_s  # the others come after a step, which may take minutes
    if (
        member.state is MemberState.READY
        and state.phase in {Phase.FORMING, Phase.REGROUPING}
        and not membership.is_spare(member.number)
    ):
        # Others may have something to compute to its end before they come.
        computing = membership.roster.states[MemberState.ACTIVE] > 0 and any(
            m.state is MemberState.ACTIVE for m in membership.in_group()
        )
        # Where they load a checkpoint they have as long as to build.
        if going_back(state):
            return max(state.settings.silence_s, state.settings.spawn_s)
        if state.settings.step > 0 and state.data.formed().committed_step == state.settings.step:
            return max(state.settings.form_s, state.settings.spawn_s)
        return state.settings.silence_s if computing else state.settings.form_s
    return float("inf")
