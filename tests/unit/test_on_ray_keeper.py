"""Whom a keeper obeys, and when it is alone."""

from __future__ import annotations

from raycloud.clock import VirtualClock
from raycloud.on_ray.keeper import LEASE_S, Reign


def test_one_driver_at_a_time():
    clock = VirtualClock()
    reign = Reign(clock, 120.0)
    assert reign.claim("") == 1
    clock.advance(LEASE_S - 1.0)
    assert reign.hear(1)
    assert reign.claim("") is None
    clock.advance(LEASE_S - 1.0)
    assert reign.claim("") is None
    clock.advance(1.0)
    assert reign.claim("") == 2
    assert not reign.hear(1)
    assert reign.hear(2)


def test_who_holds_the_lock_that_the_last_one_held_need_not_wait():
    reign = Reign(VirtualClock(), 120.0)
    assert reign.claim("disk:7") == 1
    assert reign.claim("disk:8") is None  # of a copy of the run
    assert reign.claim("") is None
    assert reign.claim("disk:7") == 2


def test_alone_once_no_driver_speaks():
    clock = VirtualClock()
    reign = Reign(clock, 30.0)
    reign.claim("")
    clock.advance(29.0)
    assert reign.hear(1)
    clock.advance(29.0)
    assert not reign.alone
    reign.hear(0)  # of one that is not obeyed
    clock.advance(1.0)
    assert reign.alone


def test_alone_if_nobody_ever_comes():
    clock = VirtualClock()
    reign = Reign(clock, 30.0)
    clock.advance(30.0)
    assert reign.alone
