"""The control lane: sums over members, one exchange a step."""

from __future__ import annotations

import pytest

from raycloud.errors import TransportError
from raycloud.net.lane import Lane, LaneReport, all_places, places_of
from raycloud.net.transport import Abandoned
from tests.loopback import Loopback


def test_every_member_reads_the_sums() -> None:
    lanes = [Lane(member) for member in Loopback(3).members]
    for step in range(3):
        for rank, lane in enumerate(lanes):
            lane.send(LaneReport(weight=rank + 1.0, loss=step * 0.5))
        expected = LaneReport(weight=6.0, loss=1.5 * step)
        assert [lane.read() for lane in lanes] == [expected] * 3
        assert lanes[0].read() == expected  # asked again


def test_a_member_alone_reads_what_it_sent() -> None:
    lane = Lane(Loopback(1).members[0])
    report = LaneReport(weight=3.0, loss=0.1)
    lane.send(report)
    assert lane.read() == report


def test_numbers_are_not_rounded_to_float32() -> None:
    lanes = [Lane(member) for member in Loopback(2).members]
    for lane in lanes:
        lane.send(LaneReport(weight=2.0**40 + 1, loss=0.1))
    assert lanes[0].read() == LaneReport(weight=2.0**41 + 2, loss=0.2)


def test_reading_ends_when_the_generation_does() -> None:
    hub = Loopback(2)
    over = [True]
    lane = Lane(hub.members[0], lambda: over[0])
    lane.send(LaneReport(weight=1.0))
    with pytest.raises(Abandoned):
        lane.read()
    over[0] = False
    hub.cut("gone")
    with pytest.raises(TransportError, match="gone"):
        lane.read()


@pytest.mark.parametrize("count", [0, 1, 2, 7, 4096])
def test_all_micro_batches_are_those_from_zero_on(count: int) -> None:
    assert all_places(count) == places_of(range(count))


def test_a_fault_in_dealing_shows_in_the_sums() -> None:
    """One that is missing, one twice, and one in the place of another."""
    every, whole = list(range(9)), all_places(9)
    for one in every:
        without = [k for k in every if k != one]
        assert places_of(without) != whole
        assert places_of([*every, one]) != whole
        assert all(places_of([*without, other]) != whole for other in without)
