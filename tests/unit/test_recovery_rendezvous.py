"""What members have once they have met."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch

from raycloud.errors import TransportError
from raycloud.net import sockets
from raycloud.net.direct import DirectTransport
from raycloud.net.rendezvous_store import Rendezvous
from raycloud.net.transport import Transport
from raycloud.net.tree import TreeTransport
from raycloud.recovery import rendezvous
from raycloud.recovery.rendezvous import Meeting, meet
from tests.lockstep import never
from tests.sockets import close_all, together

SIZE = 2


def test_once_all_have_met_a_member_listens_for_gradients_alone() -> None:
    """That is gloo's: the lane's door is closed."""
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


def met_in(zones: str, topology: str, nodes: str = "") -> list[tuple[Transport, Transport]]:
    """What members in these zones have, by rank."""
    there, size = Rendezvous("127.0.0.1"), len(zones)
    meetings = [
        Meeting(
            place=there.place,
            generation=0,
            rank=rank,
            members=tuple(range(size)),
            shares=(1,) * size,
            zones=tuple(zone.strip() for zone in zones),
            nodes=tuple(nodes),
        )
        for rank in range(size)
    ]
    coming = partial(meet, device=torch.device("cpu"), abandoned=never, topology=topology)
    try:
        return together(partial(coming, one, "127.0.0.1") for one in meetings)
    finally:
        there.close()


def test_a_node_that_is_in_no_zone_is_one_in_a_tree_and_stays_in_its_place_in_a_ring() -> None:
    """A ring in another order sums in another one: without zones nobody has asked for that."""
    for nodes, tree in (("xyxy", ((0, 2), (1, 3))), ("xyzy", ((0,), (1, 3), (2,)))):
        met = met_in("    ", "tree", nodes)
        assert [gradients._zones.groups for gradients, _ in met] == [tree] * 4
        close_all(transport for pair in met for transport in pair)
        met = met_in("    ", "ring", nodes)
        assert [gradients._group.rank() for gradients, _ in met] == [0, 1, 2, 3]
        close_all(transport for pair in met for transport in pair)
    met = met_in("a  a", "tree", "xyyz")
    assert [gradients._zones.groups for gradients, _ in met] == [((0, 3), (1, 2))] * 4
    close_all(transport for pair in met for transport in pair)


@pytest.mark.parametrize("zones", ["abab", "aaaa", "abba"])
@pytest.mark.parametrize("topology", ["ring", "direct", "tree"])
def test_members_of_zones_exchange_whatever_the_topology(topology: str, zones: str) -> None:
    met = met_in(zones, topology)
    values = [torch.full((5000,), float(rank)) for rank in range(4)]
    told = [torch.full((30,), rank) for rank in range(4)]
    flags = [torch.ones(1, dtype=torch.float64) for _ in range(4)]
    works = [pair[0].all_reduce(one) for pair, one in zip(met, values, strict=True)]
    works += [pair[0].broadcast(one, 1) for pair, one in zip(met, told, strict=True)]
    works += [pair[1].all_reduce(one) for pair, one in zip(met, flags, strict=True)]
    assert all(work.wait(10.0) for work in works)
    assert all(bool((one == 6.0).all()) for one in values)
    assert all(bool((one == 1).all()) for one in told)
    assert [one.item() for one in flags] == [4.0] * 4
    several = isinstance(met[0][0], TreeTransport)
    assert several == (topology == "tree" and zones != "aaaa")
    works.clear()
    close_all(transport for pair in met for transport in pair)


@pytest.mark.parametrize("zones", ["a" * 18, " " * 18])
def test_many_have_a_lane_in_parts(zones: str) -> None:
    met = met_in(zones, "direct", "abcdefghijklmnopqr")
    assert {len(lane._small.groups) for _, lane in met} == {4}
    numbers = [torch.full((14,), float(rank), dtype=torch.float64) for rank in range(18)]
    works = [pair[1].all_reduce(one) for pair, one in zip(met, numbers, strict=True)]
    assert all(work.wait(10.0) for work in works)
    assert all(bool((one == 153.0).all()) for one in numbers)
    close_all(transport for pair in met for transport in pair)


def test_the_lane_is_closed_where_gradients_cannot_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threading.enumerate())

    def refused(*_: Any, **__: Any) -> None:
        raise TransportError("no ring")

    monkeypatch.setattr(rendezvous, "GlooTransport", refused)
    with pytest.raises(TransportError, match="no ring"):
        met_in("aa", "ring")
    left = set(threading.enumerate()) - before
    assert not [thread for thread in left if thread.name == "courier"]


@pytest.mark.parametrize(("zones", "order"), [("abab", [0, 2, 1, 3]), ("aaaa", [0, 1, 2, 3])])
def test_a_ring_goes_by_zones_and_the_lane_by_ranks(zones: str, order: list[int]) -> None:
    """Of two zones whose members came in turns, two connections carry gradients between them."""
    met = met_in(zones, "ring")
    places = [gradients._group.rank() for gradients, _ in met]
    assert [places.index(place) for place in range(4)] == order
    assert [lane.rank for _, lane in met] == [gradients.rank for gradients, _ in met]
    assert len({type(lane) for _, lane in met}) == 1
    assert isinstance(met[0][1], DirectTransport)
    close_all(transport for pair in met for transport in pair)
