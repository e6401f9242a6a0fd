"""The processes of one run, and what they have reserved on Ray: members, collators, the pipeline.

A pool is in the driver, or in a process that outlives it (`failover`): all else is made by the pool
and ends with it, whatever becomes of the driver.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from raycloud.on_ray.attach import NODE_LABEL, draining, hash_seeded
from raycloud.on_ray.ingest import pipeline_of

if TYPE_CHECKING:
    from raycloud.clock import Clock

_THREADS = 4  # of a member: a long poll must not hold up a change
_PLACE_S = 1.0  # for all collators together
_LOOK_S = 0.05


class SupersededError(RunDirectoryError):
    """Another driver has taken the run over: this one leaves it alone."""


@dataclass(slots=True)
class Seat:
    """A place for a member, and the process that is there.

    Attributes:
        group: What is reserved: one bundle.
        shape: What was asked for.
        actor: The process; None: there is none yet.
        begun: What shows that it has begun to be a member; None: from its start.
    """

    group: PlacementGroup
    shape: Shape
    actor: Any = None
    begun: Any = None

    @property
    def is_there(self) -> bool:
        """Whether it has found its place by now."""
        return _is_created(self.group)

    @property
    def nodes(self) -> set[str]:
        """Where it is."""
        return set(placement_group_table(self.group).get("bundles_to_node_id", {}).values())

    def start(self, told: Sequence[Any], term: int) -> Any:
        """Let its process be a member, as one object in Ray's store says; returns its handle."""
        if self.actor is None:
            bundle = dict(self.shape.bundle)
            self.actor = MemberActor.options(  # type: ignore[attr-defined]
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                max_restarts=0,
                max_task_retries=0,
                max_concurrency=_THREADS,
                **_placed_in(self.group),
            ).remote(told, term)
        else:
            self.begun = self.actor.begin.remote(told, term)
        return self.actor

    def end(self) -> None:
        """End its process."""
        _kill(self.actor)
        self.actor = self.begun = None

    def give_back(self) -> None:
        """End it all."""
        self.end()
        _give_back(self.group)


@dataclass(frozen=True, slots=True)
class Shape:
    """What a member needs of a node: resources, and labels."""

    bundle: tuple[tuple[str, float], ...]
    labels: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, bundle: Mapping[str, float], labels: Mapping[str, str]) -> Shape:
        """The same, to be compared."""
        return cls(tuple(sorted(bundle.items())), tuple(sorted(labels.items())))

    def reserve(self, name: str = "") -> Seat:
        """A new seat; it may be long until it is there."""
        group = placement_group(
            [dict(self.bundle)],
            strategy="PACK",
            name=name,
            bundle_label_selector=[dict(self.labels)] if self.labels else None,
        )
        return Seat(group, self)


class ActorPool:
    """The actors and placement groups of one run.

    Configurations come as a list with one reference to Ray's store: Ray leaves such a reference as
    it is, so that a pool need not load what they are made of.

    Attributes:
        term: The number of the driver that it obeys; in the driver's own process there is one.
        most: How many members the run may have for now; None: as many as it asks for.
        pipelines: Begins the names of those that are other runs', too; empty: there are none.
        groups: Begins the names of what it reserves; empty: they have none.
    """

    term = 0
    most: int | None = None
    pipelines = groups = ""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seats: dict[int, Seat] = {}
        self._collators: dict[str, tuple[Any, PlacementGroup]] = {}
        self._pipeline: Any = None
        self._known: dict[str, Any] = {}

    def reserve(self, member: int, bundle: Mapping[str, float], labels: Mapping[str, str]) -> None:
        """Ask for a place for a member; it may come later: see `placed`."""
        self._seats[member] = self._take(Shape.of(bundle, labels))

    def placed(self, members: Sequence[int]) -> list[int]:
        """Those of them that have found a place by now."""
        return [m for m in members if m in self._seats and self._is_there(m)]

    def spare(self, bundle: Mapping[str, float], labels: Mapping[str, str]) -> int:  # noqa: ARG002 - here there are none
        """How many places are reserved, and no member has them."""
        return 0

    def start(self, member: int, config: Sequence[Any]) -> Any:
        """Start a member in its place; returns its handle."""
        return self._seats[member].start(config, self.term)

    def drop(self, members: Sequence[int]) -> None:
        """End these members, and give back what they reserved."""
        for member in members:
            if (seat := self._seats.pop(member, None)) is not None:
                self._put(seat)

    def reassign(self, before: int, member: int, leaving: Sequence[str]) -> bool:
        """End a member, and give its place to another; whether it is there, and may be used.

        Where its node is dead, or one of the nodes that are `leaving`, Ray would look for another
        one, which may take long: the place is given back.
        """
        seat = self._seats.pop(before, None)
        if seat is None:
            return False
        seat.end()
        if seat.is_there and seat.nodes.isdisjoint(leaving):
            self._seats[member] = seat
            return True
        seat.give_back()
        return False

    def rename(self, before: int, member: int) -> None:
        """What was one member's process and place is another's."""
        if before in self._seats:
            self._seats[member] = self._seats.pop(before)

    def keep(self, members: Sequence[int]) -> None:
        """Drop all others, also those that wait for a place."""
        self.drop([member for member in self._seats if member not in members])

    def _take(self, shape: Shape) -> Seat:
        return shape.reserve()

    def _is_there(self, member: int) -> bool:
        return self._seats[member].is_there

    def _put(self, seat: Seat) -> None:
        seat.give_back()

    def start_collators(
        self, on: Sequence[str], pipeline: str, config: Sequence[Any]
    ) -> tuple[str, ...]:
        """Start collators on these nodes where free CPUs are there; returns their names.

        Args:
            on: The id of a node for each; empty: it may be on any.
            pipeline: The name of the data's pipeline.
            config: See the class.
        """
        run = secrets.token_hex(4)  # several may have one pipeline
        names = [f"{pipeline}-{run}-collator-{number}" for number in range(len(on))]
        for name, node in zip(names, on, strict=True):
            group = placement_group(
                [{"CPU": 1}],
                name=self.groups and f"{self.groups}-{name}",
                bundle_label_selector=[{NODE_LABEL: node}] if node else None,
            )
            self._collators[name] = None, group
        until_s = self._clock.monotonic_s() + _PLACE_S
        pause = threading.Event()
        for name in names:
            _, group = self._collators[name]
            while not (placed := _is_created(group)) and self._clock.monotonic_s() < until_s:
                pause.wait(_LOOK_S)
            if not placed:
                remove_placement_group(group)
                del self._collators[name]
                continue
            options = CollatorActor.options(name=name, num_cpus=1, **_placed_in(group))  # type: ignore[attr-defined]
            self._collators[name] = options.remote(config[0]), group
        return tuple(self._collators)

    def start_pipeline(self, name: str, config: Sequence[Any], home: str) -> Any:
        """Start the data's pipeline on the node `home`; returns its handle."""
        _, self._pipeline = pipeline_of(name, config[0], home)
        return self._pipeline

    def check(self) -> None:
        """See that this driver is obeyed: in its own process it is."""

    def remember(self, known: Mapping[str, Any]) -> None:
        """Keep what the next driver has to know, beside what is known already."""
        self._known.update(known)

    def found(self) -> tuple[dict[str, Any], dict[int, Any], tuple[str, ...]]:
        """What was to be remembered, the members' handles, and the collators' names."""
        actors = {member: seat.actor for member, seat in self._seats.items() if seat.actor}
        return self._known, actors, tuple(self._collators)

    def close(self) -> None:
        """End all, and give all back."""
        self.drop([*self._seats])
        for actor, group in self._collators.values():
            _kill(actor)
            _give_back(group)
        _kill(self._pipeline)
        self._pipeline, self._known, self._collators = None, {}, {}


def _is_created(group: PlacementGroup) -> bool:
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
        """Give a member the place of one that has died; whether it is there, and may be used."""
        if before not in self._before:
            return False
        self._before.remove(before)
        return self._pool.reassign(before, member, tuple(draining(self._clock)))

    def give_back(self) -> None:
        """Nobody is to have those that are left."""
        if self._before:
            self._pool.drop(tuple(self._before))
            self._before.clear()
