"""A job on a described cluster: planned, and carried out on the virtual clock by the real control.

The planner says where members go and what a step costs; the driver, control and the order of
samples run as they do in a run; and what is not measured stands in `Circumstances`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from raycloud.errors import SpecError
from raycloud.planner.inventory import capacity, price_per_hour
from raycloud.planner.placement import place
from raycloud.planner.plan import make, workers
from raycloud.simulate.costing import ClusterCosts
from raycloud.simulate.policies import Played, play
from raycloud.simulate.run import simulate
from raycloud.simulate.scenario import Scenario, faults_by_chance
from raycloud.simulate.traces import Held, Paced
from raycloud.spec.sizes import report_s
from raycloud.step.speculation import ring

if TYPE_CHECKING:
    from raycloud.clock import Clock
    from raycloud.planner.cost import Profile
    from raycloud.planner.described import Described
    from raycloud.planner.plan import Plan
    from raycloud.simulate.history import Outcome
    from raycloud.simulate.scenario import Fault
    from raycloud.spec import Job

FORMAT = 1
# Interruptions of a GPU in a day, as in the training of Llama 3 (Dubey et al., "The Llama 3 herd of
# models", 2024): 466 in 54 days on 16,384 of them.
PER_DAY = 466 / 54 / 16_384
_DAY_S = 86_400.0
_LASTS = 3.0  # times as long as all steps take, faults go on
# After something has happened all goes on word by word until shares have followed: for so many
# steps, and reports of each member.
_STEPS, _REPORTS = 40, 5
_LEAST_FOLLOW_S = 0.25  # until a newcomer that has the state has the steps since, too
_MOST_FAULTS = 86_400.0  # a day


@dataclass(frozen=True, kw_only=True, slots=True)
class Circumstances:
    """What befalls the job, and what was not measured.

    Attributes:
        trace: Of machines held, or of batch times; None: neither.
        faults_per_day: Of all kinds, each of one member or node; None: as large clusters tell, and
            none beside a trace.
        start_s: From when a worker is asked for to when it can compute.
        word_s: A word between driver and member is at most this long on its way.
        seed: Of what is left to chance.
        nodes: Numbers of nodes like those of the cluster, on each of which it is carried out; none:
            on the cluster as it is.
        weak: The global batch grows with the workers there.
    """

    trace: Held | Paced | None = None
    faults_per_day: float | None = None
    start_s: float = 10.0
    word_s: float = 0.1
    seed: int = 0
    nodes: tuple[int, ...] = ()
    weak: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot be.

        Raises:
            SpecError: A number is negative, too large, or none.
        """
        for name in ("faults_per_day", "start_s", "word_s"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                option = f"--{name.replace('_', '-')}"
                what = "is no number of 0 or more"
                raise SpecError(option, value, what, hint="correct it, or leave it out")
        if self.faults_per_day is not None and self.faults_per_day > _MOST_FAULTS:
            what = "is more than one a second"
            raise SpecError("--faults-per-day", self.faults_per_day, what, hint="lower it")


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulated:
    """What came of a job on a cluster of some size.

    Attributes:
        nodes: That members are on.
        workers: At the start.
        global_batch: Samples of a step.
        step_s: As planned; likely from `low_s` to `high_s`.
        compute_s: Of it, of the worker that ends last.
        exposed_s: Of it, that nothing hides of the exchange; None where no link's rate is known.
        bytes_per_step: Each worker sends.
        planned_s: Of all steps, undisturbed.
        status: `finished`, or why not.
        asked: Steps that the job has.
        steps: That count.
        job_s: From the command to the last checkpoint, in virtual seconds.
        goodput: The part of `job_s` in which steps were computed that count.
        utilization: The part of the seconds of all nodes that were there, in which their workers
            computed micro-batches that count.
        cost: Of the nodes while they were there; None where one has no price.
        of_present: Beside a trace of machines held: samples over what the machines that were there
            could have computed with no time lost; else None.
        recoveries: How often members went on after a loss.
        faults: That befell it, by kind.
        broken: Promises; there should be none.
    """

    nodes: int
    workers: int
    global_batch: int
    step_s: float
    low_s: float
    high_s: float
    compute_s: float
    exposed_s: float | None
    bytes_per_step: int
    planned_s: float
    status: str
    asked: int
    steps: int
    job_s: float
    goodput: float
    utilization: float
    cost: float | None
    of_present: float | None
    recoveries: int
    faults: dict[str, int]
    broken: tuple[str, ...]

    @property
    def samples_per_s(self) -> float:
        """Over the whole of its time."""
        return self.steps * self.global_batch / self.job_s if self.job_s else 0.0

    def record(self) -> dict[str, Any]:
        """As plain values."""
        return {**asdict(self), "samples_per_s": self.samples_per_s}


def carried_out(
    job: Job,
    measured: Profile,
    described: Described,
    around: Circumstances,
    *,
    clock: Clock | None = None,
) -> Simulated:
    """Plan the job on the cluster, and carry it out.

    Args:
        job: What is asked.
        measured: What one worker measured, where the task was tried.
        described: The cluster.
        around: What befalls it.
        clock: See `simulate`.

    Raises:
        PlacementError: Fewer than `elastic.min_workers` fit.
        SpecError: The trace is of another number of nodes or workers.
    """
    placed = place(described.inventory, workers(job, described.inventory), job.resources.worker)
    plan = planned(job, measured, described, placed)
    counts = Counter(placed)
    costs = ClusterCosts(job, measured, described, tuple(counts), tuple(counts.values()))
    fits(around.trace, nodes=len(counts), workers=len(placed))
    outcome = simulate(_scenario(job, plan, costs, around), clock)
    return _simulated(plan, costs, around, outcome)


def reported(
    job: Job,
    measured: Profile,
    described: Described,
    around: Circumstances,
    *,
    name: str,
    clock: Clock | None = None,
) -> dict[str, Any]:
    """The job on the cluster of that name, or on numbers of nodes like it, as plain values.

    Raises:
        PlacementError: As for `carried_out`.
        SpecError: A size and a trace, which is of one number of nodes; and as for `carried_out`.
    """
    trace = around.trace
    if trace is not None and around.nodes:
        what = "a trace is of one number of nodes"
        raise SpecError("--nodes", ",".join(map(str, around.nodes)), what, hint="leave it out")
    many = [resized(job, described, nodes=n, weak=around.weak) for n in around.nodes]
    rows = [
        carried_out(one, measured, cluster, around, clock=clock)
        for one, cluster in many or [(job, described)]
    ]
    steps = rows[0].asked
    found = policies(job, measured, described, trace) if isinstance(trace, Paced) else []
    return {
        "format": FORMAT,
        "job": job.name,
        "cluster": name,
        "trace": None if trace is None else trace.name,
        "seed": around.seed,
        "steps": steps,
        "sizes": [row.record() for row in rows],
        "policies": [one.record() for one in found],
    }


def planned(job: Job, measured: Profile, described: Described, placed: Sequence[str]) -> Plan:
    """The plan for workers on these nodes."""
    profile = described.profile(measured, placed)
    return make(job, described.inventory, profile, placed=dict(enumerate(placed)))


def fits(trace: Held | Paced | None, *, nodes: int, workers: int) -> None:
    """A trace is of these nodes, or of these workers.

    Raises:
        SpecError: It is of others.
    """
    if isinstance(trace, Held) and trace.most != nodes:
        raise SpecError(
            "--trace",
            trace.name,
            f"is of {trace.most} machines, and the job is on {nodes} of the cluster's nodes",
            hint=f"describe {trace.most} nodes and set elastic.max_workers, or use another trace",
        )
    if isinstance(trace, Paced) and trace.workers != workers:
        raise SpecError(
            "--trace",
            trace.name,
            f"is of {trace.workers} workers, and the job has {workers}",
            hint=f"describe nodes for {trace.workers} workers and set elastic.max_workers to that, "
            "or use another trace",
        )


def resized(
    job: Job, described: Described, *, nodes: int, weak: bool = False
) -> tuple[Job, Described]:
    """The same job on so many nodes like those of the cluster, with as many workers as fit there.

    Its global batch stays; with `weak` it grows with the workers instead.

    Raises:
        SpecError: There is nothing to make larger or smaller.
    """
    if nodes < 1:
        raise SpecError("--nodes", nodes, "is no number of nodes", hint="give 1 or more")
    if isinstance(job.elastic.shares, tuple):
        raise SpecError(
            "elastic.shares",
            job.elastic.shares,
            "is for one number of workers",
            hint="set elastic.shares to auto or equal, or leave --nodes out",
        )
    cluster = described.repeated(nodes)
    there = min(job.most_workers, capacity(described.inventory, job.resources.worker))
    room = max(1, capacity(cluster.inventory, job.resources.worker))
    batch = job.global_batch
    if weak and there:
        micro_batches = max(1, round(job.micro_batches * room / there))
        batch = micro_batches * job.micro_batch
    elastic = job.elastic.model_copy(
        update={"max_workers": room, "min_workers": min(job.elastic.min_workers, room)}
    )
    return job.model_copy(update={"elastic": elastic, "global_batch": batch}), cluster


def policies(job: Job, measured: Profile, described: Described, trace: Paced) -> list[Played]:
    """What shares by several policies would save on a trace; see `policies.play`.

    Raises:
        SpecError: It is of another number of workers, or of a single moment.
    """
    placed = place(described.inventory, workers(job, described.inventory), job.resources.worker)
    fits(trace, nodes=len(set(placed)), workers=len(placed))
    if len(trace.rows) < 2:  # noqa: PLR2004 - of the first one nothing was known before
        what = "tells of one moment"
        raise SpecError("--trace", trace.name, what, hint="use a trace of two or more")
    each_s = [speed.seconds(1) for speed in described.profile(measured, placed).speeds]
    most = job.elastic.backup_micro_batches
    return play(
        np.array(trace.slow()) * np.array(each_s),
        job.micro_batches,
        backs_up=ring(placed, len(placed)),
        most=most if len(placed) > 1 else 0,
    )


def _scenario(job: Job, plan: Plan, costs: ClusterCosts, around: Circumstances) -> Scenario:
    members, trace = len(plan.members), around.trace
    lasts_s = _LASTS * plan.job_s + _DAY_S
    if isinstance(trace, Held):
        lasts_s *= trace.most / fmean(trace.counts)
    rate, _ = costs.described.link(costs.names)
    state_s = plan.state_bytes / rate if rate else 0.0
    faults: tuple[Fault, ...] = ()
    there = 0
    if isinstance(trace, Held):
        faults, there = trace.faults(nodes=trace.most, until_s=lasts_s, again=True), trace.counts[0]
    per_day = around.faults_per_day
    if per_day is None:
        per_day = PER_DAY * members if trace is None else 0.0
    befalls = faults_by_chance(around.seed, per_day=per_day, lasts_s=lasts_s)
    zones = set(costs.described.inventory.zones(costs.names))
    shares = job.elastic.shares
    return Scenario(
        seed=around.seed,
        members=members,
        least=min(job.elastic.min_workers, members),
        samples=plan.steps_per_epoch * job.global_batch,
        global_batch=job.global_batch,
        micro_batch=job.micro_batch,
        drop_last=job.drop_last,
        shares=shares,
        steps=plan.steps,
        lasts_s=lasts_s,
        every_steps=job.checkpoint.every_steps,
        faults=tuple(sorted([*faults, *befalls])),
        there=there,
        zones=max(1, len(zones)),
        delay_s=around.word_s,
        build_s=around.start_s,
        awake_s=math.inf
        if isinstance(trace, Paced)
        else max(_STEPS * plan.predicted.step_s, _REPORTS * report_s(members)),
        costing=costs,
        rows=_rows(trace, plan) if isinstance(trace, Paced) else (),
        follow_s=max(_LEAST_FOLLOW_S, state_s),
    )


def _rows(trace: Paced, plan: Plan) -> tuple[tuple[float, ...], ...]:
    """By node: where several workers are on one, it is as slow as the slowest of them."""
    nodes: dict[str, list[int]] = {}
    for at, member in enumerate(plan.members):
        nodes.setdefault(member.node, []).append(at)
    return tuple(
        tuple(max(row[at] for at in ats) for ats in nodes.values()) for row in trace.slow()
    )


def _simulated(
    plan: Plan, costs: ClusterCosts, around: Circumstances, outcome: Outcome
) -> Simulated:
    found = plan.predicted
    labels = {node.name: node.labels for node in costs.described.inventory.nodes}
    prices = [price_per_hour(labels[name]) for name in costs.names]
    paid = zip(prices, outcome.node_s, strict=True)
    cost = math.fsum((price or 0.0) * seconds for price, seconds in paid) / 3600
    there_s = math.fsum(
        places * seconds for places, seconds in zip(costs.places, outcome.node_s, strict=True)
    )
    of_present = None
    if isinstance(around.trace, Held) and outcome.virtual_s:
        could = _could(costs, around.trace, outcome.virtual_s)
        of_present = outcome.steps / could if could else None
    return Simulated(
        nodes=len(costs.names),
        workers=len(plan.members),
        global_batch=plan.global_batch,
        step_s=found.step_s,
        low_s=found.low_s,
        high_s=found.high_s,
        compute_s=found.compute_s,
        exposed_s=found.exposed_s,
        bytes_per_step=found.bytes_per_step,
        planned_s=plan.job_s,
        status=outcome.status,
        asked=plan.steps,
        steps=outcome.steps,
        job_s=outcome.virtual_s,
        goodput=outcome.goodput,
        utilization=outcome.busy_s / there_s if there_s else 0.0,
        cost=None if None in prices else cost,
        of_present=of_present,
        recoveries=outcome.recoveries,
        faults=dict(outcome.faults),
        broken=outcome.broken,
    )


def _could(costs: ClusterCosts, trace: Held, until_s: float) -> float:
    """Steps that the first machines of those held could compute, with no time lost."""
    per_s, steps, at_s, number = {0: 0.0}, 0.0, 0.0, 0
    while at_s < until_s:
        held = trace.counts[number % len(trace.counts)]
        if held not in per_s:
            per_s[held] = 1.0 / costs.alone_s(held)
        steps += per_s[held] * (min(until_s, at_s + trace.gap_s) - at_s)
        at_s, number = at_s + trace.gap_s, number + 1
    return steps
