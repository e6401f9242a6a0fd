"""The place where members meet: it lives with the driver, not on a mortal member."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ray

from raycloud.clock import SystemClock
from raycloud.commands import Meet
from raycloud.sync.rendezvous import Rendezvous
from raycloud.training.meeting import Meeting

if TYPE_CHECKING:
    from raycloud.commands import Form


class MeetingPlace:
    """A rendezvous in this process."""

    def __init__(self) -> None:
        """Listen on a free port."""
        self._rendezvous = Rendezvous(ray.util.get_node_ip_address(), SystemClock())

    def close(self) -> None:
        """Nobody meets any more."""
        self._rendezvous.close()

    def of(self, formed: Form | Meet, rank: int, nodes: tuple[str, ...]) -> Meeting:
        """What the member of `rank` is told of a generation, whose members are on these nodes."""
        self._rendezvous.forget(before=formed.generation - 1)  # that may be planned, and withdrawn
        return Meeting(
            place=self._rendezvous.place,
            generation=formed.generation,
            rank=rank,
            members=formed.members,
            shares=formed.shares,
            nodes=nodes,
            planned=isinstance(formed, Meet),
            following=formed.following,
            back=None if isinstance(formed, Meet) else formed.back,
        )
