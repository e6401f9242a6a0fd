"""The collators' processes: placed as far as there is room, and ended."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import (
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raycloud.on_ray.actors import CollatorActor
from raycloud.on_ray.cluster import hash_seeded

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

    from raycloud.clock import Clock

_PLACE_S = 1.0  # for all of them together
_LOOK_S = 0.05


class Crew:
    """The collators of a run, as whoever made them holds them.

    Args:
        clock: Where seconds come from.
    """

    def __init__(self, clock: Clock) -> None:
        """None yet."""
        self._clock = clock
        self._actors: dict[str, Any] = {}
        self._groups: list[PlacementGroup] = []

    def start(self, count: int, pipeline: str, config: Any) -> tuple[str, ...]:
        """Start as many as are asked for and free CPUs are there; returns their names.

        Args:
            count: How many.
            pipeline: What the run's pipeline is called.
            config: That of a member, in Ray's store.
        """
        groups = [placement_group([{"CPU": 1}]) for _ in range(count)]
        until_s = self._clock.monotonic_s() + _PLACE_S
        for number, group in enumerate(groups):
            if not self._placed(group, until_s):
                remove_placement_group(group)
                continue
            name = f"{pipeline}-collator-{number}"
            self._groups.append(group)
            self._actors[name] = CollatorActor.options(  # type: ignore[attr-defined]
                name=name,
                num_cpus=1,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=0
                ),
                **hash_seeded(),
            ).remote(config)
        return tuple(self._actors)

    def _placed(self, group: PlacementGroup, until_s: float) -> bool:
        """Whether there is a place for it, by then or when it is looked at."""
        pause = threading.Event()
        while placement_group_table(group).get("state") != "CREATED":
            if self._clock.monotonic_s() >= until_s:
                return False
            pause.wait(_LOOK_S)
        return True

    @property
    def names(self) -> tuple[str, ...]:
        """Those that there are."""
        return tuple(self._actors)

    def close(self) -> None:
        """End them."""
        for actor in self._actors.values():
            with contextlib.suppress(RayError):  # the cluster is going away itself
                ray.kill(actor)
        for group in self._groups:
            with contextlib.suppress(RayError):
                remove_placement_group(group)
        self._actors, self._groups = {}, []
