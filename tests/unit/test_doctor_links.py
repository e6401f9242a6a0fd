"""Links and clocks, over real sockets of this machine."""

from __future__ import annotations

import socket
import threading

import pytest

from raycloud.clock import SystemClock
from raycloud.doctor import links
from raycloud.doctor.links import Ear, call, greet

HOST = "127.0.0.1"


def test_a_link_is_met_and_measured() -> None:
    ear = Ear(HOST)
    round_trip_s, bytes_per_s = call(HOST, ear.port, ear.key, SystemClock(), lasts_s=0.05)
    assert 0 < round_trip_s < 1
    assert bytes_per_s is not None
    assert bytes_per_s > 1e6
    ear.close()
    with pytest.raises(OSError, match="refused"):  # one caller, then it is gone
        call(HOST, ear.port, ear.key, SystemClock())


def test_without_measuring_hardly_anything_is_sent() -> None:
    ear = Ear(HOST)
    assert call(HOST, ear.port, ear.key, SystemClock())[1] is None
    ear.close()


def test_who_does_not_know_the_key_is_not_answered() -> None:
    ear = Ear(HOST)
    with pytest.raises(OSError, match=r"closed the connection|reset"):
        call(HOST, ear.port, bytes(links.KEY_BYTES), SystemClock())
    ear.close()


def test_an_ear_that_nobody_calls_ends() -> None:
    ear = Ear(HOST, limit_s=0.05)
    ear.close()
    assert not [one for one in threading.enumerate() if one.name == "raycloud-link"]


def test_nobody_listens() -> None:
    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
        greet(HOST, port)


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_somebody_else_listens(answer: bytes) -> None:
    with socket.create_server((HOST, 0)) as server:

        def serve() -> None:
            caller, _ = server.accept()
            with caller:
                caller.recv(1 << 10)
                caller.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(ConnectionError, match="is not Ray"):
            greet(HOST, server.getsockname()[1])
        thread.join()
