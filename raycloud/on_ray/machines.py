"""The cluster's machines while a run goes on: how many members they hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raycloud.events import CapacityChanged
from raycloud.on_ray.cluster import inventory
from raycloud.planning.inventory import capacity

if TYPE_CHECKING:
    from raycloud.clock import Clock
    from raycloud.planning.inventory import Inventory
    from raycloud.spec import RoleResources

LOOK_S = 2.0


class Machines:
    """Asks the cluster now and then.

    Args:
        inventory: The machines as they are now.
        resources: What one member reserves.
        clock: To ask from time to time.

    Attributes:
        inventory: The machines as they were last seen.
    """

    def __init__(self, inventory: Inventory, resources: RoleResources, clock: Clock) -> None:
        """Nothing has changed yet."""
        self.inventory = inventory
        self._resources = resources
        self._clock = clock
        self._looked_s = clock.monotonic_s()
        self._room = self.room

    @property
    def room(self) -> int:
        """How many members they hold together, those that they hold already counted."""
        return capacity(self.inventory, self._resources)

    def poll(self) -> list[CapacityChanged]:
        """Whether they hold more or fewer members than when this was last asked."""
        now_s = self._clock.monotonic_s()
        if now_s - self._looked_s < LOOK_S:
            return []
        self._looked_s, self.inventory = now_s, inventory()
        room = self.room
        if room == self._room:
            return []
        self._room = room
        return [CapacityChanged(workers=room)]
