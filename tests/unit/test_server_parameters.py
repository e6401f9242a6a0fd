"""What members ask of a shard's parameters, by threads that wait for each other."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from raycloud.errors import TransportError
from raycloud.server import parameters
from raycloud.server.parameters import ParameterActs

WHO = {"generation": 0, "members": 2, "step": 0}


class Turn(threading.Condition):
    """It says when somebody begins to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.set()
        return super().wait(timeout)


class Shard:
    """A shard that is asked as by the connections' threads of a server."""

    def __init__(self) -> None:
        self.turn = Turn()
        self.acts = ParameterActs(self.turn)

    def ask(self, what: str, *arrays: Any, **header: Any) -> tuple[dict[str, Any], list[Any]]:
        with self.turn:
            return getattr(self.acts, what)({**WHO, **header}, list(arrays))

    def put(self) -> None:
        self.ask("put", np.ones(4, np.float32), slices=1)

    def push(self, rank: int, place: int, value: float) -> str:
        codes = np.full(4, value, np.float32).view(np.uint8)
        lease = [[place], 1.0, 0.5, 7]
        return str(self.ask("push", codes, rank=rank, lease=lease, codec="none")[0]["answer"])

    def later(self, what: str, **header: Any) -> tuple[threading.Thread, list[Any]]:
        """Asks in a thread, which has begun to wait once this returns."""
        got: list[Any] = []

        def run() -> None:
            try:
                got.append(self.ask(what, **header))
            except TransportError as error:
                got.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        assert self.turn.waits.wait(10)
        return thread, got


@pytest.fixture
def shard() -> Shard:
    return Shard()


def fetching(rank: int, need: int) -> dict[str, Any]:
    return {"rank": rank, "need": need, "codec": "none", "whole": False}


def test_who_is_too_far_ahead_waits_for_the_slowest(shard: Shard) -> None:
    """The bound of staleness: an answer is as of so many updates of each member, at least."""
    shard.put()
    for place in range(3):
        assert shard.push(0, place, 1.0) == "applied"
    thread, got = shard.later("fetch", **fetching(0, need=1))
    assert not got
    shard.push(1, 3, 1.0)
    thread.join(10)
    [(answer, [values])] = got
    assert answer == {"least": 1}
    assert values.tolist() == [5.0] * 4


def test_an_update_that_comes_twice_is_one(shard: Shard) -> None:
    """It is added once, and its sender is not taken to be further than it is."""
    shard.put()
    shard.push(1, 0, 1.0)
    assert [shard.push(0, 1, 1.0) for _ in range(2)] == ["applied", "duplicate"]
    answer, [values] = shard.ask("fetch", **fetching(0, need=1))
    assert answer == {"least": 1}
    assert values.tolist() == [3.0] * 4
    shard.push(1, 2, 0.0)
    assert shard.ask("fetch", **fetching(0, need=1))[0] == {"least": 1}


def test_what_is_pushed_before_the_round_begins_waits(shard: Shard) -> None:
    shard.ask("enter")
    assert shard.ask("settle", places=None)[0] == {"answer": "applied"}
    lease = [[0], 1.0, 0.5, 7]
    thread, got = shard.later("push", rank=0, lease=lease, codec="none")
    assert not got
    shard.put()
    thread.join(10)
    assert got == [({"answer": "applied"}, [])]


def test_a_generation_ends_the_waiting_of_the_one_before(shard: Shard) -> None:
    shard.put()
    thread, got = shard.later("fetch", **fetching(0, need=1))
    shard.ask("enter", generation=1)
    thread.join(10)
    assert isinstance(got[0], TransportError)


def test_who_waits_long_is_told_to_ask_again(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameters, "_WAITS_S", 0.01)
    shard.put()
    assert shard.ask("fetch", **fetching(0, need=1)) == ({"later": True}, [])
    assert shard.ask("push", step=9, rank=0, lease=[[0], 1.0, 0.5, 7], codec="none") == (
        {"later": True},
        [],
    )


def test_the_next_generation_hears_what_has_come(shard: Shard) -> None:
    shard.put()
    shard.push(1, 5, 2.0)
    answer, _ = shard.ask("enter", generation=1)
    leases, cut = [[[5], 1.0, 0.5, 7]], (0, 1)
    assert answer == {"answer": "applied", "stands": True, "leases": leases, "cut": cut}
    assert shard.ask("enter", generation=1, step=16)[0]["stands"] is False
