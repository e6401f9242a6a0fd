"""Roles of nodes, measured: which of them train in a run, and which make batches."""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raycloud.errors import MachineError, PlacementError, RaycloudError
from raycloud.events import CollatorsStarted, Noticed
from raycloud.on_ray.actors import CollatorActor
from raycloud.on_ray.attach import free, hash_seeded
from raycloud.on_ray.survey import MOST, all_got, chosen, survey, tried_config
from raycloud.planner.inventory import core_watts, price_per_hour
from raycloud.planner.plan import choose_roles
from raycloud.planner.roles import Machine
from raycloud.planner.speed import Speed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from raycloud.events import Event
    from raycloud.on_ray.session import Session
    from raycloud.on_ray.survey import MeasuresFile, Survey
    from raycloud.packing.code import TaskCode
    from raycloud.planner.cost import Profile
    from raycloud.planner.inventory import Inventory, Node
    from raycloud.planner.roles import Roles
    from raycloud.spec import Job

_MEASURES_S = 600.0  # a collator that is measured may have to wait for its data


def with_roles(session: Session) -> tuple[Session, tuple[Event, ...]]:
    """The start with its nodes' roles, and what the log is told; measured where the job says so.

    Its workers are then no more than the nodes that train have room for, and batches are made as
    many steps ahead as keep all collators busy.

    Raises:
        RaycloudError: The task cannot be used, or its workers do not fit.
    """
    job = session.job
    if job.data.collators != "auto":
        return session, ()
    why = ""
    if session.only_steps is not None:
        why = "it is only tried out"
    elif session.seats is not None:
        why = "its places are those of several runs"
    elif job.servers.shards:
        why = "servers have a part of the nodes"
    if why:
        data = job.data.model_copy(update={"collators": 0})
        told = Noticed(what="roles of nodes are not chosen", detail={"why": why})
        return replace(session, job=job.model_copy(update={"data": data})), (told,)
    nodes = free()
    found, machines = measure(job, session.code, nodes)
    roles = choose_roles(job, nodes, profile_of(found), machines)
    session = in_roles(session, roles)
    detail = {
        "why": roles.why,
        "workers": len(roles.trainers),
        "collators": len(roles.collators),
    }
    return session, (Noticed(what="roles of nodes were chosen", detail=detail),)


def in_roles(session: Session, roles: Roles) -> Session:
    """The start with these roles, which may have been chosen by a driver before this one."""
    job, workers, collators = session.job, len(roles.trainers), len(roles.collators)
    ahead = min(64, max(job.data.prefetch_steps, math.ceil(collators / workers) + 1))
    data = job.data.model_copy(update={"collators": collators, "prefetch_steps": ahead})
    elastic = job.elastic.model_copy(update={"max_workers": workers})
    return replace(
        session, job=job.model_copy(update={"data": data, "elastic": elastic}), roles=roles
    )


def started_collators(
    there: Inventory, on: Sequence[str], started: int
) -> Iterator[CollatorsStarted | Noticed]:
    """What the log is told of collators: of each node that they are on, and where some are missing.

    Args:
        there: The machines.
        on: The id of the node that each was to be on; empty: any, and nobody is told which.
        started: How many there are: taken to be the first ones.
    """
    if started < len(on):
        detail = {"asked": len(on), "started": started}
        yield Noticed(what="collators found no free CPU", detail=detail)
    known = {node.name: node for node in there.nodes}
    for name, count in Counter(on[:started]).items():
        if (node := known.get(name)) is not None:
            yield CollatorsStarted(
                node=name,
                count=count,
                price_per_hour=price_per_hour(node.labels),
                core_watts=core_watts(node.labels, node.cpus),
            )


def profile_of(found: Survey) -> Profile:
    """Of the task, for what of a step is not computing; of no worker alone."""
    return replace(found.profile([*found.readies]), cores=())


def measure(
    job: Job, code: TaskCode, nodes: Inventory, kept: MeasuresFile | None = None
) -> tuple[Survey, tuple[Machine, ...]]:
    """Measure both kinds of work on each type of nodes, where it is possible.

    What workers have measured before may be `kept`.

    Raises:
        MachineError: A worker was lost, or found no place on its node.
        JobError: The task's code raised.
    """
    resources = job.resources.worker
    placed = [node.name for node in nodes.nodes for _ in range(node.fits(resources))]
    if not placed:
        raise PlacementError(
            "no worker fits on any node", hint="lower resources.worker or free the cluster"
        )
    found = survey(job, code, nodes, placed, kept)
    workers = Counter(placed)
    others = [node for node in nodes.nodes if not workers[node.name] and node.cpus >= 1]
    collate_s = _collators_alone(job, code, others)
    machines = []
    for node in nodes.nodes:
        fits = workers[node.name]
        if fits:
            machines.append(_of_workers(node, fits, found, resources.cpus))
        elif node.name in collate_s:
            alone_s = max(collate_s[node.name], 1e-9)
            one = Machine(node=node.name, collate_s=alone_s, processes=int(node.cpus))
            machines.append(one)
    return found, tuple(machines)


def _of_workers(node: Node, fits: int, found: Survey, cpus: int) -> Machine:
    readies = found.readies[found.stands_for[node.name]]
    count = len(readies)
    return Machine(
        node=node.name,
        collate_s=max(sum(one.collate_s for one in readies) / count, 1e-9),
        workers=fits,
        speed=Speed(
            fixed_s=sum(one.fixed_s for one in readies) / count,
            micro_batch_s=sum(one.micro_batch_s for one in readies) / count,
        ),
        processes=int(node.cpus),
        beside=max(0, int(node.cpus) - fits * cpus),
    )


def _collators_alone(job: Job, code: TaskCode, nodes: Sequence[Node]) -> dict[str, float]:
    """How long a micro-batch takes a collator on each of these nodes, where no worker fits."""
    if not nodes:
        return {}
    stands_for = chosen(nodes, MOST)
    names = list(dict.fromkeys(stands_for.values()))
    with tempfile.TemporaryDirectory() as nothing:
        config = tried_config(job, code, nothing)
        actors = [_on(name, config) for name in names]
        told = all_got([one.measure.remote() for one in actors], _MEASURES_S)
    for one in actors:
        ray.kill(one)
    for name, seconds in zip(names, told, strict=True):
        if isinstance(seconds, RaycloudError):
            raise seconds
        if isinstance(seconds, Exception):
            raise MachineError(f"a collator on node {name} was lost: {seconds}") from seconds
    seconds = dict(zip(names, told, strict=True))
    return {name: seconds[by] for name, by in stands_for.items()}


def _on(node: str, config: Any) -> Any:
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    options = CollatorActor.options(num_cpus=1, scheduling_strategy=there, **hash_seeded())  # type: ignore[attr-defined]
    return options.remote(config)
