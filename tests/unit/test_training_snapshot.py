"""A state from several members to several others, part by part, while it is about to change."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from raycloud.errors import TransportError
from raycloud.sync.stream import Stream
from raycloud.training.as_bytes import room_for
from raycloud.training.snapshot import Incoming, Outgoing, Sharing
from tests.lockstep import Fleet, NetTask, job

SOURCES = 3


def fleet() -> Fleet:
    made = Fleet(job(), NetTask(norm=True), (4, 2, 2))
    for step in range(2):
        made.step(step)
    return made


def outgoing(
    made: Fleet, to: list[Incoming], ranks: range, busy: Callable[[], bool] = lambda: False
) -> list[Outgoing]:
    return [
        Outgoing(
            made.replicas[rank].state,
            Sharing(rank=rank, part=rank, parts=SOURCES, places=[i.place for i in to], busy=busy),
        )
        for rank in ranks
    ]


def test_it_arrives_as_it_was_whatever_becomes_of_it() -> None:
    made = fleet()
    state = made.replicas[0].state
    before = {name: t.clone() for name, t in state.tensors().items()}
    values = state.values()
    newcomers = [Incoming("127.0.0.1", SOURCES) for _ in range(2)]
    sent = outgoing(made, newcomers, range(SOURCES))
    made.compute(2)  # which changes buffers, and no parameter
    for one in sent:
        one.settle()
    for replica in made.replicas:
        replica.state.tensors()["model/last.weight"].zero_()
    for newcomer in newcomers:
        assert newcomer.whole(20.0)
        tensors, told = newcomer.take()
        assert tensors.keys() == before.keys()
        assert all(torch.equal(t, before[name]) for name, t in tensors.items())
        assert told == values
        newcomer.close()
    for one in sent:
        one.close()


def test_it_comes_also_where_gradients_travel_all_the_time() -> None:
    made = fleet()
    newcomer = Incoming("127.0.0.1", SOURCES)
    sent = outgoing(made, [newcomer], range(SOURCES), busy=lambda: True)
    newcomer.hurry()
    assert newcomer.whole(20.0)
    for one in (*sent, newcomer):
        one.close()


def test_a_part_that_breaks_off_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    made, send, count = fleet(), Stream.send, threading.Semaphore(2)

    def breaks(stream: Stream, chunk: memoryview) -> None:
        if not count.acquire(blocking=False):
            raise TransportError("cut")
        send(stream, chunk)

    monkeypatch.setattr(Stream, "send", breaks)
    newcomer = Incoming("127.0.0.1", SOURCES)
    sent = outgoing(made, [newcomer], range(SOURCES))
    with pytest.raises(TransportError, match="closed before its end"):
        newcomer.whole(20.0)
    for one in (*sent, newcomer):
        one.close()


def test_what_is_given_up_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    made, held, send = fleet(), threading.Event(), Stream.send

    def waits(stream: Stream, chunk: memoryview) -> None:
        assert held.wait(20.0)
        send(stream, chunk)

    monkeypatch.setattr(Stream, "send", waits)
    newcomer = Incoming("127.0.0.1", SOURCES)
    sent = outgoing(made, [newcomer], range(SOURCES))
    assert not newcomer.whole(0.1)
    for one in (*sent, newcomer):
        one.close()
    held.set()
    for thread in threading.enumerate():
        if thread.name.startswith("send-"):
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
