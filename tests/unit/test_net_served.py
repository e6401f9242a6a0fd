"""Servers that sum: the same bits for any order of arrival; deaths; strangers."""

from __future__ import annotations

import random
import zlib
from collections import deque
from functools import partial
from pathlib import Path

import pytest
import torch

from raycloud.errors import TransportError
from raycloud.net.exchange import DirectExchange, Frame, Operation, Phase, Plain
from raycloud.net.served import LostServerError, ServedReduction, SumExchange
from raycloud.net.stream import Place
from raycloud.server.serving import Server
from raycloud.sync.codecs import CODECS
from tests.live import wait_for
from tests.served import served_members, simulated_by_servers, summing

SOON_S = 10.0


class Wires:
    """Members and servers whose frames travel in an order that chance decides."""

    def __init__(self, size: int, servers: int, chance: random.Random) -> None:
        self.chance, self.over = chance, list[Operation]()
        self.queues: dict[tuple[int, int], deque[tuple[Phase, int, torch.Tensor]]] = {}
        self.size = size
        self.all: list[DirectExchange] = [
            DirectExchange(rank, size, partial(self._send, rank)) for rank in range(size)
        ]
        for rank in range(size, size + servers):
            made = SumExchange(size, partial(self._send, rank), CODECS.__getitem__)
            self.all.append(made)

    def _send(self, rank: int, to: int, phase: Phase, number: int, payload: torch.Tensor) -> None:
        self.queues.setdefault((rank, to), deque()).append((phase, number, payload))

    def run(self, asked: list[list[Operation]]) -> None:
        """Start each member's operations, and let frames arrive, until nothing is left to do."""
        waiting = [deque(some) for some in asked]
        while True:
            starts = [rank for rank in range(self.size) if waiting[rank]]
            pairs = [pair for pair, queue in self.queues.items() if queue]
            if not starts and not pairs:
                return
            chosen = self.chance.choice([*starts, *pairs])
            if isinstance(chosen, int):
                self.over += self.all[chosen].start(waiting[chosen].popleft())
                continue
            source, to = chosen
            phase, number, payload = self.queues[chosen].popleft()
            frame = Frame(phase, number, payload.numel(), zlib.crc32(payload.numpy()))
            place = self.all[to].expect(source, frame).copy_(payload)
            self.over += self.all[source].sent(number)
            self.over += self.all[to].receive(source, frame, place)


def values_of(size: int, count: int, seed: int) -> list[torch.Tensor]:
    """Each member's."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(count, generator=generator) for _ in range(size)]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("name", ["bf16", "int8", "int4"])
def test_sums_and_residuals_are_those_of_one_process(name: str, seed: int) -> None:
    chance = random.Random(seed)
    size, servers, codec = chance.choice((2, 3, 5)), chance.choice((1, 2, 4, 6)), CODECS[name]
    counts = [chance.choice((1, 300, 5000, 20_000)) for _ in range(3)]
    rows = [values_of(size, count, seed + k) for k, count in enumerate(counts)]
    expected = [simulated_by_servers(some, codec, servers) for some in rows]
    totals = [[torch.empty(count) for _ in range(size)] for count in counts]
    wires = Wires(size, servers, chance)
    wires.run(
        [
            [ServedReduction(rows[k][r], totals[k][r], codec, servers) for k in range(3)]
            for r in range(size)
        ]
    )
    assert len([one for one in wires.over if isinstance(one, ServedReduction)]) == 3 * size
    for k, (total, residuals) in enumerate(expected):
        for rank in range(size):
            assert torch.equal(totals[k][rank], total)
            assert torch.equal(rows[k][rank], residuals[rank])


@pytest.mark.parametrize(("name", "lost"), [("bf16", 1e-4), ("int8", 1e-4), ("int4", 0.02)])
def test_little_is_lost_of_residuals_and_sum(name: str, lost: float) -> None:
    """What encoding the sum has lost is encoded once more: of that, a part is nobody's."""
    rows = values_of(4, 10_000, 0)
    exact = torch.stack(rows).double().sum(0)
    total, residuals = simulated_by_servers(rows, CODECS[name], 4)
    kept = torch.stack(residuals).double().sum(0)
    assert float((total.double() + kept - exact).norm()) <= lost * float(exact.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("servers", [1, 3])
def test_without_a_codec_parts_are_added_in_the_order_of_ranks(
    dtype: torch.dtype, servers: int
) -> None:
    rows = [row.to(dtype) for row in values_of(3, 3000, 1)]
    expected = torch.zeros(3000, dtype=dtype)
    for row in rows:
        expected += row
    asked: list[list[Operation]] = [
        [ServedReduction(row, row, Plain(dtype), servers)] for row in rows
    ]
    Wires(3, servers, random.Random(servers)).run(asked)
    assert all(torch.equal(row, expected) for row in rows)


def opened(told: bytes) -> tuple[Frame, torch.Tensor]:
    payload = torch.frombuffer(bytearray(told), dtype=torch.uint8)
    return Frame(Phase.OPEN, 0, len(told), zlib.crc32(told)), payload


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (b'{"coding": "int5", "count": 9, "keeper": 0}', "a sum that is none"),
        (b'{"coding": "plain manual_seed", "count": 9, "keeper": 0}', "a sum that is none"),
        (b'{"coding": "int4", "count": 0, "keeper": 0}', "a sum of 0 values"),
        (b'{"coding": "plain float64", "count": 400000000, "keeper": 0}', "a sum of 400000000"),
        (b"[]", "a sum that is none"),
        (b"{", "a sum that is none"),
    ],
)
def test_what_is_no_sum_is_refused(told: bytes, why: str) -> None:
    exchange = SumExchange(2, lambda *_: None, CODECS.__getitem__)
    frame, payload = opened(told)
    assert exchange.expect(0, frame).numel() == len(told)
    with pytest.raises(TransportError, match=why):
        exchange.receive(0, frame, payload)


def test_all_members_have_to_ask_for_the_same() -> None:
    exchange = SumExchange(2, lambda *_: None, CODECS.__getitem__)
    exchange.receive(0, *opened(b'{"coding": "int4", "count": 9, "keeper": 0}'))
    with pytest.raises(TransportError, match="another sum"):
        exchange.receive(1, *opened(b'{"coding": "int4", "count": 8, "keeper": 0}'))


def wait(works: list[object]) -> None:
    assert all(work.wait(SOON_S) for work in works)  # type: ignore[attr-defined]


def test_over_sockets_sums_are_the_same_and_bytes_as_told(tmp_path: Path) -> None:
    count, many = 70_000, 6
    rows = [values_of(3, count, k) for k in range(many)]
    expected = [simulated_by_servers(some, CODECS["int4"], 2) for some in rows]
    with summing(tmp_path, 2) as servers:
        members = served_members(3, [one.place for one in servers])
        totals = [[torch.empty(count) for _ in members] for _ in range(many)]
        wait(
            [
                member.reduce(rows[k][rank], totals[k][rank], CODECS["int4"])
                for rank, member in enumerate(members)
                for k in range(many)
            ]
        )
        small = [torch.ones(3) for _ in members]
        wait([one.all_reduce(row) for one, row in zip(members, small, strict=True)])
        told = [many * one.reduce_bytes(count, CODECS["int4"]) for one in members]
        sent = [one.bytes_sent for one in members]
        for member in members:
            member.close()
    for k, (total, _) in enumerate(expected):
        assert all(torch.equal(one, total) for one in totals[k])
    assert all(bool((row == 3.0).all()) for row in small)
    assert all(0 <= s - t < 200 * 2 * many for s, t in zip(sent, told, strict=True))


def broken(members: list[object], count: int = 50_000) -> list[Exception]:
    """What each is told that waits for a sum which does not come."""
    works = [one.all_reduce(torch.ones(count)) for one in members]  # type: ignore[attr-defined]
    found: list[Exception] = []
    for work in works:
        with pytest.raises(TransportError) as told:
            work.wait(SOON_S)
        found.append(told.value)
    return found


def test_a_lost_server_is_told_as_that_and_the_others_go_on(tmp_path: Path) -> None:
    with summing(tmp_path, 2) as servers:
        members = served_members(2, [one.place for one in servers])
        servers[1].close()
        assert any(isinstance(one, LostServerError) for one in broken([*members]))
        for member in members:
            member.close()
        again = served_members(2, [one.place for one in servers], generation=1)
        rows = [torch.ones(50_000) for _ in again]
        wait([one.all_reduce(row) for one, row in zip(again, rows, strict=True)])
        assert all(bool((row == 2.0).all()) for row in rows)
        for member in again:
            member.close()


def test_a_dead_member_is_not_taken_for_a_server(tmp_path: Path) -> None:
    with summing(tmp_path, 2) as servers:
        members = served_members(3, [one.place for one in servers])
        works = [members[r].all_reduce(torch.ones(50_000)) for r in (0, 2)]
        members[1].hang_up()
        for work in works:
            with pytest.raises(TransportError, match="rank") as told:
                work.wait(SOON_S)
            assert not isinstance(told.value, LostServerError)
        for member in members:
            member.close()
        going = [sums._going for one in servers if (sums := one._sums) is not None]
        wait_for("servers to leave it", lambda: all(one.over for of in going for one in of))


def test_without_a_server_nobody_meets(tmp_path: Path) -> None:
    with summing(tmp_path, 1) as servers:
        gone: Server = servers[0]
        gone.close()
        with pytest.raises(LostServerError, match="no server"):
            served_members(2, [gone.place])
        with pytest.raises(LostServerError, match="no server"):
            served_members(2, list[Place]())


def test_an_older_generation_is_turned_away(tmp_path: Path) -> None:
    with summing(tmp_path, 1) as servers:
        places = [one.place for one in servers]
        members = served_members(2, places, generation=5)
        with pytest.raises(LostServerError):
            served_members(2, places, generation=4)
        for member in members:
            member.close()
