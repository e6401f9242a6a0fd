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

from raycloud.commands import Change, Extend, Halt, Reshare, Save
from raycloud.events import (
    ChangeApplied,
    CheckpointPublished,
    DataGrew,
    DataPrepared,
    DataPreparing,
    Evaluated,
    EvaluationPart,
    Event,
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


class Phase(StrEnum):
    """Where the job stands."""

    NEW = "NEW"  # before `start`
    PLACING = "PLACING"  # members are placed, build their model and measure themselves
    FORMING = "FORMING"  # members meet as a generation
    TRAINING = "TRAINING"  # steps are computed
    STOPPING = "STOPPING"  # steps are computed until the halt takes effect
    REGROUPING = "REGROUPING"  # those that are left meet as the next generation
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
    LOST = "LOST"  # died or went silent
    FAILED = "FAILED"  # its own code raised
    RELEASED = "RELEASED"  # its process was ended on our word


class Condition(StrEnum):
    """What must hold over all members together."""

    TOO_FEW = "fewer members are left than the job may run with"
    UNFIT = "all members are ready but their data does not fit"
    ALL_READY = "all members are ready"
    BROKEN = "a member of the generation is gone"
    MET = "the generation is known to have met"
    STOP_ASKED = "a stop was asked for"
    STOPPED_TWICE = "a stop was asked for twice"
    PART_MISSING = "all members are done but parts of a checkpoint are missing"
    ALL_DONE = "all members are done"
    HALTED = "the run was halted and all checkpoints are published"
    COMPLETE = "all checkpoints are published"


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
    ChangeApplied,
    StepsCommitted,
    PartWritten,
    EvaluationPart,
    MemberDone,
    MemberLost,
    MemberFailed,
)


def _stay(state: State, *events: type[Event]) -> dict[Trigger, State]:
    return dict.fromkeys(events, state)


PHASE_ON_EVENT: Final[Mapping[Phase, Mapping[Trigger, Phase]]] = {
    Phase.NEW: {},
    Phase.PLACING: {
        **_stay(
            Phase.PLACING,
            RunStarted,
            MemberSpawned,
            DataPreparing,
            DataPrepared,
            MemberReady,
            RangeChanged,
            DataGrew,
            Noticed,
        ),
        StopRequested: Phase.STOPPED,
        MemberLost: Phase.PLACING,
        MemberFailed: Phase.FAILED,
    },
    Phase.FORMING: {
        **_stay(Phase.FORMING, DataPrepared, RangeChanged, DataGrew, Noticed),
        GenerationFormed: Phase.TRAINING,
        # A member may be heard before the word that all have met; what it did proves it.
        StepsCommitted: Phase.TRAINING,
        PartWritten: Phase.TRAINING,
        EvaluationPart: Phase.TRAINING,
        MemberDone: Phase.TRAINING,
        StopRequested: Phase.STOPPED,
        MemberLost: Phase.REGROUPING,
        MemberFailed: Phase.FAILED,
    },
    Phase.TRAINING: {
        **_stay(
            Phase.TRAINING,
            GenerationFormed,
            ChangeApplied,
            StepsCommitted,
            PartWritten,
            CheckpointPublished,
            EvaluationPart,
            Evaluated,
            DataPrepared,
            MemberDone,
            RangeChanged,
            DataGrew,
            Noticed,
        ),
        Recovered: Phase.TRAINING,
        StopRequested: Phase.STOPPING,
        MemberLost: Phase.REGROUPING,
        MemberFailed: Phase.FAILED,
    },
    Phase.STOPPING: {
        **_stay(
            Phase.STOPPING,
            GenerationFormed,
            ChangeApplied,
            StepsCommitted,
            PartWritten,
            CheckpointPublished,
            EvaluationPart,
            Evaluated,
            DataPrepared,
            MemberDone,
            StopRequested,
            RangeChanged,
            DataGrew,
            Noticed,
            Recovered,
        ),
        MemberLost: Phase.REGROUPING,
        MemberFailed: Phase.FAILED,
    },
    Phase.REGROUPING: {
        **_stay(
            Phase.REGROUPING,
            GenerationFormed,
            ChangeApplied,
            StepsCommitted,
            PartWritten,
            CheckpointPublished,
            EvaluationPart,
            Evaluated,
            DataPrepared,
            MemberDone,
            MemberLost,
            StopRequested,
            RangeChanged,
            DataGrew,
            Noticed,
            Recovered,
        ),
        MemberFailed: Phase.FAILED,
    },
    Phase.CLOSING: {
        **_stay(
            Phase.CLOSING,
            GenerationFormed,
            CheckpointPublished,
            Evaluated,
            DataPrepared,
            StopRequested,
            RangeChanged,
            DataGrew,
            Noticed,
            Recovered,
        ),
        MemberFailed: Phase.FAILED,
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
    Phase.REGROUPING: {
        Condition.STOPPED_TWICE: Phase.STOPPED,
        Condition.TOO_FEW: Phase.FAILED,
        Condition.BROKEN: Phase.REGROUPING,
        Condition.MET: Phase.TRAINING,
    },
    Phase.TRAINING: {
        Condition.STOP_ASKED: Phase.STOPPING,
        Condition.PART_MISSING: Phase.FAILED,
        Condition.ALL_DONE: Phase.CLOSING,
    },
    Phase.STOPPING: {
        Condition.STOPPED_TWICE: Phase.STOPPED,
        Condition.PART_MISSING: Phase.FAILED,
        Condition.ALL_DONE: Phase.CLOSING,
    },
    Phase.CLOSING: {
        Condition.STOPPED_TWICE: Phase.STOPPED,
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
        MemberFailed: MemberState.FAILED,
    },
    MemberState.READY: {
        GenerationFormed: MemberState.ACTIVE,
        DataPrepared: MemberState.READY,
        StepsCommitted: MemberState.ACTIVE,
        PartWritten: MemberState.ACTIVE,
        EvaluationPart: MemberState.ACTIVE,
        MemberDone: MemberState.DONE,
        MemberLost: MemberState.LOST,
        MemberFailed: MemberState.FAILED,
    },
    MemberState.ACTIVE: {
        GenerationFormed: MemberState.ACTIVE,
        DataPrepared: MemberState.ACTIVE,
        (ChangeApplied, Reshare): MemberState.ACTIVE,
        (ChangeApplied, Save): MemberState.ACTIVE,
        (ChangeApplied, Extend): MemberState.ACTIVE,
        (ChangeApplied, Halt): MemberState.DRAINING,
        StepsCommitted: MemberState.ACTIVE,
        PartWritten: MemberState.ACTIVE,
        EvaluationPart: MemberState.ACTIVE,
        MemberDone: MemberState.DONE,
        MemberLost: MemberState.LOST,
        MemberFailed: MemberState.FAILED,
    },
    MemberState.DRAINING: {
        GenerationFormed: MemberState.DRAINING,
        DataPrepared: MemberState.DRAINING,
        StepsCommitted: MemberState.DRAINING,
        PartWritten: MemberState.DRAINING,
        EvaluationPart: MemberState.DRAINING,
        MemberDone: MemberState.DONE,
        MemberLost: MemberState.LOST,
        MemberFailed: MemberState.FAILED,
    },
    MemberState.DONE: {
        GenerationFormed: MemberState.DONE,
        DataPrepared: MemberState.DONE,
        MemberLost: LATE,  # its work is kept: nothing is lost
        MemberFailed: MemberState.FAILED,
    },
    MemberState.LOST: dict.fromkeys(_OF_MEMBERS, LATE),
    MemberState.FAILED: dict.fromkeys(_OF_MEMBERS, LATE),
    MemberState.RELEASED: dict.fromkeys(_OF_MEMBERS, LATE),
}

MEANING: Final[Mapping[type[Event], str]] = {
    RunStarted: "For the log.",
    MemberSpawned: "The member's process is asked for.",
    DataPreparing: "For the log; a sign of life.",
    DataPrepared: "For the log; a sign of life.",
    MemberReady: "The member can compute. When all can, shares are fitted and they meet.",
    MemberLost: "The machine's fault. Where the job may go on without it, those that are left meet "
    "as the next generation; otherwise the run ends as failed, and a resumed run goes on from the "
    "last checkpoint. No run goes on without a member in this version.",
    MemberFailed: "The job's or our fault, and would happen again: the run ends as failed.",
    MemberDone: "The member has committed its last step and written its parts.",
    GenerationFormed: "The members have met, or a new generation of theirs is in force.",
    ChangeApplied: "The member switched to the outstanding change; when all have, it is in force.",
    StepsCommitted: "Progress. The step that all members have reached is committed to the ledger; "
    "measured seconds feed the shares. A report of no steps is a sign of life.",
    PartWritten: "A part of a checkpoint; when all parts are there it is published.",
    CheckpointPublished: "The checkpoint may be restored from.",
    EvaluationPart: "For the log; a sign of life.",
    Evaluated: "For the log.",
    StopRequested: "First: halt, checkpoint and end, or end at once if nothing is trained yet. "
    "Second: end at once.",
    RangeChanged: "Remembered; growing and shrinking a running job is not there yet, and a notice "
    "says so.",
    DataGrew: "Sent ahead as a change; the first epoch that begins once it is in force has the "
    "new samples.",
    Noticed: "For the log.",
    Recovered: "For the log.",
    RunFinished: "For the log.",
}
