"""Connections that others opened in this process: those that nobody answers are given up."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import time
from pathlib import Path

import pytest

from raycloud.net import sockets


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("0100007F:1F90", ("127.0.0.1", 8080)),
        ("00000000000000000000000001000000:0050", ("::1", 80)),
    ],
)
def test_the_tables_of_the_kernel_are_read(text: str, place: sockets.Place) -> None:
    assert sockets._place(text) == place


def _open_as(descriptor: int) -> int:
    """How many descriptors of this process are of the same thing; others may close theirs."""
    of_process = Path("/proc/self/fd")
    named, found = (of_process / str(descriptor)).readlink(), 0
    for one in of_process.iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += one.readlink() == named
    return found


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="/proc is of Linux")
def test_what_is_no_socket_any_more_is_passed_over_and_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, writes = os.pipe()
    (tmp_path / str(reads)).symlink_to("socket:[1]")
    monkeypatch.setattr(sockets, "_DESCRIPTORS", tmp_path)
    assert _open_as(reads) == 2  # both ends
    assert [*sockets._sockets()] == []
    assert _open_as(reads) == 2  # both ends
    os.close(reads)
    os.close(writes)


def test_who_is_not_answered_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener whose queue is full answers as a path that lets nothing through: not at all."""
    monkeypatch.setattr(sockets, "HUNG_S", 2)
    monkeypatch.setattr(sockets, "_IDLE_S", 1)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        place, waiting = full.getsockname(), []
        for _ in range(8):
            one = socket.socket()
            one.setblocking(False)
            assert one.connect_ex(place) == errno.EINPROGRESS
            waiting.append(one)
        with sockets.connecting([place]):
            assert [*sockets._unanswered([("127.0.0.1", 9)])] == []
            poll, began_s = select.poll(), time.monotonic()
            poll.register(waiting[-1], select.POLLOUT)
            assert poll.poll(20_000)
            assert waiting[-1].getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ETIMEDOUT
            assert time.monotonic() - began_s < 10.0
        for one in waiting:
            one.close()
