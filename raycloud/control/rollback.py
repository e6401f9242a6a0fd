"""No sound state is left: members, old or new ones, go on from a checkpoint, in place.

Each function but those that ask changes the state that it is given and yields commands; nothing
happens until it is iterated.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from raycloud.commands import Back, Command, Form, Meet, Notice, Record, Release, Restore
from raycloud.control.data import Progress
from raycloud.control.recovery import Recovery
from raycloud.control.rendezvous import fit, withdraw
from raycloud.control.scaling import MOST_MISSES, pause_s, spares
from raycloud.control.tables import MemberState, Phase
from raycloud.errors import InternalError
from raycloud.order import Ledger, growth_record, restore_record

if TYPE_CHECKING:
    from raycloud.control.membership import Member
    from raycloud.control.state import JobState
    from raycloud.events import RolledBack, StepNotFinite

_REMEDY = "lower the learning rate, set clip_norm, or look at the samples of these steps"


def note_not_finite(state: JobState, event: StepNotFinite) -> None:
    """A member says that all are to go back; so do, or will, all others that have the state."""
    if state.not_finite is not None:
        return
    state.not_finite, progress = event, state.formed()
    progress.furthest = max(progress.furthest, event.step + 1)
    if event.left_out is not None:
        state.left_out.add(event.left_out)
    state.error = f"{event.why}\n\nhint: {_REMEDY}"


def begin(state: JobState, now_s: float) -> Iterator[Command]:
    """Words of all generations up to now do not count any more; who is new is kept.

    So is who has a state that is not to be gone on from. Where they have come no further than the
    last time, others are asked for later.
    """
    if returns := state.formed().returns:
        state.ask_again_s = max(state.ask_again_s, now_s + pause_s(returns))
    over = _part(state, now_s)
    if state.recovery is None:
        cause = state.error if state.not_finite is None else state.not_finite.why
        state.recovery = Recovery(detected_s=now_s - state.started_s, cause=cause)
    change = state.outstanding.change if state.outstanding is not None else None
    met = {*state.group, *(change.members if isinstance(change, Meet) else ())}
    state.recovery.back = None
    state.recovery.followed = tuple(sorted(filter(state.here, met)))
    for number in state.recovery.followed:
        state.members[number].enter(MemberState.READY, now_s)
    newest = withdraw(state)
    state.generation = state.formed_as = state.sound_from = newest + 1
    state.group, state.shares, state.following, state.groups = (), (), frozenset(), {}
    state.halt_sent = state.halted = state.met = False
    state.broken, state.error = None, ""
    ends = met.union(over).difference(state.turns.present, state.away.since_s)
    yield Release(members=tuple(sorted(ends)))
    yield Restore(newest=_newest(state))


def _part(state: JobState, now_s: float) -> list[int]:
    """Nobody has a state that counts; who was done, or is leaving, is of no use any more."""
    within = state.within() if state.not_finite is not None else ()
    over = []
    for member in state.present():
        if member.joined and member.number in within and member.number not in state.ended:
            member.part()
        elif member.joined:
            over.append(member.number)
            member.enter(MemberState.LOST, now_s)
    return over


def _newest(state: JobState) -> int | None:
    """Later checkpoints than this step's hold what is not to be gone on from."""
    event = state.not_finite
    if event is None:
        return None
    return event.step - 1 if event.left_out is None else event.left_out


def why_not_there(state: JobState, event: RolledBack) -> str:
    """Why this cannot be the checkpoint to go on from; empty if it can."""
    if state.recovery is None or state.recovery.back is not None:
        return "no checkpoint is looked for"
    if event.step == 0:
        return "the beginning has no ledger" if event.ledger else ""
    try:
        ledger = Ledger.from_state(event.ledger)
    except (InternalError, KeyError, TypeError, ValueError) as error:
        return f"its ledger cannot be used: {error}"
    if (ledger.samples, ledger.next_step) != (state.formed().steps.samples, event.step):
        return f"its ledger has {ledger.next_step} steps of {ledger.samples} samples per epoch"
    return ""


def go_back(state: JobState, event: RolledBack) -> Iterator[Command]:
    """Steps after the checkpoint do not count any more.

    Who has followed others, or is back, is not as it began: of no use where there is no checkpoint.
    """
    recovery, before = state.recovery, state.formed()
    if recovery is None:
        raise InternalError(f"nobody was lost: {event}")
    steps = before.steps
    ledger = Ledger(samples=steps.samples)
    if event.ledger:
        ledger.restore(event.ledger)
    records = [restore_record(ledger.state())]
    if steps.sizes != ledger.sizes:  # it had grown before this start
        ledger.grow(*steps.later[-1])
        records.append(growth_record(*steps.later[-1]))
    progress = state.progress = Progress(
        steps=steps,
        step=event.step,
        position=ledger.newest,
        ledger=ledger,
        generation=state.generation,
    )
    progress.furthest = max(before.furthest, event.step)  # its reports may be still to come
    progress.returns, progress.sound_from = before.returns + 1, state.generation
    progress.took = before.took
    progress.took.go_back(event.step)
    there = before.committed_step if state.not_finite is None else state.not_finite.step
    state.checkpoints.go_back(event.step)
    if state.saving is not None:
        state.saving.dropped()
    state.skips.clear()
    without = tuple(step for step in sorted(state.left_out) if step >= event.step)
    recovery.back = Back(step=event.step, generation=state.generation, without=without)
    recovery.found_s = state.now_s
    recovery.lost_steps += max(0, there - event.step)
    yield Record(records=tuple(records))
    if event.step == 0:
        old = {*recovery.followed, *state.away.returns}
        useless = tuple(filter(state.here, sorted(old)))
        for number in useless:
            state.members[number].enter(MemberState.RELEASED, state.now_s)
        yield Release(members=useless)
    if state.not_finite is None:
        what = f"no worker is left, at least {state.workers[0]} are needed: waiting for them"
        yield Notice(what=what, detail={"machines_hold": state.capacity})
    else:
        what = f"step {there} is computed once more from step {event.step} on"
        yield Notice(what=what, detail={"left_out": list(without)})
    state.not_finite = None


def gathered(state: JobState) -> bool:
    """Enough are ready, and the others that have a place, too, or they were waited for."""
    if state.recovery is None or state.recovery.back is None:
        return False
    ready_s = sorted(m.since_s for m in spares(state) if not m.leaving)
    fewest, most = state.workers
    if len(ready_s) < fewest:
        return False
    placed = sum(m.placed and not m.leaving for m in state.joining())
    waited_s = state.now_s - max(ready_s[fewest - 1], state.recovery.found_s)
    return len(ready_s) >= min(placed, most) or waited_s >= state.settings.gather_s


def gather(state: JobState, now_s: float) -> Iterator[Command]:
    """Those that are ready meet, and load the checkpoint there."""
    step = state.formed().committed_step
    new = [m for m in spares(state) if not m.leaving][: state.workers[1]]
    state.group = tuple(member.number for member in new)
    state.groups = {state.generation: state.group}
    state.shares = fit(state, state.group)
    state.meetings, state.losing, state.unmet, state.misses = 1, 0, 0, 0
    state.called_s = now_s
    state.save_asked = False
    if state.resharing is not None:
        state.resharing.wait(step, now_s)
    state.hearing.begin(state.group)
    for member in new:
        member.join(step)
        member.generation, member.heard_s, member.part_step = state.generation, now_s, -1
    yield Form(
        generation=state.generation,
        members=state.group,
        shares=state.shares,
        step=step,
        settled=state.settled,
        back=state.recovery.back if state.recovery is not None else None,
    )


def why_stranded(state: JobState) -> str:
    """Why nobody can go on, where data has grown since the last one was lost."""
    cause = "" if state.recovery is None else state.recovery.cause
    return (
        f"no worker is left, and none can join, since the data has grown: {cause}\n\nhint: "
        "--resume goes on from the last checkpoint, if there is one, with all of the data"
    )


def going_back(state: JobState) -> bool:
    """Whether members are told to load a checkpoint, and are not known to have done so."""
    return state.recovery is not None and state.recovery.back is not None and not state.met


def tolerates(state: JobState, member: Member, now_s: float) -> bool:
    """Whether one that has failed by an error of its own is only lost: it has computed nothing yet.

    Nor has one that is told to go back. Where nobody has the state, those that fail again and again
    end the run; one incident may cost several, as where they were to join: see `growing.missed`.
    """
    back = going_back(state)
    if member.joined and not back:
        return False
    if state.recovery is None or member.gone or not (back or state.phase is Phase.RESTORING):
        return True
    if state.recovery.failures >= MOST_MISSES:
        return False
    if now_s >= state.ask_again_s:
        state.recovery.failures += 1
        if member.joined:
            state.ask_again_s = now_s + pause_s(state.recovery.failures)
    return True
