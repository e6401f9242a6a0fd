"""Ended connections that somebody looks at: told once more, then left alone."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from raycloud.net.sockets import hang_up, look_once_more

pytestmark = pytest.mark.skipif(not hasattr(select, "epoll"), reason="epoll is of Linux")


@contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
        with near, far:
            yield near, far


def inode(one: socket.socket) -> int:
    return os.fstat(one.fileno()).st_ino


def test_what_has_ended_is_told_without_end_and_then_once() -> None:
    with connected() as (near, far), select.epoll() as poller:
        poller.register(near, select.EPOLLIN)
        far.sendall(b"never read")
        hang_up([], [far.getsockname()])
        ended = {inode(near)}
        told = [poller.poll(1.0) for _ in range(3)]
        assert all(dict(one)[near.fileno()] & select.EPOLLHUP for one in told)
        assert look_once_more(ended) == 1
        assert len(poller.poll(1.0)) == 1
        assert poller.poll(0.05) == []
        assert look_once_more(ended) == 0
        poller.modify(near, select.EPOLLIN | select.EPOLLOUT)  # who looks there asks anew
        assert look_once_more(ended) == 1
        poller.unregister(near)  # as gloo does in the end


def test_what_it_is_told_with_stays_the_same() -> None:
    """Gloo has an address there, and goes to it."""
    with connected() as (near, _), select.epoll() as poller:
        poller.register(near, select.EPOLLIN)
        near.shutdown(socket.SHUT_RDWR)
        look_once_more({inode(near)})
        assert [descriptor for descriptor, _ in poller.poll(1.0)] == [near.fileno()]


def test_others_are_left_alone() -> None:
    with connected() as (near, far), select.epoll() as poller:
        poller.register(far, select.EPOLLIN)
        assert look_once_more({inode(near)}) == 0
        near.sendall(b"x")
        assert all(poller.poll(1.0) for _ in range(3))
