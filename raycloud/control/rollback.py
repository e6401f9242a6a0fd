"""Rollback: no sound state is left, and members, old or new ones, go on from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from raycloud.commands import Back, Command, Release, Restore
from raycloud.control.generations import meet, withdraw
from raycloud.control.membership import pause_s
from raycloud.control.scaling import MOST_MISSES, let_go
from raycloud.control.tables import MemberState, Phase
from raycloud.errors import InternalError
from raycloud.events import Noticed
from raycloud.order import Ledger

if TYPE_CHECKING:
    from raycloud.control.member import Member
    from raycloud.control.state import JobState
    from raycloud.events import RolledBack, StepNotFinite


def note_not_finite(state: JobState, event: StepNotFinite) -> None:
    """A member says that all are to go back; so do, or will, all others that have the state."""
    if state.recovery.note_not_finite(event):
        state.data.formed().reach(event.step + 1)


def begin(state: JobState) -> Iterator[Command]:
    """Words of all generations up to now do not count any more; who is new is kept.

    So is who has a state that is not to be gone on from. Where they have come no further than the
    last time, others are asked for later.
    """
    membership, recovery = state.membership, state.recovery
    present = membership.roster.present
    if returns := state.data.formed().returns:
        membership.ask_not_before(state.now_s + pause_s(returns))
    over = _forget_states(state)
    met = {*membership.group, *(membership.coming.members if membership.coming else ())}
    followed = tuple(sorted(met.intersection(present)))
    recovery.look_for_checkpoint(followed, state.now_s)
    for number in followed:
        membership.members[number].hear(state.now_s)
        membership.members[number].enter(MemberState.READY)
    membership.form((), (), withdraw(state, membership.group) + 1)
    ends = met.union(over).difference(present, membership.absent_since_s)
    yield Release(members=tuple(sorted(ends)))
    yield Restore(newest=_newest(recovery.not_finite))


def _forget_states(state: JobState) -> list[int]:
    """Nobody has a state that counts; who was done, or is leaving, is of no use any more."""
    membership = state.membership
    within = membership.within() if state.recovery.not_finite is not None else ()
    over = []
    for member in membership.present():
        if member.joined and member.number in within and member.number not in membership.ended:
            member.forget_state()
        elif member.joined:
            over.append(member.number)
            member.enter(MemberState.LOST)
    return over


def _newest(event: StepNotFinite | None) -> int | None:
    """Later checkpoints than this step's hold what is not to be gone on from."""
    if event is None:
        return None
    return event.step - 1 if event.left_out is None else event.left_out


def why_not_there(state: JobState, event: RolledBack) -> str:
    """Why this cannot be the checkpoint to go on from; empty if it can."""
    if state.recovery.incident is None or state.recovery.back is not None:
        return "no checkpoint is looked for"
    if event.step == 0:
        return "the beginning has no ledger" if event.ledger else ""
    try:
        ledger = Ledger.from_state(event.ledger)
    except (InternalError, KeyError, TypeError, ValueError) as error:
        return f"its ledger cannot be used: {error}"
    if (ledger.samples, ledger.next_step) != (state.data.formed().steps.samples, event.step):
        return f"its ledger has {ledger.next_step} steps of {ledger.samples} samples per epoch"
    return ""


def go_back(state: JobState, event: RolledBack) -> Iterator[Command]:
    """Steps after the checkpoint do not count any more.

    Who has followed others, or is back, is not as it began: of no use where there is no checkpoint.
    """
    membership, recovery, not_finite = state.membership, state.recovery, state.recovery.not_finite
    if recovery.incident is None:
        raise InternalError(f"nobody was lost: {event}")
    there = state.data.formed().committed_step if not_finite is None else not_finite.step
    records = tuple(state.data.go_back(event, membership.generation))
    state.checkpoints.go_back(event.step)
    without = tuple(step for step in sorted(recovery.left_out) if step >= event.step)
    back = Back(step=event.step, generation=membership.generation, without=without)
    recovery.go_back(back, max(0, there - event.step), state.now_s)
    yield from records
    if event.step == 0:
        old = {*recovery.incident.followed, *membership.returns}
        yield from let_go([m for m in membership.present() if m.number in old])
    if not_finite is None:
        fewest = membership.workers[0]
        what = f"no worker is left, at least {fewest} are needed: waiting for them"
        yield Noticed(what=what, detail={"machines_hold": membership.capacity})
    else:
        what = f"step {there} is computed once more from step {event.step} on"
        yield Noticed(what=what, detail={"left_out": list(without)})


def gathered(state: JobState) -> bool:
    """Enough are ready, and the others that have a place, too, or they were waited for."""
    membership, incident = state.membership, state.recovery.incident
    if incident is None or incident.back is None:
        return False
    ready_s = sorted(m.since_s for m in membership.spares() if not m.leaving)
    fewest, most = membership.workers
    if len(ready_s) < fewest:
        return False
    placed = sum(m.placed and not m.leaving for m in membership.joining())
    waited_s = state.now_s - max(ready_s[fewest - 1], incident.found_s)
    return len(ready_s) >= min(placed, most) or waited_s >= state.settings.gather_s


def gather(state: JobState) -> Iterator[Command]:
    """Those that are ready meet, and load the checkpoint there."""
    membership, step = state.membership, state.data.formed().committed_step
    new = [m for m in membership.spares() if not m.leaving][: membership.workers[1]]
    membership.forget_misses()
    state.recovery.gather(state.now_s)
    state.checkpoints.gather()
    yield from meet(state, new, state.resharing.fit(new), step)


def going_back(state: JobState) -> bool:
    """Whether members are told to load a checkpoint, and are not known to have done so."""
    return state.recovery.back is not None and not state.membership.met


def tolerates(state: JobState, member: Member, now_s: float) -> bool:
    """Whether one that has failed by an error of its own is only lost: it has computed nothing yet.

    Nor has one that is told to go back. Where nobody has the state, those that fail again and again
    end the run; one incident may cost several, as where they were to join: see `scaling.missed`.
    """
    membership, incident = state.membership, state.recovery.incident
    back = going_back(state)
    if member.joined and not back:
        return False
    if incident is None or member.gone or not (back or state.phase is Phase.RESTORING):
        return True
    if incident.failures >= MOST_MISSES:
        return False
    if now_s >= membership.ask_again_s:
        state.recovery.note_failure()
        if member.joined:
            membership.ask_not_before(now_s + pause_s(incident.failures))
    return True
