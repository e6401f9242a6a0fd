"""Ingest: one process of a run makes its task's `Source`s into blocks, for all members.

The pipeline is a named actor on the driver's node, whose files the user named, and in nobody's
placement group. The driver makes it where the task looks as if it were needed, else the first
member to need it; any member makes it again where it has died. Here is what others have to know of
it, who need not load what it does that with: see `pipeline`.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raycloud.clock import SystemClock
from raycloud.on_ray.attach import hash_seeded, keep_confidential

if TYPE_CHECKING:
    from raycloud.on_ray.pipeline import PipelineConfig
    from raycloud.spec import Job

_THREADS = 64  # members wait in one while others ask


def pipeline_name() -> str:
    """A name that no other run's pipeline has."""
    return f"raycloud-data-{secrets.token_hex(8)}"


# What is asked while others wait for the data has threads of its own; Ray's types do not know them.
@ray.remote(concurrency_groups={"blocks": 8, "turns": 2})  # type: ignore[call-overload]
class PipelineActor:
    """A run's pipeline and its node's blocks, in a process of their own."""

    def __init__(self, config: PipelineConfig) -> None:
        from raycloud.on_ray.block_store import NodeBlocks, answer
        from raycloud.on_ray.pipeline import Pipeline

        keep_confidential(config.job)
        context = ray.get_runtime_context()
        node = context.get_node_id()
        self._blocks = NodeBlocks(config.task, config.job, node, SystemClock())
        self._pipeline = Pipeline(config, self._blocks, context.current_actor)
        self._answer = answer

    @ray.method(concurrency_group="blocks")
    def ask(self, method: str, *args: Any) -> Any:
        """See `NodeBlocksActor.ask`."""
        return self._answer(self._blocks, method, *args)

    @ray.method(concurrency_group="turns")
    def take(self, ticket: str) -> int | None:
        """See `WorkQueue.take`."""
        return self._pipeline.queue.take(ticket)

    def call(self, method: str, *args: Any) -> Any:
        """What a method of `Pipeline` returns, or the `RaycloudError` that it raised."""
        return self._answer(self._pipeline, method, *args)


def pipeline_of(name: str, config: Any, home: str, *, after: int = -1) -> tuple[int, Any]:
    """The run's pipeline, made if it is not there, and its number.

    Args:
        name: What all pipelines of the run are called, before their numbers.
        config: What to tell a new one: a `PipelineConfig`, or where it is in Ray's store.
        home: The node it has to be on.
        after: The number of the last one known to be dead.
    """
    number = max(_numbers(name), default=-1)
    number = number if number > after else after + 1
    actor = PipelineActor.options(  # type: ignore[attr-defined]
        # Each has a name of its own: a process that holds a dead one is given it again by its name.
        name=f"{name}-{number}",
        get_if_exists=True,
        num_cpus=0,
        max_concurrency=_THREADS,
        # Softly is not enough: it would also go elsewhere. Where the driver dies, so does the run.
        scheduling_strategy=NodeAffinitySchedulingStrategy(home, soft=False),
        **hash_seeded(),
    ).remote(config)
    return number, actor


def living_pipeline(name: str) -> Any:
    """The run's pipeline; a `ValueError` where there is none."""
    return ray.get_actor(f"{name}-{max(_numbers(name))}")


def _numbers(name: str) -> list[int]:
    """The numbers of those that live."""
    found = (one.removeprefix(f"{name}-") for one in ray.util.list_named_actors())
    return [int(one) for one in found if one.isdecimal()]


def settings_digest(job: Job) -> str:
    """A short name for a job's settings."""
    told = json.dumps(job.settings, sort_keys=True, default=repr).encode()
    return hashlib.sha256(told).hexdigest()[:8]
