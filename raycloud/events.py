"""What happened: frozen records, and the schema of a run's `events.jsonl`.

An event is a fact, past tense, with plain values only, so that it can be written as JSON, sent
between processes and fed to `control` in a simulation. `to_record` and `from_record` are each
other's inverse.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, get_args

FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStarted:
    """A run began, or went on from a checkpoint."""

    job: str
    version: str
    resumed_from_step: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberSpawned:
    """A place was reserved for a member, and its process asked for.

    `node` is empty where the sender does not know it yet, as the driver does not in this version:
    `MemberReady` names the node.
    """

    member: int
    node: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberReady:
    """A member has built its model and data and measured itself.

    `fixed_s` and `micro_batch_s` are the fitted seconds of T(b) = fixed_s + b * micro_batch_s for b
    micro-batches; `state_digest` tells whether members start from the same parameters; `node` is
    the id of the node that it runs on.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberLost:
    """A member died, went silent, or can no longer be reached: the machine's fault."""

    member: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberFailed:
    """A member's own code raised: the job's or raycloud's fault, and would happen again."""

    member: int
    error: str
    message: str
    hint: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberDone:
    """A member reached the last step, or the one it was told to stop at; nothing is left to do."""

    member: int
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationFormed:
    """Members agreed on a generation; it computes steps from `first_step` on."""

    generation: int
    members: tuple[int, ...]
    shares: tuple[int, ...]
    first_step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangeApplied:
    """A member switched to a prepared change at the start of `step`."""

    member: int
    change: int
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepsCommitted:
    """One member's word that it committed steps [first_step, last_step).

    `epoch` and `offset` are the position after the last of them. `loss` is the weighted mean over
    the global batches of these steps, `weight` their summed weight, `grad_norm` that of the last
    step. Seconds are sums over the steps: computing, waiting for data, waiting for the exchange.
    Byte counts are this member's own, for the exchange of gradients alone: sent, and what an
    uncompressed exchange would have sent. Both follow from sizes and the ring's formula; what
    travels for BatchNorm and other changing buffers, and for the control lane, is left out.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class PartWritten:
    """A member finished writing its part of the checkpoint of `step`.

    `part` is the part's record for the manifest: file name, digest, tensors.
    """

    member: int
    step: int
    part: Mapping[str, Any]
    blocked_s: float
    write_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointPublished:
    """The checkpoint of `step` is complete and may be restored from."""

    step: int
    path: str
    state_bytes: int
    write_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationPart:
    """A member measured its part of the held-out samples; `states` are mergeable metric states."""

    member: int
    step: int
    states: Mapping[str, Any]
    sample: str | None = None


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
class RangeChanged:
    """The elastic range was changed from outside."""

    min_workers: int
    max_workers: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Noticed:
    """Something fell back, or a person should know: never silent."""

    what: str
    member: int | None = None
    detail: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFinished:
    """The run ended. `status` is `finished`, `stopped` or `failed`."""

    status: str
    steps: int
    error: str | None = None


Event = (
    RunStarted
    | MemberSpawned
    | MemberReady
    | MemberLost
    | MemberFailed
    | MemberDone
    | GenerationFormed
    | ChangeApplied
    | StepsCommitted
    | PartWritten
    | CheckpointPublished
    | EvaluationPart
    | Evaluated
    | StopRequested
    | RangeChanged
    | Noticed
    | RunFinished
)

_KINDS: dict[str, Callable[..., Event]] = {kind.__name__: kind for kind in get_args(Event)}


def to_record(event: Event) -> dict[str, Any]:
    """The event as JSON-ready values, its kind under `event`."""
    return {"event": type(event).__name__, **asdict(event)}


def from_record(record: Mapping[str, Any]) -> Event:
    """Rebuild an event from `to_record`'s values; the log's own keys (`t`, `format`) are ignored.

    Raises:
        ValueError: The kind is not known to this version.
    """
    kind = _KINDS.get(str(record.get("event")))
    if kind is None:
        raise ValueError(f"unknown event {record.get('event')!r}: written by a newer raycloud?")
    names = {f.name for f in fields(kind)}  # type: ignore[arg-type]
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in record.items() if k in names}
    return kind(**values)
