"""What makes and holds the processes of a run: in the driver, or in a process that outlives it.

On a cluster that was there before, the keeper is a detached actor on the driver's node. All else is
made by it and so ends with it, whatever becomes of the driver: members, their reservations,
collators, the data's pipeline. Left alone for too long it ends by itself.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raycloud.clock import SystemClock
from raycloud.errors import RunDirectoryError
from raycloud.on_ray.actors import MemberActor
from raycloud.on_ray.cluster import hash_seeded
from raycloud.on_ray.crew import Crew

if TYPE_CHECKING:
    from raycloud.clock import Clock

LEASE_S = 10.0  # a driver that is silent for so long may be followed by another
ANSWER_S = 30.0  # so long a driver waits for what it has asked for
_LOOK_S = 0.5
_THREADS = 4  # a long poll must not hold up a change


@dataclass(frozen=True, slots=True)
class Opaque:
    """What the keeper passes on without looking: it need not load what it is made of.

    Attributes:
        ref: An object in Ray's store.
    """

    ref: Any


class FollowedError(RunDirectoryError):
    """Another driver has taken the run over: this one leaves it alone."""


class Keeper:
    """The processes of one run, and what they have reserved.

    Args:
        clock: Where seconds come from.

    Attributes:
        number: Of the driver that it obeys; there is one.
    """

    number = 0

    def __init__(self, clock: Clock) -> None:
        """None."""
        self._groups: dict[int, PlacementGroup] = {}
        self._actors: dict[int, Any] = {}
        self._crew = Crew(clock)
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

    def start(self, member: int, config: Opaque, cpus: int, gpus: int) -> Any:
        """Start a member in its place; returns its handle."""
        actor = MemberActor.options(  # type: ignore[attr-defined]
            num_cpus=cpus,
            num_gpus=gpus,
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=_THREADS,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self._groups[member], placement_group_bundle_index=0
            ),
            **hash_seeded(),
        ).remote([config.ref])
        self._actors[member] = actor
        return actor

    def drop(self, members: Sequence[int]) -> None:
        """End these members, and give back what they reserved."""
        for member in members:
            self._end(member)
            group = self._groups.pop(member, None)
            with contextlib.suppress(RayError):
                if group is not None:
                    remove_placement_group(group)

    def hand_on(self, before: int, member: int) -> PlacementGroup | None:
        """End a member, and give its place to another; None: it has none."""
        self._end(before)
        group = self._groups.pop(before, None)
        if group is not None:
            self._groups[member] = group
        return group

    def _end(self, member: int) -> None:
        actor = self._actors.pop(member, None)
        with contextlib.suppress(RayError):  # the cluster is going away itself
            if actor is not None:
                ray.kill(actor)

    def rename(self, before: int, member: int) -> None:
        """What was one member's process and place is another's."""
        for held in (self._groups, self._actors):
            if before in held:
                held[member] = held.pop(before)

    def keep(self, members: Sequence[int]) -> None:
        """Drop all others, also those that wait for a place."""
        self.drop([member for member in self._groups if member not in members])

    def crew(self, count: int, name: str, config: Opaque) -> tuple[str, ...]:
        """Start collators; see `Crew.start`."""
        return self._crew.start(count, name, config.ref)

    def pipeline(self, name: str, config: Opaque, home: str) -> Any:
        """Start the data's pipeline on the node `home`; returns its handle."""
        from raycloud.on_ray.pipeline_actor import pipeline_of  # loads much

        _, self._pipeline = pipeline_of(name, lambda: config.ref, home)
        return self._pipeline

    def check(self) -> None:
        """A keeper in the driver's own process obeys no other one."""

    def remember(self, known: Mapping[str, Any]) -> None:
        """Keep what the next driver has to know, beside what is known already."""
        self._known.update(known)

    def found(self) -> tuple[dict[str, Any], dict[int, Any], tuple[str, ...]]:
        """What was to be remembered, the members' handles, and the collators' names."""
        return self._known, dict(self._actors), self._crew.names

    def close(self) -> None:
        """End all, and give all back."""
        self.drop([*self._groups])
        self._crew.close()
        if self._pipeline is not None:
            with contextlib.suppress(RayError):
                ray.kill(self._pipeline)
        self._pipeline, self._known = None, {}


class Reign:
    """Which driver a keeper obeys, and whether there is one. Any thread may ask.

    Args:
        clock: Where seconds come from.
        orphan_s: A keeper that no driver speaks to for so long is alone.
    """

    def __init__(self, clock: Clock, orphan_s: float) -> None:
        """Nobody's yet."""
        self._clock, self._orphan_s = clock, orphan_s
        self._lock = ""
        self._heard_s = clock.monotonic_s()
        self._called_s: float | None = None  # since when a call is carried out
        self._over = False
        self._turn = threading.Lock()
        self.number = 0

    def claim(self, lock: str) -> int | None:
        """A driver wants to be obeyed: its number; None while the one before it may be alive.

        Args:
            lock: Names the lock on the run's log that it holds, so that whoever held it before is
                dead; empty where the file system has none.
        """
        with self._turn:
            dead = bool(lock) and lock == self._lock
            if self._over or (self.number and not dead and self._silent_s() < LEASE_S):
                return None
            self.number, self._lock = self.number + 1, lock
            self._heard_s = self._clock.monotonic_s()
            return self.number

    def hear(self, number: int) -> bool:
        """A driver speaks; whether it is the one that is obeyed."""
        with self._turn:
            if number != self.number:
                return False
            self._heard_s = self._clock.monotonic_s()
            return True

    @contextlib.contextmanager
    def hearing(self, number: int) -> Iterator[bool]:
        """A driver's call is carried out, and it is heard meanwhile, as long as it waits for it.

        Yields:
            Whether it is the one that is obeyed.
        """
        obeyed = self.hear(number)
        if not obeyed:
            yield False
            return
        with self._turn:
            self._called_s = self._heard_s
        try:
            yield True
        finally:
            with self._turn:
                self._heard_s = self._clock.monotonic_s() - self._silent_s()
                self._called_s = None

    def end_if_alone(self) -> bool:
        """Whether no driver has spoken for too long; then none can claim the keeper any more."""
        with self._turn:
            self._over = self._over or self._silent_s() >= self._orphan_s
            return self._over

    def _silent_s(self) -> float:
        heard_s, now_s = self._heard_s, self._clock.monotonic_s()
        if self._called_s is not None:
            heard_s = max(heard_s, min(now_s, self._called_s + ANSWER_S))
        return now_s - heard_s


@ray.remote(num_cpus=0)
class KeeperActor:
    """A keeper in a process of its own. It ends itself once it is alone."""

    def __init__(self, orphan_s: float) -> None:
        """Hold nothing, for nobody."""
        self._keeper = Keeper(SystemClock())
        self._reign = Reign(SystemClock(), orphan_s)
        self._me = ray.get_runtime_context().current_actor
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def claim(self, lock: str) -> int | None:
        """See `Reign.claim`."""
        return self._reign.claim(lock)

    def hear(self, number: int) -> bool:
        """See `Reign.hear`."""
        return self._reign.hear(number)

    def call(self, number: int, method: str, *args: Any) -> tuple[bool, Any]:
        """Whether this driver is obeyed, and then what a method of `Keeper` returns."""
        with self._reign.hearing(number) as obeyed:
            return obeyed, getattr(self._keeper, method)(*args) if obeyed else None

    def _watch(self) -> None:
        pause = threading.Event()
        while not self._reign.end_if_alone():
            pause.wait(_LOOK_S)
        try:
            self._keeper.close()
        finally:
            ray.kill(self._me)
