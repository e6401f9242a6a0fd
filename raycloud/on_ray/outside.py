"""What befalls a run from outside: machines that come and go, and what people ask of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raycloud.events import CapacityChanged, Noticed, RangeChanged
from raycloud.on_ray.cluster import inventory
from raycloud.planning.inventory import capacity
from raycloud.spec.requests import take_range

if TYPE_CHECKING:
    from raycloud.clock import Clock
    from raycloud.events import Event
    from raycloud.planning.inventory import Inventory
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

    Attributes:
        inventory: The machines as they were last seen.
    """

    def __init__(
        self,
        inventory: Inventory,
        resources: RoleResources,
        directory: RunDirectory,
        clock: Clock,
    ) -> None:
        """Nothing has changed yet."""
        self.inventory = inventory
        self._resources = resources
        self._directory = directory
        self._clock = clock
        self._looked_s = self._asked_s = clock.monotonic_s()
        self._room = self.room

    @property
    def room(self) -> int:
        """How many members they hold together, those that they hold already counted."""
        return capacity(self.inventory, self._resources)

    def poll(self) -> list[Event]:
        """What has happened since this was last asked."""
        return [*self._asked(), *self._machines()]

    def _machines(self) -> list[Event]:
        """Whether they hold more or fewer members than before."""
        now_s = self._clock.monotonic_s()
        if now_s - self._looked_s < LOOK_S:
            return []
        self._looked_s, self.inventory = now_s, inventory()
        room = self.room
        if room == self._room:
            return []
        self._room = room
        return [CapacityChanged(workers=room)]

    def _asked(self) -> list[Event]:
        now_s = self._clock.monotonic_s()
        if now_s - self._asked_s < _ASKED_S:
            return []
        self._asked_s = now_s
        try:
            asked = take_range(self._directory.path)
        except ValueError as error:
            return [
                Noticed(what="a wish for other workers was passed over", detail={"why": str(error)})
            ]
        return [] if asked is None else [RangeChanged(**asked)]
