"""A state through a third member, where the link from who has it is thin."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from typing import Any

import pytest
import torch

from raycloud.clock import SystemClock
from raycloud.errors import TransportError
from raycloud.net.stream import Sockets, Stream
from raycloud.recovery.receiving import Receiver
from raycloud.recovery.relay import Relay, ask_through
from raycloud.recovery.rendezvous import HOST, Host
from raycloud.recovery.state_transfer import Beside, Sender
from tests.unit.test_recovery_state_transfer import State

THIN_BYTES_PER_S, STATE_BYTES = 1.0e6, 6_000_000
A, B, C = range(3)  # two that have the state, and who takes it


class Still(State):
    """None of it changes in a forward pass."""

    def is_buffer(self, name: str) -> bool:
        return False


class ThinSocket(socket.socket):
    """Bytes leave slowly."""

    def sendall(self, data: bytes | memoryview, *_: int) -> None:  # type: ignore[override]
        threading.Event().wait(len(data) / THIN_BYTES_PER_S)
        super().sendall(data)


class ThinSockets(Sockets):
    """Whoever connects has a thin link; who is connected to has not."""

    def connect(self, where: tuple[str, int], timeout_s: float) -> socket.socket:
        found = super().connect(where, timeout_s)
        thin = ThinSocket(fileno=found.detach())
        thin.settimeout(timeout_s)
        return thin


class Triangle:
    """A and B have the state, each gives a part; C takes it, from A over a thin link.

    Attributes:
        told: What was noticed at C.
    """

    def __init__(self, *, relays: bool) -> None:
        self._relays = relays
        self.told: list[tuple[str, Mapping[str, Any]]] = []
        self.tensors = {
            name: torch.randint(256, (STATE_BYTES // 2,), dtype=torch.uint8) for name in "ab"
        }
        self._stack = ExitStack()

    def __enter__(self) -> Triangle:
        self.receiver = Receiver("127.0.0.1", 2, HOST)
        self._stack.callback(self.receiver.close)
        self.doors = [Relay("127.0.0.1", HOST) for _ in range(3)]
        for door in self.doors:
            self._stack.callback(door.close)
        return self

    def __exit__(self, *told: object) -> None:
        self._stack.close()
        for thread in threading.enumerate():
            if thread.name.startswith(("stream-", "arrival", "relay", "through")):
                thread.join(20.0)
                assert not thread.is_alive(), thread.name

    def send(self, thin: Host) -> None:
        places = [door.place for door in self.doors]
        if self._relays:
            self.receiver.relay(C, places, lambda what, detail: self.told.append((what, detail)))
        self.doors[C].begin(C, places, None)
        for rank, host in ((A, thin), (B, HOST)):
            beside = Beside(part=rank, parts=2, busy=lambda: False)
            state = Still(dict(self.tensors), {"n": 7})
            sender = Sender(state, rank, [self.receiver.place], host, beside=beside)
            self._stack.callback(sender.close)
            self.doors[rank].begin(rank, places, sender.serve)

    def took_s(self) -> float:
        """Until all has arrived as it is."""
        clock = SystemClock()
        began_s = clock.monotonic_s()
        self.send(Host(sockets=ThinSockets()))
        assert self.receiver.wait(60.0)
        took_s = clock.monotonic_s() - began_s
        tensors, values = self.receiver.take()
        assert values == {"n": 7}
        assert all(torch.equal(tensors[name], t) for name, t in self.tensors.items())
        return took_s


def test_what_would_take_long_over_a_thin_link_comes_through_who_has_a_wide_one() -> None:
    with Triangle(relays=False) as one:
        direct_s = one.took_s()
    assert direct_s >= STATE_BYTES / 2 / THIN_BYTES_PER_S
    with Triangle(relays=True) as other:
        assert other.took_s() < direct_s / 2
    [(what, detail)] = other.told
    assert what == f"the state comes through the member of rank {B}, too"
    assert detail["from"] == A
    assert detail["bytes_per_s"] == pytest.approx(THIN_BYTES_PER_S, rel=0.3)


def test_a_relay_that_breaks_costs_nothing_but_its_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was asked for through it is asked for again, of the sender itself."""

    def breaks(one: Stream, other: Stream) -> None:
        with suppress(TransportError):
            one.some(5.0)
        one.hang_up()
        other.hang_up()

    monkeypatch.setattr("raycloud.recovery.relay._pass_on", breaks)
    with Triangle(relays=True) as triangle:
        assert triangle.took_s() >= STATE_BYTES / 4 / THIN_BYTES_PER_S
    assert "ended" in triangle.told[-1][0]


def test_a_member_that_cannot_be_reached_relays_nothing() -> None:
    with Triangle(relays=True) as triangle:
        triangle.doors[B].close()
        triangle.took_s()
    assert [what for what, _ in triangle.told] == ["a relay of the state ended"]


@pytest.fixture
def door() -> Iterator[Callable[..., Relay]]:
    with ExitStack() as stack:

        def make() -> Relay:
            made = Relay("127.0.0.1", HOST)
            stack.callback(made.close)
            return made

        yield make


@pytest.mark.parametrize("source", [-1, 2, 10**6])
def test_nothing_is_passed_on_from_who_is_no_member(
    source: int, door: Callable[..., Relay]
) -> None:
    one, other = door(), door()
    places = [one.place, other.place]
    one.begin(0, places, None)
    with closing(ask_through(one.place, 1, source, HOST)) as stream, pytest.raises(TransportError):
        stream.hear()


def test_who_does_not_know_the_key_is_not_heard(door: Callable[..., Relay]) -> None:
    one = door()
    asked = threading.Event()
    one.begin(0, [one.place], lambda _: asked.set())
    with socket.create_connection((one.place.address, one.place.port)) as stranger:
        stranger.sendall(b"\0" * 64)
        stranger.settimeout(20.0)
        assert stranger.recv(1) == b""
    assert not asked.is_set()
