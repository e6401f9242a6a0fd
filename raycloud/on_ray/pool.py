"""The processes of one run, and what they have reserved on Ray: members, collators, the pipeline.

A pool is in the driver, or in a process that outlives it (`failover`): all else is made by the pool
and ends with it, whatever becomes of the driver.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raycloud.errors import RunDirectoryError
from raycloud.on_ray.actors import CollatorActor, MemberActor
from raycloud.on_ray.attach import draining, hash_seeded

if TYPE_CHECKING:
    from raycloud.clock import Clock

_THREADS = 4  # of a member: a long poll must not hold up a change
_PLACE_S = 1.0  # for all collators together
_LOOK_S = 0.05


class SupersededError(RunDirectoryError):
    """Another driver has taken the run over: this one leaves it alone."""


class ActorPool:
    """The actors and placement groups of one run.

    Configurations come as a list with one reference to Ray's store: Ray leaves such a reference as
    it is, so that a pool need not load what they are made of.

    Attributes:
        term: The number of the driver that it obeys; in the driver's own process there is one.
    """

    term = 0

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._groups: dict[int, PlacementGroup] = {}
        self._actors: dict[int, Any] = {}
        self._collators: dict[str, tuple[Any, PlacementGroup]] = {}
        self._pipeline: Any = None
        self._known: dict[str, Any] = {}

    def reserve(
        self, member: int, bundle: Mapping[str, float], labels: Mapping[str, str]
    ) -> PlacementGroup:
        """Ask for a place for a member; it may come later."""
        group: PlacementGroup = placement_group(
            [dict(bundle)],
            strategy="PACK",
            bundle_label_selector=[dict(labels)] if labels else None,
        )
        self._groups[member] = group
        return group

    def start(self, member: int, config: Sequence[Any], cpus: int, gpus: int) -> Any:
        """Start a member in its place; returns its handle."""
        actor = MemberActor.options(  # type: ignore[attr-defined]
            num_cpus=cpus,
            num_gpus=gpus,
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=_THREADS,
            **_placed_in(self._groups[member]),
        ).remote(config)
        self._actors[member] = actor
        return actor

    def drop(self, members: Sequence[int]) -> None:
        """End these members, and give back what they reserved."""
        for member in members:
            _kill(self._actors.pop(member, None))
            _give_back(self._groups.pop(member, None))

    def reassign(self, before: int, member: int) -> PlacementGroup | None:
        """End a member, and give its place to another; None: it has none."""
        _kill(self._actors.pop(before, None))
        if before in self._groups:
            self._groups[member] = self._groups.pop(before)
        return self._groups.get(member)

    def rename(self, before: int, member: int) -> None:
        """What was one member's process and place is another's."""
        for held in (self._groups, self._actors):
            if before in held:
                held[member] = held.pop(before)

    def keep(self, members: Sequence[int]) -> None:
        """Drop all others, also those that wait for a place."""
        self.drop([member for member in self._groups if member not in members])

    def start_collators(self, count: int, pipeline: str, config: Sequence[Any]) -> tuple[str, ...]:
        """Start as many collators as are asked for and free CPUs are there; returns their names."""
        groups = [placement_group([{"CPU": 1}]) for _ in range(count)]
        until_s = self._clock.monotonic_s() + _PLACE_S
        pause = threading.Event()
        for number, group in enumerate(groups):
            while not (placed := is_created(group)) and self._clock.monotonic_s() < until_s:
                pause.wait(_LOOK_S)
            if not placed:
                remove_placement_group(group)
                continue
            name = f"{pipeline}-collator-{number}"
            options = CollatorActor.options(name=name, num_cpus=1, **_placed_in(group))  # type: ignore[attr-defined]
            self._collators[name] = options.remote(config[0]), group
        return tuple(self._collators)

    def start_pipeline(self, name: str, config: Sequence[Any], home: str) -> Any:
        """Start the data's pipeline on the node `home`; returns its handle."""
        from raycloud.on_ray.ingest import pipeline_of  # loads much

        _, self._pipeline = pipeline_of(name, config[0], home)
        return self._pipeline

    def check(self) -> None:
        """See that this driver is obeyed: in its own process it is."""

    def remember(self, known: Mapping[str, Any]) -> None:
        """Keep what the next driver has to know, beside what is known already."""
        self._known.update(known)

    def found(self) -> tuple[dict[str, Any], dict[int, Any], tuple[str, ...]]:
        """What was to be remembered, the members' handles, and the collators' names."""
        return self._known, dict(self._actors), tuple(self._collators)

    def close(self) -> None:
        """End all, and give all back."""
        self.drop([*self._groups])
        for actor, group in self._collators.values():
            _kill(actor)
            _give_back(group)
        _kill(self._pipeline)
        self._pipeline, self._known, self._collators = None, {}, {}


def is_created(group: PlacementGroup) -> bool:
    """Whether there is a place for it now."""
    return bool(placement_group_table(group).get("state") == "CREATED")


def _placed_in(group: PlacementGroup) -> dict[str, Any]:
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
    return {"scheduling_strategy": strategy, **hash_seeded()}


def _kill(actor: Any) -> None:
    with contextlib.suppress(RayError):  # the cluster is going away itself
        if actor is not None:
            ray.kill(actor)


def _give_back(group: PlacementGroup | None) -> None:
    with contextlib.suppress(RayError):
        if group is not None:
            remove_placement_group(group)


class Vacancies:
    """The places of members that have died, kept until it is known who is to have them."""

    def __init__(self, pool: ActorPool, clock: Clock) -> None:
        self._pool, self._clock = pool, clock
        self._before: list[int] = []
        self.add = self._before.append

    def __contains__(self, member: int) -> bool:
        """Whether this member has died, and its place is kept."""
        return member in self._before

    def take(self, before: int, member: int) -> bool:
        """Give a member the place of one that has died; whether it is there, and may be used.

        Where its node is dead, or drained, Ray would look for another one, which may take long.
        """
        if before not in self._before:
            return False
        self._before.remove(before)
        group = self._pool.reassign(before, member)
        if group is not None:
            nodes = set(placement_group_table(group).get("bundles_to_node_id", {}).values())
            if is_created(group) and nodes.isdisjoint(draining(self._clock)):
                return True
        self._pool.drop([member])
        return False

    def give_back(self) -> None:
        """Nobody is to have those that are left."""
        if self._before:
            self._pool.drop(tuple(self._before))
            self._before.clear()
