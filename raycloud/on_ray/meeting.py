"""The place where members meet: a store that lives with the driver, not on a mortal member."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING

import ray
from torch import distributed as dist

from raycloud.commands import Meet
from raycloud.training.meeting import Meeting

if TYPE_CHECKING:
    from raycloud.commands import Form


class MeetingPlace:
    """A key-value server in this process; each generation uses names of its own."""

    def __init__(self) -> None:
        """Listen on a free port."""
        self._store = dist.TCPStore(
            ray.util.get_node_ip_address(),
            0,
            is_master=True,
            wait_for_workers=False,
            timeout=datetime.timedelta(seconds=30),
        )

    def of(self, formed: Form | Meet, rank: int, nodes: tuple[str, ...]) -> Meeting:
        """What the member of `rank` is told of a generation, whose members are on these nodes."""
        return Meeting(
            host=self.host,
            port=self.port,
            generation=formed.generation,
            rank=rank,
            members=formed.members,
            shares=formed.shares,
            nodes=nodes,
            planned=isinstance(formed, Meet),
            following=formed.following,
            back=None if isinstance(formed, Meet) else formed.back,
        )

    @property
    def host(self) -> str:
        """Address that members reach."""
        return str(self._store.host)

    @property
    def port(self) -> int:
        """Port it listens on."""
        return int(self._store.port)
