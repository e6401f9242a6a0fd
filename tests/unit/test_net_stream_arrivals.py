"""Members that come, among others that do not know the key: real sockets."""

from __future__ import annotations

import socket
import threading
from queue import SimpleQueue

import pytest

from raycloud.errors import TransportError
from raycloud.net import stream
from raycloud.net.stream import MOST_STRANGERS, Arrivals, Stream, connect

_WAIT_S = 20.0


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("arrival")]


def gone(connection: socket.socket) -> bool:
    connection.settimeout(_WAIT_S)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_strangers_are_few_at_a_time_and_keep_no_member_away() -> None:
    heard: SimpleQueue[int] = SimpleQueue()

    def hear(rank: int, stream: Stream) -> None:
        heard.put(rank)
        stream.take(1)

    arrivals = Arrivals("127.0.0.1", 2, hear, lambda _: None)
    where = arrivals.place.address, arrivals.place.port
    strangers = [socket.create_connection(where) for _ in range(3 * MOST_STRANGERS)]
    members = [connect(arrivals.place, rank) for rank in (0, 1)]
    assert {heard.get(timeout=_WAIT_S), heard.get(timeout=_WAIT_S)} == {0, 1}
    assert all(map(gone, strangers[: 2 * MOST_STRANGERS]))  # for those that came after them
    assert len(threads()) <= MOST_STRANGERS + len(members) + 1
    arrivals.close()
    assert all(map(gone, strangers))
    for thread in threads():
        thread.join(_WAIT_S)
    assert threads() == []
    for one in (*strangers, *members):
        one.close()


def test_who_does_not_come_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "SILENT_S", 0.1)
    missed: SimpleQueue[TransportError] = SimpleQueue()
    arrivals = Arrivals("127.0.0.1", 1, lambda *_: None, missed.put)
    assert "no member has connected in 0.1 s" in missed.get(timeout=_WAIT_S).message
    arrivals.close()
