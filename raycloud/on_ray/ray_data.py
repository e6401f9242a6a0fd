"""Ray Data as it runs here: without bars and talk, and without two processes that nobody needs.

The first of those keeps statistics for Ray's dashboard, the second asks Ray's autoscaler for nodes;
readers ask for no CPU, so that they need neither. Each would take as long to start as a reader.
What is done about them touches Ray's private parts, here alone: `ray.data._internal` of Ray 2.60.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

import ray

_STATISTICS = (
    "register_dataset_to_stats_actor",
    "update_execution_metrics",
    "update_iteration_metrics",
)


def quiet(rows: Any, *, in_order: bool) -> Any:
    """A `ray.data.Dataset` that runs without bars and talk.

    Args:
        rows: The data set, not run yet.
        in_order: Whether its rows come out in the order of what went in.
    """
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    rows.context.enable_progress_bars = False
    rows.context.execution_options.preserve_order = in_order
    return rows


@lru_cache(maxsize=1)
def do_without_servants() -> None:
    """Let Ray Data, where it is driven from this process, start no processes but readers."""
    from ray.data._internal import stats
    from ray.data._internal.cluster_autoscaler import default_autoscaling_coordinator as scaling

    for name in _STATISTICS:
        setattr(stats._StatsManager, name, staticmethod(_nothing))  # noqa: SLF001
    # It also tells Ray Data what the cluster has.
    known = scaling._AutoscalingCoordinatorActor(send_resources_request=_nothing)  # noqa: SLF001
    here = _Here(known)
    scaling.get_or_create_autoscaling_coordinator = lambda: here


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
