"""What a run would be: one worker is placed and measures itself; nothing is trained or kept."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING

from raycloud import errors
from raycloud.clock import SystemClock
from raycloud.events import MemberFailed, MemberLost, MemberReady
from raycloud.on_ray.cluster import inventory
from raycloud.on_ray.failure import error_of
from raycloud.on_ray.fleet import Fleet
from raycloud.on_ray.profile import profile_of
from raycloud.on_ray.sources import here, pipeline_name
from raycloud.planning.inventory import require
from raycloud.planning.plan import Plan, make
from raycloud.training.member import MemberConfig
from raycloud.training.words import Word

if TYPE_CHECKING:
    from raycloud.packing.code import TaskCode
    from raycloud.spec import Job


def dry_run(job: Job, code: TaskCode) -> Plan:
    """Measure the task on one worker, and plan for all.

    Raises:
        RaycloudError: The machines cannot hold the job, the task's code raised, or the worker was
            lost.
    """
    nodes = inventory()
    require(nodes, job.resources.worker, job.elastic.min_workers)
    fleet = Fleet(job.resources.worker, SystemClock())
    with tempfile.TemporaryDirectory() as nothing:
        config = MemberConfig(
            member=0,
            node="",
            address="",
            job=code.named_in(job),
            task=code,
            checkpoints=nothing,
            pipeline=pipeline_name(),
            home=here(),
        )
        try:
            fleet.spawn([config])
            ready = _ready(fleet)
        finally:
            fleet.close()
    return make(job, nodes, profile_of([ready]))


def _ready(fleet: Fleet) -> MemberReady:
    while True:
        for event in fleet.poll(1.0, {}):
            match event:
                case Word(event=MemberReady() as ready):
                    return ready
                case Word(event=MemberFailed() as failed):
                    raise error_of(failed)
                case MemberLost():
                    raise errors.MemberLostError(f"the worker was lost: {event.reason}")
                case _:
                    pass
