"""What an event changes besides phase and member states, and what is done on entering a phase.

Each function changes the state that it is given, which `guards.judge` has found to allow it, and
yields commands; nothing happens until it is iterated.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, assert_never

from raycloud.commands import (
    Change,
    Command,
    Extend,
    Finish,
    Form,
    Halt,
    Notice,
    Prepare,
    Publish,
    Record,
    Release,
    Reshare,
    Save,
    TellRecovery,
)
from raycloud.control.progress import Progress
from raycloud.control.resharing import Resharing, first_shares, left_shares
from raycloud.control.state import JobState, Member, Outstanding, Recovery
from raycloud.control.tables import MemberState, Phase
from raycloud.errors import InternalError
from raycloud.events import (
    ChangeApplied,
    CheckpointPublished,
    DataGrew,
    DataPrepared,
    DataPreparing,
    Evaluated,
    EvaluationPart,
    GenerationFormed,
    MemberDone,
    MemberFailed,
    MemberLost,
    MemberReady,
    MemberSpawned,
    Noticed,
    PartWritten,
    RangeChanged,
    Recovered,
    RunFinished,
    RunStarted,
    StepsCommitted,
    StopRequested,
)
from raycloud.order import (
    Ledger,
    commit_record,
    growth_record,
    header_record,
    restore_record,
)

if TYPE_CHECKING:
    from raycloud.control.guards import JobEvent, MemberEvent


def absorb_of_member(state: JobState, event: MemberEvent, now_s: float) -> Iterator[Command]:
    """Take in what a member did, or what befell it."""
    member = state.members[event.member]
    match event:
        case MemberSpawned():
            member.node = event.node
        case MemberReady():
            member.ready, member.node = event, event.node or member.node
        case ChangeApplied():
            yield from _applied(state, event, now_s)
        case StepsCommitted():
            yield from _progressed(state, event, now_s)
        case PartWritten():
            yield from _written(state, event)
        case MemberLost():
            yield from _lost(state, event, now_s)
        case MemberFailed():
            hint = f"\n\nhint: {event.hint}" if event.hint else ""
            state.error = f"{member}: {event.error}: {event.message}{hint}"
        case MemberDone() | EvaluationPart() | DataPreparing() | DataPrepared():
            pass
        case _:
            assert_never(event)


def _written(state: JobState, event: PartWritten) -> Iterator[Command]:
    if event.generation < state.formed_as:
        return  # of a group that is no more
    state.met = True
    state.members[event.member].part_step = event.step
    parts = state.checkpoints.add(event.step, event.member, event.part, state.group)
    if parts is not None:
        yield Publish(step=event.step, parts=parts)


def _lost(state: JobState, event: MemberLost, now_s: float) -> Iterator[Command]:
    member = state.members[event.member]
    state.error = f"{member} was lost: {event.reason}\n\nhint: {_resume(state)}"
    if state.progress is None:
        if state.settings.regroups and len(state.present()) > state.settings.min_workers:
            yield Release(members=(event.member,))
        return
    if state.recovery is None:
        state.recovery = Recovery(detected_s=now_s - state.started_s, cause=event.reason)
    state.recovery.lost.append(event.member)


def absorb_of_job(state: JobState, event: JobEvent) -> Iterator[Command]:
    """Take in what concerns the job as a whole."""
    match event:
        case CheckpointPublished():
            state.checkpoints.published(event.step)
        case StopRequested():
            state.stop_requests += 1
            state.stop_reason = state.stop_reason or event.reason
        case RangeChanged():
            state.workers = (event.min_workers, event.max_workers)
            yield Notice(
                what="the elastic range was changed, but a running job does not grow or shrink "
                "yet: it takes effect when the run is resumed",
                detail={"min_workers": event.min_workers, "max_workers": event.max_workers},
            )
        case DataGrew():
            state.data_samples, state.data_version = event.samples, event.version
            state.data_ahead = event
        case GenerationFormed():
            if event.generation >= state.formed_as:
                state.met = True
                state.formed().change_generation(event.generation, event.first_step)
        case RunStarted() | Evaluated() | Noticed() | Recovered() | RunFinished():
            pass
        case _:
            assert_never(event)


def form(state: JobState, now_s: float) -> Iterator[Command]:
    """The members meet for the first time: fit shares, open the ledger."""
    settings = state.settings
    readies = {m.number: m.ready for m in state.present() if m.ready is not None}
    steps = settings.steps(next(iter(readies.values())).samples)
    ledger = Ledger(samples=steps.samples)
    records = [header_record(steps.samples)]
    if settings.ledger is not None:
        ledger.restore(settings.ledger)
        records.append(restore_record(settings.ledger))
    if steps.sizes != ledger.sizes:
        epoch, samples = steps.later[-1]
        yield _grown(epoch, samples, before=ledger.sizes.most)
        ledger.grow(epoch, samples)
        records.append(growth_record(epoch, samples))
    state.group, state.formed_as = tuple(readies), state.generation
    state.error = ""  # whoever was lost before is not missed
    state.shares = first_shares(settings, list(readies.values()))
    state.progress = Progress(
        steps=steps,
        step=settings.step,
        position=settings.position,
        ledger=ledger,
        generation=state.generation,
    )
    if settings.shares == "auto" and len(readies) > 1:
        state.resharing = Resharing(settings, readies, now_s)
    _seen(state, steps.sizes.most)
    for member in state.in_group():
        member.heard_s, member.step, member.generation = now_s, settings.step, state.generation
    yield Record(records=tuple(records))
    yield Form(
        generation=state.generation,
        members=state.group,
        shares=state.shares,
        step=settings.step,
    )


def regroup(state: JobState, now_s: float) -> Iterator[Command]:
    """Those that are left of the generation meet as the next one.

    A change that is not in force everywhere is withdrawn, to be sent again if it is still wanted;
    growth of the data is not, since some may have taken it in.
    """
    lost = tuple(m.number for m in state.in_group() if m.gone)
    shares = dict(zip(state.group, state.shares, strict=True))
    state.group = tuple(number for number in state.group if state.here(number))
    newest = state.generation
    outstanding = state.outstanding
    if outstanding is not None:
        outstanding.members = state.group
        if isinstance(outstanding.change, Reshare):
            newest = max(newest, outstanding.change.generation)
        if not isinstance(outstanding.change, Extend) or outstanding.everywhere:
            state.settled, state.outstanding = outstanding.number, None
    state.halt_sent = state.halted = state.met = False
    state.generation = state.formed_as = newest + 1
    state.shares = left_shares(
        state.settings, {number: shares[number] for number in state.group}, state.resharing
    )
    state.checkpoints.drop()
    state.error = ""
    for member in state.in_group():
        member.heard_s, member.part_step = now_s, -1
        if member.state in {MemberState.DRAINING, MemberState.DONE}:
            move(member, MemberState.ACTIVE, now_s)
    yield Release(members=lost)
    yield Form(
        generation=state.generation,
        members=state.group,
        shares=state.shares,
        step=state.formed().committed_step,
        settled=state.settled,
    )


def end(state: JobState, status: str, now_s: float) -> Iterator[Command]:
    """Every member's process ends and its place is given back, also that of a lost one."""
    for member in state.members.values():
        if not member.gone:
            move(member, MemberState.RELEASED, now_s)
    state.outstanding = None
    yield Release(members=tuple(state.members))
    yield Finish(status=status, error=state.error or None)


def move(member: Member, state: MemberState, now_s: float) -> None:
    """The member is in `state` from now on."""
    if member.state is not state:
        member.state, member.since_s = state, now_s


def send_ahead(state: JobState, now_s: float) -> Iterator[Command]:
    """One change at a time: the halt if a stop was asked for, else grown data, else shares."""
    if (
        state.phase not in {Phase.TRAINING, Phase.STOPPING}
        or state.outstanding is not None
        or state.halt_sent
        or any(m.state is MemberState.DONE for m in state.in_group())
    ):
        return
    change: Change | None
    if state.phase is Phase.STOPPING:
        change = Halt(reason=state.stop_reason)
        state.halt_sent = True
    elif state.data_ahead is not None:
        grew, state.data_ahead = state.data_ahead, None
        change = Extend(version=grew.version, samples=grew.samples, partitions=grew.partitions)
    else:
        change = _better_shares(state, now_s)
    if change is None:
        return
    state.changes += 1
    state.outstanding = Outstanding(number=state.changes, members=state.group, change=change)
    yield Prepare(number=state.changes, members=state.group, change=change)


def _better_shares(state: JobState, now_s: float) -> Reshare | None:
    if state.resharing is None:
        return None
    step = state.formed().committed_step
    shares = state.resharing.look(group=state.group, shares=state.shares, step=step, now_s=now_s)
    return None if shares is None else Reshare(generation=state.generation + 1, shares=shares)


def _progressed(state: JobState, event: StepsCommitted, now_s: float) -> Iterator[Command]:
    member = state.members[event.member]
    if event.generation >= state.formed_as:
        state.met = True
        yield from _recovered(state, event, now_s)
    state.formed().change_generation(event.generation, event.first_step)
    member.step, member.generation = event.last_step, event.generation
    if state.resharing is not None:
        state.resharing.observe(event)
    commits = state.formed().commit_to(min(m.step for m in state.in_group()))
    if commits:
        yield Record(records=tuple(commit_record(c) for c in commits))


def _recovered(state: JobState, event: StepsCommitted, now_s: float) -> Iterator[Command]:
    recovery = state.recovery
    if recovery is not None and event.last_step > event.first_step:
        state.recovery = None
        yield TellRecovery(
            generation=event.generation,
            lost=tuple(recovery.lost),
            cause=recovery.cause,
            detected_s=recovery.detected_s,
            resumed_s=now_s - state.started_s,
        )


def _seen(state: JobState, samples: int) -> None:
    """The members that met have read `samples` samples: growth up to there is no news to them."""
    if state.data_ahead is not None and state.data_ahead.samples <= samples:
        state.data_ahead = None
    state.data_samples = max(state.data_samples, samples)


def _grown(epoch: int, samples: int, *, before: int) -> Notice:
    return Notice(
        what=f"the data has grown from {before} to {samples} samples, from epoch {epoch} on",
        detail={"epoch": epoch, "samples": samples},
    )


def _applied(state: JobState, event: ChangeApplied, now_s: float) -> Iterator[Command]:
    outstanding = state.outstanding
    if outstanding is None:
        raise InternalError(f"no change is outstanding: {event}")
    first = not outstanding.applied
    outstanding.applied[event.member] = event.step
    everywhere = outstanding.everywhere
    match outstanding.change:
        case Reshare(generation=generation, shares=shares):
            if first:
                state.formed().change_generation(generation, event.step)
            if everywhere:
                state.generation, state.shares = generation, shares
                if state.resharing is not None:
                    state.resharing.wait(event.step, now_s)
        case Extend(samples=samples):
            if first:
                before = state.formed().steps.sizes.most
                epoch = state.formed().grow(samples, event.step)
                yield Record(records=(growth_record(epoch, samples),))
                yield _grown(epoch, samples, before=before)
        case Halt():
            state.halted = True
        case Save():
            pass
        case _:
            assert_never(outstanding.change)
    if everywhere:
        state.settled, state.outstanding = outstanding.number, None


def _resume(state: JobState) -> str:
    last = state.checkpoints.last_published
    if last is None:
        return "there is no checkpoint yet to resume from; checkpoint.every_steps keeps some"
    return f"--resume goes on from the last checkpoint, of step {last}"
