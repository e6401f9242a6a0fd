"""The plan of a run: members, shares and sync, with the predicted seconds and bytes of a step."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from raycloud.bounded import json_value
from raycloud.errors import PlacementError, RunDirectoryError, SpecError
from raycloud.events import Predicted
from raycloud.order import Steps
from raycloud.planner.cost import (
    Alternative,
    Costs,
    LargestPass,
    Prediction,
    Profile,
    link_of,
    sent_bytes,
    transport_seconds,
)
from raycloud.planner.inventory import Inventory, core_watts, price_per_hour, require
from raycloud.planner.placement import place
from raycloud.planner.roles import Machine, Roles, Work, choose, fed_seconds
from raycloud.planner.shares import equal_shares, first_shares, step_seconds
from raycloud.planner.speed import Speed
from raycloud.planner.storage import Storage
from raycloud.spec import Job, SyncPoint
from raycloud.spec.sizes import coded_bytes, least_servers, ring_bytes, served_bytes

FORMAT = 2
_READS = (1, 2)
_ID = 8  # characters of a node's id tell it from others
_WORTH = 0.85  # of the seconds of the way that was asked for: less is worth a word


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedMember:
    """One member: where it is, its share, and the speed from which the share was fitted.

    `node` is Ray's name of its machine, `host` what people call that; empty where it is not known.
    """

    member: int
    node: str
    share: float
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
        steps: Of the whole job; 0: a plan that was written before this was told.
        price_per_hour: Of all nodes that members or collators are on; None: not all of them are
            labelled.
        watts: That they take of their nodes, while they compute as predicted; likewise.
        cluster: The file that describes the nodes, whose speeds are no measures; None: none does.
        alternatives: What a step would cost by other ways, where that was asked.
        largest: The largest pass that memory holds; None where it was not found out.
        servers: The nodes of those that sum in lockstep; none where members do.
        roles: Which nodes train and which make batches; None where that was not looked at.
        kept_s: Seconds since the oldest measure was made that was kept from a plan before this one;
            None: all were made for it.
        storage: Of a source on another machine, and of checkpoints; None: nothing is known of them.
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
    steps: int = 0
    price_per_hour: float | None = None
    watts: float | None = None
    cluster: str | None = None
    alternatives: tuple[Alternative, ...] = ()
    largest: LargestPass | None = None
    servers: tuple[str, ...] = ()
    roles: Roles | None = None
    kept_s: float | None = None
    storage: Storage | None = None

    @property
    def job_s(self) -> float:
        """Seconds of all steps, as predicted; without what comes before, between and after."""
        return self.steps * self.predicted.step_s

    @property
    def cost(self) -> float | None:
        """Of the nodes for these seconds, in the currency of their prices."""
        return None if self.price_per_hour is None else self.price_per_hour * self.job_s / 3600

    @property
    def energy_j(self) -> float | None:
        """Joules that members take in these seconds."""
        return None if self.watts is None else self.watts * self.job_s

    def said(self, generation: int, step: int, left: int, *, seen: bool) -> Predicted:
        """The word of it in a run's log: of a generation that goes on at `step`."""
        found = self.predicted
        return Predicted(
            generation=generation,
            step=step,
            left=left,
            step_s=found.step_s,
            low_s=found.low_s,
            high_s=found.high_s,
            sent_bytes=found.bytes_per_step * len(self.members),
            seen=seen,
            price_per_hour=self.price_per_hour,
            watts=self.watts,
        )

    @property
    def shares(self) -> tuple[float, ...]:
        """The shares of generation 0, in rank order."""
        return tuple(member.share for member in self.members)

    def measured(self) -> Profile:
        """What one worker had measured before: of an epoch, the samples of whole steps."""
        return Profile(
            samples=max(1, self.steps_per_epoch * self.global_batch),
            parameters=self.parameters,
            gradient_bytes=self.gradient_bytes,
            state_bytes=self.state_bytes,
            speeds=(self.members[0].speed,),
            largest=self.largest,
        )

    def to_json(self) -> str:
        """The text of `plan.json`; `from_json` is the inverse."""
        told = {"format": FORMAT, **asdict(self)}
        for name in ("largest", "roles", "watts", "cluster", "kept_s", "storage"):
            if told[name] is None:
                del told[name]
        return json.dumps(told, indent=2, allow_nan=False) + "\n"

    def member_rows(self) -> list[dict[str, Any]]:
        """One row per member, for a table; seconds are those of computing one step."""
        hosts = Counter(host for _, host in {(x.node, x.host) for x in self.members})
        return [
            {
                "member": x.member,
                "node": x.host if hosts[x.host] == 1 and x.host else _told_apart(x),
                "share": x.share,
                "samples": round(x.share * self.global_batch / self.micro_batches),
                "compute_s": x.speed.seconds(x.share),
            }
            for x in self.members
        ]

    def prediction_rows(self) -> list[dict[str, Any]]:
        """One row per predicted quantity, for a table; `note` says what it rests on."""
        found = self.predicted
        left_out = overlap = ""
        if found.exchange_s is None:
            left_out, overlap = "without the exchange", "no link rate was measured"
        elif found.exposed_s is not None:
            overlap = f"of which nothing hides {found.exposed_s:.3g}"
        sure = [f"likely {found.low_s:.3g} to {found.high_s:.3g}"] if found.high_s else []
        equal_s = step_seconds(
            [x.speed for x in self.members], equal_shares(len(self.members), self.micro_batches)
        )
        rows: list[tuple[str, float | None, str]] = [
            ("step_s", found.step_s, ", ".join([*sure, *filter(None, [left_out])])),
            ("samples_per_s", self.predicted.samples_per_s, left_out),
            ("compute_s", self.predicted.compute_s, f"{equal_s:.3g} with equal shares"),
            ("exchange_s", self.predicted.exchange_s, overlap),
            ("bytes_per_step", self.predicted.bytes_per_step, "sent by each member"),
            ("state_bytes", self.state_bytes, "of a checkpoint"),
            ("job_s", self.job_s, f"of {self.steps} steps, without start and checkpoints"),
            *_memory_rows(self.largest),
        ]
        if self.cost is not None:
            rows.append(("cost", self.cost, f"at {self.price_per_hour:g} an hour for all nodes"))
        if self.energy_j is not None:
            rows.append(
                ("energy_j", self.energy_j, f"at {self.watts:.3g} W, as nodes are labelled")
            )
        if self.servers:
            rows.append(self._of_servers())
        return [{"quantity": name, "value": value, "note": note} for name, value, note in rows]

    def alternative_rows(self) -> list[dict[str, Any]]:
        """One row for each other way for updates to travel, for a table."""
        return [
            {
                "sync": str(one.sync),
                "step_s": one.predicted.step_s,
                "samples_per_s": one.predicted.samples_per_s,
                "bytes_per_step": one.predicted.bytes_per_step,
                "note": _note(one),
            }
            for one in self.alternatives
        ]

    def role_rows(self) -> list[dict[str, Any]]:
        """One row for each node, where roles were looked at, for a table."""
        if self.roles is None:
            return []
        workers, collators = Counter(self.roles.trainers), Counter(self.roles.collators)
        hosts = {x.node: x.host for x in self.members if x.host}
        return [
            {
                "node": hosts.get(one.node, one.node[:_ID]),
                "workers": workers[one.node],
                "collators": collators[one.node],
                "train_s": None if one.speed is None else one.speed.micro_batch_s,
                "collate_s": one.collate_s,
            }
            for one in self.roles.machines
        ]

    def advice(self) -> str:
        """What another way would gain, where that is much; empty where it is not."""
        at_most_s = _WORTH * self.predicted.step_s
        better = [one for one in self.alternatives if one.predicted.step_s <= at_most_s]
        if not better:
            return ""
        best = min(better, key=lambda one: one.predicted.step_s)
        return (
            f"a step would take {best.predicted.step_s:.3g} s in place of "
            f"{self.predicted.step_s:.3g} with {best.sync}: try --set sync=auto, which "
            "chooses in the run by what it measures"
        )

    def _of_servers(self) -> tuple[str, int, str]:
        """What the busiest node sends, and when that is less than in a ring."""
        workers, code = [x.node for x in self.members], self._code_bytes // self.sync.period
        busiest = served_bytes(code, *_counts(workers, self.servers)) if len(workers) > 1 else 0
        ring, least = ring_bytes(code, len(workers)), least_servers(len(workers))
        if busiest < ring:
            why = "each worker sends its gradient once"
        elif least is None:
            why = "with so few workers no servers send less"
        else:
            why = f"less with servers on {least} nodes or more that have no worker"
        return "busiest_node_bytes", busiest, f"in a ring {ring}: {why}"

    @property
    def _code_bytes(self) -> int:
        return coded_bytes(self.gradient_bytes, self.sync.codec, self.sync.ratio)


def _told_apart(member: PlannedMember) -> str:
    return f"{member.host} {member.node[:_ID]}".strip()


def _note(one: Alternative) -> str:
    exposed_s, step_s = one.predicted.exposed_s or 0.0, one.predicted.step_s
    waits = f"{exposed_s / step_s:.0%} of a step is exchange"
    if one.sync.period > 1:
        return f"{waits}; local steps between"
    return waits


def _memory_rows(largest: LargestPass | None) -> list[tuple[str, int, str]]:
    if largest is None:
        return []
    said = f"foretold from passes of up to {largest.tried}"
    said = "which was tried" if largest.tried >= largest.samples else said
    return [
        ("pass_samples", largest.samples, f"the largest pass that memory holds, {said}"),
        ("sample_bytes", largest.sample_bytes, "that each sample of a pass takes"),
    ]


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
    if written not in _READS:
        raise RunDirectoryError(
            f"plan.json has format {written!r}, this version reads 1 to {FORMAT}", hint=hint
        )
    try:
        members = tuple(
            PlannedMember(**{**x, "speed": Speed(**x["speed"])}) for x in record.pop("members")
        )
        largest = record.pop("largest", None)
        largest = None if largest is None else LargestPass(**largest)
        sync, predicted = SyncPoint(**record.pop("sync")), Prediction(**record.pop("predicted"))
        others = tuple(
            Alternative(sync=SyncPoint(**x["sync"]), predicted=Prediction(**x["predicted"]))
            for x in record.pop("alternatives", ())
        )
        servers = tuple(record.pop("servers", ()))
        roles, storage = record.pop("roles", None), record.pop("storage", None)
        return Plan(
            members=members,
            sync=sync,
            predicted=predicted,
            alternatives=others,
            largest=largest,
            servers=servers,
            roles=None if roles is None else Roles.from_record(roles),
            storage=None if storage is None else Storage.from_record(storage),
            **record,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise RunDirectoryError(f"plan.json does not hold a plan: {error}", hint=hint) from error


def make(
    job: Job,
    inventory: Inventory,
    profile: Profile,
    *,
    placed: Mapping[int, str] | None = None,
    compare: bool = False,
    roles: Roles | None = None,
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
        compare: Predict also what other ways for updates to travel would cost.
        roles: Those of the nodes; a step then takes no less than its batches do.

    Raises:
        PlacementError: Fewer than `elastic.min_workers` fit, or they cannot hold a step.
        SpecError: `drop_last` leaves no step.
        ValueError: `profile.speeds` is neither one nor one per member, or `placed` holds another
            number of members than the job has shares.
    """
    if placed is None:
        nodes = place(inventory, workers(job, inventory), job.resources.worker)
        placed = dict(enumerate(nodes))
    if len(profile.speeds) == 1:
        profile = replace(profile, cores=profile.cores * len(placed))
    speeds = profile.speeds * (len(placed) if len(profile.speeds) == 1 else 1)
    if len(speeds) != len(placed):
        raise ValueError(f"{len(placed)} members need as many speeds, or one: got {len(speeds)}")
    hosts = {node.name: node.host for node in inventory.nodes}
    on = [*placed.values()]
    costs = costs_of(job, inventory, profile, speeds, on)
    shares, servers = costs.shares, _servers(job, inventory)
    feeding = roles if profile.overhead_s is None else None  # steps that were seen waited for it
    predicted = _fed(costs.predict(job.sync_point), feeding, job.global_batch)
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
        predicted=predicted,
        parameters=profile.parameters,
        gradient_bytes=profile.gradient_bytes,
        state_bytes=profile.state_bytes,
        steps=_steps(job, profile.samples),
        price_per_hour=_price(inventory, [*on, *(() if roles is None else roles.collators)]),
        watts=_watts(inventory, on, costs, predicted.step_s, roles),
        alternatives=costs.alternatives() if compare else (),
        largest=profile.largest,
        servers=servers,
        roles=roles,
    )


def _fed(found: Prediction, roles: Roles | None, global_batch: int) -> Prediction:
    """The same, where collators make the batches."""
    if roles is None or roles.feed_s <= found.step_s:
        return found
    step_s = fed_seconds(found.step_s, feed_s=roles.feed_s, help_s=roles.help_s)
    by = step_s / found.step_s
    return replace(
        found,
        step_s=step_s,
        samples_per_s=global_batch / step_s,
        low_s=by * found.low_s,
        high_s=by * found.high_s,
    )


def choose_roles(
    job: Job, inventory: Inventory, profile: Profile, machines: Sequence[Machine]
) -> Roles:
    """Which of these machines train and which make batches: see `planner.roles`.

    Raises:
        PlacementError: Fewer than `elastic.min_workers` fit.
    """

    def besides_s(nodes: Sequence[str], speeds: Sequence[Speed], shares: Sequence[float]) -> float:
        """What of a step is not computing."""
        zones = tuple(zone_sizes(inventory, nodes))
        found = Costs(job, profile, tuple(speeds), tuple(shares), zones)
        predicted = found.predict_as_is(job.sync_point)
        return predicted.step_s - predicted.compute_s

    return choose(machines, replace(_work(job), besides_s=besides_s))


def _work(job: Job) -> Work:
    resources, shares = job.resources.worker, job.elastic.shares
    return Work(
        micro_batches=job.micro_batches,
        least=job.elastic.min_workers,
        most=job.most_workers,
        cpus=resources.cpus,
        threads=job.data.threads,
        on_gpu=resources.gpus > 0,
        shares=shares if isinstance(shares, tuple) else None,
    )


def speeds_in(job: Job, roles: Roles) -> tuple[Speed, ...]:
    """The speed of each worker in its role: with the batches that it makes, if it makes them."""
    work, by_node = _work(job), {one.node: one for one in roles.machines}
    found = []
    for node in roles.trainers:
        speed = by_node[node].speed
        if speed is None:
            raise ValueError(f"a worker on {node}, of which no speed is known")
        found.append(speed if roles.collators else work.alone(by_node[node]))
    return tuple(found)


def costs_of(
    job: Job,
    inventory: Inventory,
    profile: Profile,
    speeds: Sequence[Speed],
    on: Sequence[str],
    *,
    shares: Sequence[float] | None = None,
) -> Costs:
    """What a step costs members with these speeds on these nodes.

    Without `shares` they are those that a run begins with.

    Raises:
        PlacementError: The members cannot hold a step.
        ValueError: The job's shares are others than there are members.
    """
    zones, counts = tuple(zone_sizes(inventory, on)), _counts(on, _servers(job, inventory))
    if shares is None:
        sent = sent_bytes(job.sync_point, profile.gradient_bytes, zones)
        cores = () if profile.overhead_s is not None else profile.cores
        shares = _shares(job, transport_seconds(speeds, sent, cores))
    return Costs(job, profile, tuple(speeds), tuple(shares), zones, counts)


def linked(
    job: Job, inventory: Inventory, on: Sequence[str], exchanged: Sequence[tuple[int, float]]
) -> tuple[float, float] | None:
    """Rate and round trip of links between members on these nodes: see `link_of`.

    They had summed messages by the way in which the job's updates travel; those of asynchronous
    ones go to servers, and members meet in a ring.
    """
    sync = SyncPoint() if job.asynchronous else job.sync_point
    counts = _counts(on, _servers(job, inventory))
    return link_of(sync, tuple(zone_sizes(inventory, on)), exchanged, counts)


def _servers(job: Job, inventory: Inventory) -> tuple[str, ...]:
    """The nodes of those that sum in lockstep; none where members do."""
    sums = job.served and not job.asynchronous
    return server_nodes(inventory, job.servers.shards) if sums else ()


def server_nodes(inventory: Inventory, shards: int) -> tuple[str, ...]:
    """The nodes of the servers of so many shards: one after the other, the largest first."""
    names = inventory.largest_first()
    return tuple(names[shard % len(names)] for shard in range(shards if names else 0))


def _counts(
    workers: Sequence[str], servers: Sequence[str]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """How many workers, and servers, each node has that has either."""
    on, beside = Counter(workers), Counter(servers)
    nodes = dict.fromkeys((*workers, *servers))
    return tuple(on[node] for node in nodes), tuple(beside[node] for node in nodes)


def _steps(job: Job, samples: int) -> int:
    return job.steps or (job.epochs or 1) * _steps_per_epoch(job, samples)


def _price(inventory: Inventory, nodes: Sequence[str]) -> float | None:
    """Of these nodes together; None where one is not known, or has no price."""
    labels = {node.name: node.labels for node in inventory.nodes}
    prices = [price_per_hour(labels.get(node, {})) for node in set(nodes)]
    known = [price for price in prices if price is not None]
    return math.fsum(known) if known and len(known) == len(prices) else None


def _watts(
    inventory: Inventory, nodes: Sequence[str], costs: Costs, step_s: float, roles: Roles | None
) -> float | None:
    """Of the members' cores, each busy while its member computes; None as for `_price`.

    And of collators, each busy while it makes its part of a step's batches. A node's own word of
    what a core takes counts, which goes by all cores that it has; else those that Ray has.
    """
    told, cpus = costs.profile.core_watts, costs.job.resources.worker.cpus
    known = {one.name: core_watts(one.labels, one.cpus) for one in inventory.nodes} | {**told}
    cores = costs.profile.cores or (math.inf,) * len(nodes)
    each = zip(costs.speeds, costs.shares, cores, strict=True)
    busy_s = [min(cpus, got) * speed.seconds(share) for speed, share, got in each]
    pairs = [*zip(nodes, busy_s, strict=True)]
    if roles is not None:
        pairs += [(node, roles.feed_s) for node in roles.collators]
    found = [w * s / step_s for node, s in pairs if (w := known.get(node)) is not None]
    return math.fsum(found) if found and len(found) == len(pairs) else None


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


def workers(job: Job, inventory: Inventory) -> int:
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


def zone_sizes(inventory: Inventory, nodes: Sequence[str]) -> list[int]:
    """How many members each zone of a tree has; a node without the label is one of its own."""
    pairs = zip(inventory.zones(nodes), nodes, strict=True)
    return [*Counter(zone or node for zone, node in pairs).values()]
