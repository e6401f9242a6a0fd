"""Members that meet: one call a round for each, however many they are, and nothing is kept."""

from __future__ import annotations

import resource
import socket
import struct
import threading
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import distributed as dist

from raycloud.errors import TransportError
from raycloud.net import rendezvous_store as module
from raycloud.net.gloo import GlooTransport
from raycloud.net.rendezvous_store import (
    Rendezvous,
    RendezvousClient,
    RendezvousStore,
    opened,
)
from raycloud.net.stream import Place, greeting
from raycloud.recovery.rendezvous import _store
from tests.sockets import together

HERE = "127.0.0.1"


@pytest.fixture
def meeting() -> Iterator[Rendezvous]:
    one = Rendezvous(HERE)
    yield one
    one.close()


def exchange(place: Place, head: tuple[int, int, int], *given: bytes) -> list[list[bytes]]:
    """Each round's bytes, by rank."""
    with RendezvousClient(place, *head) as roll:
        return [[opened(part) for part in roll.exchange(one)] for one in given]


def emptied(meeting: Rendezvous) -> None:
    """Waits until nobody is there any more."""
    pause = threading.Event()
    while meeting._rounds:
        pause.wait(0.01)


def test_each_gets_what_all_have_given_round_by_round(meeting: Rendezvous) -> None:
    size = 7
    rounds = together(
        partial(exchange, meeting.place, (3, rank, size), b"%d" % rank, bytes(rank))
        for rank in range(size)
    )
    assert (
        rounds
        == [[[b"%d" % rank for rank in range(size)], [bytes(rank) for rank in range(size)]]] * size
    )
    emptied(meeting)


def test_generations_meet_apart(meeting: Rendezvous) -> None:
    heads = [(generation, rank, 2) for generation in (1, 2, 3) for rank in (0, 1)]
    found = together(partial(exchange, meeting.place, head, b"%d" % head[0]) for head in heads)
    assert found == [[[b"%d" % head[0]] * 2] for head in heads]


def test_who_is_alone_asks_nobody() -> None:
    assert exchange(Place("", 0, 0), (0, 0, 1), b"a") == [[b"a"]]


def test_who_waits_for_one_that_has_left_is_let_go(meeting: Rendezvous) -> None:
    def left(rank: int) -> None:
        with (
            RendezvousClient(meeting.place, 0, rank, 3) as roll,
            pytest.raises(TransportError, match="generation 0 did not meet"),
        ):
            roll.exchange(b"")

    def leaves() -> None:
        with RendezvousClient(meeting.place, 0, 2, 3):
            while len(meeting._rounds.get(0, module._Round(3)).given) < 2:
                threading.Event().wait(0.01)

    together([partial(left, 0), partial(left, 1), leaves])
    emptied(meeting)


def test_older_generations_are_let_go(meeting: Rendezvous) -> None:
    begun = threading.Event()

    def waits() -> None:
        with RendezvousClient(meeting.place, 4, 0, 2) as roll:
            begun.set()
            with pytest.raises(TransportError, match="generation 4 did not meet"):
                roll.exchange(b"")

    def forgets() -> None:
        begun.wait()
        while not meeting._rounds:
            threading.Event().wait(0.01)
        meeting.forget(before=5)

    together([waits, forgets])
    emptied(meeting)
    with pytest.raises(TransportError, match="did not meet"):
        exchange(meeting.place, (4, 0, 2), b"")


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n" + bytes(40),
        greeting(1, 0) + bytes(20),
        bytes(100),
    ],
)
def test_a_stranger_is_turned_away(meeting: Rendezvous, said: bytes) -> None:
    with socket.create_connection((meeting.place.address, meeting.place.port)) as one:
        one.sendall(said)
        assert one.recv(1) == b""
    assert not meeting._rounds


@pytest.mark.parametrize("head", [(0, 2, 2), (0, 0, 2), (0, 1, 3)])
def test_who_does_not_belong_there_is_turned_away(
    meeting: Rendezvous, head: tuple[int, int, int]
) -> None:
    with RendezvousClient(meeting.place, 0, 0, 2):
        while not meeting._rounds:
            threading.Event().wait(0.01)
        with pytest.raises(TransportError, match="did not meet"):
            exchange(meeting.place, head, b"")
        assert len(meeting._rounds) == 1


def test_strangers_that_are_silent_are_few_and_stay_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MOST_STRANGERS", 3)
    monkeypatch.setattr(module, "STRANGER_S", 0.5)
    meeting = Rendezvous(HERE)
    where = meeting.place.address, meeting.place.port
    silent = [socket.create_connection(where) for _ in range(3)]
    with socket.create_connection(where) as fourth:
        assert fourth.recv(1) == b""
    for one in silent:
        assert one.recv(1) == b""
        one.close()
    assert exchange(meeting.place, (0, 0, 1), b"") == [[b""]]
    meeting.close()


def test_a_rank_that_has_not_told_is_named(meeting: Rendezvous) -> None:
    def asks(rank: int) -> None:
        with RendezvousClient(meeting.place, 0, rank, 2) as roll:
            store = RendezvousStore(roll)
            store.set(f"a/{rank}", "x")
            assert store.get(f"a/{1 - rank}") == b"x"
            with pytest.raises(TransportError, match=r"rank 1 has not told 'b/1' in this round"):
                store.get("b/1")

    together([partial(asks, 0), partial(asks, 1)])


def test_gloo_meets_there(meeting: Rendezvous) -> None:
    size = 5
    done = threading.Barrier(size)

    def member(rank: int) -> float:
        transports = []
        for generation in (0, 1):
            with RendezvousClient(meeting.place, generation, rank, size) as roll:
                store = RendezvousStore(roll)
                transports.append(GlooTransport(store, rank=rank, size=size, address=HERE))
        found = torch.tensor([float(rank)])
        for transport in transports:
            work = transport.all_reduce(found)
            while not work.wait(1.0):
                pass
        done.wait()
        for transport in transports:
            transport.close()
        return float(found)

    assert together(partial(member, rank) for rank in range(size)) == [10.0 * size] * size


def test_a_store_for_nccl_lives_with_rank_0(meeting: Rendezvous) -> None:
    def member(rank: int) -> dist.Store:
        with RendezvousClient(meeting.place, 0, rank, 3) as roll:
            store = _store(roll, HERE, rank=rank, size=3)
        if rank == 0:
            store.set("id", "abc")
        assert store.get("id") == b"abc"
        return store

    together(partial(member, rank) for rank in range(3))


def test_500_members_make_few_calls(meeting: Rendezvous) -> None:
    """The rounds of a first meeting, with as many bytes as gloo has to tell there."""
    size, answers = 500, []

    def member(rank: int) -> None:
        for generation in (0, 1):
            with RendezvousClient(meeting.place, generation, rank, size) as roll:
                parts = roll.exchange(b"%d " % rank * 300)
                answers.append(opened(parts[(rank + 1) % size])[:8].split()[0])

    threads = [threading.Thread(target=member, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = sorted(b"%d" % rank for rank in range(size) for _ in (0, 1))
    assert sorted(answers) == expected
    emptied(meeting)


def test_more_come_at_once_than_wait_to_be_taken_in(
    meeting: Rendezvous,
) -> None:
    size, where = 1500, (meeting.place.address, meeting.place.port)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 4096), hard), hard))
    said = struct.Struct(">QIIII4s")
    members = [socket.socket() for _ in range(size)]
    try:
        for one in members:
            one.setblocking(False)
            one.connect_ex(where)
        for rank, one in enumerate(members):
            one.settimeout(30.0)
            head = said.pack(0, 0, rank, size, 4, b"%4d" % rank)
            one.sendall(greeting(meeting.place.key, rank) + head)
        assert all(len(one.recv(1)) == 1 for one in members)
    finally:
        for one in members:
            one.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
