"""What members have once they have met."""

from __future__ import annotations

from functools import partial

import torch

from raycloud.net import sockets
from raycloud.net.rendezvous_store import Rendezvous
from raycloud.recovery.rendezvous import Meeting, meet
from tests.lockstep import never
from tests.sockets import together

SIZE = 2


def test_gradients_and_lane_of_a_member_come_in_at_one_door() -> None:
    """A second one would be a thread more, which wakes up a hundred times a second."""
    rendezvous = Rendezvous("127.0.0.1")
    before = set(sockets._listeners())
    meetings = [
        Meeting(
            place=rendezvous.place,
            generation=0,
            rank=rank,
            members=tuple(range(SIZE)),
            shares=(1,) * SIZE,
        )
        for rank in range(SIZE)
    ]
    device = torch.device("cpu")
    met = together(partial(meet, one, "127.0.0.1", device, never) for one in meetings)
    doors = set(sockets._listeners()) - before
    for transport in (transport for pair in met for transport in pair):
        transport.close()
    rendezvous.close()
    assert len(doors) == SIZE
