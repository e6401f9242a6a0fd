"""The members' processes: placed all or none, asked for events, ended."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raycloud.errors import PlacementError
from raycloud.events import Event, MemberLost
from raycloud.on_ray.actors import MemberActor
from raycloud.on_ray.crew import Crew
from raycloud.training.journal import Lines

if TYPE_CHECKING:
    from raycloud.commands import Change
    from raycloud.spec.job import RoleResources
    from raycloud.training.member import Meeting, MemberConfig

_POLL_S = 2.0
_PLACE_S = 60
_THREADS = 4  # a long poll must not hold up a change


@dataclass
class _Seat:
    """One member's process and the reservation it runs in."""

    group: PlacementGroup
    actor: Any
    poll: Any


class Fleet:
    """Members of one run.

    Args:
        resources: What each worker reserves.
    """

    def __init__(self, resources: RoleResources) -> None:
        """No members yet."""
        self._resources = resources
        self._seats: dict[int, _Seat] = {}
        self._crew = Crew()
        self._lines: list[Lines] = []
        self._missed: list[Event] = []

    def spawn(self, configs: Sequence[MemberConfig]) -> int:
        """Reserve a place for every member, then start them all, and collators beside them.

        Returns:
            How many collators there are: fewer than asked for where CPUs are short.

        Raises:
            PlacementError: Not all fit within a minute; nothing is left reserved.
        """
        groups = [self._reserve() for _ in configs]
        placed = sum(1 for _ in itertools.takewhile(lambda g: g.wait(_PLACE_S), groups))
        if placed < len(groups):
            for group in groups:
                remove_placement_group(group)
            raise PlacementError(
                f"only {placed} of {len(groups)} workers found a place within {_PLACE_S} s: "
                f"each asks for {self._bundle()}",
                hint="lower elastic.max_workers or resources.worker, or free the cluster",
            )
        collators = self._crew.start(configs[0])
        for config, group in zip(configs, groups, strict=True):
            actor = MemberActor.options(  # type: ignore[attr-defined]
                num_cpus=self._resources.cpus,
                num_gpus=self._resources.gpus,
                max_restarts=0,
                max_task_retries=0,
                max_concurrency=_THREADS,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=0
                ),
            ).remote(replace(config, collators=collators))
            self._seats[config.member] = _Seat(
                group=group, actor=actor, poll=actor.poll.remote(_POLL_S)
            )
        return len(collators)

    def poll(self, timeout_s: float) -> list[Event]:
        """Events of all members that came within `timeout_s`, in order for each member."""
        if self._missed:
            missed, self._missed = self._missed, []
            return missed
        by_poll = {seat.poll: member for member, seat in self._seats.items()}
        if not by_poll:
            return []
        ready, _ = ray.wait(list(by_poll), num_returns=1, timeout=timeout_s)
        if ready:  # whoever else is ready by now
            ready, _ = ray.wait(list(by_poll), num_returns=len(by_poll), timeout=0)
        events: list[Event] = []
        for poll in ready:
            member = by_poll[poll]
            try:
                for told in ray.get(poll):
                    (self._lines if isinstance(told, Lines) else events).append(told)
            except RayError as error:  # died, was evicted, or its node or reservation is gone
                events.append(MemberLost(member=member, reason=_reason(error)))
                self._drop(member)
                continue
            seat = self._seats[member]
            seat.poll = seat.actor.poll.remote(_POLL_S)
        return events

    def lines(self) -> list[Lines]:
        """What members' logs have said since the last call; it came with their events."""
        found, self._lines = self._lines, []
        return found

    def form(self, member: int, meeting: Meeting) -> None:
        """Tell a member where to meet the others."""
        if seat := self._seats.get(member):
            seat.actor.form.remote(meeting)
        else:  # it had done its part, and its end was no loss then
            self._missed.append(MemberLost(member=member, reason="its process has ended"))

    def prepare(self, member: int, number: int, change: Change) -> None:
        """Send a change ahead to a member."""
        if seat := self._seats.get(member):
            seat.actor.prepare.remote(number, change)

    def release(self, members: Sequence[int]) -> None:
        """End processes and give back what they reserved."""
        for member in members:
            self._drop(member)

    def close(self) -> None:
        """End all that is left."""
        self.release(list(self._seats))
        self._crew.close()

    def _drop(self, member: int) -> None:
        seat = self._seats.pop(member, None)
        if seat is None:
            return
        try:
            ray.kill(seat.actor)
            remove_placement_group(seat.group)
        except RayError:  # the cluster is going away itself
            return

    def _reserve(self) -> PlacementGroup:
        labels = self._resources.labels
        group: PlacementGroup = placement_group(
            [self._bundle()],
            strategy="PACK",
            bundle_label_selector=[dict(labels)] if labels else None,
        )
        return group

    def _bundle(self) -> dict[str, float]:
        bundle: dict[str, float] = {"CPU": self._resources.cpus}
        if self._resources.gpus:
            bundle["GPU"] = self._resources.gpus
        if self._resources.memory_bytes:
            bundle["memory"] = self._resources.memory_bytes
        return bundle


def _reason(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
