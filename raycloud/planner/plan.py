"""The plan of a run: members, shares and sync, with the predicted seconds and bytes of a step."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from raycloud.bounded import json_value
from raycloud.errors import PlacementError, RunDirectoryError, SpecError
from raycloud.order import Steps
from raycloud.planner.inventory import Inventory, place, require
from raycloud.planner.shares import equal_shares, first_shares, step_seconds
from raycloud.planner.speed import Speed
from raycloud.spec import Job, SyncPoint
from raycloud.spec.sizes import coded_bytes, ring_bytes, tree_bytes

FORMAT = 1
_BACKWARD = 2 / 3  # of a micro-batch's seconds: backward costs about twice the forward


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What a step costs if nothing changes.

    Attributes:
        step_s: Seconds from commit to commit. Without a link rate: of the computing alone.
        samples_per_s: Samples committed per second at that rate.
        compute_s: Seconds of computing of the worker which ends last.
        exchange_s: Seconds of the exchange on its own; None where no link rate was measured.
        bytes_per_step: Bytes each member sends per step.
    """

    step_s: float
    samples_per_s: float
    compute_s: float
    exchange_s: float | None
    bytes_per_step: int


def exposed_seconds(
    exchange_s: float, *, last_micro_batch_s: float, bucket_bytes: int, gradient_bytes: int
) -> float:
    """Seconds by which an exchange lengthens the step, when it overlaps with the last backward.

    The assumption: buckets leave one after another while the last micro-batch of the slowest worker
    runs backward, which takes 2/3 of its seconds; computing is not slowed down by it; and the last
    bucket, of the fraction bucket_bytes / gradient_bytes, leaves only when the backward has ended:

        exposed = max(exchange_s - 2/3 * last_micro_batch_s, exchange_s * last bucket's fraction).

    >>> exposed_seconds(1.0, last_micro_batch_s=0.75, bucket_bytes=1, gradient_bytes=10)
    0.5
    >>> exposed_seconds(1.0, last_micro_batch_s=60.0, bucket_bytes=1, gradient_bytes=10)
    0.1
    """
    if gradient_bytes == 0:
        return exchange_s
    last = min(1.0, bucket_bytes / gradient_bytes)
    return max(exchange_s - _BACKWARD * last_micro_batch_s, exchange_s * last)


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """What was measured of a task on the machines there are.

    Attributes:
        samples: Samples of one epoch.
        parameters: Trained numbers of the model.
        gradient_bytes: Bytes of one dense exchange of gradients.
        state_bytes: Bytes of a checkpoint: parameters, optimizer, buffers.
        speeds: One per member in their order, or a single one that stands for all.
        link_bytes_per_s: Rate of the slowest link of the ring; None where it was not measured.
    """

    samples: int
    parameters: int
    gradient_bytes: int
    state_bytes: int
    speeds: tuple[Speed, ...]
    link_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        """Refuse numbers from which nothing can be predicted."""
        if self.samples < 1 or min(self.parameters, self.gradient_bytes, self.state_bytes) < 0:
            raise ValueError(f"a profile takes samples >= 1 and sizes >= 0, got {self}")
        if not self.speeds or any(speed.seconds(1) <= 0 for speed in self.speeds):
            raise ValueError(f"a profile takes speeds of more than 0 seconds, got {self.speeds}")
        if self.link_bytes_per_s is not None and not self.link_bytes_per_s > 0:
            raise ValueError(f"link_bytes_per_s takes a rate > 0, got {self.link_bytes_per_s}")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedMember:
    """One member: where it is, its share, and the speed from which the share was fitted.

    `node` is Ray's name of its machine, `host` what people call that; empty where it is not known.
    """

    member: int
    node: str
    share: int
    speed: Speed
    host: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What shall happen; written to `plan.json`.

    Attributes:
        job: The job's name.
        members: The members of generation 0 in rank order.
        micro_batches: Micro-batches per step; the shares sum to it.
        global_batch: Samples per step.
        steps_per_epoch: Steps of one epoch, the short last one included unless the job drops it.
        sync: How updates travel.
        predicted: Seconds and bytes of a step.
        parameters: Trained numbers of the model.
        gradient_bytes: Bytes of one dense exchange.
        state_bytes: Bytes of a checkpoint.
    """

    job: str
    members: tuple[PlannedMember, ...]
    micro_batches: int
    global_batch: int
    steps_per_epoch: int
    sync: SyncPoint
    predicted: Prediction
    parameters: int
    gradient_bytes: int
    state_bytes: int

    @property
    def shares(self) -> tuple[int, ...]:
        """The shares of generation 0, in rank order."""
        return tuple(member.share for member in self.members)

    def to_json(self) -> str:
        """The text of `plan.json`; `from_json` is the inverse."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=2, allow_nan=False) + "\n"

    def member_rows(self) -> list[dict[str, Any]]:
        """One row per member, for a table; seconds are those of computing one step."""
        hosts = Counter(host for _, host in {(x.node, x.host) for x in self.members})
        return [
            {
                "member": x.member,
                "node": x.host if x.host and hosts[x.host] == 1 else f"{x.host} {x.node}".strip(),
                "share": x.share,
                "samples": x.share * self.global_batch // self.micro_batches,
                "compute_s": x.speed.seconds(x.share),
            }
            for x in self.members
        ]

    def prediction_rows(self) -> list[dict[str, Any]]:
        """One row per predicted quantity, for a table; `note` says what it rests on."""
        known = self.predicted.exchange_s is not None
        left_out = "" if known else "without the exchange: no link rate was measured"
        overlap = "overlaps with the last backward" if known else "no link rate was measured"
        equal_s = step_seconds(
            [x.speed for x in self.members], equal_shares(len(self.members), self.micro_batches)
        )
        rows = (
            ("step_s", self.predicted.step_s, left_out),
            ("samples_per_s", self.predicted.samples_per_s, left_out),
            ("compute_s", self.predicted.compute_s, f"{equal_s:.3g} with equal shares"),
            ("exchange_s", self.predicted.exchange_s, overlap),
            ("bytes_per_step", self.predicted.bytes_per_step, "sent by each member"),
            ("state_bytes", self.state_bytes, "of a checkpoint"),
        )
        return [{"quantity": name, "value": value, "note": note} for name, value, note in rows]


def from_json(text: str) -> Plan:
    """Rebuild a plan from the text of `plan.json`.

    Raises:
        RunDirectoryError: It is no plan, or of a format this version does not read.
    """
    hint = "look at the run with the raycloud version that wrote it"
    try:
        record = json_value(text)
        written = record.pop("format")
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise RunDirectoryError(f"plan.json is not a plan: {error}", hint=hint) from error
    if written != FORMAT:
        raise RunDirectoryError(
            f"plan.json has format {written!r}, this version reads format {FORMAT}", hint=hint
        )
    try:
        members = tuple(
            PlannedMember(**{**x, "speed": Speed(**x["speed"])}) for x in record.pop("members")
        )
        sync, predicted = SyncPoint(**record.pop("sync")), Prediction(**record.pop("predicted"))
        return Plan(members=members, sync=sync, predicted=predicted, **record)
    except (KeyError, TypeError, ValueError) as error:
        raise RunDirectoryError(f"plan.json does not hold a plan: {error}", hint=hint) from error


def make(
    job: Job, inventory: Inventory, profile: Profile, *, placed: Mapping[int, str] | None = None
) -> Plan:
    """Plan a run: as many workers as fit, shares from their speeds, and what a step will cost.

    The shares are those of `first_shares`, unless the job fixes them. The same arguments give the
    same plan.

    Args:
        job: What is asked.
        inventory: The machines there are, free for this run.
        profile: What was measured of the task.
        placed: Members that run already and their nodes, in rank order; they are then taken as they
            are. Otherwise members 0, 1, ... are placed on the inventory.

    Raises:
        PlacementError: Fewer than `elastic.min_workers` fit, or they cannot hold a step.
        SpecError: `drop_last` leaves no step.
        ValueError: `profile.speeds` is neither one nor one per member, or `placed` holds another
            number of members than the job has shares.
    """
    if placed is None:
        nodes = place(inventory, _workers(job, inventory), job.resources.worker)
        placed = dict(enumerate(nodes))
    speeds = profile.speeds * (len(placed) if len(profile.speeds) == 1 else 1)
    if len(speeds) != len(placed):
        raise ValueError(f"{len(placed)} members need as many speeds, or one: got {len(speeds)}")
    shares = _shares(job, speeds)
    hosts = {node.name: node.host for node in inventory.nodes}
    return Plan(
        job=job.name,
        members=tuple(
            PlannedMember(
                member=member, node=node, share=share, speed=speed, host=hosts.get(node, "")
            )
            for (member, node), share, speed in zip(placed.items(), shares, speeds, strict=True)
        ),
        micro_batches=job.micro_batches,
        global_batch=job.global_batch,
        steps_per_epoch=_steps_per_epoch(job, profile.samples),
        sync=job.sync_point,
        predicted=_predict(job, profile, speeds, shares, _zones(inventory, [*placed.values()])),
        parameters=profile.parameters,
        gradient_bytes=profile.gradient_bytes,
        state_bytes=profile.state_bytes,
    )


def _steps_per_epoch(job: Job, samples: int) -> int:
    if job.drop_last and samples < job.global_batch:
        raise SpecError(
            "drop_last",
            job.drop_last,
            f"leaves no step: an epoch has {samples} samples, global_batch is {job.global_batch}",
            hint=f"lower global_batch to at most {samples}, or leave drop_last out",
        )
    return Steps(
        samples=samples,
        global_batch=job.global_batch,
        micro_batch=job.micro_batch,
        drop_last=job.drop_last,
    ).per_epoch()


def _workers(job: Job, inventory: Inventory) -> int:
    """How many workers to start with: as many as fit and have something to do."""
    if isinstance(job.elastic.shares, tuple):
        return len(job.elastic.shares)
    room = require(inventory, job.resources.worker, job.elastic.min_workers)
    return min(job.most_workers, room)


def _shares(job: Job, speeds: Sequence[Speed]) -> tuple[int, ...]:
    asked, micro_batches = job.elastic.shares, job.micro_batches
    if asked == "auto":
        return first_shares(speeds, micro_batches)
    shares = equal_shares(len(speeds), micro_batches) if asked == "equal" else asked
    if len(shares) != len(speeds):
        raise ValueError(f"{len(speeds)} members do not match the shares {shares}")
    for rank, (speed, share) in enumerate(zip(speeds, shares, strict=True)):
        if speed.max_micro_batches is not None and share > speed.max_micro_batches:
            raise PlacementError(
                f"worker {rank} holds at most {speed.max_micro_batches} micro-batches per step, "
                f"but elastic.shares = {asked!r} gives it {share}",
                hint="set elastic.shares to 'auto', or lower global_batch",
            )
    return shares


def _zones(inventory: Inventory, nodes: Sequence[str]) -> list[int]:
    """How many members each zone of a tree has; a node without the label is one of its own."""
    pairs = zip(inventory.zones(nodes), nodes, strict=True)
    return [*Counter(zone or node for zone, node in pairs).values()]


def _predict(
    job: Job,
    profile: Profile,
    speeds: Sequence[Speed],
    shares: Sequence[int],
    zones: Sequence[int],
) -> Prediction:
    """Step = slowest computing + what of the exchange is not hidden behind its last backward.

    In a tree of zones of so many members the links between them count, taken for the slowest.
    """
    compute_s = step_seconds(speeds, shares)
    coded = coded_bytes(profile.gradient_bytes, job.sync_point.codec)
    sent = slowest = ring_bytes(coded, len(speeds))
    if job.asynchronous:  # to servers, and as much from there, beside computing
        sent = slowest = coded // job.sync_point.period
    elif job.sync_point.topology == "tree" and len(zones) > 1:
        sent, slowest = tree_bytes(profile.gradient_bytes, coded, zones)
    exchange_s: float | None = None
    step_s = compute_s
    if sent == 0:
        exchange_s = 0.0
    elif profile.link_bytes_per_s is not None:
        exchange_s = slowest / profile.link_bytes_per_s
        last = max(range(len(speeds)), key=lambda i: speeds[i].seconds(shares[i]))
        step_s += (
            max(0.0, exchange_s - compute_s)
            if job.asynchronous
            else exposed_seconds(
                exchange_s,
                last_micro_batch_s=speeds[last].micro_batch_s,
                bucket_bytes=job.bucket_bytes(profile.gradient_bytes),
                gradient_bytes=profile.gradient_bytes,
            )
        )
    return Prediction(
        step_s=step_s,
        samples_per_s=job.global_batch / step_s,
        compute_s=compute_s,
        exchange_s=exchange_s,
        bytes_per_step=sent,
    )
