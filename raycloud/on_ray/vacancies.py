"""The places of members that have died: kept until it is known whether others are to have them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ray.util.placement_group import placement_group_table

from raycloud.on_ray.draining import draining

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

    from raycloud.clock import Clock
    from raycloud.on_ray.keeper import Keeper
    from raycloud.on_ray.tenure import Tenure


class Vacancies:
    """Places that nobody has just now.

    Args:
        keeper: Holds them.
        clock: For what Ray says of nodes that it drains.
    """

    def __init__(self, keeper: Keeper | Tenure, clock: Clock) -> None:
        """None yet."""
        self._keeper, self._clock = keeper, clock
        self._before: list[int] = []

    def __contains__(self, member: int) -> bool:
        """Whether this member has died, and its place is kept."""
        return member in self._before

    def add(self, member: int) -> None:
        """A member has died."""
        self._before.append(member)

    def take(self, before: int, member: int) -> bool:
        """Give a member the place of one that has died; whether it is there, and may be used.

        Where its node is dead, or drained, Ray would look for another one, which may take long.
        """
        if before not in self._before:
            return False
        self._before.remove(before)
        group = self._keeper.hand_on(before, member)
        if group is not None and self._stands(group):
            return True
        self._keeper.drop([member])
        return False

    def give_back(self) -> None:
        """Nobody is to have those that are left."""
        if self._before:
            self._keeper.drop(self._before)
            self._before = []

    def _stands(self, group: PlacementGroup) -> bool:
        told = placement_group_table(group)
        nodes = set(told.get("bundles_to_node_id", {}).values())
        return told.get("state") == "CREATED" and nodes.isdisjoint(draining(self._clock))
