"""Direct exchange without sockets: any order of arrival gives the same sums, bit for bit."""

from __future__ import annotations

import random
import zlib
from collections import Counter, deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from raycloud.errors import TransportError
from raycloud.net import exchange
from raycloud.net.exchange import (
    WHOLE_BYTES,
    Broadcast,
    DirectExchange,
    Frame,
    Gather,
    Operation,
    Phase,
    Plain,
    reduction,
)
from tests.coded import EVERY, simulated

if TYPE_CHECKING:
    from raycloud.net.transport import Coding

SIZES = (2, 3, 5)


@dataclass
class Wires:
    """Members whose frames travel in an order that chance decides, one after the other per pair."""

    size: int
    chance: random.Random
    members: list[DirectExchange] = field(init=False)
    over: list[Operation] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.queues: dict[tuple[int, int], deque[tuple[Phase, int, torch.Tensor]]] = {}
        self.members = [
            DirectExchange(rank, self.size, partial(self._send, rank)) for rank in range(self.size)
        ]

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
                self.over += self.members[chosen].start(waiting[chosen].popleft())
                continue
            source, to = chosen
            phase, number, payload = self.queues[chosen].popleft()
            frame = Frame(phase, number, payload.numel(), zlib.crc32(payload.numpy()))
            place = self.members[to].expect(source, frame).copy_(payload)
            self.over += self.members[source].sent(number)
            self.over += self.members[to].receive(source, frame, place)


def decoded(coding: Coding, values: torch.Tensor) -> torch.Tensor:
    """What the code of these values stands for."""
    codes = torch.empty(coding.bound(len(values)), dtype=torch.uint8)
    coding.encode(values, codes)
    into = torch.zeros_like(values)
    coding.add(codes, into)
    return into


def values_of(size: int, count: int, *, seed: int = 0) -> list[torch.Tensor]:
    """Each member's."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(count, generator=generator) for _ in range(size)]


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("name", EVERY)
def test_sums_are_those_of_one_process(name: str, seed: int) -> None:
    chance = random.Random(seed)
    size, codec = chance.choice(SIZES), EVERY[name]
    counts = [chance.choice((1, 300, 5000, 20_000)) for _ in range(3)]
    rows = [values_of(size, count, seed=seed + k) for k, count in enumerate(counts)]
    expected = [simulated(some, codec) for some in rows]
    totals = [[torch.empty(count) for _ in range(size)] for count in counts]
    wires = Wires(size, chance)
    wires.run(
        [[reduction(rows[k][r], totals[k][r], codec, size) for k in range(3)] for r in range(size)]
    )
    assert len(wires.over) == 3 * size
    for k, (total, residuals) in enumerate(expected):
        for rank in range(size):
            assert torch.equal(totals[k][rank], total)
            if name != "none":
                assert torch.equal(rows[k][rank], residuals[rank])


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["bf16", "int8", "int4", "topk"])
def test_residuals_and_sum_make_the_sum_of_values(name: str, size: int) -> None:
    rows = values_of(size, 10_000)
    exact = torch.stack(rows).double().sum(0)
    total, *others = [torch.empty(10_000) for _ in rows]
    each = zip(rows, (total, *others), strict=True)
    Wires(size, random.Random(0)).run([[reduction(*one, EVERY[name], size)] for one in each])
    kept = torch.stack(rows).double().sum(0)
    assert float((total.double() + kept - exact).norm()) <= 1e-6 * float(exact.norm())


@pytest.mark.parametrize("tails", ["normal", "heavy"])
def test_a_sum_of_two_loses_about_what_it_did_where_it_was_encoded_twice(tails: str) -> None:
    """One code of each in blocks of 128, beside a code there and one of the sum back, of 32."""
    rows, codec = values_of(2, 2**17), EVERY["int4"]
    if tails == "heavy":  # Student's t of three degrees of freedom, about
        rows = [row / part.abs().clamp_min(0.1) for row, part in zip(rows, rows[::-1], strict=True)]
    exact = torch.stack(rows).double().sum(0)
    twice = decoded(codec, rows[0] + decoded(codec, rows[1]))
    totals = [torch.empty_like(row) for row in rows]
    each = zip(rows, totals, strict=True)
    Wires(2, random.Random(0)).run([[reduction(*one, codec, 2)] for one in each])

    def lost(total: torch.Tensor) -> float:
        return float((total.double() - exact).square().mean())

    assert codec.for_pair.bound(2**17) * 1.17 < codec.bound(2**17)
    assert lost(totals[0]) <= (1.1 if tails == "normal" else 2.0) * lost(twice)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_in_place_and_of_any_type(dtype: torch.dtype, size: int) -> None:
    rows = [row.to(dtype) for row in values_of(size, 3000)]
    expected = torch.zeros(3000, dtype=dtype)
    for row in rows:
        expected += row
    asked: list[list[Operation]] = [[reduction(row, row, Plain(dtype), size)] for row in rows]
    Wires(size, random.Random(1)).run(asked)
    assert all(torch.equal(row, expected) for row in rows)


def test_small_and_broadcast_in_any_order() -> None:
    for seed in range(20):
        flags = [torch.tensor([float(rank), 1.0], dtype=torch.float64) for rank in range(3)]
        told = [torch.arange(5) * rank for rank in range(3)]
        large = [torch.full((WHOLE_BYTES,), rank, dtype=torch.int16) for rank in range(3)]
        asked: list[list[Operation]] = [
            [
                Gather(flags[rank]),
                Broadcast(told[rank], (2, 0, 1)),
                Broadcast(large[rank], (1, 2, 0)),
            ]
            for rank in range(3)
        ]
        Wires(3, random.Random(seed)).run(asked)
        assert [flag.tolist() for flag in flags] == [[3.0, 3.0]] * 3
        assert [one.tolist() for one in told] == [[0, 2, 4, 6, 8]] * 3
        assert all(one.eq(1).all() for one in large)


def test_what_is_large_is_sent_once_by_each_but_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    large = [torch.full((WHOLE_BYTES,), rank, dtype=torch.int16) for rank in range(4)]
    wires, counts = Wires(4, random.Random(0)), Counter[tuple[int, int]]()
    sends = wires._send
    for rank, member in enumerate(wires.members):

        def counted(to: int, phase: Phase, number: int, payload: Any, rank: int = rank) -> None:
            counts[rank, to] += 1
            sends(rank, to, phase, number, payload)

        monkeypatch.setattr(member, "_send", counted)
    wires.run([[Broadcast(one, (2, 3, 1, 0))] for one in large])
    assert counts == {(2, 3): 1, (3, 1): 1, (1, 0): 1, (0, 2): 1}  # the last: it has come
    assert wires.over[-1]._values is large[2]  # so the source is done last
    assert all(one.eq(2).all() for one in large)


def test_memory_is_used_again() -> None:
    wires = Wires(3, random.Random(3))
    rows, out = values_of(3, 5000), [torch.empty(5000) for _ in range(3)]
    for _ in range(2):
        wires.run([[reduction(rows[r], out[r], EVERY["int4"], 3)] for r in range(3)])
    held = [sum(map(len, member.pool._free.values())) for member in wires.members]
    for _ in range(20):
        wires.run([[reduction(rows[r], out[r], EVERY["int4"], 3)] for r in range(3)])
    later = [sum(map(len, member.pool._free.values())) for member in wires.members]
    assert all(b <= a + 4 for a, b in zip(held, later, strict=True))


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (Frame(Phase.PART, 0, 2**31, 0), "not expected"),
        (Frame(Phase.PART, 0, 12, 0), "not expected"),
        (Frame(Phase.WHOLE, 0, 8, 0), "not expected"),
    ],
    ids=["too long", "of another length", "of another kind"],
)
def test_a_frame_that_is_not_expected_is_refused_unread(frame: Frame, why: str) -> None:
    member = DirectExchange(0, 2, lambda *_: None)
    values = torch.zeros(1000)
    member.start(reduction(values, values, Plain(values.dtype), 2))
    with pytest.raises(TransportError, match=why):
        member.expect(1, frame)


def test_a_damaged_frame_is_refused() -> None:
    member = DirectExchange(0, 2, lambda *_: None)
    values = torch.zeros(2)
    member.start(Gather(values))
    frame = Frame(Phase.WHOLE, 0, 8, 1)
    with pytest.raises(TransportError, match="damaged"):
        member.receive(1, frame, member.expect(1, frame).zero_())


def test_early_frames_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_EARLY_BYTES", 2**18)
    member = DirectExchange(0, 2, lambda *_: None)

    def take(number: int) -> None:
        frame = Frame(Phase.WHOLE, number, 2**16, 0)
        payload = member.expect(1, frame)
        member.receive(1, frame._replace(check=zlib.crc32(payload.numpy())), payload)

    with pytest.raises(TransportError, match="not expected"):
        member.expect(1, Frame(Phase.SUM, 1, 2**18 + 1, 0))
    take(0)
    with pytest.raises(TransportError, match="not expected"):
        deque(map(take, range(1, 10)))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda octets: b"xx" + octets[2:], "another format"),
        (lambda octets: octets[:2] + b"\x09" + octets[3:], "another format"),
        (lambda octets: octets[:3] + b"\x09" + octets[4:], "phase 9"),
        (lambda octets: octets[:4] + b"\x09" + octets[5:], "generation"),
    ],
)
def test_a_header_of_another_kind_is_refused(change: object, why: str) -> None:
    octets = Frame(Phase.SUM, 5, 17, 99).pack(7)
    assert Frame.unpack(octets, 7) == Frame(Phase.SUM, 5, 17, 99)
    with pytest.raises(TransportError, match=why):
        Frame.unpack(change(octets), 7)  # type: ignore[operator]


def test_golden_header() -> None:
    assert Frame(Phase.SUM, 5, 17, 99).pack(7).hex() == "7266010100000007000000050000001100000063"
