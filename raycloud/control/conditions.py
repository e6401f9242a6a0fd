"""When a condition of the tables holds. Nothing here changes anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from raycloud.control.growing import other_samples, spares
from raycloud.control.restoring import gathered
from raycloud.control.tables import Condition, MemberState, Phase
from raycloud.order import EpochSizes

if TYPE_CHECKING:
    from raycloud.control.state import JobState


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
