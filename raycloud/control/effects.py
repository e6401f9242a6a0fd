"""What an event changes besides phase and member states, and what is done on entering a phase.

Each function changes the state that it is given, which `guards` have found to allow it, and
yields commands; nothing happens until it is iterated.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, assert_never

from raycloud.commands import (
    Change,
    Command,
    Extend,
    Finish,
    Halt,
    Meet,
    Notice,
    Prepare,
    Publish,
    Record,
    Release,
    Save,
    TellRecovery,
)
from raycloud.control.data import hear_of_skips, write_skips
from raycloud.control.membership import Outstanding
from raycloud.control.recovery import Recovery
from raycloud.control.rendezvous import (
    completed,
    in_force,
    know_speed,
    next_meeting,
    next_shares,
    switched,
)
from raycloud.control.rollback import go_back, note_not_finite
from raycloud.control.scaling import come_back, leave_out, missed, note_pace, prepare_for_leave
from raycloud.control.tables import MemberState, Phase
from raycloud.events import (
    CapacityChanged,
    ChangeApplied,
    CheckpointFailed,
    CheckpointPublished,
    DataGrew,
    DataPrepared,
    DataPreparing,
    Evaluated,
    EvaluationPart,
    ExchangeBroken,
    GenerationFormed,
    MemberCaughtUp,
    MemberDone,
    MemberFailed,
    MemberLeaving,
    MemberLost,
    MemberReady,
    MemberReturned,
    MemberSpawned,
    Noticed,
    PartFailed,
    PartWritten,
    RangeChanged,
    Recovered,
    RolledBack,
    RunFinished,
    RunStarted,
    StepNotFinite,
    StepsCommitted,
    StopRequested,
)
from raycloud.order import commit_record

_MAY_PUBLISH: Final = frozenset(
    {Phase.TRAINING, Phase.STOPPING, Phase.REGROUPING, Phase.WAITING, Phase.CLOSING}
)

if TYPE_CHECKING:
    from raycloud.control.guards import JobEvent, MemberEvent
    from raycloud.control.membership import Member
    from raycloud.control.state import JobState


def absorb_of_member(state: JobState, event: MemberEvent, now_s: float) -> Iterator[Command]:
    """Take in what a member did, or what befell it."""
    member = state.members[event.member]
    match event:
        case StepsCommitted():
            yield from _progressed(state, event, now_s)
        case ChangeApplied():
            yield from switched(state, event, now_s)
        case MemberSpawned():
            member.node, member.placed = event.node, True
        case MemberReady():
            member.ready, member.node = event, event.node or member.node
            know_speed(state, event, now_s)
            state.hearing.begin([member.number])
        case PartWritten() | PartFailed():
            yield from _written(state, event)
        case MemberLost() | MemberLeaving() | ExchangeBroken():
            yield from _parts(state, event, now_s)
        case StepNotFinite() | MemberFailed():
            _failed(state, event)
        case MemberCaughtUp():
            yield from _joined(state, event, now_s)
        case MemberDone():
            yield from _joined(state, event, now_s)
            state.members[event.member].come_to(event.step, event.generation)
            yield from _counted(state)
            yield from _recovered(state, event.generation, now_s)  # nothing was left to compute
        case MemberReturned():
            yield from come_back(state, event, now_s)
        case EvaluationPart() | DataPreparing() | DataPrepared():
            pass
        case _:
            assert_never(event)


def _failed(state: JobState, event: StepNotFinite | MemberFailed) -> None:
    if isinstance(event, StepNotFinite):
        note_not_finite(state, event)
        return
    hint = f"\n\nhint: {event.hint}" if event.hint else ""
    state.error = f"{state.members[event.member]}: {event.error}: {event.message}{hint}"


def _written(state: JobState, event: PartWritten | PartFailed) -> Iterator[Command]:
    if event.generation < state.sound_from:
        return  # of a generation that broke
    state.met = True
    if isinstance(event, PartFailed):
        if state.checkpoints.lack(event.step, event.generation):
            yield from _not_kept(state, event)
        return
    state.members[event.member].part_step = event.step
    if state.saving is not None:
        state.saving.wrote(event.blocked_s, event.write_s)
    group = state.group_of(event.generation)
    parts = state.checkpoints.add(event.step, event.member, event.part, group, event.generation)
    if parts is not None:
        yield Publish(step=event.step, parts=parts)


def _not_kept(state: JobState, event: PartFailed | CheckpointFailed) -> Iterator[Command]:
    """Training goes on without this checkpoint, and another one is tried."""
    failing, ends = state.failing, state.phase is Phase.CLOSING or state.any_done()
    failing.step, failing.why, failing.hint = event.step, event.why, event.hint
    if state.saving is not None:
        state.saving.dropped()
    pause_s = failing.failed(state.now_s, ends=ends)
    if pause_s is not None and failing.in_a_row < state.settings.most_failed:
        detail = {"why": event.why, "in_a_row": failing.in_a_row, "again_s": pause_s}
        what = f"the checkpoint of step {event.step} could not be kept, and another is tried"
        yield Notice(what=what, detail=detail)


def save_again(state: JobState, now_s: float) -> Iterator[Command]:
    """What could not be published is, where it is time; or else a checkpoint is to be made."""
    if state.phase not in _MAY_PUBLISH or not state.failing.due(now_s):
        return
    again = state.checkpoints.again()
    if again is not None:
        state.failing.tried()
        yield Publish(step=again[0], parts=again[1])


def unsaved(state: JobState) -> str:
    """Why a run ends whose checkpoints cannot be kept."""
    failing, last = state.failing, state.checkpoints.last_published
    times = f", {failing.in_a_row} times in a row" if failing.in_a_row > 1 else ""
    good = (
        "there is none before it" if last is None else f"the last good one is that of step {last}"
    )
    what = f"the checkpoint of step {failing.step} could not be kept{times}; {good}"
    hint = f"{failing.hint}; {_resume(state)}" if failing.hint else _resume(state)
    return f"{what}: {failing.why}\n\nhint: {hint}"


def _parts(
    state: JobState, event: MemberLost | MemberLeaving | ExchangeBroken, now_s: float
) -> Iterator[Command]:
    member = state.members[event.member]
    if isinstance(event, ExchangeBroken):
        if state.broken is None:
            state.broken, state.broken_s = event, now_s
        return
    if isinstance(event, MemberLeaving):
        yield from prepare_for_leave(state, event, now_s)
        return
    yield from leave_out(state, event, now_s)
    if member.joined and not (event.silent or member.leaving):
        state.away.vacant.append(member.number)
    if not member.joined and state.progress is not None:
        yield from missed(state, member, event.reason, now_s)
        if state.spare(event.member):
            return
    if state.progress is not None and member.number not in state.group:
        yield from _left_early(state, member, now_s)
        return
    state.error = f"{member} was lost: {event.reason}\n\nhint: {_resume(state)}"
    if state.progress is None:
        if len(state.turns.present) > state.workers[0]:
            yield Release(members=(event.member,))
        return
    if state.saving is not None:
        state.saving.losses += 1
    if state.recovery is None:
        known_s = now_s if state.broken is None else state.broken_s
        state.recovery = Recovery(detected_s=known_s - state.started_s, cause=event.reason)
    state.recovery.lost.append(event.member)


def _left_early(state: JobState, member: Member, now_s: float) -> Iterator[Command]:
    """The others go on without it already: only a checkpoint may lack its part."""
    yield Release(members=(member.number,))
    state.checkpoints.drop_before(state.formed_as)
    if state.saving is not None:
        state.saving.dropped()
    outstanding = state.outstanding
    if outstanding is not None and member.number in outstanding.members:
        outstanding.members = tuple(m for m in outstanding.members if m != member.number)
        if outstanding.everywhere:
            step = next(iter(outstanding.applied.values()), state.formed().committed_step)
            yield from completed(state, outstanding, step, now_s)


def absorb_of_job(state: JobState, event: JobEvent) -> Iterator[Command]:
    """Take in what concerns the job as a whole."""
    match event:
        case CheckpointPublished():
            state.checkpoints.published(event.step)
            state.failing.kept()
            if state.saving is not None:
                state.saving.published(state.now_s)
        case CheckpointFailed():
            state.checkpoints.failed(event.step, damaged=event.damaged)
            yield from _not_kept(state, event)
        case StopRequested():
            state.stop_requests += 1
            state.stop_reason = state.stop_reason or event.reason
        case RangeChanged():
            state.workers = (event.min_workers, event.max_workers)
        case CapacityChanged():
            _hold(state, event.workers)
        case DataGrew():
            state.data_samples, state.data_version = event.samples, event.version
            state.data_ahead = event
        case GenerationFormed():
            if event.generation >= state.formed_as:
                state.met = True
                state.formed().change_generation(event.generation, event.first_step)
        case RolledBack():
            yield from go_back(state, event)
        case RunStarted() | Evaluated() | Noticed() | Recovered() | RunFinished():
            pass
        case _:
            assert_never(event)


def _hold(state: JobState, workers: int) -> None:
    """The machines hold so many; where that is more, another machine may do."""
    if workers > state.capacity:
        state.misses = 0
        if state.recovery is not None:
            state.recovery.failures = 0
    state.capacity = workers


def end(state: JobState, status: str, now_s: float) -> Iterator[Command]:
    """Every member's process ends and its place is given back, also that of a lost one."""
    for member in state.members.values():
        if not member.gone:
            member.enter(MemberState.RELEASED, now_s)
    state.outstanding = None
    yield Release(members=tuple(state.members))
    yield Finish(status=status, error=state.error or None, blames=state.blames)


def send_ahead(state: JobState, now_s: float) -> Iterator[Command]:
    """One change at a time: a halt that was asked for, else data, a save, members, shares."""
    if (
        state.phase not in {Phase.TRAINING, Phase.STOPPING}
        or state.outstanding is not None
        or state.halt_sent
        or state.any_done()
    ):
        return
    change: Change | None
    if state.phase is Phase.STOPPING:
        change = Halt(reason=state.stop_reason)
        state.halt_sent = True
    elif state.data_ahead is not None:
        grew, state.data_ahead = state.data_ahead, None
        change = Extend(version=grew.version, samples=grew.samples, partitions=grew.partitions)
    elif state.save_asked or state.failing.due(now_s) or _is_worth_it(state, now_s):
        change, state.save_asked = Save(), False
        state.failing.tried()
        if state.saving is not None:
            state.saving.asked(now_s)
    else:
        change = next_meeting(state, now_s) or next_shares(state, now_s)
    if change is None:
        return
    state.changes += 1
    state.outstanding = Outstanding(number=state.changes, members=state.group, change=change)
    yield Prepare(number=state.changes, members=state.group, change=change)


def _is_worth_it(state: JobState, now_s: float) -> bool:
    return state.saving is not None and not state.failing.waits and state.saving.due(now_s)


def _progressed(state: JobState, event: StepsCommitted, now_s: float) -> Iterator[Command]:
    member = state.members[event.member]
    if not member.joined:
        yield from _joined(state, event, now_s)
    if event.generation >= state.formed_as and state.phase is not Phase.WAITING:
        state.met = True
        if event.last_step > event.first_step:
            state.meetings, state.losing = 1, 0
        if event.last_step > event.first_step and state.recovery is not None:
            yield from _recovered(state, event.generation, now_s)
    progress = state.formed()
    progress.change_generation(event.generation, event.first_step)
    member.generation = event.generation
    member.come_to(event.last_step, event.generation)
    state.formed().took.note(event)
    note_pace(state, event)
    if state.resharing is not None:
        state.resharing.observe(event)
    if event.skips:
        hear_of_skips(state, event)
    if state.skips or state.all_past(progress.committed_step):
        yield from _counted(state)


def _counted(state: JobState) -> Iterator[Command]:
    """Steps count that all members have; also those that only a lost one had not told of."""
    before, follow = state.formed().committed_step, state.following
    if state.all_past(before):
        commits = state.formed().commit_to(min(m.step for m in state.holders()))
        for number in follow:  # who follows has its part in each of these steps
            state.members[number].heard_s = state.now_s
        if commits:
            yield Record(records=tuple(commit_record(c) for c in commits))
    if state.skips:
        yield from write_skips(state)


def _joined(
    state: JobState, event: StepsCommitted | MemberCaughtUp | MemberDone, now_s: float
) -> Iterator[Command]:
    """A member that is new has the state, maybe before others say that they changed."""
    member, sent = state.members[event.member], state.outstanding
    if member.joined:
        return
    if isinstance(event, MemberDone) and state.is_to_follow(event.member):
        member.step = event.step  # it has followed to the end
        return
    first_step = event.step if isinstance(event, MemberDone) else event.first_step
    change = sent.change if sent is not None else None
    if sent is not None and isinstance(change, Meet) and change.generation == event.generation:
        yield from in_force(state, sent, first_step, now_s)
    member.join(event.step if isinstance(event, MemberCaughtUp) else first_step)
    state.misses = 0


def _recovered(state: JobState, generation: int, now_s: float) -> Iterator[Command]:
    recovery = state.recovery
    if recovery is not None:
        state.recovery = None
        yield TellRecovery(
            generation=generation,
            lost=tuple(recovery.lost),
            cause=recovery.cause,
            detected_s=recovery.detected_s,
            resumed_s=now_s - state.started_s,
            lost_steps=recovery.lost_steps,
        )


def _resume(state: JobState) -> str:
    last = state.checkpoints.last_published
    if last is None:
        return "there is no checkpoint yet to resume from; checkpoint.every_steps keeps some"
    return f"--resume goes on from the last checkpoint, of step {last}"
