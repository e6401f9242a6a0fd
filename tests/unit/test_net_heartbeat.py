"""Whether a machine is there, asked along real connections whose packets are really dropped."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from raycloud.clock import SystemClock
from raycloud.errors import TransportError
from raycloud.net import heartbeat
from raycloud.net.heartbeat import HeartbeatPeer, Heartbeats, Reach
from raycloud.net.stream import connect
from tests.connections import deafen, hearken

WAIT_S = 45.0  # longer than the pauses after which TCP tries again on a busy machine


@pytest.fixture(autouse=True)
def as_if_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members on this machine are asked as often as those on others."""
    monkeypatch.setattr(heartbeat, "_HERE_S", heartbeat.EVERY_S)


@contextlib.contextmanager
def probes() -> Iterator[Heartbeats]:
    one = Heartbeats("127.0.0.1", SystemClock())
    try:
        yield one
    finally:
        one.close()


@contextlib.contextmanager
def members(asks: Heartbeats, count: int) -> Iterator[list[HeartbeatPeer]]:
    ends = [HeartbeatPeer(SystemClock()) for _ in range(count)]
    assert asks.place is not None
    for number, end in enumerate(ends):
        end.keep(asks.place, number)
    until(asks, lambda reach: reach.reached == set(range(count)))
    try:
        yield ends
    finally:
        for end in ends:
            end.close()


def wire(end: HeartbeatPeer) -> socket.socket:
    assert end._stream is not None
    return end._stream._socket


def until(asks: Heartbeats, holds: Callable[[Reach], bool]) -> Reach:
    """Wait until something holds; returns what was found then."""
    end_s, turns = time.monotonic() + WAIT_S, threading.Event()
    while not holds(found := asks.reach):
        assert time.monotonic() < end_s, found
        turns.wait(0.01)
    return found


def turns(asks: Heartbeats, count: int) -> list[Reach]:
    """What was found in so many turns one after the other."""
    found = [asks.reach]
    while len(found) < count:
        found.append(until(asks, lambda reach: reach is not found[-1]))
    return found


def test_whose_machine_acknowledges_nothing_is_cut_off_and_the_others_are_not() -> None:
    with probes() as asks, members(asks, 3) as ends:
        assert not any(reach.cut_s for reach in turns(asks, 10))
        deafen(wire(ends[1]))
        found = until(asks, lambda reach: 1 in reach.cut_s)
        assert (found.cut_s.keys(), found.reached, found.doubtful) == ({1}, {0, 2}, True)
        assert found.cut_s[1] >= 0.2


def test_one_that_is_heard_again_is_there_again_and_waited_for_longer() -> None:
    with probes() as asks, members(asks, 2) as ends:
        deafen(wire(ends[1]))
        until(asks, lambda reach: 1 in reach.cut_s)
        hearken(wire(ends[1]))
        assert not until(asks, lambda reach: reach.reached == {0, 1}).cut_s
        deafen(wire(ends[1]))
        assert until(asks, lambda reach: 1 in reach.cut_s).cut_s[1] > 2 * 0.2 + 0.125


def test_a_process_that_does_nothing_is_there() -> None:
    """Nobody takes the bytes out of the kernel: it acknowledges them all the same."""
    with probes() as asks, members(asks, 2):
        assert all(reach.reached == {0, 1} for reach in turns(asks, 30)[1:])


def test_two_at_once_are_told_at_once() -> None:
    with probes() as asks, members(asks, 4) as ends:
        for end in ends[1:3]:
            deafen(wire(end))
        assert until(asks, lambda reach: bool(reach.cut_s)).cut_s.keys() == {1, 2}


def test_after_a_time_without_anybody_all_have_their_time_again() -> None:
    """Some come back before others, since TCP tries each again when it sees fit."""
    with probes() as asks, members(asks, 3) as ends:
        for end in ends:
            deafen(wire(end))
        until(asks, lambda reach: reach.doubtful and not reach.reached)
        turns(asks, 20)
        hearken(wire(ends[0]))
        until(asks, lambda reach: reach.reached == {0})
        assert not any(reach.cut_s for reach in turns(asks, 5))
        hearken(wire(ends[1]))
        until(asks, lambda reach: reach.reached == {0, 1})
        until(asks, lambda reach: reach.cut_s.keys() == {2})


def test_who_is_forgotten_connects_again_if_it_goes_on_as_another() -> None:
    with probes() as asks, members(asks, 1) as (end,):
        asks.forget(0)
        until(asks, lambda reach: not reach.reached)
        assert asks.place is not None
        end.keep(asks.place, 7)
        until(asks, lambda reach: reach.reached == {7})


def test_a_connection_that_ends_says_nothing_about_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(heartbeat, "_TRY_S", 0.0)
    with probes() as asks, members(asks, 2) as ends:
        wire(ends[0]).shutdown(socket.SHUT_RDWR)
        assert not until(asks, lambda reach: reach.reached == {1}).cut_s
        place = asks.place
        assert place is not None

        def there_again(reach: Reach) -> bool:
            ends[0].keep(place, 0)
            return reach.reached == {0, 1}

        until(asks, there_again)


def test_where_nobody_asks_any_more_a_member_goes_on_trying() -> None:
    with probes() as asks, members(asks, 1) as (end,):
        place = asks.place
    assert place is not None
    for _ in range(3):
        end.keep(place, 0)
    end.close()


def test_strangers_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "_STRANGERS", 2)
    with probes() as asks, members(asks, 1):
        assert asks.place is not None
        wrong = connect(dataclasses.replace(asks.place, key=asks.place.key ^ 1), 5)
        with pytest.raises(TransportError):
            wrong.hear()
        where = asks.place.address, asks.place.port
        mute = [socket.create_connection(where) for _ in range(3)]
        mute[0].settimeout(WAIT_S)
        assert mute[0].recv(1) == b""  # more than two that say nothing are too many
        assert all(reach.reached == {0} for reach in turns(asks, 5))
        for one in (wrong, *mute):
            one.close()


def test_where_the_address_is_another_machines_nobody_is_asked() -> None:
    """Nodes may know each other by addresses that a network translates."""
    asks = Heartbeats("198.51.100.7", SystemClock())
    assert asks.place is None
    assert asks.reach == Reach()
    asks.forget(3)
    asks.close()


def test_a_driver_that_stood_still_asks_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """It did not ask meanwhile, and so nobody is silent."""

    class Paused(SystemClock):
        ahead_s = 0.0

        def monotonic_s(self) -> float:
            return super().monotonic_s() + self.ahead_s

    clock = Paused()
    asks = Heartbeats("127.0.0.1", clock)
    with contextlib.closing(asks), members(asks, 2) as ends:
        deafen(wire(ends[1]))
        until(asks, lambda reach: reach.doubtful)
        clock.ahead_s = 60.0
        found = turns(asks, 3)
        assert not any(s > 30.0 for reach in found for s in reach.cut_s.values())
        assert until(asks, lambda reach: 1 in reach.cut_s).cut_s[1] < 30.0


def test_a_driver_that_stands_still_again_and_again_finds_who_is_gone() -> None:
    """By 0.2 s each time: about as long as it takes to find it in all."""

    class Held(SystemClock):
        turn = 0

        def monotonic_s(self) -> float:
            self.turn += 1
            return super().monotonic_s() + 0.2 * self.turn

    asks = Heartbeats("127.0.0.1", Held())
    with contextlib.closing(asks), members(asks, 2) as ends:
        assert not any(reach.cut_s for reach in turns(asks, 10))
        deafen(wire(ends[1]))
        assert until(asks, lambda reach: bool(reach.cut_s)).cut_s.keys() == {1}


def test_members_are_asked_less_often_where_all_are_on_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with probes() as asks, members(asks, 2):
        monkeypatch.setattr(heartbeat, "_HERE_S", 7.0)
        assert asks._usual_s() == 7.0
        next(iter(asks._lines.values())).here = False
        assert asks._usual_s() == heartbeat.EVERY_S
