"""The process of a run's pipeline: a named actor.

The driver makes it where the task looks as if it were needed, else the first member to need it; any
member makes it again where it has died. It is on the driver's node, whose files the user named, and
in nobody's placement group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raycloud.clock import SystemClock
from raycloud.on_ray.cluster import hash_seeded
from raycloud.on_ray.confidential import keep_confidential
from raycloud.on_ray.holder import Holder, answer, place_of
from raycloud.on_ray.pipeline import Pipeline, PipelineConfig
from raycloud.step.contract import construct

_THREADS = 64  # members wait in one while others ask


# What is asked while others wait for the data has threads of its own; Ray's types do not know them.
@ray.remote(concurrency_groups={"blocks": 8, "turns": 2})  # type: ignore[call-overload]
class PipelineActor:
    """A run's pipeline and its node's holder, in a process of their own."""

    def __init__(self, config: PipelineConfig) -> None:
        """Find out where this is."""
        keep_confidential(config.job)
        context = ray.get_runtime_context()
        place = place_of(config.job, context.get_node_id(), f"run {config.job.name}")
        clock = SystemClock()
        self._holder = Holder(place, lambda: construct(config.task, config.job), clock)
        self._pipeline = Pipeline(config, self._holder, context.current_actor, clock)

    @ray.method(concurrency_group="blocks")
    def ask(self, method: str, *args: Any) -> Any:
        """See `HolderActor.ask`."""
        return answer(self._holder, method, *args)

    @ray.method(concurrency_group="turns")
    def take(self, ticket: str) -> int | None:
        """See `Turns.take`."""
        return self._pipeline.take(ticket)

    def call(self, method: str, *args: Any) -> Any:
        """What a method of `Pipeline` returns, or the `RaycloudError` that it raised."""
        return answer(self._pipeline, method, *args)


def pipeline_of(
    name: str, config: Callable[[], PipelineConfig], home: str, *, after: int = -1
) -> tuple[int, Any]:
    """The run's pipeline, made if it is not there, and its number.

    Args:
        name: What all pipelines of the run are called, before their numbers.
        config: What to tell a new one.
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
    ).remote(config())
    return number, actor


def living(name: str) -> Any:
    """The run's pipeline, if there is one.

    Raises:
        ValueError: There is none.
    """
    return ray.get_actor(f"{name}-{max(_numbers(name))}")


def _numbers(name: str) -> list[int]:
    """The numbers of those that live."""
    found = (one.removeprefix(f"{name}-") for one in ray.util.list_named_actors())
    return [int(one) for one in found if one.isdecimal()]
