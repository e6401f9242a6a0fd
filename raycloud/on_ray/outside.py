"""What befalls a run from outside: machines that come and go, and what people ask of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raycloud.events import (
    CapacityChanged,
    MemberLeaving,
    Noticed,
    RangeChanged,
    StopRequested,
)
from raycloud.on_ray.cluster import inventory
from raycloud.on_ray.draining import draining
from raycloud.planning.inventory import Inventory, capacity
from raycloud.spec.requests import take_range

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from raycloud.clock import Clock
    from raycloud.events import Event
    from raycloud.on_ray.run import StopSwitch
    from raycloud.spec import RoleResources
    from raycloud.spec.rundir import RunDirectory

LOOK_S = 2.0
_ASKED_S = 0.5


class Outside:
    """Looks at the cluster and into the run directory now and then.

    Args:
        inventory: The machines as they are now.
        resources: What one member reserves.
        directory: Where people leave what they ask for.
        clock: To look from time to time.
        stop: What a caller turns to end the run; None: nothing.

    Attributes:
        inventory: The machines as they were last seen.
    """

    def __init__(
        self,
        inventory: Inventory,
        resources: RoleResources,
        directory: RunDirectory,
        clock: Clock,
        stop: StopSwitch | None = None,
    ) -> None:
        """Nothing has changed yet."""
        self.inventory = inventory
        self._resources = resources
        self._directory = directory
        self._clock = clock
        self._stop = stop
        self._looked_s = self._asked_s = clock.monotonic_s()
        self._leaving: set[str] = set()  # nodes
        self._told: set[int] = set()  # members on them
        self._room = self.room

    @property
    def room(self) -> int:
        """How many members they hold together, those that they hold already counted.

        What is going to leave holds none.
        """
        nodes = (node for node in self.inventory.nodes if node.name not in self._leaving)
        return capacity(Inventory(nodes=tuple(nodes)), self._resources)

    def poll(self, placed: Callable[[], Mapping[int, str]]) -> list[Event]:
        """What has happened since this was last asked.

        Args:
            placed: Gives the nodes of members, by member; asked now and then.
        """
        now_s = self._clock.monotonic_s()
        found: list[Event] = []
        if self._stop is not None and (why := self._stop.reason) is not None:
            self._stop = None
            found.append(StopRequested(reason=why))
        if now_s - self._asked_s >= _ASKED_S:
            self._asked_s = now_s
            found += [*self._asked(), *self._drained(placed())]
        if now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            found += self._machines()
        return found

    def leaves(self, event: MemberLeaving) -> None:
        """A member has said of itself or its node that it is going to leave."""
        self._told.add(event.member)
        if event.node:
            self._leaving.add(event.node)

    def _drained(self, placed: Mapping[int, str]) -> list[Event]:
        """The members on nodes that Ray drains, each told once."""
        found: list[Event] = []
        for node, leaving in draining(self._clock).items():
            self._leaving.add(node)
            for member in sorted(m for m, at in placed.items() if at == node):
                if member not in self._told:
                    self._told.add(member)
                    found.append(
                        MemberLeaving(
                            member=member,
                            reason=leaving.reason,
                            deadline_s=leaving.deadline_s,
                            node=node,
                        )
                    )
        return found

    def _machines(self) -> list[Event]:
        """Whether they hold more or fewer members than before."""
        self.inventory = inventory()
        room = self.room
        if room == self._room:
            return []
        self._room = room
        return [CapacityChanged(workers=room)]

    def _asked(self) -> list[Event]:
        try:
            asked = take_range(self._directory.path)
        except ValueError as error:
            return [
                Noticed(what="a wish for other workers was passed over", detail={"why": str(error)})
            ]
        return [] if asked is None else [RangeChanged(**asked)]
