"""Run status: how a run stands at a moment, as a record, a line of a log, and Prometheus gauges.

A line `raycloud-card {json}` in the log of a job is a `RunStatus`; all others are for people.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from raycloud.order import Steps
from raycloud.redact import redact
from raycloud.report.predictions import Compared, compared
from raycloud.report.recoveries import NAMES, counts, counts_text
from raycloud.report.summary import cost, recent, step_s
from raycloud.report.usage import usage

if TYPE_CHECKING:
    from pathlib import Path

    from raycloud.report.state import Tally
    from raycloud.spec.job import Job

FORMAT = 1
PREFIX = "raycloud-card "

_ENDED = frozenset({"finished", "stopped", "failed", "killed"})
_MOST_LINE = 1 << 16  # characters: a longer line is no card
_MOST_TEXT = 1024  # characters of a text in a card


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStatus:
    """How a run stands. None: not known.

    Attributes:
        run: The name of its run directory, `directory`, which is on the machine of its driver.
        status: `starting`, `running`, `stopping`; `finished`, `stopped`, `failed` once it has
            ended; `killed` where its driver is gone and logged no end.
        t: Unix seconds of this moment.
        step: Steps that every member has committed, of `steps` of the whole job, with `samples`.
        loss: Of the newest reported steps.
        samples_per_s: Over the last quarter of a minute; at that rate the rest takes `left_s`.
        workers: Members of the generation; while it starts, those asked for, some of them `ready`.
        members: Their numbers, in the order of `shares`, their micro-batches per step.
        recoveries: Of all kinds, in all sessions; then how many of each, as `recoveries.counts`
            has them. A status of an older raycloud has none of these.
        bytes_sent: By all members, for the exchange of gradients.
        checkpoint_step: The newest checkpoint, published at `checkpoint_t` unix seconds.
        cost: So far, by the prices that nodes are labelled with, in the labels' currency.
        compared: As in a `Summary`, measured so far.
    """

    run: str
    job: str
    status: str
    t: float
    step: int = 0
    steps: int | None = None
    samples: int = 0
    loss: float | None = None
    samples_per_s: float | None = None
    left_s: float | None = None
    workers: int = 0
    ready: int = 0
    members: tuple[int, ...] = ()
    shares: tuple[int | float, ...] = ()
    generation: int | None = None
    recoveries: int = 0
    lost: int = 0
    rolled_back: int = 0
    met_anew: int = 0
    taken_over: int = 0
    resumed: int = 0
    bytes_sent: int = 0
    checkpoint_step: int | None = None
    checkpoint_t: float | None = None
    cost: float | None = None
    error: str | None = None
    directory: str = ""
    compared: tuple[Compared, ...] = ()

    @property
    def recoveries_text(self) -> str:
        """The recoveries by kind, for people."""
        by_kind = {name: int(getattr(self, name)) for name in NAMES.values()}
        return counts_text(by_kind) if sum(by_kind.values()) else str(self.recoveries or "none")

    @property
    def has_ended(self) -> bool:
        """Whether the run has ended, one way or another."""
        return self.status in _ENDED

    def after_end(self) -> RunStatus:
        """The same, once its driver is gone: if no end was logged it was killed."""
        status = self.status if self.has_ended else "killed"
        return replace(self, status=status, samples_per_s=None, left_s=None)

    def to_record(self) -> dict[str, Any]:
        """JSON-ready values with the format number, without what looks like a secret."""
        lists: dict[str, Any] = {"members": list(self.members), "shares": list(self.shares)}
        lists["compared"] = [one.to_record() for one in self.compared]
        record: dict[str, Any] = redact({"format": FORMAT, **asdict(self), **lists})
        return record

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> RunStatus:
        """The inverse of `to_record`; unknown names are left out.

        Raises:
            ValueError: Another format; or a value is missing, or of the wrong kind.
        """
        if record.get("format") != FORMAT:
            raise ValueError(f"format is {record.get('format')!r}, this raycloud reads {FORMAT}")
        try:
            found = _adapter().validate_json(json.dumps([record]))[0]
        except ValidationError as error:
            raise ValueError(str(error)) from error
        texts: dict[str, Any] = {
            name: value[:_MOST_TEXT]
            for name in found.__slots__
            if isinstance(value := getattr(found, name), str)
        }
        return replace(found, **texts)


@cache
def _adapter() -> TypeAdapter[list[RunStatus]]:
    # In a list, since a type adapter of a dataclass takes no configuration.
    return TypeAdapter(list[RunStatus], config=ConfigDict(strict=True, allow_inf_nan=False))


def status_of(
    tally: Tally,
    *,
    now_t: float,
    unix_s: float | None = None,
    steps: int | None = None,
    directory: Path | None = None,
) -> RunStatus:
    """How the run of `tally` stands, which is kept in `directory` and has `steps` in all.

    Args:
        tally: What has happened.
        now_t: The present, by the clock that the tally's events were stamped with.
        unix_s: The present in unix seconds; None: `now_t` is that.
        steps: Steps of the whole job.
        directory: The run directory.
    """
    unix_s = now_t if unix_s is None else unix_s
    rate = recent(tally)
    loss = tally.points[-1].loss if tally.points else math.nan
    left = max(0, (steps or 0) - tally.steps)
    status = tally.status
    if status == "unfinished" and tally.stop_reason is not None:
        status = "stopping"
    elif status == "unfinished":
        status = "running" if tally.members or tally.steps else "starting"
    saved_t = tally.checkpoint_t
    return RunStatus(
        run="" if directory is None else directory.absolute().name,
        job=tally.job,
        status=status,
        t=round(unix_s, 3),
        step=tally.steps,
        steps=steps,
        samples=tally.samples,
        loss=loss if math.isfinite(loss) else None,
        samples_per_s=rate[1] if rate else None,
        left_s=left / rate[0] if rate and left and rate[0] > 0 else None,
        workers=len(tally.members or tally.awaited),
        ready=len(tally.ready & tally.awaited),
        members=tally.members,
        shares=tally.shares,
        generation=tally.generation if tally.generation >= 0 else None,
        recoveries=len(tally.recoveries),
        **counts(tally.recoveries),
        bytes_sent=tally.spent.bytes_sent,
        checkpoint_step=tally.checkpoint.step if tally.checkpoint else None,
        checkpoint_t=None if saved_t is None else round(unix_s - (now_t - saved_t), 3),
        cost=cost(tally, now_t),
        error=tally.error,
        directory="" if directory is None else str(directory),
        compared=tuple(compared(tally, step_s(tally), cost(tally, now_t), now_t)),
    )


def total_steps(job: Job, epoch_samples: int) -> int | None:
    """Steps of the whole job; None while the number of samples in an epoch is not known (0)."""
    if job.steps is not None or job.epochs is None or not epoch_samples:
        return job.steps
    steps = Steps(
        samples=epoch_samples,
        global_batch=job.global_batch,
        micro_batch=job.micro_batch,
        drop_last=job.drop_last,
    )
    return job.epochs * steps.per_epoch()


def to_line(status: RunStatus) -> str:
    """The status as a line, without its newline; `parse_line` is its inverse."""
    text = json.dumps(status.to_record(), separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return PREFIX + text


def parse_line(line: str) -> RunStatus | None:
    """The status in a line of a log; None if the line is none that this version reads."""
    line = line.rstrip("\r\n")
    if not line.startswith(PREFIX) or len(line) > _MOST_LINE:
        return None
    try:
        record = json.loads(line.removeprefix(PREFIX))
        return RunStatus.from_record(record) if isinstance(record, dict) else None
    except (ValueError, RecursionError):
        return None


TAGS = ("job", "run")
_MEANINGS = {
    "step": "Steps that every member has committed.",
    "steps": "Steps of the whole job.",
    "samples": "Samples committed in this start of the run.",
    "loss": "Loss of the newest reported steps.",
    "learning_rate": "Learning rate of the newest reported step.",
    "samples_per_s": "Samples per second, lately.",
    "left_s": "Seconds until the last step, at that rate.",
    "workers": "Workers that compute.",
    "generation": "Number of the generation.",
    "recoveries": "Members lost, meetings anew, and resumes.",
    "notices": "Notices in the log.",
    "checkpoint_step": "Step of the newest checkpoint.",
    "checkpoint_unix_s": "When the newest checkpoint was published, in unix seconds.",
    "cost": "Cost so far, in the currency of the nodes' labels.",
    "bytes_sent": "Bytes sent for the exchange of gradients.",
    "compute_s": "Seconds of computing, of all members.",
    "data_wait_s": "Seconds of waiting for data, of all members.",
    "exchange_wait_s": "Seconds of waiting for the exchange, of all members.",
}
_TAGGED = {
    "member_share": ("Micro-batches per step of a member.", "member"),
    "node_cpu": ("Part of the cores of a node's workers that they use, in their steps.", "node"),
    "node_gpu": ("Part of the time that the GPUs of a node's workers are busy.", "node"),
    "node_memory_bytes": ("The most that a worker of a node was seen to take.", "node"),
    "node_gpu_bytes": ("The same, on its GPU.", "node"),
    "node_sent_bytes_per_s": ("Bytes of updates a second that the workers of a node send.", "node"),
    "member_compute_s": ("Seconds of computing of a member, in this start of the run.", "member"),
    "held_out": ("Measures of the held-out samples.", "measure"),
}
MEASURES = {
    f"raycloud_{name}": about
    for name, about in ({name: (m, "") for name, m in _MEANINGS.items()} | _TAGGED).items()
}
"""Prometheus gauges of a run: what each means, and its tag beside the run's, if it has one.

Ray puts `ray_` before the names. What only grows is a sum over this start of the run: `rate()`
works on it as on a counter.
"""


def values(tally: Tally, job: Job, now_t: float) -> Iterator[tuple[str, float, str]]:
    """Each measure that is known at `now_t` unix seconds: name, number, and its tag's value."""
    status = status_of(tally, now_t=now_t, steps=total_steps(job, tally.epoch_samples))
    known: dict[str, float | None] = {
        **{name: getattr(status, name, None) for name in _MEANINGS},
        "learning_rate": tally.learning_rate,
        "workers": len(status.members),
        "notices": len(tally.notices) + tally.notices_left_out,
        "checkpoint_unix_s": status.checkpoint_t,
        "compute_s": tally.spent.compute_s,
        "data_wait_s": tally.spent.data_s,
        "exchange_wait_s": tally.spent.exchange_s,
    }
    for name, value in known.items():
        if value is not None and math.isfinite(value):
            yield f"raycloud_{name}", float(value), ""
    for member, share in zip(status.members, status.shares, strict=False):
        yield "raycloud_member_share", float(share), str(member)
        if member in tally.computed:
            yield "raycloud_member_compute_s", tally.computed[member][0], str(member)
    for one in usage(tally.used)[1:]:
        for name in ("cpu", "gpu", "memory_bytes", "gpu_bytes", "sent_bytes_per_s"):
            if (used := getattr(one, name)) is not None:
                yield f"raycloud_node_{name}", float(used), one.node
    for measure, value in tally.metrics.items():
        if math.isfinite(value):
            yield "raycloud_held_out", float(value), measure
