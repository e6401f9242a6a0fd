"""What happened: frozen records, and the schema of a run's `events.jsonl`.

An event is a fact with plain values only: it can be written as JSON (see `report.log`), sent
between processes and fed to `control` in a simulation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncPoint:
    """A point in the space of exchanges: a job's `sync` section with every auto decided."""

    period: int = 1
    topology: Literal["ring", "direct", "tree", "servers"] = "ring"
    staleness: int | Literal["unbounded"] = 0
    codec: str = "none"
    ratio: int | None = None
    stream: int = 1

    def __str__(self) -> str:
        """As settings of a job say it, for people.

        >>> print(SyncPoint(), "/", SyncPoint(topology="tree", codec="int4", period=8))
        exact / tree, codec int4, period 8
        """
        if self == SyncPoint():
            return "exact"
        told = [f"codec {self.codec}"] if self.codec != "none" else []
        if self.period > 1:
            told.append(f"period {self.period}")
        if self.stream > 1:
            told.append(f"stream {self.stream}")
        return ", ".join((self.topology, *told))


WorkerKey = tuple[int, int]
"""What identifies a worker's work: its replica, and its position among that replica's workers."""


def key_of(keys: tuple[WorkerKey, ...], rank: int) -> WorkerKey:
    """The key of one member of a generation; none are given where each is a replica of its own.

    >>> key_of((), 2), key_of(((0, 0), (0, 1), (1, 0)), 2)
    ((2, 0), (1, 0))
    """
    return keys[rank] if keys else (rank, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStarted:
    """A run began, or went on from a checkpoint, or with members that outlived their driver."""

    job: str
    version: str
    resumed_from_step: int | None = None
    taken_over: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberSpawned:
    """A place was reserved for a member, and its process asked for; `node` is empty if unknown."""

    member: int
    node: str = ""
    role: str = "worker"


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberReady:
    """A member has built model and data; b micro-batches take it fixed_s + b * micro_batch_s.

    Which is fitted, or known of its place. `state_digest` tells whether members start from the same
    parameters, `fingerprint` whether the task gives them the same samples: digests of some, by
    split and id (`train/127`), and of how many are `held_out` (None: it is not told). Its process
    is `pid` on the node of id `node`, labelled to cost `price_per_hour`; it computes on a
    `processor`: replicas on unlike ones differ by rounding. Its memory holds a pass of
    `pass_samples` (0: it was not found out), of which each takes `sample_bytes`; the largest that
    was computed had `pass_tried`. Making the batch of a micro-batch took a thread `collate_s`; 0:
    it was not measured. A busy core of its node takes `core_watts`, by its label. Its steps cannot
    be made in rounds, and why: `no_rounds`. It may use `cores`; a `quota` holds it to fewer (or 0).
    """

    member: int
    samples: int
    parameters: int
    state_bytes: int
    gradient_bytes: int
    fixed_s: float
    micro_batch_s: float
    state_digest: str = ""
    node: str = ""
    price_per_hour: float | None = None
    pid: int = 0
    processor: str = ""
    held_out: int | None = None
    role: str = "worker"
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    pass_samples: int = 0
    pass_tried: int = 0
    sample_bytes: int = 0
    collate_s: float = 0.0
    core_watts: float | None = None
    no_rounds: str = ""
    cores: float = 0.0
    quota: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DataPreparing:
    """A member still waits for its data to be prepared, for `seconds` by now: a sign of life."""

    member: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class DataPrepared:
    """A member has the blocks of a split at hand, as every member does after the same preparation.

    `split` is `train` or `held_out`, all of it, after the data has grown `version` times in this
    start of the run. `cached_blocks` of the `blocks` were there already. `bad` names the first of
    `bad_rows`, which were left out, `inputs` the `files` read: `path`, `bytes` and `digest`. In
    `seconds`, readers spent `read_s` together; for `waited_s` this member did nothing else.
    """

    member: int
    split: str
    rows: int
    bytes: int
    blocks: int
    cached_blocks: int
    partitions: int
    bad_rows: int
    bad: tuple[str, ...]
    inputs: tuple[Mapping[str, Any], ...]
    seconds: float
    read_s: float
    version: int = 0
    files: int = 0
    price_per_gb_month: float | None = None
    waited_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberLost:
    """A member died, or cannot be reached (`silent`: maybe for a while): the machine's fault."""

    member: int
    reason: str
    silent: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberReturned:
    """The process of a member that was lost as `silent` answers again, `late_s` later than due."""

    member: int
    late_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberLeaving:
    """A notice: a member, or all on `node` if set, will be gone in `deadline_s`; None: any time."""

    member: int
    reason: str
    deadline_s: float | None = None
    node: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityChanged:
    """The machines hold so many workers of this job now, also if others reserve them."""

    workers: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeBroken:
    """A member's word that it cannot reach a peer, which may be alive, and why.

    It may be a `server` of tables: no member needs to be gone then.
    """

    member: int
    generation: int
    why: str
    server: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class StepNotFinite:
    """A member's word that all are to go back, and `why`; `left_out` then changes nothing more."""

    member: int
    generation: int
    step: int
    why: str
    left_out: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberFailed:
    """A member's own code raised: the job's or raycloud's fault, and would happen again."""

    member: int
    error: str
    message: str
    hint: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberDone:
    """A member of the group that met as `generation` is done: `step` was its last one."""

    member: int
    step: int
    generation: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationFormed:
    """Members agreed on a generation; it computes steps from `first_step` on.

    `keys` are those of the members, by rank; `shares` are of replicas. Empty: see `key_of`. Of that
    step or round they have `kept` micro-batches. Members on several machines that begin have summed
    messages before it, to learn of links: `exchanged` are bytes, and the seconds that each took.
    """

    generation: int
    members: tuple[int, ...]
    shares: tuple[float, ...]
    first_step: int
    keys: tuple[WorkerKey, ...] = ()
    kept: int = 0
    exchanged: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangeApplied:
    """A member switched to a prepared change at the start of `step`."""

    member: int
    change: int
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberCaughtUp:
    """A member that has followed `generation` from `first_step` on has the state before `step`."""

    member: int
    generation: int
    first_step: int
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepsCommitted:
    """One member's word that it committed steps [first_step, last_step).

    `epoch` and `offset` are the position after them, `loss` the mean by weight over their global
    batches, `weight` the sum, `grad_norm` the last step's. Seconds are sums over the steps:
    computing, waiting for data, for the exchange (in that, `lane_s`: for the control lane); in
    other threads, `read_s` of samples, `collate_s` of batches; `overlap_s` of an exchange that
    goes on while the member computes. Byte counts are this member's own, of gradients alone: sent
    (`bytes_last` with the last message), and what a ring would have sent uncompressed. `skips` are
    records of what these steps took and did not count: see `order.Skip`. `micro_batches` are this
    member's own; `computed` are those of all members, as they told each other before the steps
    counted. `residual` is the norm of what encoding has lost here, and is kept for the next step.
    `noise` and `signal` are this member's parts of two sums over some of the steps: of the trace of
    the covariance of one sample's gradient, and of the squared norm of its mean. From commit to
    commit a step took `typical_s`, the median (0: unknown); each was in a round of `period` at most
    (1: some in none). Meters of its node say that it took `energy_j` joules; 0: none is read. Of
    one whose GPU alone has one, it is `gpu_only`. Its process takes `memory_bytes` (0: unknown),
    and `gpu_bytes` on its GPU at most, busy for the part `gpu_busy` of the last moment.
    """

    member: int
    generation: int
    first_step: int
    last_step: int
    epoch: int
    offset: int
    loss: float
    weight: float
    samples: int
    micro_batches: int
    grad_norm: float
    learning_rate: float
    wall_s: float
    compute_s: float
    data_s: float
    exchange_s: float
    cpu_s: float
    bytes_sent: int
    bytes_dense: int
    read_s: float = 0.0
    collate_s: float = 0.0
    lane_s: float = 0.0
    overlap_s: float = 0.0
    bytes_last: int = 0
    computed: int = 0
    residual: float = 0.0
    noise: float = 0.0
    signal: float = 0.0
    typical_s: float = 0.0
    period: int = 1
    energy_j: float = 0.0
    memory_bytes: int = 0
    gpu_bytes: int = 0
    gpu_busy: float | None = None
    gpu_only: bool = False
    skips: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class PartWritten:
    """A member wrote its `part` of a checkpoint, for its manifest, as divided in `generation`.

    It is that of the worker at `position` of `replica`; -1 in logs that do not tell.
    """

    member: int
    step: int
    part: Mapping[str, Any]
    blocked_s: float
    write_s: float
    generation: int = 0
    replica: int = -1
    position: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class PartFailed:
    """A member could not write its part of the checkpoint of `step` this time, and `why`."""

    member: int
    step: int
    why: str
    hint: str = ""
    generation: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointFailed:
    """The checkpoint of `step` could not be published this time, though all parts were written.

    It may be later, unless it is `damaged`: not all of them are there, and as they were written.
    """

    step: int
    why: str
    hint: str = ""
    damaged: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointPublished:
    """The checkpoint of `step` is complete and may be restored from."""

    step: int
    path: str
    state_bytes: int
    write_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationPart:
    """A member measured its part, as `generation`; `states` are mergeable metric states.

    `replica` and `position` as in `PartWritten`.
    """

    member: int
    step: int
    states: Mapping[str, Any]
    sample: str | None = None
    generation: int = 0
    replica: int = -1
    position: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    """The held-out samples were measured with the parameters after `step` steps."""

    step: int
    metrics: Mapping[str, float]
    sample: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StopRequested:
    """Someone asked the run to checkpoint and end."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncAsked:
    """Updates are to travel by another point, fields of a `SyncPoint`, from soon on."""

    point: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncChanged:
    """Updates travel by another point from `step` on, and `why`; the job says `given`.

    A `generation` has begun with it. It was the last word of a tour that is over: `toured`.
    """

    generation: int
    step: int
    point: Mapping[str, Any]
    given: Mapping[str, Any]
    why: str
    toured: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncMeasured:
    """A point of a tour: its steps took `step_s`, the median of so many, as this generation."""

    generation: int
    point: Mapping[str, Any]
    step_s: float
    steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundsRefused:
    """A member's word that steps cannot be made in rounds, as those that it made show, and why.

    Rounds were asked for, and all members exchange each step from here on.
    """

    member: int
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RangeChanged:
    """The elastic range was changed from outside."""

    min_workers: int
    max_workers: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DataGrew:
    """Files were added to what is trained on, and are read: there are `samples` samples now.

    `version` counts up, and names it to members; `inputs` are the added files; see `Extend`.
    """

    samples: int
    version: int
    inputs: tuple[str, ...] = ()
    partitions: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Noticed:
    """Something fell back, or a person should know: never silent."""

    what: str
    member: int | None = None
    detail: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Printed:
    """A line that the task has printed in a member's process; shown, and not in the run's log."""

    member: int
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Predicted:
    """What each step is predicted to take from `step` on, of which `left` are to come.

    It takes `step_s` seconds, likely `low_s` to `high_s`, by what a run has `seen` of its steps, or
    else by what was tried before. Members together send `sent_bytes` a step; their nodes cost
    `price_per_hour` and take `watts`, as they are labelled. None: not all of them are.
    """

    generation: int
    step: int
    left: int
    step_s: float
    low_s: float
    high_s: float
    sent_bytes: int
    seen: bool = False
    price_per_hour: float | None = None
    watts: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CollatorsStarted:
    """So many collators make batches on a node, with its `price_per_hour` and `core_watts`."""

    node: str
    count: int
    price_per_hour: float | None = None
    core_watts: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RolledBack:
    """No sound state is left: back to `step`'s checkpoint (0: none); `ledger` is not logged."""

    step: int
    ledger: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovered:
    """Training goes on after a generation broke, without those that were `lost`, if anybody was.

    Seconds are from the run's start: `detected_s` that it was known, `resumed_s` that the next step
    is committed, or none is left. `lost_steps` are computed again: none, but after a `RolledBack`.
    """

    generation: int
    lost: tuple[int, ...]
    cause: str
    detected_s: float
    resumed_s: float
    lost_steps: int = 0

    @property
    def seconds(self) -> float:
        """How long training stood still."""
        return self.resumed_s - self.detected_s


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFinished:
    """The run ended. `status` is `finished`, `stopped` or `failed`."""

    status: str
    steps: int
    error: str | None = None


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
    | RoundsRefused
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
    | SyncAsked
    | SyncChanged
    | SyncMeasured
    | RangeChanged
    | CapacityChanged
    | DataGrew
    | Noticed
    | CollatorsStarted
    | Predicted
    | RolledBack
    | Recovered
    | RunFinished
)
Event = MemberEvent | JobEvent

Observed = Event | Printed
"""What whoever watches a run is told."""
