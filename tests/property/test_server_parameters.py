"""Parameters on two shards under members that die between them: each update counts on both."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raycloud.server.parameters import NOWHERE, Lease, ParameterShard
from raycloud.server.shard import Answer
from raycloud.sync.codecs import CODECS

SIZE = 64  # of a shard's slice
SHARDS = 2
ROUND = 12  # micro-batches of a round


def coded(codec: str, values: torch.Tensor) -> torch.Tensor:
    codes = torch.empty(CODECS[codec].bound(len(values)), dtype=torch.uint8)
    CODECS[codec].encode(values, codes)
    return codes


@dataclass
class Members:
    """Members of a job, in a round; `counted` is what the shards should have added, by place."""

    draw: st.DataObject
    codec: str
    shards: list[ParameterShard] = field(default_factory=lambda: [ParameterShard() for _ in "ab"])
    generation: int = 0
    step: int = 0
    base: list[torch.Tensor] = field(default_factory=lambda: [torch.ones(SIZE)] * SHARDS)
    truth: list[torch.Tensor] = field(default_factory=lambda: [torch.ones(SIZE)] * SHARDS)

    def put(self) -> None:
        for shard, base in zip(self.shards, self.base, strict=True):
            assert shard.put(self.generation, self.step, base.clone()) is Answer.APPLIED

    def update(self, places: tuple[int, ...], shard: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(hash((places, shard, self.generation)))
        return torch.randn(SIZE, generator=generator)

    def round(self) -> None:
        counted: dict[tuple[int, ...], list[torch.Tensor]] = {}
        while len(left := self.left(counted)):
            self.generate(left, counted)
        self.check(counted)
        members = self.draw.draw(st.integers(1, 3))
        for number, shard in enumerate(self.shards):
            told = [
                shard.meet(self.step + 1, rank, members, CODECS[self.codec])
                for rank in range(members)
            ]
            assert all(bool((one == told[0]).all()) for one in told)
            base = torch.zeros(SIZE) if self.codec == "none" else self.base[number].clone()
            added = told[0].view(torch.uint8) if self.codec == "none" else told[0]
            CODECS[self.codec].add(added, base)
            self.base[number] = base
            assert (shard.step, shard.leases) == (self.step + 1, {})
            for updates in counted.values():
                self.truth[number] = self.truth[number].clone()
                CODECS[self.codec].add(updates[number], self.truth[number])
        self.step += 1

    def left(self, counted: dict[tuple[int, ...], list[torch.Tensor]]) -> list[int]:
        return sorted(set(range(ROUND)) - {k for places in counted for k in places})

    def generate(self, left: list[int], counted: dict[tuple[int, ...], list[torch.Tensor]]) -> None:
        """A generation, whose members share what is left, and may die in the midst of it."""
        cuts = sorted(self.draw.draw(st.sets(st.sampled_from(left), max_size=3)))
        leases = [
            tuple(k for k in left if (a <= k < b))
            for a, b in zip([0, *cuts], [*cuts, ROUND], strict=True)
        ]
        dies = self.draw.draw(st.one_of(st.none(), st.integers(0, len(leases) - 1)))
        for rank, places in enumerate(leases):
            if not places:
                continue
            half = rank == dies
            updates = [coded(self.codec, self.update(places, n)) for n in range(SHARDS)]
            given = Lease(places, float(len(places)), 1.0, 1)
            for shard, codes in list(zip(self.shards, updates, strict=True))[: 1 if half else 2]:
                assert self.push(shard, rank, given, codes) is Answer.APPLIED
                if self.draw.draw(st.booleans()):
                    assert self.push(shard, rank, given, codes) is Answer.DUPLICATE
            if half:
                break
            counted[places] = updates
        self.generation += 1
        for shard in self.shards:
            assert shard.enter(self.generation) is Answer.APPLIED
            old = Lease((ROUND,), 1.0, 1.0, 1)
            codes = coded(self.codec, torch.full((SIZE,), 100.0))
            assert shard.push(self.generation - 1, 0, old, self.codec, codes) is Answer.OLD_TERM
        whole = set.intersection(*({*shard.leases} for shard in self.shards))
        assert whole == counted.keys()
        if not whole:
            for shard in self.shards:
                assert shard.settle(self.generation, None) is Answer.APPLIED
                assert (shard.step, shard.leases) == (NOWHERE, {})
            self.put()
            self.truth = [base.clone() for base in self.base]
            return
        for shard in self.shards:
            assert shard.settle(self.generation, sorted(whole)) is Answer.APPLIED
            assert shard.settle(self.generation, []) is Answer.DUPLICATE
        self.check(counted)

    def push(self, shard: ParameterShard, rank: int, lease: Lease, codes: torch.Tensor) -> Answer:
        return shard.push(self.generation, rank, lease, self.codec, codes.clone())

    def check(self, counted: dict[tuple[int, ...], list[torch.Tensor]]) -> None:
        for number, shard in enumerate(self.shards):
            expected = self.truth[number].clone()
            for updates in counted.values():
                CODECS[self.codec].add(updates[number], expected)
            assert torch.allclose(shard.whole(), expected, atol=1e-4)


@settings(max_examples=100, deadline=None)
@given(st.data(), st.sampled_from(["none", "int4"]))
def test_each_update_counts_once_on_all_shards(data: st.DataObject, codec: str) -> None:
    members = Members(data, codec)
    members.put()
    for _ in range(data.draw(st.integers(1, 3))):
        members.round()
        for base, truth in zip(members.base, members.truth, strict=True):
            # What encoding has lost of a round comes with the next.
            assert torch.allclose(base, truth, atol=1.5 if codec == "int4" else 1e-4)


@given(st.lists(st.integers(0, 2), max_size=30))
def test_the_slowest_is_known(ranks: list[int]) -> None:
    shard = ParameterShard()
    shard.put(0, 0, torch.zeros(4))
    for rank in ranks:
        shard.push(0, rank, Lease((), 0.0, 0.0, 0), "none", None)
    assert shard.least(3) == min(ranks.count(rank) for rank in range(3))


def test_what_a_member_has_comes_near_what_there_is() -> None:
    """The difference is encoded, so what one answer loses the next one brings."""
    shard, codec = ParameterShard(), CODECS["int4"]
    base = torch.randn(256)
    shard.put(0, 0, base.clone())
    shard.push(0, 1, Lease((0,), 1.0, 0.0, 0), "none", coded("none", torch.randn(256)))
    known, far = base.clone(), []
    for _ in range(4):
        codec.add(shard.change(0, codec), known)
        far.append(float((shard.whole() - known).norm()))
    assert all(b < a / 4 for a, b in pairwise(far))
