"""Guards: what an event must satisfy beyond the tables, and when a condition of the tables holds.

Nothing here changes anything: `judge` either raises, or says what the members become; `holds` says
whether a condition does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from raycloud import events
from raycloud.commands import Meet, Reshare
from raycloud.control.membership import one_worker_each
from raycloud.control.rollback import gathered, why_not_there
from raycloud.control.scaling import SAME_DATA, other_samples
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
from raycloud.order import EpochSizes, Position, skip_of

if TYPE_CHECKING:
    from raycloud.control.data import Progress
    from raycloud.control.member import Member
    from raycloud.control.state import JobState
    from raycloud.events import Event

_OTHERS_PART: Final = 0.2  # of what they took, that who is ready waits for the others
_MAY_BE_OLD: Final = (
    events.PartWritten,
    events.PartFailed,
    events.EvaluationPart,
    events.MemberDone,
    events.ExchangeBroken,
    events.StepNotFinite,
)


# ---- events


def judge(state: JobState, event: Event) -> dict[int, MemberState] | None:
    """May this event come now, and what do the members that it concerns become?

    Returns:
        The next state of each; None if the event is legal and changes nothing.

    Raises:
        InternalError: The event is illegal here; the message names it and where things stand.
    """
    moves: dict[int, MemberState] = {}
    if isinstance(event, events.MemberEvent):
        known = state.membership.members
        if (member := known.get(event.member)) is None:
            raise InternalError(f"there is no member {event.member}; known are {sorted(known)}")
        becomes = _member_row(state, member, event)
        if becomes is None:
            return None
        moves[event.member] = becomes
    elif isinstance(event, events.GenerationFormed):
        moves = _all_rows(state, event)
    if type(event) not in PHASE_ON_EVENT[state.phase]:
        raise _illegal(state, event, f"in phase {state.phase}")
    if state.phase in FINAL:
        return None
    wrong = _WRONG.get(type(event))
    if wrong is not None and (why := wrong(state, event)):
        raise _illegal(state, event, why)
    return moves


def _illegal(state: JobState, event: Event, why: str) -> InternalError:
    return InternalError(
        f"{type(event).__name__} is illegal: {why} (phase {state.phase}, generation "
        f"{state.membership.generation}): {event}"
    )


def _member_row(state: JobState, member: Member, event: Event) -> MemberState | None:
    row, membership = MEMBER_ON_EVENT[member.state], state.membership
    trigger: Trigger = type(event)
    if isinstance(event, events.ChangeApplied):
        if event.change <= membership.settled:
            return None  # it was withdrawn meanwhile
        if trigger not in row:
            sent = membership.outstanding
            if sent is None or sent.number != event.change or not sent.concerns(event.member):
                why = f"change {event.change} is not outstanding for this member"
                raise _illegal(state, event, why)
            trigger = (events.ChangeApplied, type(sent.change))
    elif isinstance(event, _MAY_BE_OLD) and event.generation < membership.sound_from:
        return None  # of a generation that broke: nothing of it counts any more
    if trigger not in row:
        raise _illegal(state, event, f"{member} is {member.state}")
    return None if _is_echo(state, member, event) else row[trigger]


def _all_rows(state: JobState, event: events.GenerationFormed) -> dict[int, MemberState]:
    """What those of the group become that do not stay what they are: it follows from that alone."""
    rows: dict[MemberState, MemberState | None] = {}
    moves: dict[int, MemberState] = {}
    for member in state.membership.in_group():
        now = member.state
        if now not in rows:
            rows[now] = _member_row(state, member, event)
        known = rows[now]
        if known is not None and known is not now:
            moves[member.number] = known
    return moves


def _is_echo(state: JobState, member: Member, event: Event) -> bool:
    """A word of how far a newcomer has come where the others have gone on without it, or know.

    Or of steps that were taken back since; or that a process is back whose place is another's.
    """
    membership, progress = state.membership, state.data.progress
    match event:
        case events.MemberReturned():
            return member.number not in membership.absent_since_s
        case events.MemberCaughtUp():
            due = membership.is_to_follow(member.number)
        case events.StepsCommitted() if member.joined:
            return progress is not None and event.generation < progress.sound_from
        case events.StepsCommitted():
            due = membership.is_to_meet(member.number)
        case _:
            return False
    return not due or event.generation < membership.sound_from


# ---- why an event cannot be; empty if it can


def _wrong_ready(state: JobState, event: events.MemberReady) -> str:
    seconds = (event.fixed_s, event.micro_batch_s)
    if event.samples < 0 or not all(math.isfinite(s) and s >= 0 for s in seconds):
        return "samples and seconds must be numbers >= 0"
    unmeasured = state.settings.shares == "auto" and sum(seconds) <= 0
    return "shares can only be fitted to measured seconds > 0" if unmeasured else ""


def _wrong_formed(state: JobState, event: events.GenerationFormed) -> str:
    membership = state.membership
    change = membership.outstanding.change if membership.outstanding else None
    generation, group, shares = membership.generation, membership.group, membership.shares
    if isinstance(change, Reshare | Meet) and event.generation == change.generation:
        generation, shares = change.generation, change.shares
        group = change.members if isinstance(change, Meet) else group
    elif event.generation < max(generation, membership.sound_from):
        return ""  # an echo of what was replaced meanwhile
    keys = one_worker_each(len(group))
    if event.keys and event.keys != keys:
        return f"replicas and positions {keys} are due"
    if (event.generation, event.members, event.shares) == (generation, group, shares):
        return ""
    return f"generation {generation}, members {group}, shares {shares} are due"


def _wrong_part(state: JobState, event: events.PartWritten) -> str:
    membership = state.membership
    if event.step <= membership.members[event.member].part_step:
        return "the member has written this or a later part"
    # Of a generation that is not known to be in force yet, the keys are not known, either.
    due = membership.groups.get(event.generation, {}).get(event.member)
    key = event.replica, event.position
    if due is not None and event.replica >= 0 and key != due:
        return f"the member's replica and position are {due}, not {key}"
    return ""


def _wrong_applied(state: JobState, event: events.ChangeApplied) -> str:
    sent, committed = state.membership.outstanding, state.data.formed().committed_step
    if sent is None or event.member not in sent.waits_for:
        return "the member has applied it already"
    if sent.step not in {None, event.step}:
        return f"other members applied it at step {sent.step}"
    early = not sent.in_force and event.step < committed
    return f"steps up to {committed} are committed" if early else ""


def _wrong_steps(state: JobState, event: events.StepsCommitted) -> str:
    membership, progress = state.membership, state.data.formed()
    member = membership.members[event.member]
    begins = member.goes_on(event.first_step, event.generation)
    if not member.joined:  # from the others it has all steps before its first
        begins = begins or event.first_step >= progress.committed_step
    if not begins or event.last_step < event.first_step:
        return f"the member's next step is {member.step}"
    change = membership.outstanding.change if membership.outstanding else None
    newest = change.generation if isinstance(change, Reshare | Meet) else membership.generation
    if not member.generation <= event.generation <= newest:
        return f"generations {member.generation} to {newest} are possible"
    return _wrong_reach(progress, event) or (_wrong_skips(event) if event.skips else "")


def _wrong_reach(progress: Progress, event: events.StepsCommitted) -> str:
    """A driver that died may have counted steps, and not have come to log who told of them."""
    if event.last_step < progress.first_step:
        return ""
    due = progress.position_at(event.last_step)
    as_due = event.epoch == due.epoch and event.offset == due.offset
    if event.last_step > event.first_step and not as_due:
        reached = Position(epoch=event.epoch, offset=event.offset)
        if not progress.same_position(reached, due):
            return f"after step {event.last_step} the sequence stands at {due}"
    if event.first_step < progress.first_step:
        return ""
    many = progress.micro_batches(event.first_step, event.last_step)
    if event.computed != many:
        return f"the steps have {many} micro-batches, members have computed {event.computed}"
    return ""


def _wrong_skips(event: events.StepsCommitted) -> str:
    try:
        skips = [skip_of(record) for record in event.skips]
    except ValueError as error:
        return str(error)
    other = next((s for s in skips if not event.first_step <= s.step < event.last_step), None)
    return "" if other is None else f"{other} is of another step"


def _wrong_not_finite(state: JobState, event: events.StepNotFinite) -> str:
    member, made_by = state.membership.members[event.member], event.left_out
    if event.step < member.step and member.joined:
        return f"the member's next step is {member.step}"
    possible = made_by is None or 0 <= made_by <= event.step
    return "" if possible else "only this step or an earlier one can have made it so"


def _wrong_done(state: JobState, event: events.MemberDone) -> str:
    membership = state.membership
    member = membership.members[event.member]
    if member.joined and not member.goes_on(event.step, event.generation):
        return f"the member has reported steps up to {member.step}"
    if not membership.any_done():
        return ""
    other = next(m for m in membership.in_group() if m.state is MemberState.DONE)
    return "" if other.step == event.step else f"{other} is done at step {other.step}"


def _wrong_growth(state: JobState, event: events.DataGrew) -> str:
    data = state.data
    if event.samples > data.samples and event.version > data.version:
        return ""
    return f"{data.samples} samples of version {data.version} are known, and data only grows"


def _not_published(state: JobState, event: events.CheckpointPublished) -> str:
    there = event.step in state.checkpoints.publishing
    return "" if there else "this checkpoint is not being published"


def _no_range(_: JobState, event: events.RangeChanged) -> str:
    return "" if 1 <= event.min_workers <= event.max_workers else "this is no range"


_WRONG: Final[Mapping[type[Event], Callable[[JobState, Any], str]]] = {
    events.MemberReady: _wrong_ready,
    events.GenerationFormed: _wrong_formed,
    events.PartWritten: _wrong_part,
    events.ChangeApplied: _wrong_applied,
    events.StepsCommitted: _wrong_steps,
    events.StepNotFinite: _wrong_not_finite,
    events.MemberDone: _wrong_done,
    events.DataGrew: _wrong_growth,
    events.RolledBack: why_not_there,
    events.CheckpointPublished: _not_published,
    events.CheckpointFailed: _not_published,
    events.RangeChanged: _no_range,
    events.CapacityChanged: lambda _, e: "" if e.workers >= 0 else "this is no number of workers",
}


# ---- conditions


def holds(state: JobState, condition: Condition) -> bool:
    """Does `condition` hold over all members together?"""
    return _HOLDS[condition](state)


def _apart(state: JobState) -> bool:
    """Time for another meeting of the same members, unless it is one of them that is to go."""
    settings, recovery = state.settings, state.recovery
    if recovery.broken is None:
        return False
    if recovery.broken.server:
        return True
    if recovery.meetings >= settings.meetings:
        return False
    waited_s = state.now_s - recovery.broken_s
    if waited_s >= settings.broken_s:
        return True
    if waited_s <= settings.answer_s:
        return False
    since_s = recovery.broken_s + settings.answer_s  # what is heard then was asked for afterwards
    group = state.membership.group
    return state.heartbeats.heard_since(since_s, group) == len(group)


def _uneven(state: JobState) -> bool:
    """Once in a round, and where members that meet anew have nothing to write or measure again."""
    membership, measures = state.membership, state.settings.measures
    step = state.data.formed().committed_step
    return (
        state.recovery.meetings == 1
        and all(step % every for every in state.settings.reads if every != measures)
        and (measures == 0 or step % measures > 0 or step == state.data.measured)
        and membership.met
        and not membership.following
        and not membership.any_done()
        and state.resharing.late_in_round(membership.group, membership.shares) is not None
    )


def _all_ready(state: JobState) -> bool:
    roster = state.membership.roster
    return roster.states[MemberState.READY] == len(roster.present)


def _some_ready(state: JobState) -> bool:
    """They have waited for the others for a part of what they took themselves, and a while."""
    membership = state.membership
    if membership.roster.states[MemberState.READY] < max(1, membership.workers[0]):
        return False
    took_s = membership.ready_s - state.recovery.started_s
    return state.now_s - membership.ready_s >= max(state.settings.others_s, _OTHERS_PART * took_s)


def _all_done(state: JobState) -> bool:
    """Who has left the group, and is not gone yet, may be among those that are done."""
    membership = state.membership
    if membership.roster.states[MemberState.DONE] < len(membership.group):
        return False
    return all(member.state is MemberState.DONE for member in membership.in_group())


def _part_missing(state: JobState) -> bool:
    """Who leaves may still be writing its part of an older one, which nobody needs any more."""
    return _all_done(state) and bool(state.checkpoints.collecting(state.membership.formed_as))


def _too_few(state: JobState) -> bool:
    """Who is to stop may do so with fewer."""
    membership = state.membership
    if state.data.progress is None:
        fewest = min(membership.workers[0], state.settings.min_workers)  # or asked for meanwhile
        return len(membership.roster.present) < fewest
    # The range may be another one than that they began with.
    return membership.any_gone() and not _enough(state)


def _enough(state: JobState) -> bool:
    membership = state.membership
    there = len(membership.left()) + len(membership.spares())
    return state.stop_requests > 0 or there >= membership.workers[0]


def _stranded(state: JobState) -> bool:
    """Where data has grown, those that are left have read it, and nobody can join them."""
    if state.data.progress is None or state.data.version == 0:
        return False
    return state.phase is Phase.RESTORING or _too_few(state) or _nobody(state)


def _nobody(state: JobState) -> bool:
    membership = state.membership
    if state.recovery.not_finite is not None:
        return True
    if state.data.progress is None or not membership.any_gone():
        return False
    return not any(membership.members[number].joined for number in membership.left())


def _kept(state: JobState) -> bool:
    """The run fails, and no checkpoint that members have begun can become whole any more."""
    membership, checkpoints = state.membership, state.checkpoints
    if state.now_s - (state.recovery.failed_s or 0.0) >= state.settings.keep_s:
        return True
    for step in checkpoints.collecting(membership.formed_as):
        missing = checkpoints.missing(step, membership.held_keys())
        if not any(membership.members[number].gone for number in missing):
            return False
    return not checkpoints.publishing


def _unsaved(state: JobState) -> bool:
    """No step is left that another checkpoint could be made after, or too many have failed."""
    closes = state.phase is Phase.CLOSING and state.checkpoints.damaged
    return closes or state.checkpoints.in_a_row >= state.settings.most_failed


def _stop_asked(state: JobState) -> bool:
    """Where nobody is left, the run ends with the steps of the checkpoint, once that is found."""
    known = state.recovery.back is not None
    return state.stop_requests > 0 and (known or state.phase is not Phase.RESTORING)


def _hopeless(state: JobState) -> bool:
    """Another loss of the generation, or of all: whoever computes this step seems lost by it."""
    most, losing = state.settings.losing, state.recovery.losing
    if state.phase is Phase.REGROUPING and losing >= most and state.membership.any_missing():
        return True
    return _nobody(state) and state.data.formed().returns >= most


_HOLDS: Final[Mapping[Condition, Callable[[JobState], bool]]] = {
    Condition.TOO_FEW: _too_few,
    Condition.STRANDED: _stranded,
    Condition.NOBODY: _nobody,
    Condition.HOPELESS: _hopeless,
    Condition.ENOUGH: _enough,
    Condition.BROKEN: lambda state: state.membership.any_missing(),
    Condition.APART: _apart,
    Condition.UNEVEN: _uneven,
    Condition.MET: lambda state: state.membership.met,
    Condition.STOP_ASKED: _stop_asked,
    Condition.GATHERED: gathered,
    Condition.UNFIT: lambda s: (_all_ready(s) or _some_ready(s)) and bool(unfit(s)),
    Condition.ALL_READY: _all_ready,
    Condition.SOME_READY: _some_ready,
    Condition.STOPPED_TWICE: lambda state: state.stop_requests > 1,
    Condition.UNSAVED: _unsaved,
    Condition.PART_MISSING: _part_missing,
    Condition.ALL_DONE: _all_done,
    Condition.HALTED: lambda s: not s.checkpoints.publishing and s.membership.halted,
    Condition.COMPLETE: lambda state: not state.checkpoints.publishing,
    Condition.KEPT: _kept,
}


# ---- why a run fails where a condition holds


def explain(state: JobState, condition: Condition) -> str:
    """Why the run fails, where this condition ends it; empty if that is known, or it does not."""
    match condition:
        case Condition.UNFIT:
            return unfit(state)
        case Condition.STRANDED:
            return state.recovery.error or _why_stranded(state)
        case Condition.HOPELESS:
            return _why_hopeless(state)
        case Condition.UNSAVED:
            return state.checkpoints.why_unsaved()
        case Condition.PART_MISSING:
            return state.checkpoints.why_unsaved() or _why_part_missing(state)
        case _:
            return ""


def unfit(state: JobState) -> str:
    """Why the data that the members see cannot be trained on; empty if it can."""
    settings = state.settings
    readies = [m.ready for m in state.membership.present() if m.ready is not None]
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
                f"{differing}\n\nhint: {SAME_DATA}"
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


def _why_hopeless(state: JobState) -> str:
    progress, recovery = state.data.formed(), state.recovery
    if recovery.not_finite is not None:
        furthest = f"came no further than step {progress.furthest}"
        return f"it went back {progress.returns} times, and {furthest}: {recovery.error}"
    times = max(recovery.losing, progress.returns) + 1
    return f"{times} times in step {progress.committed_step}: {recovery.error}"


def _why_stranded(state: JobState) -> str:
    incident = state.recovery.incident
    return (
        "no worker is left, and none can join, since the data has grown: "
        f"{incident.cause if incident else ''}\n\nhint: "
        "--resume goes on from the last checkpoint, if there is one, with all of the data"
    )


def _why_part_missing(state: JobState) -> str:
    step = state.checkpoints.collecting(state.membership.formed_as)[0]
    lacking = state.checkpoints.missing(step, state.membership.held_keys())
    return f"the checkpoint of step {step} has no part of members {lacking}"
