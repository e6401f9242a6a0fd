"""raycloud's members in a group that never changes, and of which nobody asks anything.

Model, step, transport and control lane are those of every raycloud run, in actors of a Ray that is
set as raycloud's own. Left out is what a job needs to be elastic while nothing happens: a thread to
answer beside the one that computes, events and answers about once a second, the looks at whether it
stands still, at notices of clouds and at what is logged, and a driver that takes all that in.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import ray

from benchmarks.contestants import Attempt, raycloud_job
from benchmarks.raycloud_task import Throughput
from benchmarks.workload import WORKERS
from raycloud.commands import Form
from raycloud.net.rendezvous_store import Rendezvous
from raycloud.on_ray.attach import attached
from raycloud.recovery.rendezvous import HOST, Meeting
from raycloud.spec import Job
from raycloud.worker.context import Changes, MemberConfig
from raycloud.worker.worker import Worker


class FixedMember:
    """One member, which computes to the last step in the thread that it is called in."""

    def __init__(self, config: MemberConfig) -> None:
        changes = Changes(feed_depth=config.job.data.prefetch_steps)
        self._life = Worker(config, HOST, changes, lambda _: None)
        self._life.measure()

    def train(self, meeting: Meeting) -> None:
        """Meet the others, and compute to the end."""
        self._life.train(meeting, lambda: False)


def fixed_job(attempt: Attempt) -> dict[str, Any]:
    """The workload in small micro-batches, with no checkpoint before the last step."""
    values = raycloud_job(attempt)
    return {**values, "micro_batch": 4, "checkpoint": {"every_steps": attempt.steps}}


def main() -> None:
    """Start Ray, train, end Ray."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--directory", type=Path, required=True)
    asked = parser.parse_args()
    attempt = Attempt(directory=asked.directory, steps=asked.steps)
    job = Job(**{**fixed_job(attempt), "task": Throughput})
    with attached(job, None):
        address = ray.util.get_node_ip_address()
        made = ray.remote(num_cpus=1)(FixedMember)
        members = [
            made.remote(
                MemberConfig(
                    member=number,
                    node="",
                    address=address,
                    job=job,
                    task=Throughput,
                    checkpoints=str(attempt.directory / "checkpoints"),
                )
            )
            for number in range(WORKERS)
        ]
        share = job.global_batch // job.micro_batch // WORKERS
        numbers = tuple(range(WORKERS))
        form = Form(generation=0, members=numbers, shares=(share,) * WORKERS, step=0)
        rendezvous = Rendezvous(address)
        meetings = [Meeting.of(form, n, rendezvous.place) for n in numbers]
        ray.get([one.train.remote(told) for one, told in zip(members, meetings, strict=True)])


if __name__ == "__main__":
    main()
