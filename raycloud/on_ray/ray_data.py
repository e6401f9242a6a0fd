"""Ray Data as it runs here: beside members that have reserved every CPU, and without talk.

It would wait for a CPU that nobody gives back, and start two more processes, each of which takes as
long to start as a reader: one keeps statistics for Ray's dashboard, one asks its autoscaler for
nodes. What is done about that touches Ray's private parts, here alone: `ray.data._internal` of Ray
2.60.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

import ray

_CPUS = "raycloud.cpus"
_STATISTICS = (
    "register_dataset_to_stats_actor",
    "update_execution_metrics",
    "update_iteration_metrics",
)


def quiet(rows: Any, *, cpus: int, in_order: bool) -> Any:
    """A `ray.data.Dataset` that runs without bars and talk, and keeps few CPUs busy.

    Args:
        rows: The data set, not run yet.
        cpus: Most tasks that each of its operators runs at once.
        in_order: Whether its rows come out in the order of what went in.
    """
    from ray.data._internal.execution import backpressure_policy as policies

    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    context = rows.context
    context.enable_progress_bars = False
    context.execution_options.preserve_order = in_order
    context.execution_no_progress_timeout_s = -1  # preprocessing may take its time
    context.set_config(_CPUS, cpus)
    context.set_config(
        policies.ENABLED_BACKPRESSURE_POLICIES_CONFIG_KEY,
        [*policies.ENABLED_BACKPRESSURE_POLICIES, _Modest],
    )
    return rows


def needs_cpu(rows: Any) -> bool:
    """Whether a `ray.data.Dataset` has to shuffle or sort, which Ray Data does on CPUs of its own.

    What reads and maps is made to do without by `make_modest`.
    """
    from ray.data._internal.logical.operators import AbstractAllToAll

    plan = rows._logical_plan.dag  # noqa: SLF001
    return any(isinstance(operator, AbstractAllToAll) for operator in plan.post_order_iter())


class _Modest:
    """A back-pressure policy: no operator runs more tasks than there are CPUs to keep busy."""

    name = "modest"

    def __init__(self, context: Any, *_: Any) -> None:
        self._cpus = context.get_config(_CPUS)

    def can_add_input(self, operator: Any) -> bool:
        return bool(operator.num_active_tasks() < self._cpus)

    def max_task_output_bytes_to_read(self, operator: Any) -> None:
        del operator


@lru_cache(maxsize=1)
def make_modest() -> None:
    """Let Ray Data, where it is driven from this process, ask for no CPU and start only readers."""
    from ray.data._internal import stats
    from ray.data._internal.cluster_autoscaler import default_autoscaling_coordinator as scaling
    from ray.data._internal.execution.operators import map_operator

    for name in _STATISTICS:
        setattr(stats._StatsManager, name, staticmethod(_nothing))  # noqa: SLF001
    # It also tells Ray Data what the cluster has.
    known = scaling._AutoscalingCoordinatorActor(send_resources_request=_nothing)  # noqa: SLF001
    here = _Here(known)
    scaling.get_or_create_autoscaling_coordinator = lambda: here
    operators: Any = map_operator
    whole = operators._canonicalize_ray_remote_args  # noqa: SLF001
    operators._canonicalize_ray_remote_args = lambda options: whole(  # noqa: SLF001
        {"num_cpus": 0, **options}
    )


def _nothing(*_: Any, **__: Any) -> None:
    return


class _Here:
    """An object of this process that is called as an actor is."""

    def __init__(self, one: Any) -> None:
        self._one = one

    def __getattr__(self, name: str) -> Any:
        return _Method(getattr(self._one, name))


class _Method:
    def __init__(self, method: Any) -> None:
        self._method = method

    def remote(self, *args: Any, **named: Any) -> Any:
        return ray.put(self._method(*args, **named))
