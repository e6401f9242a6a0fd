"""The members' processes: placed all or none, asked for events, ended."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
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

from raycloud.control.hearing import Heard
from raycloud.errors import PlacementError
from raycloud.events import Event, MemberLost, MemberSpawned
from raycloud.on_ray.actors import MemberActor
from raycloud.on_ray.crew import Crew
from raycloud.training.journal import Lines
from raycloud.training.stillness import Still

if TYPE_CHECKING:
    from raycloud.clock import Clock
    from raycloud.commands import Change
    from raycloud.spec.job import RoleResources
    from raycloud.training.member import Meeting, MemberConfig

POLL_S = 1.0  # a member that has nothing to say says so
_LOOK_S = 0.5  # between two looks whether there is a place
_PLACE_S = 60
_THREADS = 4  # a long poll must not hold up a change


@dataclass
class _Seat:
    """One member's process, the reservation it runs in, and by when it is to answer."""

    group: PlacementGroup
    actor: Any
    poll: Any = None
    due_s: float = 0.0


class Fleet:
    """Members of one run.

    Args:
        resources: What each worker reserves.
        clock: To see who answers in time.
    """

    def __init__(self, resources: RoleResources, clock: Clock) -> None:
        """No members yet."""
        self._resources = resources
        self._clock = clock
        self._polled_s = float("-inf")
        self._late_s: dict[int, float] = {}
        self._still_s: dict[int, float] = {}
        self._waiting: dict[int, tuple[PlacementGroup, MemberConfig]] = {}
        self._looked_s = 0.0
        self._collators: tuple[str, ...] = ()
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
        self._collators = self._crew.start(configs[0])
        for config, group in zip(configs, groups, strict=True):
            self._start(config, group)
        return len(self._collators)

    def await_place(self, config: MemberConfig) -> None:
        """Start a member as soon as there is a place for it; `MemberSpawned` then says so."""
        self._waiting[config.member] = self._reserve(), config

    def _start(self, config: MemberConfig, group: PlacementGroup) -> None:
        actor = MemberActor.options(  # type: ignore[attr-defined]
            num_cpus=self._resources.cpus,
            num_gpus=self._resources.gpus,
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=_THREADS,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=0
            ),
        ).remote(replace(config, collators=self._collators))
        self._ask(self._seats.setdefault(config.member, _Seat(group=group, actor=actor)))

    def _start_placed(self) -> list[Event]:
        """Start whoever has found a place meanwhile."""
        now_s = self._clock.monotonic_s()
        if not self._waiting or now_s - self._looked_s < _LOOK_S:
            return []
        self._looked_s = now_s
        placed = [
            member
            for member, (group, _) in self._waiting.items()
            if placement_group_table(group).get("state") == "CREATED"
        ]
        for member in placed:
            group, config = self._waiting.pop(member)
            self._start(config, group)
        return [MemberSpawned(member=member) for member in placed]

    def poll(self, timeout_s: float) -> list[Event]:
        """Events of all members that came within `timeout_s`, in order for each member."""
        if self._missed:
            missed, self._missed = self._missed, []
            return missed
        events = self._start_placed()
        before_s = self._polled_s
        by_poll = {seat.poll: member for member, seat in self._seats.items()}
        if not by_poll:
            return events
        wait_s = 0.0 if events else timeout_s
        ready, _ = ray.wait(list(by_poll), num_returns=1, timeout=wait_s)
        if ready:  # whoever else is ready by now
            ready, _ = ray.wait(list(by_poll), num_returns=len(by_poll), timeout=0)
        self._polled_s = self._clock.monotonic_s()
        for poll in ready:
            member = by_poll[poll]
            try:
                events += self._sorted(member, ray.get(poll))
            except RayError as error:  # died, was evicted, or its node or reservation is gone
                events.append(MemberLost(member=member, reason=_reason(error)))
                self._drop(member)
                continue
            seat = self._seats[member]
            self._late_s[member] = max(0.0, before_s - seat.due_s)  # then it was not there yet
            self._ask(seat)
        return events

    def _sorted(self, member: int, told: Iterable[Event | Lines | Still]) -> list[Event]:
        """The events of an answer; the rest is kept for who asks for it."""
        self._still_s[member] = 0.0
        events: list[Event] = []
        for one in told:
            if isinstance(one, Still):
                self._still_s[member] = one.seconds
            elif isinstance(one, Lines):
                self._lines.append(one)
            else:
                events.append(one)
        return events

    def _ask(self, seat: _Seat) -> None:
        seat.poll = seat.actor.poll.remote(POLL_S)
        seat.due_s = self._clock.monotonic_s() + POLL_S

    def heard(self) -> Heard:
        """Which members have answered since the last call, and until when the next answers are due.

        As of the end of the last `poll`: what takes its time after that makes nobody late.
        """
        late_s, self._late_s = self._late_s, {}
        due_s = {member: seat.due_s for member, seat in self._seats.items()}
        still_s = {member: seconds for member, seconds in self._still_s.items() if seconds > 0.0}
        return Heard(looked_s=self._polled_s, late_s=late_s, due_s=due_s, still_s=still_s)

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
        self.release([*self._seats, *self._waiting])
        self._crew.close()

    def _drop(self, member: int) -> None:
        seat = self._seats.pop(member, None)
        self._still_s.pop(member, None)
        waiting, _ = self._waiting.pop(member, (None, None))
        group = waiting if seat is None else seat.group
        with contextlib.suppress(RayError):  # the cluster is going away itself
            if seat is not None:
                ray.kill(seat.actor)
        with contextlib.suppress(RayError):
            if group is not None:
                remove_placement_group(group)

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
