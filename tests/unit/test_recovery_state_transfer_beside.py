"""A state from several members to several others, part by part, while it is about to change."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from raycloud.clock import VirtualClock
from raycloud.errors import TransportError
from raycloud.net.stream import Sockets, Stream
from raycloud.recovery import state_transfer
from raycloud.recovery.receiving import Receiver, room_for
from raycloud.recovery.rendezvous import HOST, Host
from raycloud.recovery.state_transfer import Beside, Sender
from tests.lockstep import Fleet, NetTask, job

SOURCES = 3


def fleet() -> Fleet:
    made = Fleet(job(), NetTask(norm=True), (4, 2, 2))
    for step in range(2):
        made.step(step)
    return made


def senders(
    made: Fleet,
    to: list[Receiver],
    ranks: range,
    busy: Callable[[], bool] = lambda: False,
    host: Host = HOST,
) -> list[Sender]:
    places = [one.place for one in to]
    return [
        Sender(
            made.replicas[rank].state,
            rank,
            places,
            host,
            beside=Beside(part=rank, parts=SOURCES, busy=busy),
        )
        for rank in ranks
    ]


def test_it_arrives_as_it_was_whatever_becomes_of_it() -> None:
    made = fleet()
    state = made.replicas[0].state
    before = {name: t.clone() for name, t in state.tensors().items()}
    values = state.values()
    newcomers = [Receiver("127.0.0.1", SOURCES, HOST) for _ in range(2)]
    sent = senders(made, newcomers, range(SOURCES))
    made.compute(2)  # which changes buffers, and no parameter
    for one in sent:
        one.settle()
    for replica in made.replicas:
        replica.state.tensors()["model/last.weight"].zero_()
    for newcomer in newcomers:
        assert newcomer.wait(20.0)
        tensors, told = newcomer.take()
        assert tensors.keys() == before.keys()
        assert all(torch.equal(t, before[name]) for name, t in tensors.items())
        assert told == values
        newcomer.close()
    for one in sent:
        one.close()


def test_it_comes_also_where_gradients_travel_all_the_time() -> None:
    made = fleet()
    newcomer = Receiver("127.0.0.1", SOURCES, HOST)
    sent = senders(made, [newcomer], range(SOURCES), busy=lambda: True)
    newcomer.hurry()
    assert newcomer.wait(20.0)
    for one in (*sent, newcomer):
        one.close()


def test_who_connects_after_a_newcomer_is_waited_for_hurries_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(state_transfer, "_GIVE_WAY_S", 60.0)
    made, newcomer = fleet(), Receiver("127.0.0.1", SOURCES, HOST)
    newcomer.hurry()
    sent = senders(made, [newcomer], range(SOURCES), busy=lambda: True)
    assert newcomer.wait(20.0)
    for one in (*sent, newcomer):
        one.close()


@pytest.mark.parametrize(
    ("arrives_s", "apart_s"),
    [(0.0, 0.3), (0.01, 0.31), (0.4, 4.0), (3.0, 13.0), (60.0, 10.0)],
    ids=["at once", "fast", "a thin link", "a thinner one", "hardly at all"],
)
def test_on_a_thin_link_gradients_have_nine_tenths(
    arrives_s: float, apart_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that is waited for lasts as long as the clock says, which goes on in waiting alone."""
    clock, sent_s, send, hears = VirtualClock(), list[float](), Stream.send, Stream.heard
    host = Host(clock=clock, sockets=Sockets())
    monkeypatch.setattr(host.sockets, "chunk_bytes", 2**9)

    def sends(stream: Stream, chunk: memoryview) -> None:
        sent_s.append(clock.monotonic_s())
        send(stream, chunk)

    def heard(stream: Stream, timeout_s: float) -> bool:
        if timeout_s < 1.0:  # it gives way, and is not asked for more
            clock.advance(timeout_s)
            return False
        return hears(stream, timeout_s)

    def on_its_way(_: Stream) -> int:
        return bool(sent_s) and clock.monotonic_s() < sent_s[-1] + arrives_s - 1e-9

    for name, instead in (("send", sends), ("heard", heard), ("on_its_way", on_its_way)):
        monkeypatch.setattr(Stream, name, instead)
    made, newcomer = fleet(), Receiver("127.0.0.1", 1, host)
    (sent,) = senders(made, [newcomer], range(1), busy=lambda: True, host=host)
    assert newcomer.wait(20.0)
    sent.close()
    newcomer.close()
    starts_s = [b for a, b in pairwise(sent_s) if b > a]  # the first one is asked for by nobody
    assert len(starts_s) > 1
    assert all(b - a == pytest.approx(apart_s, abs=0.02) for a, b in pairwise(starts_s))


def test_a_part_that_breaks_off_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    made, send, count = fleet(), Stream.send, threading.Semaphore(2)

    def breaks(stream: Stream, chunk: memoryview) -> None:
        if not count.acquire(blocking=False):
            raise TransportError("cut")
        send(stream, chunk)

    monkeypatch.setattr(Stream, "send", breaks)
    newcomer = Receiver("127.0.0.1", SOURCES, HOST)
    sent = senders(made, [newcomer], range(SOURCES))
    with pytest.raises(TransportError, match="closed before its end"):
        newcomer.wait(20.0)
    for one in (*sent, newcomer):
        one.close()


def test_what_is_given_up_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    made, held, send = fleet(), threading.Event(), Stream.send

    def waits(stream: Stream, chunk: memoryview) -> None:
        assert held.wait(20.0)
        send(stream, chunk)

    monkeypatch.setattr(Stream, "send", waits)
    newcomer = Receiver("127.0.0.1", SOURCES, HOST)
    sent = senders(made, [newcomer], range(SOURCES))
    assert not newcomer.wait(0.1)
    for one in (*sent, newcomer):
        one.close()
    held.set()
    for thread in threading.enumerate():
        if thread.name.startswith("stream-"):
            thread.join(20.0)
            assert not thread.is_alive()


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([["a", "float31", [1]]], "can be none: .'a', 'float31'"),
        ([["a", "load", [1]]], "can be none"),
        ([["a", "float32", [-1]]], "can be none"),
        ([["a", "float32", [True]]], "can be none"),
        (["a"], "can be none"),
        ([["a", "float64", [2**30, 2**20]]], "more than 1099511627776 bytes are announced"),
    ],
)
def test_what_cannot_be_a_tensor_is_refused(tensors: Any, message: str) -> None:
    with pytest.raises(TransportError, match=message):
        room_for({"tensors": tensors})
