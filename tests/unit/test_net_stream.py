"""Bytes from one member to another: as they were sent, from who knows the key, and nothing else."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import socket
import struct
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from raycloud.errors import TransportError
from raycloud.net import sockets
from raycloud.net.stream import SOCKETS, Place, Stream, connect, greeting, listen, welcome
from tests.connections import deafen
from tests.sockets import together


@contextmanager
def two_ends() -> Iterator[tuple[Stream, Stream]]:
    """Who sends, and who receives."""
    ours, theirs = socket.socketpair()
    sender, receiver = Stream(ours), Stream(theirs)
    yield sender, receiver
    sender.close()
    receiver.close()


def test_what_arrives_is_what_was_sent() -> None:
    sent = os.urandom(SOCKETS.chunk_bytes + 5)
    place = bytearray(len(sent))

    def give(stream: Stream) -> None:
        stream.tell({"tensors": [["a", "float32", [2]]]})
        stream.send(memoryview(sent)[: SOCKETS.chunk_bytes])
        stream.send(memoryview(sent)[SOCKETS.chunk_bytes :])

    def take(stream: Stream) -> dict[str, object]:
        told = stream.hear()
        stream.receive(memoryview(place))
        stream.close()
        return told

    with two_ends() as (sender, receiver):
        _, told = together([partial(give, sender), partial(take, receiver)])
    assert told == {"tensors": [["a", "float32", [2]]]}
    assert place == sent


def test_the_format_is_known_byte_by_byte() -> None:
    assert greeting(0x0102, 3) == b"raycloud" + bytes.fromhex("0002 0000000000000102 00000003")
    with two_ends() as (sender, receiver):
        sender.tell({"values": None})
        sender.send(memoryview(b"abc"))
        header = b'{"values": null}'
        wanted = struct.pack(">I", 16) + header + struct.pack(">II", 3, 0x352441C2) + b"abc"
        assert receiver.take(len(wanted)) == wanted
    assert zlib.crc32(b"abc") == 0x352441C2


@pytest.mark.parametrize(
    ("wire", "message"),
    [
        (struct.pack(">I", 2**31), "a header of 2147483648 bytes came"),
        (struct.pack(">I", 1) + b"{", "no JSON"),
        (struct.pack(">I", 2) + b"[]", "no object but list"),
        (b"", "closed before its end"),
    ],
)
def test_what_is_no_header_is_refused(wire: bytes, message: str) -> None:
    with two_ends() as (sender, receiver):
        sender.give(wire)
        sender.close()
        with pytest.raises(TransportError, match=message):
            receiver.hear()


@pytest.mark.parametrize(
    ("wire", "message"),
    [
        (struct.pack(">II", 3, zlib.crc32(b"abd")) + b"abc", "damaged on its way"),
        (struct.pack(">II", 5, 0) + b"abcde", "a chunk of 5 bytes came, 4 are missing"),
        (struct.pack(">II", 0, 0), "a chunk of 0 bytes came"),
        (struct.pack(">II", 4, 0) + b"ab", "closed before its end"),
    ],
)
def test_what_is_no_chunk_is_refused(wire: bytes, message: str) -> None:
    with two_ends() as (sender, receiver):
        sender.give(wire)
        sender.close()
        with pytest.raises(TransportError, match=message):
            receiver.receive(memoryview(bytearray(4)))


def test_who_knows_the_key_is_welcome() -> None:
    door, place = listen("127.0.0.1")
    stream = connect(place, 7)
    found = welcome(door.accept()[0], place)
    assert found is not None
    rank, other = found
    assert rank == 7
    stream.tell({"a": 1})
    assert other.hear() == {"a": 1}
    for one in (stream, other, door):
        one.close()


def test_who_does_not_is_not() -> None:
    door, place = listen("127.0.0.1")
    stranger = connect(Place(place.address, place.port, place.key ^ 1), 7)
    assert welcome(door.accept()[0], place) is None
    with pytest.raises(TransportError, match="the connection to a member"):
        stranger.hear()
    stranger.close()
    silent = socket.create_connection((place.address, place.port))
    silent.sendall(b"GET / HTTP/1.1\r\n\r\n" + json.dumps({}).encode() * 4)
    assert welcome(door.accept()[0], place) is None
    silent.close()
    door.close()


def test_a_path_that_hangs_ends_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "HUNG_S", 2)
    monkeypatch.setattr(sockets, "_IDLE_S", 1)
    door, place = listen("127.0.0.1")
    stream = connect(place, 7)
    found = welcome(door.accept()[0], place)
    assert found is not None
    _, other = found
    stream.tell({"a": 1})
    assert other.hear() == {"a": 1}
    for one in (stream, other):
        deafen(one._socket)
    began_s = time.monotonic()
    stream.send(memoryview(b"abcd"))  # the kernel takes it
    with pytest.raises(TransportError, match=r"broke: \[Errno 110\]"):
        other.receive(memoryview(bytearray(4)))
    assert stream.heard(10.0)
    with pytest.raises(TransportError, match="broke"):
        stream.take(1)
    assert time.monotonic() - began_s < 6.0
    for end in (stream, other, door):
        end.close()


def test_any_descriptor_will_do() -> None:
    """`select` knows none from 1,024 on, and a process of many files has such."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 1100:
        pytest.skip(f"this process may open {soft} files")
    with two_ends() as (near, receiver):
        number = fcntl.fcntl(near._socket, fcntl.F_DUPFD, 1024)
        sender = Stream(socket.socket(fileno=number))
        assert number >= 1024
        assert not sender.heard(0.0)
        receiver.give(b"!")
        assert sender.heard(5.0)
        sender.close()


def test_where_nobody_listens_any_more() -> None:
    door, place = listen("127.0.0.1")
    door.close()
    with pytest.raises(TransportError, match="a member cannot be reached at"):
        connect(place, 0)
