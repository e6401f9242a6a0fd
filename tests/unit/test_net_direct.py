"""Direct transport: real sockets and threads; deaths, strangers, and what is left over."""

from __future__ import annotations

import fcntl
import json
import socket
import sys
import termios
import threading
import time
import zlib
from functools import partial
from queue import Queue

import pytest
import torch

from raycloud.errors import TransportError
from raycloud.net import direct
from raycloud.net.direct import DirectTransport
from raycloud.net.exchange import HEADER, Frame, Phase
from raycloud.net.stream import greeting
from tests.coded import EVERY
from tests.sockets import Rounds, direct_members, together

HERE = "127.0.0.1"
SOON_S = 10.0


def wait(works: list[direct.DirectWork]) -> None:
    """Until all are complete."""
    assert all(work.wait(SOON_S) for work in works)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 2000, 300_000])
def test_sums(size: int, count: int) -> None:
    rows = [torch.randn(count, dtype=torch.float64) for _ in range(size)]
    expected = torch.zeros(count, dtype=torch.float64)
    for row in rows:
        expected += row
    with direct_members(size) as members:
        wait([member.all_reduce(row) for member, row in zip(members, rows, strict=True)])
    assert all(torch.equal(row, expected) for row in rows)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("codec", "times"), [("int4", 6.2), ("topk", 130.0)])
def test_many_at_once_with_a_codec(codec: str, times: float, size: int) -> None:
    """With frame headers, so many times fewer bytes than a ring of fp32 sends."""
    count, many = 70_000, 6
    rows = [[torch.randn(count) for _ in range(many)] for _ in range(size)]
    totals = [[torch.empty(count) for _ in range(many)] for _ in range(size)]
    sums = [torch.stack([row[k] for row in rows]).sum(0) for k in range(many)]
    with direct_members(size) as members:
        works = [
            member.reduce(rows[rank][k], totals[rank][k], EVERY[codec])
            for rank, member in enumerate(members)
            for k in range(many)
        ]
        wait(works)
        sent = [member.bytes_sent for member in members]
        told = [many * member.reduce_bytes(count, EVERY[codec]) for member in members]
    assert all(0 < own - payload <= 24 * many * 4 for own, payload in zip(sent, told, strict=True))
    for k in range(many):
        assert all(torch.equal(total[k], totals[0][k]) for total in totals)
        kept = torch.stack([row[k] for row in rows]).sum(0)
        torch.testing.assert_close(totals[0][k] + kept, sums[k], rtol=0, atol=1e-5)
    dense = 4 * count * many * 2 * (size - 1) / size
    assert max(sent) < dense / times


def test_broadcast() -> None:
    told = [torch.full((9, 9), float(rank)) for rank in range(3)]
    with direct_members(3) as members:
        wait([member.broadcast(one, 1) for member, one in zip(members, told, strict=True)])
    assert all(bool((one == 1.0).all()) for one in told)


def test_a_broadcast_of_many_pieces() -> None:
    told = [torch.full((700_001,), rank, dtype=torch.int64) for rank in range(4)]  # 5.3 MiB
    with direct_members(4) as members:
        wait([member.broadcast(told[member.rank], 2) for member in members])
        sent = [member.bytes_sent for member in members]
    assert all(bool((one == 2).all()) for one in told)
    assert sent[2] == sent[3] == sent[0] > 700_001 * 8  # along the chain; the last one says a word
    assert sent[1] < 1000


def test_a_broadcast_ends_for_all_where_one_of_the_chain_dies() -> None:
    told = [torch.zeros(4_000_000) for _ in range(5)]
    with direct_members(5) as members:
        others = [member for member in members if member.rank != 3]
        works = [member.broadcast(told[member.rank], 0) for member in others]
        members[3].hang_up()
        for work in (works[0], works[3]):  # the source, and who was to have it of the dead
            with pytest.raises(TransportError, match="broke"):
                work.wait(SOON_S)


def test_nothing_is_exchanged_of_an_empty_tensor() -> None:
    with direct_members(2) as members:
        wait([member.all_reduce(torch.ones(0)) for member in members])
        wait([member.broadcast(torch.ones(0), 0) for member in members])
        rows = [torch.ones(3) for _ in members]
        wait([member.all_reduce(row) for member, row in zip(members, rows, strict=True)])
    assert all(bool((row == 2.0).all()) for row in rows)


def test_the_end_of_who_has_sent_all_disturbs_nobody() -> None:
    """Two go on to another generation as soon as they are done; the third may not be yet."""
    with direct_members(3) as members:
        rows = [torch.ones(600_000) for _ in members]
        works = [member.all_reduce(row) for member, row in zip(members, rows, strict=True)]
        wait(works[:1])
        members[0].close()
        wait(works[1:])
        assert all(bool((row == 3.0).all()) for row in rows)
        with pytest.raises(TransportError, match="was closed"):
            members[1].all_reduce(torch.ones(3)).wait(SOON_S)


def test_who_dies_breaks_the_exchange_of_all_others() -> None:
    with direct_members(3) as members:
        waits = [members[r].all_reduce(torch.ones(50_000)) for r in (0, 2)]
        members[1].hang_up()
        for work in waits:
            with pytest.raises(TransportError, match="broke"):
                work.wait(SOON_S)
        with pytest.raises(TransportError, match="broke"):
            members[0].all_reduce(torch.ones(3)).wait(SOON_S)


def test_closing_ends_the_thread_and_what_waits() -> None:
    before = set(threading.enumerate())
    with direct_members(2) as members:
        work = members[0].all_reduce(torch.ones(3))
        members[0].close()
        with pytest.raises(TransportError):
            work.wait(SOON_S)
    left = set(threading.enumerate()) - before
    assert not [thread for thread in left if thread.name == "courier"]


def test_a_frame_of_another_generation_breaks_it() -> None:
    def told(member: DirectTransport) -> str:
        with pytest.raises(TransportError) as refused:
            member.all_reduce(torch.ones(3)).wait(SOON_S)
        return str(refused.value)

    with direct_members(2) as members:
        members[1]._nonce = 6
        said = together(partial(told, member) for member in members)
    assert any("generation" in one for one in said)  # who heard it first


def test_strangers_are_refused_and_nobody_is_harmed() -> None:
    rounds, found = Rounds(2), Queue[DirectTransport]()
    strangers: list[socket.socket] = []

    def come(rank: int) -> None:
        tell = partial(rounds.tell, rank) if rank == 0 else after_strangers
        found.put(direct.meet(tell, rank=rank, size=2, address=HERE)[0])

    def after_strangers(told: bytes) -> list[bytes]:
        every = rounds.tell(1, told)
        [[address, port, _]] = json.loads(every[0])
        flood = b"", b"GET / HTTP/1.1\r\n\r\n", greeting(12345, 1) + bytes(HEADER.size)
        for message in flood * 30:
            stranger = socket.create_connection((address, port))
            strangers.append(stranger)
            stranger.sendall(message)
        return every

    for rank in (0, 1):
        threading.Thread(target=come, args=(rank,), daemon=True).start()
    members = sorted((found.get(timeout=SOON_S) for _ in range(2)), key=lambda one: one.rank)
    try:
        rows = [torch.ones(40_000) for _ in members]
        wait([member.all_reduce(row) for member, row in zip(members, rows, strict=True)])
        assert all(bool((row == 2.0).all()) for row in rows)
    finally:
        for one in (*members, *strangers):
            one.close()


def test_who_does_not_come_lets_the_others_go() -> None:
    rounds = Rounds(2, most_s=0.2)
    with pytest.raises(TransportError, match="rank 1 could not meet"):
        direct.meet(partial(rounds.tell, 1), rank=1, size=2, address=HERE)


def test_who_cannot_be_reached_is_named() -> None:
    door = socket.create_server((HERE, 0))
    place = json.dumps([[HERE, door.getsockname()[1], 7]]).encode()
    door.close()
    with pytest.raises(TransportError, match="cannot be reached"):
        direct.meet(lambda own: [place, own], rank=1, size=2, address=HERE)


def test_waiting_costs_nothing() -> None:
    with direct_members(2) as members:
        work = members[0].all_reduce(torch.ones(3))
        before = time.process_time()
        assert not work.wait(0.5)
        assert time.process_time() - before < 0.1
        other = members[1].all_reduce(torch.ones(3))
        wait([work, other])


def test_the_last_bytes_of_a_payload_wake_the_courier(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its turn has ended just before them, and it was to be woken by more."""
    monkeypatch.setattr(direct, "_TURN_BYTES", 2000)
    monkeypatch.setattr(direct, "_AT_ONCE_BYTES", 100)
    payload = torch.arange(3050, dtype=torch.int64).to(torch.uint8)
    octets = payload.numpy().tobytes()
    frame = Frame(Phase.WHOLE, 0, len(octets), zlib.crc32(octets))
    with (
        socket.create_server((HERE, 0)) as door,
        socket.create_connection(door.getsockname()) as peer,
    ):
        connection, _ = door.accept()
        member = DirectTransport(1, {0: connection}, nonce=5)
        got = torch.zeros_like(payload)
        work = member.broadcast(got, 0)
        sent = frame.pack(5) + octets
        for some in (sent[:1024], sent[1024:3024], sent[3024:]):
            peer.sendall(some)
            until_read(connection)
        assert work.wait(SOON_S)
        member.close()
    assert torch.equal(got, payload)


def until_read(connection: socket.socket) -> None:
    """Until nothing is left in its buffer, or too little to be woken by."""
    waiting, until_s = bytearray(4), time.monotonic() + 1.0
    while time.monotonic() < until_s:
        fcntl.ioctl(connection, termios.FIONREAD, waiting)
        if int.from_bytes(waiting, sys.byteorder) < direct._AT_ONCE_BYTES:
            return
