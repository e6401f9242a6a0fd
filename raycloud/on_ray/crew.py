"""The collators' processes: placed as far as there is room, and ended."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raycloud.on_ray.actors import CollatorActor

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

_PLACE_S = 1.0


class Crew:
    """The collators of a run, as whoever made them holds them."""

    def __init__(self) -> None:
        """None yet."""
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
        for number, group in enumerate(groups):
            if not group.wait(_PLACE_S):
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
            ).remote(config)
        return tuple(self._actors)

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
