"""A server that gets the rows of others, while members tell it what comes next."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Event
from threading import enumerate as enumerate_threads
from typing import Any

import pytest

from raycloud.checkpoint import open_store
from raycloud.errors import TransportError
from raycloud.server import serving
from raycloud.server.serving import Server
from tests.live import wait_for


def test_rows_that_do_not_come_for_a_generation_keep_none_from_a_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows come in parts, and between two of them another generation may have begun."""
    server = Server(0, 1, open_store(tmp_path), "127.0.0.1")
    may, ended, asked_for = {1: Event(), 2: Event()}, Event(), list[int]()

    def snapshots(_: Any, asked: Any) -> Iterator[Any]:
        generation, _ = asked["kept"]
        asked_for.append(generation)
        assert may[generation].wait(30)
        if generation == 1:
            ended.set()
            raise TransportError("its rows are not kept any more")
        yield from ()

    monkeypatch.setattr(serving, "_snapshots", snapshots)
    for generation in (1, 2):
        told = {"do": "fill", "generation": generation, "step": 5, "places": [], "anew": True}
        server._reply(told, [])
    may[1].set()
    assert ended.wait(30)
    wait_for("one thread", lambda: [t.name for t in enumerate_threads()].count("fills") == 1)
    assert server._reply({"do": "filled"}, [])[0] == {"filled": False}
    may[2].set()
    wait_for("the rows", lambda: server._reply({"do": "filled"}, [])[0]["filled"])
    assert sorted(asked_for) == [1, 2]
    assert server.shard.step == 0
    server.close()
