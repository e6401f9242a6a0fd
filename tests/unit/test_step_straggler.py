"""A share that takes far longer than usual is told of while it is computed, by whoever looks."""

from __future__ import annotations

import math

import pytest

from raycloud.clock import VirtualClock
from raycloud.step.straggler import StragglerWatch, Straggling


class Clock(VirtualClock):
    """Virtual seconds, and those in which the process had a processor."""

    used_s = 0.0

    def cpu_s(self) -> float:
        return self.used_s

    def passes(self, seconds: float, part: float = 1.0) -> None:
        self.advance(seconds)
        self.used_s += part * seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def usual(clock: Clock, seconds: float = 1.0, micro_batches: int = 4) -> StragglerWatch:
    """One that has computed a share with four tenths of a processor."""
    pace = StragglerWatch(clock)
    pace.begin(micro_batches)
    clock.passes(seconds, 0.4)
    pace.end(done=True)
    return pace


def test_how_long_the_rest_will_take_follows_from_the_processor_time_of_now(clock: Clock) -> None:
    pace = usual(clock)
    pace.begin(4)
    clock.passes(0.5, 0.4)
    assert pace.look() == []
    clock.passes(1.0, 0.1)  # a quarter of what it had
    assert pace.look() == []
    clock.passes(1.0, 0.1)
    assert not pace.told()
    [told] = pace.look()
    assert told == Straggling(4, pytest.approx(4.0))
    with pace.waiting():
        pass
    assert pace.told()
    pace.end(done=True)
    pace.begin(4)
    assert not pace.told()


def test_where_nobody_has_looked_before_the_whole_share_counts(clock: Clock) -> None:
    pace = usual(clock)
    pace.begin(2)
    clock.passes(2.5, 0.1)
    assert pace.look() == [Straggling(2, pytest.approx(2.5))]  # half a second at this pace, and yet


def test_with_as_much_processor_time_as_ever_it_has_taken_what_it_has(clock: Clock) -> None:
    pace = usual(clock)
    pace.begin(4)
    clock.passes(3.0, 0.4)
    assert pace.look() == [Straggling(4, pytest.approx(3.0))]


def test_what_stands_still_has_not_taken_for_ever(clock: Clock) -> None:
    pace = usual(clock)
    pace.begin(4)
    clock.passes(3.0, 0.0)
    assert pace.look() == [Straggling(4, pytest.approx(12.0))]


def test_a_hiccup_and_a_large_share_are_not_told_of(clock: Clock) -> None:
    pace = usual(clock)
    pace.begin(4)
    clock.passes(1.9, 0.1)
    assert pace.look() == []
    pace.end(done=True)
    pace.begin(16)
    clock.passes(4.0 * 1.9, 0.4)
    assert pace.look() == []


def test_who_waits_for_others_is_not_late(clock: Clock) -> None:
    pace = usual(clock)
    looked: list[object] = []

    def others() -> int:
        clock.passes(30.0, 0.0)
        looked.extend(pace.look())
        return 7

    pace.begin(4)
    clock.passes(0.5, 0.4)
    with pace.waiting():
        assert others() == 7
    clock.passes(0.5, 0.4)
    assert looked == pace.look() == []
    pace.end(done=True)
    assert pace.longest_s == pytest.approx(1.0)


def test_of_the_first_share_and_of_one_given_up_nothing_is_known(clock: Clock) -> None:
    pace = StragglerWatch(clock)
    assert pace.look() == []
    for _ in range(2):
        pace.begin(4)
        clock.passes(60.0, 0.1)
        assert pace.computing
        assert pace.look() == []
        pace.end(done=False)
    assert not pace.computing
    assert pace.longest_s is None


def test_a_share_of_nothing_is_not_told_of(clock: Clock) -> None:
    pace = usual(clock)
    pace.begin(0)
    clock.passes(60.0, 0.1)
    assert pace.look() == []
    pace.end(done=True)
    pace.begin(4)
    clock.passes(2.5, 0.4)
    assert pace.look() == [Straggling(4, pytest.approx(2.5))]


def test_when_a_share_will_be_late_is_known(clock: Clock) -> None:
    pace = StragglerWatch(clock)
    assert pace.late_in_s() == math.inf
    pace = usual(clock, 3.0)
    assert pace.late_in_s() == math.inf
    pace.begin(2)
    assert pace.late_in_s() == pytest.approx(3.0)  # twice 1.5 s
    clock.passes(2.0)
    assert pace.late_in_s() == pytest.approx(1.0)
    clock.passes(pace.late_in_s())
    assert pace.look() != []
    assert pace.late_in_s() == math.inf  # it is told by now, and again with each look
    pace.end(done=True)
    pace.begin(0)
    assert pace.late_in_s() == math.inf


def test_when_a_share_will_be_late_is_not_known_while_it_waits_for_others(clock: Clock) -> None:
    pace = usual(clock)
    pace.begin(4)
    with pace.waiting():
        assert pace.late_in_s() == math.inf
    assert pace.late_in_s() == pytest.approx(2.0)
