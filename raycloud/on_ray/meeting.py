"""The place where members meet: a store that lives with the driver, not on a mortal member."""

from __future__ import annotations

import datetime

import ray
from torch import distributed as dist


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

    @property
    def host(self) -> str:
        """Address that members reach."""
        return str(self._store.host)

    @property
    def port(self) -> int:
        """Port it listens on."""
        return int(self._store.port)
