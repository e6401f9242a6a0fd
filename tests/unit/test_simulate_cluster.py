"""How the simulation measures decisions."""

from __future__ import annotations

import pytest

from raycloud.simulate.cluster import Stopwatch


class Busy:
    """A clock on a machine where others take every second moment, which counts what it is asked."""

    def __init__(self):
        self.now_s, self.asked = 0.0, 0

    def monotonic_s(self):
        return self.now_s

    def cpu_s(self):
        self.asked += 1
        return self.now_s / 2


def test_what_is_short_is_told_by_the_clock():
    clock = Busy()
    watch = Stopwatch(clock)
    for _ in range(40):
        watch.begin()
        clock.now_s += 0.00001
        assert watch.took_s() == pytest.approx(0.00001)
    assert clock.asked == 1


def test_what_is_long_is_told_in_processor_seconds():
    clock = Busy()
    watch = Stopwatch(clock)
    for took_s in (0.004, 0.02):
        watch.begin()
        clock.now_s += took_s
        assert watch.took_s() == pytest.approx(took_s / 2)


def test_at_most_half_a_millisecond_is_too_many():
    clock = Busy()
    watch = Stopwatch(clock)
    watch.begin()
    clock.now_s = 0.0004
    watch.begin()
    clock.now_s += 0.01
    assert watch.took_s() == pytest.approx(0.0052)
