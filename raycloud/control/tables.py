"""The state machine of one job: which event may come when, and what follows.

Everything that decides what state comes next stands in these tables; the rest of this room holds
the guards that a table cannot express (`guards`) and what else an event changes (`effects`). Two
machines run side by side, the job's *phase* and each member's *state*. There are two kinds of
transitions:

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

from raycloud.commands import Change, Extend, Halt, Meet, Reshare, Save
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
    RunStarted,
    StepNotFinite,
    StepsCommitted,
    StopRequested,
)


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
    UNFIT = "all members are ready but their data does not fit"
    ALL_READY = "all members are ready"
    BROKEN = "a member of the generation, or of the one to come, is gone"
    APART = "the exchange broke, and nobody was found to be gone"
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

Trigger = type[Event] | tuple[type[ChangeApplied], type[Change]]
State = TypeVar("State", Phase, MemberState)

_ANY: tuple[type[Event], ...] = get_args(Event)
_OF_MEMBERS: tuple[type[Event], ...] = (
    MemberSpawned,
    MemberReady,
    DataPreparing,
    DataPrepared,
    GenerationFormed,
    MemberCaughtUp,
    ChangeApplied,
    StepsCommitted,
    PartWritten,
    PartFailed,
    EvaluationPart,
    MemberDone,
    MemberLost,
    MemberReturned,
    MemberLeaving,
    ExchangeBroken,
    StepNotFinite,
    MemberFailed,
)


# A member may be started while others compute.
_JOINING: tuple[type[Event], ...] = (MemberSpawned, DataPreparing, DataPrepared, MemberReady)
_FROM_OUTSIDE: tuple[type[Event], ...] = (RangeChanged, CapacityChanged, DataGrew, Noticed)

_WITHOUT_STEPS: tuple[type[Event], ...] = (
    GenerationFormed,
    CheckpointPublished,
    CheckpointFailed,
    Evaluated,
    DataPrepared,
    MemberLeaving,
    StopRequested,
    *_FROM_OUTSIDE,
    Recovered,
)
_WHILE_COMPUTING: tuple[type[Event], ...] = (
    GenerationFormed,
    MemberCaughtUp,
    ChangeApplied,
    StepsCommitted,
    PartWritten,
    PartFailed,
    CheckpointPublished,
    CheckpointFailed,
    EvaluationPart,
    Evaluated,
    *_JOINING,
    MemberDone,
    MemberReturned,
    MemberLeaving,
    ExchangeBroken,
    StepNotFinite,
    *_FROM_OUTSIDE,
    Recovered,
)


def _stay(state: State, *events: type[Event]) -> dict[Trigger, State]:
    return dict.fromkeys(events, state)


PHASE_ON_EVENT: Final[Mapping[Phase, Mapping[Trigger, Phase]]] = {
    Phase.NEW: {},
    Phase.PLACING: {
        **_stay(Phase.PLACING, RunStarted, *_JOINING, MemberLeaving, *_FROM_OUTSIDE),
        StopRequested: Phase.STOPPED,
        MemberLost: Phase.PLACING,
        MemberFailed: Phase.FAILED,
    },
    Phase.FORMING: {
        **_stay(Phase.FORMING, ExchangeBroken, MemberLeaving, DataPrepared, *_FROM_OUTSIDE),
        GenerationFormed: Phase.TRAINING,
        # A member may be heard before the word that all have met; what it did proves it.
        StepsCommitted: Phase.TRAINING,
        PartWritten: Phase.TRAINING,
        PartFailed: Phase.TRAINING,
        EvaluationPart: Phase.TRAINING,
        MemberDone: Phase.TRAINING,
        StopRequested: Phase.STOPPED,
        StepNotFinite: Phase.REGROUPING,
        MemberLost: Phase.REGROUPING,
        MemberFailed: Phase.FAILED,
    },
    Phase.TRAINING: {
        **_stay(Phase.TRAINING, *_WHILE_COMPUTING),
        StopRequested: Phase.STOPPING,
        StepNotFinite: Phase.REGROUPING,
        MemberLost: Phase.REGROUPING,
        MemberFailed: Phase.ENDING,
    },
    Phase.STOPPING: {
        **_stay(Phase.STOPPING, *_WHILE_COMPUTING, StopRequested),
        StepNotFinite: Phase.REGROUPING,
        MemberLost: Phase.REGROUPING,
        MemberFailed: Phase.ENDING,
    },
    Phase.REGROUPING: {
        **_stay(Phase.REGROUPING, *_WHILE_COMPUTING, MemberLost, StopRequested),
        MemberFailed: Phase.ENDING,
    },
    Phase.WAITING: {
        **_stay(Phase.WAITING, *_WHILE_COMPUTING, MemberLost, StopRequested),
        MemberFailed: Phase.FAILED,
    },
    Phase.RESTORING: {
        **_stay(
            Phase.RESTORING, *_WITHOUT_STEPS, *_JOINING, MemberLost, MemberReturned, RolledBack
        ),
        MemberFailed: Phase.FAILED,
    },
    Phase.ENDING: _stay(
        Phase.ENDING, *_WHILE_COMPUTING, MemberLost, MemberFailed, StopRequested, RolledBack
    ),
    Phase.CLOSING: {
        **_stay(Phase.CLOSING, *_WITHOUT_STEPS),
        MemberFailed: Phase.ENDING,
    },
    Phase.FINISHED: _stay(Phase.FINISHED, *_ANY),
    Phase.STOPPED: _stay(Phase.STOPPED, *_ANY),
    Phase.FAILED: _stay(Phase.FAILED, *_ANY),
}

PHASE_ON_CONDITION: Final[Mapping[Phase, Mapping[Condition, Phase]]] = {
    Phase.PLACING: {
        Condition.TOO_FEW: Phase.FAILED,
        Condition.UNFIT: Phase.FAILED,
        Condition.ALL_READY: Phase.FORMING,
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

MEMBER_ON_EVENT: Final[Mapping[MemberState, Mapping[Trigger, MemberState | None]]] = {
    MemberState.SPAWNING: {
        MemberSpawned: MemberState.SPAWNING,
        DataPreparing: MemberState.SPAWNING,
        DataPrepared: MemberState.SPAWNING,
        MemberReady: MemberState.READY,
        MemberLost: MemberState.LOST,
        MemberLeaving: MemberState.SPAWNING,
        MemberFailed: MemberState.FAILED,
    },
    MemberState.READY: {
        GenerationFormed: MemberState.ACTIVE,
        DataPrepared: MemberState.READY,
        MemberCaughtUp: MemberState.ACTIVE,
        StepsCommitted: MemberState.ACTIVE,
        PartWritten: MemberState.ACTIVE,
        PartFailed: MemberState.ACTIVE,
        EvaluationPart: MemberState.ACTIVE,
        MemberDone: MemberState.DONE,
        MemberLost: MemberState.LOST,
        MemberLeaving: MemberState.READY,
        ExchangeBroken: MemberState.READY,
        StepNotFinite: MemberState.READY,
        MemberFailed: MemberState.FAILED,
    },
    MemberState.ACTIVE: {
        GenerationFormed: MemberState.ACTIVE,
        DataPrepared: MemberState.ACTIVE,
        MemberCaughtUp: MemberState.ACTIVE,
        (ChangeApplied, Reshare): MemberState.ACTIVE,
        (ChangeApplied, Meet): MemberState.ACTIVE,
        (ChangeApplied, Save): MemberState.ACTIVE,
        (ChangeApplied, Extend): MemberState.ACTIVE,
        (ChangeApplied, Halt): MemberState.DRAINING,
        StepsCommitted: MemberState.ACTIVE,
        PartWritten: MemberState.ACTIVE,
        PartFailed: MemberState.ACTIVE,
        EvaluationPart: MemberState.ACTIVE,
        MemberDone: MemberState.DONE,
        MemberLost: MemberState.LOST,
        MemberLeaving: MemberState.ACTIVE,
        ExchangeBroken: MemberState.ACTIVE,
        StepNotFinite: MemberState.ACTIVE,
        MemberFailed: MemberState.FAILED,
    },
    MemberState.DRAINING: {
        GenerationFormed: MemberState.DRAINING,
        DataPrepared: MemberState.DRAINING,
        MemberCaughtUp: MemberState.DRAINING,
        StepsCommitted: MemberState.DRAINING,
        PartWritten: MemberState.DRAINING,
        PartFailed: MemberState.DRAINING,
        EvaluationPart: MemberState.DRAINING,
        MemberDone: MemberState.DONE,
        MemberLost: MemberState.LOST,
        MemberLeaving: MemberState.DRAINING,
        ExchangeBroken: MemberState.DRAINING,
        MemberFailed: MemberState.FAILED,
    },
    MemberState.DONE: {
        GenerationFormed: MemberState.DONE,
        DataPrepared: MemberState.DONE,
        MemberLost: LATE,  # its work is kept: nothing is lost, unless others must meet again
        MemberReturned: LATE,
        MemberLeaving: LATE,
        ExchangeBroken: LATE,  # it came ahead to a meeting, and others had done all by then
        MemberFailed: MemberState.FAILED,
    },
    MemberState.LOST: {**dict.fromkeys(_OF_MEMBERS, LATE), MemberReturned: MemberState.LOST},
    MemberState.FAILED: dict.fromkeys(_OF_MEMBERS, LATE),
    MemberState.RELEASED: dict.fromkeys(_OF_MEMBERS, LATE),
}
