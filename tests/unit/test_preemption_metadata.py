"""A metadata server that is absent, slow, lies or says too much costs seconds and kilobytes."""

from __future__ import annotations

import itertools
import resource
import socket
import time

import pytest

from raycloud.clock import SystemClock, VirtualClock
from raycloud.errors import MachineError
from raycloud.preemption.metadata import MOST_BYTES, MetadataServer, _Bounded
from tests.metadata_servers import HOST, answering, saying

OK = b"HTTP/1.1 200 OK\r\n"
LIMIT_S = 0.3


def asked(port: int, answer_s: float = 20.0) -> str:
    return MetadataServer(SystemClock(), HOST, port, answer_s=answer_s).ask("/", {}).text()


def test_an_answer() -> None:
    with answering(lambda _: (200, {"ETag": "e1"}, b" TRUE\n")) as running:
        answer = running.client.ask("/a?b=c", {"Metadata": "true"}, method="PUT")
        assert answer.text() == "TRUE"
        assert answer.headers["etag"] == "e1"
        (one,) = running.asked
    assert (one.method, one.path) == ("PUT", "/a?b=c")
    assert one.headers["metadata"] == "true"
    assert one.headers["content-length"] == "0"


def test_nobody_there() -> None:
    with socket.create_server((HOST, 0)) as one:
        port = one.getsockname()[1]
    with pytest.raises(MachineError, match="gives no answer"):
        asked(port)


@pytest.mark.parametrize(
    ("pieces", "stay"),
    [
        pytest.param([], True, id="nothing"),
        pytest.param([], False, id="hung up"),
        pytest.param([b"\x00\xff\x80 nonsense\r\n\r\n"], False, id="no HTTP"),
        pytest.param([b"HTTP/1.1 many\r\n\r\n"], False, id="no status"),
        pytest.param([OK + b"Content-Length: 900\r\n\r\nshort"], False, id="cut off"),
        pytest.param([OK + b"Content-Length: 900\r\n\r\nshort"], True, id="cut off, and silent"),
        pytest.param([OK, b"X: " + b"x" * 70_000 + b"\r\n\r\n"], False, id="a long header"),
        pytest.param([OK, b"X: x\r\n" * 200, b"\r\n"], False, id="many headers"),
        pytest.param([b"HTTP/1.1 100 Continue\r\n\r\n"] * 20_000, False, id="go on for ever"),
        pytest.param(
            [OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nx\r\n"], False, id="no size of a chunk"
        ),
        pytest.param(
            [OK + b"Transfer-Encoding: chunked\r\n\r\nffffffffff\r\nx"], False, id="a vast chunk"
        ),
        pytest.param([OK + b"Content-Length: 999999999999\r\n\r\nx"], False, id="a vast length"),
    ],
)
def test_no_answer(pieces: list[bytes], stay: bool) -> None:
    began_s = time.monotonic()
    with saying(*pieces, stay=stay) as port, pytest.raises(MachineError, match="gives no answer"):
        asked(port, LIMIT_S if stay else 20.0)
    assert time.monotonic() - began_s < 15.0


def test_bytes_that_come_one_by_one_do_not_keep_it_waiting() -> None:
    dribble = [OK, *itertools.repeat(b"x", 200)]
    began_s = time.monotonic()
    with (
        saying(*dribble, every_s=LIMIT_S / 4) as port,
        pytest.raises(MachineError, match=r"too long|timed out"),
    ):
        asked(port, LIMIT_S)
    assert time.monotonic() - began_s < 10.0  # the whole would take 15 s


def test_each_byte_has_what_is_left_of_the_time() -> None:
    clock = VirtualClock()
    with saying(b"x", stay=True) as port, _Bounded(clock, 30.0) as connection:
        connection.connect((HOST, port))
        clock.advance(7.0)
        assert connection.recv_into(bytearray(9)) == 1
        assert connection.gettimeout() == 23.0
        clock.advance(23.0)
        with pytest.raises(TimeoutError, match="too long"):
            connection.recv_into(bytearray(9))


@pytest.mark.parametrize("length", [b"", b"Content-Length: 5000000\r\n"], ids=["untold", "told"])
def test_megabytes_are_not_read(length: bytes) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with (
        saying(OK + length + b"\r\n", *[b"x" * 10_000] * 500) as port,
        pytest.raises(MachineError, match=f"longer than {MOST_BYTES} bytes"),
    ):
        asked(port)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000


def test_no_redirect_is_followed() -> None:
    with (
        answering(lambda _: (200, {}, b"elsewhere")) as other,
        answering(lambda _: (302, {"Location": f"http://{HOST}:{other.port}/"}, b"")) as running,
    ):
        with pytest.raises(MachineError, match="status 302"):
            asked(running.port)
        assert other.asked == []


def test_no_proxy_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        answering(lambda _: (200, {}, b"proxy")) as proxy,
        answering(lambda _: (200, {}, b"itself")) as running,
    ):
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://{HOST}:{proxy.port}")
        assert asked(running.port) == "itself"
        assert proxy.asked == []


@pytest.mark.parametrize("body", [b"{", b"[]", b"null", b"NaN", b"[" * 30_000, b"\xff\xfe"])
def test_no_record(body: bytes) -> None:
    with answering(lambda _: (200, {}, body)) as running:
        answer = running.client.ask("/", {})
    with pytest.raises(MachineError, match="no JSON"):
        answer.record()
