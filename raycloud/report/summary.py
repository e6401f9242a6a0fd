"""Summary: what a run came to, in one record, from its state; and `summary.json`."""

from __future__ import annotations

import json
import math
import os
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raycloud.bounded import json_value, read_whole
from raycloud.errors import RunDirectoryError
from raycloud.events import SyncPoint
from raycloud.redact import redact
from raycloud.report.figures import finite
from raycloud.report.predictions import compared
from raycloud.report.snapshot import state_of
from raycloud.report.usage import usage
from raycloud.spec.rundir import RunDirectory

if TYPE_CHECKING:
    from raycloud.report.state import Tally
    from raycloud.spec.job import Job

FORMAT = 1
_CURVE_POINTS = 120
_RECENT_S = 15.0
_FINAL_STEPS = 10
_HOUR_S = 3600.0


_AS_IN_TALLY = (
    "status",
    "steps",
    "samples",
    "generations",
    "job",
    "version",
    "error",
    "parameters",
    "state_bytes",
    "epoch_samples",
    "epoch",
    "notices_left_out",
    "sample",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """What a run came to. Sums over sessions where a run was resumed; None: not known.

    Attributes:
        status: `finished`, `stopped`, `failed`; `unfinished` while it runs or after it was killed.
        steps: Steps that every member of the generation has committed, less those taken back;
            each of their `samples` is counted once.
        first_step_s: From the start of the (latest) command to the report of its first committed
            step by the slowest member.
        train_s: See `train_s` of this module, as for `samples_per_s`, `step_s` and `final_loss`.
        wall_s: From the start of the command to its last event, added up over sessions.
        eval: Metrics on the held-out samples, by name; `eval_step` is the step they belong to.
        workers: Members of the last generation; `shares` are their micro-batches per step.
        generations: Generations formed, those of earlier sessions included.
        recoveries: What was lost and resumed: `kind`, `t` (unix seconds), `step`, `seconds` until
            training went on (None: it did not), and more by kind (see `report.recoveries`).
        bytes_sent: Bytes that all members sent for the exchange of gradients; `bytes_dense`: what
            uncompressed exchanges would have sent. `hidden_s` and `exposed_s`: seconds of members'
            steps in which they exchanged while they computed, and in which they waited for it.
        noise_scale: The gradient noise scale, in samples, over the run: see
            `worker.tally.noise_and_signal`.
        cpu_s: Processor seconds of all members' steps; with `compute_share`, `data_share` and
            `exchange_share` (fractions of the members' step seconds) this includes repeated steps.
        goodput: Where the workers' time went: see `report.goodput.Parts`.
        cold_data_share: `data_share` in the first epoch of each session, with `data_waited_s`, the
            seconds that members waited for the data to be prepared; `warm_data_share`: later.
        data_read_s: Seconds of reading samples, and `data_collate_s` of `Task.batch`, in all
            members' threads beside the training.
        data: Of data that was prepared: see `report.data.DataTally.to_record`.
        checkpoint_blocked_s: Seconds that members' training stood still for checkpoints, added up.
        predicted: What the plan expected, by name. `measured` has what came true, under the same
            names: `compute_s` is that of the member which takes longest per step, `bytes_per_step`
            what a member sends, both averaged over the steps it computed.
        compared: Of this start of the run each quantity as predicted and as measured: see
            `report.predictions.Compared`.
        toured: Points of the newest tour: `point`, `measured_s` of a step, and `predicted_s`,
            likely `low_s` to `high_s`, where that was known. Updates travel by `sync` at the end,
            where that is not what the job says.
        usage: Of all nodes together, then of each: see `report.usage.NodeUsage`.
        cost: See `cost` of this module; `priced_nodes` of all `nodes` have a price.
        loss_curve: [step, loss] at up to 120 places; `rate_curve`: [step, samples per second up to
            it], likewise.
    """

    status: str
    steps: int
    samples: int
    first_step_s: float | None
    train_s: float
    samples_per_s: float | None
    final_loss: float | None
    eval: dict[str, float | None]
    workers: int
    generations: int
    recoveries: list[dict[str, Any]]
    bytes_sent: int
    bytes_dense: int
    hidden_s: float = 0.0
    exposed_s: float = 0.0
    noise_scale: float | None = None
    predicted: dict[str, Any] = field(default_factory=dict)
    measured: dict[str, float] = field(default_factory=dict)
    compared: list[dict[str, Any]] = field(default_factory=list)
    toured: list[dict[str, Any]] = field(default_factory=list)
    sync: str = ""
    job: str = ""
    version: str = ""
    error: str | None = None
    step_s: float | None = None
    wall_s: float = 0.0
    started_unix_s: float | None = None
    ended_unix_s: float | None = None
    sessions: int = 0
    shares: list[float] = field(default_factory=list)
    parameters: int = 0
    state_bytes: int = 0
    epoch_samples: int = 0
    epoch: int = 0
    eval_step: int | None = None
    cpu_s: float = 0.0
    compute_share: float | None = None
    data_share: float | None = None
    exchange_share: float | None = None
    goodput: dict[str, float] = field(default_factory=dict)
    cold_data_share: float | None = None
    warm_data_share: float | None = None
    data_waited_s: float = 0.0
    data_read_s: float = 0.0
    data_collate_s: float = 0.0
    data: dict[str, Any] = field(default_factory=dict)
    checkpoints: int = 0
    checkpoint_step: int | None = None
    checkpoint_path: str | None = None
    checkpoint_blocked_s: float = 0.0
    loss_curve: list[list[float | None]] = field(default_factory=list)
    rate_curve: list[list[float | None]] = field(default_factory=list)
    notices: list[dict[str, Any]] = field(default_factory=list)
    notices_left_out: int = 0
    sample: str | None = None
    usage: list[dict[str, Any]] = field(default_factory=list)
    cost: float | None = None
    nodes: int = 0
    priced_nodes: int = 0

    def to_record(self) -> dict[str, Any]:
        """JSON-ready values with the format number; numbers that are not finite become None."""
        record: dict[str, Any] = finite({"format": FORMAT, **asdict(self)})
        return record

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Summary:
        """The inverse of `to_record`; unknown names are left out.

        Raises:
            ValueError: It is of another format.
        """
        if record.get("format") != FORMAT:
            raise ValueError(f"format is {record.get('format')!r}, this raycloud reads {FORMAT}")
        return cls(**{f.name: record[f.name] for f in fields(cls) if f.name in record})


def summarize(tally: Tally, *, predicted: Mapping[str, Any] | None = None) -> Summary:
    """The summary of what `tally` has seen so far."""
    session, spent, data, last = tally.session, tally.spent, tally.data, tally.checkpoint
    train, rate, per_step_s = train_s(tally), samples_per_s(tally), step_s(tally)
    first_step_s = session.first[0] - session.started_t if session and session.first else None
    member_steps = sum(steps for _, steps in tally.computed.values())
    measured = {
        "first_step_s": first_step_s,
        "step_s": per_step_s,
        "samples_per_s": rate,
        "compute_s": max((s / n for s, n in tally.computed.values() if n), default=None),
        "bytes_per_step": spent.bytes_sent / member_steps if member_steps else None,
    }
    priced_nodes, all_nodes = nodes(tally)
    same: dict[str, Any] = {name: getattr(tally, name) for name in _AS_IN_TALLY}
    return Summary(
        **same,
        first_step_s=first_step_s,
        train_s=train,
        samples_per_s=rate,
        final_loss=final_loss(tally),
        eval=dict(tally.metrics),
        workers=len(tally.members),
        recoveries=[dict(recovery) for recovery in tally.recoveries],
        bytes_sent=spent.bytes_sent,
        bytes_dense=spent.bytes_dense,
        noise_scale=spent.noise / spent.signal if min(spent.noise, spent.signal) > 0 else None,
        hidden_s=spent.overlap_s,
        exposed_s=spent.exchange_s,
        predicted=dict(predicted or {}),
        toured=list(tally.toured),
        sync="" if tally.sync is None else str(SyncPoint(**tally.sync.point)),
        compared=[one.to_record() for one in compared(tally, per_step_s, cost(tally))],
        measured={name: value for name, value in measured.items() if value is not None},
        step_s=per_step_s,
        wall_s=sum((s.ended_t or s.started_t) - s.started_t for s in tally.sessions),
        started_unix_s=tally.sessions[0].started_t if tally.sessions else None,
        ended_unix_s=session.ended_t if session else None,
        sessions=len(tally.sessions),
        shares=list(tally.shares),
        eval_step=tally.metrics_step,
        cpu_s=spent.cpu_s,
        compute_share=_share(spent.compute_s, spent.wall_s),
        data_share=_share(spent.data_s, spent.wall_s),
        exchange_share=_share(spent.exchange_s, spent.wall_s),
        goodput=tally.goodput.parts().to_record(),
        cold_data_share=_share(data.cold_data_s + data.waited_s, data.cold_wall_s + data.waited_s),
        warm_data_share=_share(spent.data_s - data.cold_data_s, spent.wall_s - data.cold_wall_s),
        data_waited_s=data.waited_s,
        data_read_s=data.read_s,
        data_collate_s=data.collate_s,
        data=data.to_record(samples=tally.lead_steps[0], epoch_samples=tally.epoch_samples),
        checkpoints=tally.published,
        checkpoint_step=last.step if last else None,
        checkpoint_path=last.path if last else None,
        checkpoint_blocked_s=spent.blocked_s,
        loss_curve=_loss_curve(tally),
        rate_curve=rate_curve(tally, _CURVE_POINTS),
        notices=list(tally.notices),
        usage=[one.to_record() for one in usage(tally.used)],
        cost=cost(tally),
        nodes=all_nodes,
        priced_nodes=priced_nodes,
    )


def job_of(directory: Path) -> Job:
    """The job of the run kept in `directory`.

    Raises:
        RunDirectoryError: There is no run.
        SpecError: Its job is damaged.
    """
    run = RunDirectory(directory)
    if not run.job_yaml.is_file():
        raise RunDirectoryError(
            f"{directory} holds no run: there is no {run.job_yaml.name}",
            hint="name the directory of a run, such as runs/gpt-1",
        )
    return run.job()


def of_run(directory: Path) -> Summary:
    """The summary of the run kept in `directory`, from its log; of a run in any state.

    Raises:
        RunDirectoryError: There is no run, or its log cannot be read.
    """
    predicted: Any = {}
    run = RunDirectory(directory)
    plan = run.plan_json
    if plan.exists():
        try:
            predicted = json_value(read_whole(plan)).get("predicted")
        except (OSError, ValueError, AttributeError) as error:
            raise RunDirectoryError(
                f"{plan} cannot be read: {error}", hint="move it away: the rest is shown without it"
            ) from error
    tally = state_of(run.events_jsonl).tally
    return summarize(tally, predicted=predicted if isinstance(predicted, dict) else {})


def write_summary(path: Path, summary: Summary) -> None:
    """Publish `summary.json`: draft, fsync, rename. What looks like a secret is left out."""
    draft = path.with_name(path.name + ".draft")
    text = json.dumps(redact(summary.to_record()), indent=2, allow_nan=False) + "\n"
    with draft.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _loss_curve(tally: Tally) -> list[list[float | None]]:
    points = tally.points
    picked = min(len(points), _CURVE_POINTS)
    places = [round(i * (len(points) - 1) / max(1, picked - 1)) for i in range(picked)]
    losses = (None if math.isnan(points[at].loss) else points[at].loss for at in places)
    return [[points[at].step, loss] for at, loss in zip(places, losses, strict=True)]


def final_loss(tally: Tally) -> float | None:
    """Weighted mean loss over the last reports that hold at least ten steps between them.

    A member knows the loss of a step when the next one is under way, so its first report may have
    none (not a number): it is left out.
    """
    steps, total, weight = 0, 0.0, 0.0
    for point in reversed(tally.points):
        if math.isnan(point.loss):
            continue
        steps += point.steps
        total += point.loss * point.weight
        weight += point.weight
        if steps >= _FINAL_STEPS:
            break
    return total / weight if weight else None


def recent(tally: Tally) -> tuple[float, float] | None:
    """(steps, samples) per second over the last quarter of a minute of this session."""
    if tally.session is None or tally.session.first is None or not tally.points:
        return None
    last = tally.points[-1]
    since = max(last.t - _RECENT_S, tally.session.first[0])
    at = bisect_left(tally.points, since, key=lambda point: point.t)
    first = tally.points[min(at, len(tally.points) - 1)]
    seconds = last.t - first.t
    if seconds <= 0:
        return None
    return (last.step - first.step) / seconds, (last.samples - first.samples) / seconds


def train_s(tally: Tally) -> float:
    """Seconds from the first report of committed steps to the last, added up over sessions.

    Pauses between them (evaluation, checkpoints) are in it.
    """
    return sum(s.last[0] - s.first[0] for s in tally.sessions if s.first and s.last)


def step_s(tally: Tally) -> float | None:
    """Seconds per step within `train_s`."""
    gained = sum(s.last[1] - s.first[1] for s in tally.sessions if s.first and s.last)
    return train_s(tally) / gained if gained else None


def samples_per_s(tally: Tally) -> float | None:
    """Samples committed in `train_s`, so without those of each session's first report.

    Of a run that made one report only: its samples over its steps' own seconds.
    """
    seconds = train_s(tally)
    if seconds > 0:
        gained = sum(s.last[2] - s.first[2] for s in tally.sessions if s.first and s.last)
        return gained / seconds
    samples, wall_s = tally.lead_steps
    return samples / wall_s if wall_s > 0 else None


def rate_curve(tally: Tally, places: int) -> list[list[float | None]]:
    """[step, samples per second up to it] at up to `places` places.

    A pause between two sessions is left out. A place that holds nothing but one, or whose reports
    came at one moment, has None.
    """
    starts = [session.started_t for session in tally.sessions]
    ends: list[int] = []
    gained: list[tuple[float, int]] = []  # seconds and samples from one report to the next
    for a, b in pairwise(tally.points):
        paused = bisect_left(starts, a.t) != bisect_left(starts, b.t)
        ends.append(b.step)
        gained.append((0.0, 0) if paused else (b.t - a.t, b.samples - a.samples))
    places = min(places, len(ends))
    curve: list[list[float | None]] = []
    for place in range(places):
        first, past = place * len(ends) // places, (place + 1) * len(ends) // places
        seconds = sum(s for s, _ in gained[first:past])
        samples = sum(n for _, n in gained[first:past])
        curve.append([ends[past - 1], samples / seconds if seconds > 0 else None])
    return curve


def cost(tally: Tally, now_t: float | None = None) -> float | None:
    """What the nodes of the run cost, in the currency of their labels; None: none has a price.

    Each node counts once in a session, from its first member's readiness to the session's end:
    what is lost or idle then is still paid for. Nodes without a price are left out.

    Args:
        tally: What has happened.
        now_t: The present, for a session that goes on; None: its last event.
    """
    total, priced = 0.0, False
    for session in tally.sessions:
        goes_on = session is tally.session and tally.status == "unfinished"
        last_t = session.ended_t or session.started_t
        end_t = now_t if goes_on and now_t is not None else last_t
        for since_t, price_per_hour in session.nodes.values():
            if price_per_hour is not None:
                total += price_per_hour * max(0.0, end_t - since_t) / _HOUR_S
                priced = True
    return total if priced else None


def nodes(tally: Tally) -> tuple[int, int]:
    """Of how many nodes the price is known, and how many there were, in all sessions."""
    known: dict[str, bool] = {}
    for session in tally.sessions:
        for node, (_, price_per_hour) in session.nodes.items():
            known[node] = known.get(node, False) or price_per_hour is not None
    return sum(known.values()), len(known)
