"""What members have once they have met."""

from __future__ import annotations

import datetime
from functools import partial

import torch
import torch.distributed as dist

from raycloud.sync import own_sockets
from raycloud.training.meeting import Meeting, meet
from tests.lockstep import never
from tests.sockets import together

SIZE = 2


def test_gradients_and_lane_of_a_member_come_in_at_one_door() -> None:
    """A second one would be a thread more, which wakes up a hundred times a second."""
    limit = datetime.timedelta(seconds=20.0)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
    before = set(own_sockets._listeners())
    meetings = [
        Meeting(
            host="127.0.0.1",
            port=store.port,
            generation=0,
            rank=rank,
            members=tuple(range(SIZE)),
            shares=(1,) * SIZE,
        )
        for rank in range(SIZE)
    ]
    device = torch.device("cpu")
    met = together(partial(meet, one, "127.0.0.1", device, never) for one in meetings)
    doors = set(own_sockets._listeners()) - before
    for transport in (transport for pair in met for transport in pair):
        transport.close()
    assert len(doors) == SIZE
