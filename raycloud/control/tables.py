"""The state machine of one job: which event may come when, and what follows.

Two machines run side by side, the job's *phase* and each member's *state*, with transitions

1. On an event. An event that has no entry in the present row is illegal: it raises and changes
   nothing. `LATE` marks a word that comes too late to matter, from a member that is gone: legal,
   ignored, and the phase does not see it.
2. On a condition (phases only): what holds over all members together, checked after each event and
   tick, in the order of the row, until none holds.

An event of a member is looked up in the member's row first, and then in the row of the phase.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final, TypeVar, get_args

from raycloud import events
from raycloud.commands import Change, Halt


class Phase(StrEnum):
    """Where the job stands."""

    NEW = "NEW"  # before `start`
    PLACING = "PLACING"  # members are placed, build their model and measure themselves
    FORMING = "FORMING"  # members meet as a generation
    TRAINING = "TRAINING"  # steps are computed
    STOPPING = "STOPPING"  # steps are computed until the halt takes effect
    REGROUPING = "REGROUPING"  # those that are left meet as the next generation
    WAITING = "WAITING"  # too few are left: they keep what they have until others come
    RESTORING = "RESTORING"  # nobody has the state: others come, and go on from a checkpoint
    ENDING = "ENDING"  # the run fails: what makes the last checkpoint whole is still to come
    CLOSING = "CLOSING"  # members are done; their last checkpoints are being published
    FINISHED = "FINISHED"
    STOPPED = "STOPPED"
    FAILED = "FAILED"


class MemberState(StrEnum):
    """Where one member stands."""

    SPAWNING = "SPAWNING"  # its process was asked for
    READY = "READY"  # has model and data, belongs to no generation yet
    ACTIVE = "ACTIVE"  # computes steps
    DRAINING = "DRAINING"  # has halted: writes its part of the last checkpoint
    DONE = "DONE"  # has nothing left to do
    LOST = "LOST"  # died or went silent; of the latter the process may come back as another
    FAILED = "FAILED"  # its own code raised
    RELEASED = "RELEASED"  # its process was ended on our word


class Condition(StrEnum):
    """What must hold over all members together."""

    TOO_FEW = "fewer members are left than the job may run with"
    STRANDED = "too few are left, and the data has grown, so that nobody can join them"
    NOBODY = "nobody is left who has the state, or it is not to be gone on from"
    HOPELESS = "members were lost in one meeting after the other, or all again and again"
    ENOUGH = "as many members are there as the job must run with, or it is to stop"
    GATHERED = "as many members are ready as the job must run with, and the checkpoint is found"
    UNFIT = "members are to begin but their data does not fit"
    ALL_READY = "all members are ready"
    SOME_READY = "as many are ready as the job must run with, and the others take far longer"
    BROKEN = "a member of the generation, or of the one to come, is gone"
    APART = "the exchange broke, and nobody was found to be gone"
    UNEVEN = "a member is far behind in a round, and its rest is done sooner where all divide it"
    MET = "the generation is known to have met"
    STOP_ASKED = "a stop was asked for"
    STOPPED_TWICE = "a stop was asked for twice"
    UNSAVED = "more checkpoints in a row could not be kept than the job allows"
    PART_MISSING = "all members are done but parts of a checkpoint are missing"
    ALL_DONE = "all members are done"
    HALTED = "the run was halted and all checkpoints are published"
    COMPLETE = "all checkpoints are published"
    KEPT = "no checkpoint is to be waited for any more"


FINAL: Final = frozenset({Phase.FINISHED, Phase.STOPPED, Phase.FAILED})
GONE: Final = frozenset({MemberState.LOST, MemberState.FAILED, MemberState.RELEASED})
LATE: Final = None

Trigger = type[events.Event] | tuple[type[events.ChangeApplied], type[Change]]
State = TypeVar("State", Phase, MemberState)

_Kinds = tuple[type[events.Event], ...]
_ANY: _Kinds = get_args(events.Event)
_OF_MEMBERS: _Kinds = (events.GenerationFormed, *get_args(events.MemberEvent))
# A member may be started while others compute.
_JOINING: _Kinds = (
    events.MemberSpawned,
    events.DataPreparing,
    events.DataPrepared,
    events.MemberReady,
)
_FROM_OUTSIDE: _Kinds = (
    events.RangeChanged,
    events.CapacityChanged,
    events.DataGrew,
    events.Noticed,
    events.CollatorsStarted,
    events.Predicted,
    events.SyncAsked,
    events.SyncChanged,
    events.SyncMeasured,
)
_WITHOUT_STEPS: _Kinds = (
    events.GenerationFormed,
    events.CheckpointPublished,
    events.CheckpointFailed,
    events.Evaluated,
    events.DataPrepared,
    events.MemberLeaving,
    events.StopRequested,
    *_FROM_OUTSIDE,
    events.Recovered,
)
_NOT_WHILE_COMPUTING = {
    events.RunStarted,
    events.MemberLost,
    events.MemberFailed,
    events.StopRequested,
    events.RolledBack,
    events.RunFinished,
}
_WHILE_COMPUTING: _Kinds = tuple(kind for kind in _ANY if kind not in _NOT_WHILE_COMPUTING)
# What a member of a generation says of its work: a member may be heard before the word that all
# have met, and what it did proves it.
_OF_WORK: _Kinds = (
    events.StepsCommitted,
    events.PartWritten,
    events.PartFailed,
    events.EvaluationPart,
)


def _each(state: State, *kinds: type[events.Event]) -> dict[Trigger, State]:
    return dict.fromkeys(kinds, state)


PHASE_ON_EVENT: Final[Mapping[Phase, Mapping[Trigger, Phase]]] = {
    Phase.NEW: {},
    Phase.PLACING: {
        **_each(Phase.PLACING, events.RunStarted, *_JOINING, events.MemberLeaving, *_FROM_OUTSIDE),
        events.StopRequested: Phase.STOPPED,
        events.MemberLost: Phase.PLACING,
        events.MemberFailed: Phase.FAILED,
    },
    Phase.FORMING: {
        **_each(
            Phase.FORMING,
            events.ExchangeBroken,
            events.RoundsRefused,
            events.MemberLeaving,
            *_JOINING,
            *_FROM_OUTSIDE,
        ),
        events.GenerationFormed: Phase.TRAINING,
        **_each(Phase.TRAINING, *_OF_WORK, events.MemberDone),
        events.StopRequested: Phase.STOPPED,
        events.StepNotFinite: Phase.REGROUPING,
        events.MemberLost: Phase.REGROUPING,
        events.MemberFailed: Phase.FAILED,
    },
    Phase.TRAINING: {
        **_each(Phase.TRAINING, *_WHILE_COMPUTING),
        events.StopRequested: Phase.STOPPING,
        events.StepNotFinite: Phase.REGROUPING,
        events.MemberLost: Phase.REGROUPING,
        events.MemberFailed: Phase.ENDING,
    },
    Phase.STOPPING: {
        **_each(Phase.STOPPING, *_WHILE_COMPUTING, events.StopRequested),
        events.StepNotFinite: Phase.REGROUPING,
        events.MemberLost: Phase.REGROUPING,
        events.MemberFailed: Phase.ENDING,
    },
    Phase.REGROUPING: {
        **_each(Phase.REGROUPING, *_WHILE_COMPUTING, events.MemberLost, events.StopRequested),
        events.MemberFailed: Phase.ENDING,
    },
    Phase.WAITING: {
        **_each(Phase.WAITING, *_WHILE_COMPUTING, events.MemberLost, events.StopRequested),
        events.MemberFailed: Phase.FAILED,
    },
    Phase.RESTORING: {
        **_each(
            Phase.RESTORING,
            *_WITHOUT_STEPS,
            *_JOINING,
            events.MemberLost,
            events.MemberReturned,
            events.RolledBack,
        ),
        events.MemberFailed: Phase.FAILED,
    },
    Phase.ENDING: _each(
        Phase.ENDING,
        *_WHILE_COMPUTING,
        events.MemberLost,
        events.MemberFailed,
        events.StopRequested,
        events.RolledBack,
    ),
    Phase.CLOSING: {**_each(Phase.CLOSING, *_WITHOUT_STEPS), events.MemberFailed: Phase.ENDING},
    Phase.FINISHED: _each(Phase.FINISHED, *_ANY),
    Phase.STOPPED: _each(Phase.STOPPED, *_ANY),
    Phase.FAILED: _each(Phase.FAILED, *_ANY),
}

PHASE_ON_CONDITION: Final[Mapping[Phase, Mapping[Condition, Phase]]] = {
    Phase.PLACING: {
        Condition.TOO_FEW: Phase.FAILED,
        Condition.UNFIT: Phase.FAILED,
        Condition.ALL_READY: Phase.FORMING,
        Condition.SOME_READY: Phase.FORMING,
    },
    Phase.FORMING: {Condition.APART: Phase.REGROUPING},
    Phase.REGROUPING: {
        Condition.STOPPED_TWICE: Phase.STOPPED,
        Condition.STRANDED: Phase.FAILED,
        Condition.HOPELESS: Phase.FAILED,
        Condition.NOBODY: Phase.RESTORING,
        Condition.TOO_FEW: Phase.WAITING,
        Condition.BROKEN: Phase.REGROUPING,
        Condition.APART: Phase.REGROUPING,
        Condition.MET: Phase.TRAINING,
    },
    Phase.WAITING: {
        Condition.STOPPED_TWICE: Phase.STOPPED,
        Condition.STRANDED: Phase.FAILED,
        Condition.HOPELESS: Phase.FAILED,
        Condition.NOBODY: Phase.RESTORING,
        Condition.ENOUGH: Phase.REGROUPING,
    },
    Phase.RESTORING: {
        Condition.STRANDED: Phase.FAILED,
        Condition.STOP_ASKED: Phase.STOPPED,
        Condition.GATHERED: Phase.REGROUPING,
    },
    Phase.TRAINING: {
        Condition.BROKEN: Phase.REGROUPING,
        Condition.APART: Phase.REGROUPING,
        Condition.UNEVEN: Phase.REGROUPING,
        Condition.STOP_ASKED: Phase.STOPPING,
        Condition.UNSAVED: Phase.FAILED,
        Condition.PART_MISSING: Phase.FAILED,
        Condition.ALL_DONE: Phase.CLOSING,
    },
    Phase.STOPPING: {
        Condition.STOPPED_TWICE: Phase.STOPPED,
        Condition.BROKEN: Phase.REGROUPING,
        Condition.APART: Phase.REGROUPING,
        Condition.UNSAVED: Phase.FAILED,
        Condition.PART_MISSING: Phase.FAILED,
        Condition.ALL_DONE: Phase.CLOSING,
    },
    Phase.ENDING: {Condition.STOPPED_TWICE: Phase.FAILED, Condition.KEPT: Phase.FAILED},
    Phase.CLOSING: {
        Condition.STOPPED_TWICE: Phase.STOPPED,
        Condition.UNSAVED: Phase.FAILED,
        Condition.HALTED: Phase.STOPPED,
        Condition.COMPLETE: Phase.FINISHED,
    },
}

_OF_GENERATION: _Kinds = (
    events.GenerationFormed,
    events.DataPrepared,
    events.MemberCaughtUp,
    events.RoundsRefused,
    *_OF_WORK,
)
_TROUBLES: _Kinds = (events.MemberLeaving, events.ExchangeBroken, events.StepNotFinite)
_LAST: dict[Trigger, MemberState] = {
    events.MemberDone: MemberState.DONE,
    events.MemberLost: MemberState.LOST,
    events.MemberFailed: MemberState.FAILED,
}

MEMBER_ON_EVENT: Final[Mapping[MemberState, Mapping[Trigger, MemberState | None]]] = {
    MemberState.SPAWNING: {
        **_each(MemberState.SPAWNING, *_JOINING, events.MemberLeaving),
        events.MemberReady: MemberState.READY,
        events.MemberLost: MemberState.LOST,
        events.MemberFailed: MemberState.FAILED,
    },
    MemberState.READY: {
        **_each(MemberState.READY, events.DataPrepared, events.RoundsRefused, *_TROUBLES),
        **_each(MemberState.ACTIVE, events.GenerationFormed, events.MemberCaughtUp, *_OF_WORK),
        **_LAST,
    },
    MemberState.ACTIVE: {
        **_each(MemberState.ACTIVE, *_OF_GENERATION, *_TROUBLES),
        **{(events.ChangeApplied, kind): MemberState.ACTIVE for kind in get_args(Change)},
        (events.ChangeApplied, Halt): MemberState.DRAINING,
        **_LAST,
    },
    MemberState.DRAINING: {
        **_each(MemberState.DRAINING, *_OF_GENERATION, events.MemberLeaving, events.ExchangeBroken),
        **_LAST,
    },
    MemberState.DONE: {
        events.GenerationFormed: MemberState.DONE,
        events.DataPrepared: MemberState.DONE,
        events.MemberLost: LATE,  # its work is kept: nothing is lost, unless others must meet again
        events.MemberReturned: LATE,
        events.MemberLeaving: LATE,
        events.ExchangeBroken: LATE,  # it came ahead to a meeting, and others had done all by then
        events.MemberFailed: MemberState.FAILED,
    },
    MemberState.LOST: {**dict.fromkeys(_OF_MEMBERS, LATE), events.MemberReturned: MemberState.LOST},
    MemberState.FAILED: dict.fromkeys(_OF_MEMBERS, LATE),
    MemberState.RELEASED: dict.fromkeys(_OF_MEMBERS, LATE),
}
