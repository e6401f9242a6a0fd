"""What members have once they have met."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from raycloud.net import sockets
from raycloud.net.rendezvous_store import Rendezvous
from raycloud.recovery import rendezvous
from raycloud.recovery.rendezvous import Meeting, meet
from tests.lockstep import never
from tests.sockets import together

SIZE = 2


def test_gradients_and_lane_of_a_member_come_in_at_one_door() -> None:
    """A second one would be a thread more, which wakes up a hundred times a second."""
    place = Rendezvous("127.0.0.1")
    before = set(sockets._listeners())
    meetings = [
        Meeting(
            place=place.place,
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
    place.close()
    assert len(doors) == SIZE


def test_a_member_alone_has_no_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("it takes memory of the GPU, and a second, for nothing")

    monkeypatch.setattr(rendezvous, "NcclTransport", refused)
    place = Rendezvous("127.0.0.1")
    alone = Meeting(place=place.place, generation=0, rank=0, members=(0,), shares=(1,))
    met = meet(alone, "127.0.0.1", torch.device("cuda", 0), never)
    assert [one.size for one in met] == [1, 1]
    for one in met:
        one.close()
    place.close()
