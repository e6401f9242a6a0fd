"""What each event means to a job's control, for the page that is made from the tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

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

MEANING: Final[Mapping[type[Event], str]] = {
    RunStarted: "For the log.",
    MemberSpawned: "The member's process is asked for.",
    DataPreparing: "For the log; a sign of life.",
    DataPrepared: "For the log; a sign of life.",
    MemberReady: "The member can compute. When all can, shares are fitted and they meet.",
    MemberLost: "The machine's fault. Those that are left meet as the next generation; where they "
    "are too few, they wait until others have come. Where nobody is left who has the state, others "
    "are asked for, and go on from the newest checkpoint. One that is lost by silence alone keeps "
    "its process and its place for a while.",
    MemberReturned: "The process of a member that was lost by silence goes on as another member, "
    "which joins the others once it is ready; what the one before says counts no more.",
    MemberLeaving: "It leaves between two steps that all agree on, if enough others are left or "
    "have come; until then it computes. Where they are too few, a checkpoint is made at once.",
    CapacityChanged: "Where there is room for more members, and the job may have them, they are "
    "asked for and join the others as soon as they are ready; where there is less, those that "
    "found no place are given up.",
    ExchangeBroken: "A peer is gone or cut off, or a connection is. If nobody is found to be gone "
    "within a few seconds, the same members meet anew.",
    StepNotFinite: "A step's loss or gradient is not finite, and the job goes back then: members "
    "keep their processes, load the newest checkpoint that is sound and meet. What they say of "
    "what they did before counts no more.",
    MemberFailed: "The job's or our fault, and would happen again: the run ends as failed, once "
    "the checkpoint that members are writing is whole and published.",
    MemberDone: "The member has committed its last step and written its parts.",
    GenerationFormed: "The members have met, or a new generation of theirs is in force.",
    MemberCaughtUp: "A member that followed without a share has the state now. At once it is given "
    "a share, and takes part in what is written and measured.",
    ChangeApplied: "The member switched to the outstanding change; when all have, it is in force.",
    StepsCommitted: "Progress. The step that all members have reached is committed to the ledger; "
    "measured seconds feed the shares. A report of no steps is a sign of life.",
    PartWritten: "A part of a checkpoint; when all parts are there it is published.",
    PartFailed: "That checkpoint is dropped unless the member still writes its part, as it does at "
    "the end of a run. Another one is asked for after a while; too many in a row end the run.",
    CheckpointPublished: "The checkpoint may be restored from.",
    CheckpointFailed: "It is published again after a while, or another one asked for where its "
    "parts are not sound; too many in a row end the run.",
    EvaluationPart: "For the log; a sign of life.",
    Evaluated: "For the log.",
    StopRequested: "First: halt, checkpoint and end, or end at once if nothing is trained yet. "
    "Second: end at once.",
    RangeChanged: "In force at once: where more members are allowed they are asked for; where "
    "fewer are, the last ones go.",
    DataGrew: "Sent ahead as a change; the first epoch that begins once it is in force has the "
    "new samples.",
    Noticed: "For the log.",
    RolledBack: "The newest sound checkpoint is found: steps after it count no more, and members "
    "load it: those that are there, and others that are asked for. As soon as there are enough "
    "they meet.",
    Recovered: "For the log.",
    RunFinished: "For the log.",
}
