"""What an event must satisfy beyond the tables.

Nothing here changes anything: `judge_of_member` and `judge_of_job` either raise, or say what the
members become.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, assert_never

from raycloud.commands import Meet, Reshare
from raycloud.control.data import why_wrong
from raycloud.control.rollback import gathered, why_not_there
from raycloud.control.scaling import other_samples, spares
from raycloud.control.tables import (
    FINAL,
    MEMBER_ON_EVENT,
    PHASE_ON_EVENT,
    Condition,
    MemberState,
    Phase,
    Trigger,
)
from raycloud.errors import InternalError
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
    Event,
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
from raycloud.order import EpochSizes, Position

if TYPE_CHECKING:
    from raycloud.control.membership import Member, Outstanding
    from raycloud.control.state import JobState

MemberEvent = (  # the more often it comes, the sooner it is asked for
    StepsCommitted
    | ChangeApplied
    | PartWritten
    | MemberSpawned
    | MemberReady
    | DataPreparing
    | DataPrepared
    | MemberCaughtUp
    | EvaluationPart
    | MemberDone
    | MemberLost
    | MemberReturned
    | MemberLeaving
    | ExchangeBroken
    | PartFailed
    | StepNotFinite
    | MemberFailed
)
JobEvent = (
    RunStarted
    | GenerationFormed
    | CheckpointPublished
    | CheckpointFailed
    | Evaluated
    | StopRequested
    | RangeChanged
    | CapacityChanged
    | DataGrew
    | Noticed
    | RolledBack
    | Recovered
    | RunFinished
)
_MAY_BE_OLD: Final = (
    MemberDone,
    ExchangeBroken,
    PartWritten,
    PartFailed,
    EvaluationPart,
    StepNotFinite,
)
_PARTS: Final = (PartWritten, PartFailed, EvaluationPart)
_OF_NEWCOMERS: Final = (MemberCaughtUp, StepsCommitted)
_NEXT: Final = (Reshare, Meet)  # changes that name a generation
_MORE_TO_ASK: Final = frozenset(
    {ChangeApplied, MemberDone, MemberReturned, ExchangeBroken, StepNotFinite, MemberCaughtUp}
)


def judge_of_member(state: JobState, event: MemberEvent) -> MemberState | None:
    """May this event of a member come now, and what does that become?

    Returns:
        The member's next state; None if the event is legal and changes nothing.

    Raises:
        InternalError: The event is illegal here; the message names it and where things stand.
    """
    becomes = _member_row(state, event.member, event)
    if becomes is None or _is_over(state, event):
        return None
    _check_of_member(state, event)
    return becomes


def judge_of_job(state: JobState, event: JobEvent) -> dict[int, MemberState] | None:
    """May this event of the job come now, and what do the members it concerns become?

    Returns:
        The next state of each member concerned; None if the event is legal and changes nothing.

    Raises:
        InternalError: The event is illegal here; the message names it and where things stand.
    """
    moves = _all_rows(state, event) if isinstance(event, GenerationFormed) else {}
    if _is_over(state, event):
        return None
    _check_of_job(state, event)
    return moves


def _is_over(state: JobState, event: Event) -> bool:
    """The job has ended, and nothing changes it any more."""
    if type(event) not in PHASE_ON_EVENT[state.phase]:
        raise illegal(state, event, f"in phase {state.phase}")
    return state.phase in FINAL


def illegal(state: JobState, event: Event, why: str) -> InternalError:
    """The error for an event that cannot be: it names the event and where things stand."""
    return InternalError(
        f"{type(event).__name__} is illegal: {why} (phase {state.phase}, generation "
        f"{state.generation}): {event}"
    )


def _member_row(state: JobState, number: int, event: Event) -> MemberState | None:
    member = state.member(number)
    row = MEMBER_ON_EVENT[member.state]
    trigger: Trigger = type(event)
    plain = member.joined and trigger in row and trigger not in _MORE_TO_ASK
    if plain and not _taken_back(state, event):
        return row[trigger]
    if isinstance(event, ChangeApplied) and event.change <= state.settled:
        return None  # it was withdrawn meanwhile
    if isinstance(event, _MAY_BE_OLD) and event.generation < state.sound_from:
        return None  # of a generation that broke: nothing of it counts any more
    if isinstance(event, ChangeApplied) and trigger not in row:
        trigger = (ChangeApplied, type(_outstanding(state, event).change))
    if trigger not in row:
        raise illegal(state, event, f"{member} is {member.state}")
    return None if _echo(state, member, event) else row[trigger]


def _all_rows(state: JobState, event: GenerationFormed) -> dict[int, MemberState]:
    """What those of the group become that do not stay what they are: it follows from that alone."""
    rows: dict[MemberState, MemberState | None] = {}
    moves: dict[int, MemberState] = {}
    for number in state.group:
        now = state.members[number].state
        if now not in rows:
            rows[now] = _member_row(state, number, event)
        known = rows[now]
        if known is not None and known is not now:
            moves[number] = known
    return moves


def _echo(state: JobState, member: Member, event: Event) -> bool:
    """A word of how far a newcomer has come where the others have gone on without it, or know.

    Or of steps that were taken back since, or what was written then; or that a process is back
    whose place is another's.
    """
    if isinstance(event, MemberReturned):
        return member.number not in state.away
    if isinstance(event, _PARTS):
        return not member.joined and event.generation < state.sound_from
    if member.joined or not isinstance(event, _OF_NEWCOMERS):
        return isinstance(event, MemberCaughtUp) or _taken_back(state, event)
    if isinstance(event, MemberCaughtUp):
        alone = not state.is_to_follow(member.number)
    else:
        alone = not state.is_to_meet(member.number)
    return alone or event.generation < state.sound_from


def _taken_back(state: JobState, event: Event) -> bool:
    if state.progress is None or not isinstance(event, StepsCommitted):
        return False
    return event.generation < state.progress.sound_from


def _outstanding(state: JobState, event: ChangeApplied) -> Outstanding:
    change = state.outstanding
    if change is None or change.number != event.change or not change.concerns(event.member):
        raise illegal(state, event, f"change {event.change} is not outstanding for this member")
    return change


def _check_of_member(state: JobState, event: MemberEvent) -> None:
    match event:
        case StepsCommitted():
            _check_steps(state, event)
        case ChangeApplied():
            _check_applied(state, event)
        case MemberReady():
            _check_ready(state, event)
        case PartWritten():
            behind = event.step <= state.member(event.member).part_step
            if behind and event.generation >= state.sound_from:
                raise illegal(state, event, "the member has written this or a later part")
        case MemberDone():
            _check_done(state, event)
        case MemberSpawned() | MemberLost() | ExchangeBroken() | MemberFailed() | EvaluationPart():
            pass
        case DataPreparing() | DataPrepared() | MemberLeaving() | MemberCaughtUp():
            pass
        case StepNotFinite():
            _check_not_finite(state, event)
        case MemberReturned() | PartFailed():
            pass
        case _:
            assert_never(event)


def _check_of_job(state: JobState, event: JobEvent) -> None:
    match event:
        case GenerationFormed():
            _check_formed(state, event)
        case CheckpointPublished() | CheckpointFailed() | RolledBack():
            if wrong := _not_there(state, event):
                raise illegal(state, event, wrong)
        case RangeChanged():
            if not 1 <= event.min_workers <= event.max_workers:
                raise illegal(state, event, "this is no range")
        case DataGrew():
            if event.samples <= state.data_samples or event.version <= state.data_version:
                known = f"{state.data_samples} samples of version {state.data_version}"
                raise illegal(state, event, f"{known} are known, and data only grows")
        case CapacityChanged():
            if event.workers < 0:
                raise illegal(state, event, "this is no number of workers")
        case RunStarted() | Evaluated() | StopRequested() | Noticed() | Recovered() | RunFinished():
            pass
        case _:
            assert_never(event)


def _not_there(state: JobState, event: CheckpointPublished | CheckpointFailed | RolledBack) -> str:
    if isinstance(event, RolledBack):
        return why_not_there(state, event)
    there = event.step in state.checkpoints.publishing
    return "" if there else "this checkpoint is not being published"


def _check_ready(state: JobState, event: MemberReady) -> None:
    seconds = (event.fixed_s, event.micro_batch_s)
    if event.samples < 0 or not all(math.isfinite(s) and s >= 0 for s in seconds):
        raise illegal(state, event, "samples and seconds must be numbers >= 0")
    if state.settings.shares == "auto" and sum(seconds) <= 0:
        raise illegal(state, event, "shares can only be fitted to measured seconds > 0")


def _check_formed(state: JobState, event: GenerationFormed) -> None:
    change = state.outstanding.change if state.outstanding else None
    if isinstance(change, Reshare) and event.generation == change.generation:
        expected = (change.generation, state.group, change.shares)
    elif isinstance(change, Meet) and event.generation == change.generation:
        expected = (change.generation, change.members, change.shares)
    elif event.generation < max(state.generation, state.sound_from):
        return  # an echo of what was replaced meanwhile
    else:
        expected = (state.generation, state.group, state.shares)
    if (event.generation, event.members, event.shares) != expected:
        raise illegal(
            state, event, "generation {}, members {}, shares {} are due".format(*expected)
        )


def _check_applied(state: JobState, event: ChangeApplied) -> None:
    change = _outstanding(state, event)
    if event.member in change.applied:
        raise illegal(state, event, "the member has applied it already")
    others = next(iter(change.applied.values()), event.step)
    if others != event.step:
        raise illegal(state, event, f"other members applied it at step {others}")
    if not change.in_force and event.step < state.formed().committed_step:
        raise illegal(state, event, f"steps up to {state.formed().committed_step} are committed")


def _check_steps(state: JobState, event: StepsCommitted) -> None:
    member, progress = state.members[event.member], state.formed()
    begins = member.goes_on(event.first_step, event.generation)
    if not member.joined:  # from the others it has all steps before its first
        begins = begins or event.first_step >= progress.committed_step
    if not begins or event.last_step < event.first_step:
        raise illegal(state, event, f"the member's next step is {member.step}")
    change = state.outstanding.change if state.outstanding else None
    newest = change.generation if isinstance(change, _NEXT) else state.generation
    if not member.generation <= event.generation <= newest:
        raise illegal(state, event, f"generations {member.generation} to {newest} are possible")
    due = progress.position_at(event.last_step)
    as_due = event.epoch == due.epoch and event.offset == due.offset
    if event.last_step > event.first_step and not as_due:
        reached = Position(epoch=event.epoch, offset=event.offset)
        if not progress.same_position(reached, due):
            what = f"after step {event.last_step} the sequence stands at {due}"
            raise illegal(state, event, what)
    many = progress.micro_batches(event.first_step, event.last_step)
    if event.computed != many:
        what = f"the steps have {many} micro-batches, members have computed {event.computed}"
        raise illegal(state, event, what)
    if event.skips and (wrong := why_wrong(event)):
        raise illegal(state, event, wrong)


def _check_not_finite(state: JobState, event: StepNotFinite) -> None:
    member, made_by = state.member(event.member), event.left_out
    if event.step < member.step and member.joined:
        raise illegal(state, event, f"the member's next step is {member.step}")
    if made_by is not None and not 0 <= made_by <= event.step:
        raise illegal(state, event, "only this step or an earlier one can have made it so")


def _check_done(state: JobState, event: MemberDone) -> None:
    member = state.member(event.member)
    if member.joined and not member.goes_on(event.step, event.generation):
        raise illegal(state, event, f"the member has reported steps up to {member.step}")
    members = (state.members[number] for number in state.group)
    other = next((m for m in members if m.state is MemberState.DONE), None)
    if other is not None and other.step != event.step:  # all others are done where it is
        raise illegal(state, event, f"{other} is done at step {other.step}")


_SAME = (
    "every worker calls Task.data, and all have to get the same from it: list files in sorted "
    "order, give random_split, shuffles and permutations a generator with a seed of their own, and "
    "leave what is random about a sample to Task.batch"
)


def holds(state: JobState, condition: Condition) -> bool:
    """Does `condition` hold over all members together?"""
    return _HOLDS[condition](state)


def _apart(state: JobState) -> bool:
    """Time for another meeting of the same members, unless it is one of them that is to go."""
    settings, waited_s = state.settings, state.now_s - state.broken_s
    if state.broken is None or state.meetings >= settings.meetings:
        return False
    if waited_s >= settings.broken_s:
        return True
    if waited_s <= settings.answer_s:
        return False
    since_s = state.broken_s + settings.answer_s  # what is heard then was asked for afterwards
    return state.hearing.heard_since(since_s, state.group) == len(state.group)


def _all_ready(state: JobState) -> bool:
    return state.turns.states[MemberState.READY] == len(state.turns.present)


def _all_done(state: JobState) -> bool:
    """Who has left the group, and is not gone yet, may be among those that are done."""
    if state.turns.states[MemberState.DONE] < len(state.group):
        return False
    return all(state.members[number].state is MemberState.DONE for number in state.group)


def _part_missing(state: JobState) -> bool:
    """Who leaves may still be writing its part of an older one, which nobody needs any more."""
    return bool(state.checkpoints.collecting(state.formed_as))


def _too_few(state: JobState) -> bool:
    """Who is to stop may do so with fewer."""
    if state.progress is None:
        fewest = min(state.workers[0], state.settings.min_workers)  # or asked for meanwhile
        return len(state.turns.present) < fewest
    if not state.any_gone():
        return False  # the range may be another one than that they began with
    return not state.stop_requests and not _enough(state)


def _enough(state: JobState) -> bool:
    left = state.left()
    return state.stop_requests > 0 or len(left) + len(spares(state)) >= state.workers[0]


def _stranded(state: JobState) -> bool:
    """Where data has grown, those that are left have read it, and nobody can join them."""
    if state.progress is None or state.data_version == 0:
        return False
    return state.phase is Phase.RESTORING or _too_few(state) or _nobody(state)


def _nobody(state: JobState) -> bool:
    if state.not_finite is not None:
        return True
    if state.progress is None or not state.any_gone():
        return False
    return not any(state.members[number].joined for number in state.left())


def _kept(state: JobState) -> bool:
    """The run fails, and no checkpoint that members have begun can become whole any more."""
    if state.now_s - state.failed_s >= state.settings.keep_s:
        return True
    holders = tuple(member.number for member in state.holders())
    for step in state.checkpoints.collecting(state.formed_as):
        missing = state.checkpoints.missing(step, holders)
        if not any(state.members[number].gone for number in missing):
            return False
    return not state.checkpoints.publishing


def _unsaved(state: JobState) -> bool:
    """No step is left that another checkpoint could be made after, or too many have failed."""
    closes = state.phase is Phase.CLOSING and state.checkpoints.damaged
    return closes or state.failing.in_a_row >= state.settings.most_failed


def _stop_asked(state: JobState) -> bool:
    """Where nobody is left, the run ends with the steps of the checkpoint, once that is found."""
    known = state.recovery is not None and state.recovery.back is not None
    return state.stop_requests > 0 and (known or state.phase is not Phase.RESTORING)


def _hopeless(state: JobState) -> bool:
    """Another loss of the generation, or of all: whoever computes this step seems lost by it."""
    most = state.settings.losing
    if state.phase is Phase.REGROUPING and state.losing >= most and state.any_missing():
        return True
    return _nobody(state) and state.formed().returns >= most


_HOLDS: Final[Mapping[Condition, Callable[[JobState], bool]]] = {
    Condition.TOO_FEW: _too_few,
    Condition.STRANDED: _stranded,
    Condition.NOBODY: _nobody,
    Condition.HOPELESS: _hopeless,
    Condition.ENOUGH: _enough,
    Condition.BROKEN: lambda state: state.any_missing(),
    Condition.APART: _apart,
    Condition.MET: lambda state: state.met,
    Condition.STOP_ASKED: _stop_asked,
    Condition.GATHERED: gathered,
    Condition.UNFIT: lambda state: _all_ready(state) and bool(unfit(state)),
    Condition.ALL_READY: _all_ready,
    Condition.STOPPED_TWICE: lambda state: state.stop_requests > 1,
    Condition.UNSAVED: _unsaved,
    Condition.PART_MISSING: lambda s: _all_done(s) and _part_missing(s),
    Condition.ALL_DONE: _all_done,
    Condition.HALTED: lambda state: not state.checkpoints.publishing and state.halted,
    Condition.COMPLETE: lambda state: not state.checkpoints.publishing,
    Condition.KEPT: _kept,
}


def unfit(state: JobState) -> str:
    """Why the data that the members see cannot be trained on; empty if it can."""
    settings = state.settings
    readies = [m.ready for m in state.present() if m.ready is not None]
    samples = readies[0].samples
    for ready in readies:
        if ready.samples != samples:
            return (
                f"members see different data: member {readies[0].member} has {samples} samples, "
                f"member {ready.member} has {ready.samples}"
            )
    for ready in readies[1:]:
        if differing := other_samples(readies[0], ready):
            return (
                f"Task.data gives member {readies[0].member} and {ready.member} different samples: "
                f"{differing}\n\nhint: {_SAME}"
            )
    trained = 0 if settings.ledger is None else EpochSizes.from_state(settings.ledger).most
    if samples < trained:
        return (
            f"the data has changed: the checkpoint was trained on {trained} samples per epoch, the "
            f"members see {samples}"
        )
    try:
        settings.steps(samples)
    except ValueError as error:
        return f"data.path: {error}"
    return ""


def hopeless(state: JobState) -> str:
    """Why the run does not go on, where it would go round in circles."""
    progress = state.formed()
    if state.not_finite is not None:
        furthest = f"came no further than step {progress.furthest}"
        return f"it went back {progress.returns} times, and {furthest}: {state.error}"
    times = max(state.losing, progress.returns) + 1
    return f"{times} times in step {progress.committed_step}: {state.error}"
