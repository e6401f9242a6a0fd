"""Codes that are made on a GPU: the same bits everywhere, and exchanged over our own sockets."""

from __future__ import annotations

import pytest
import torch

from tests import lockstep
from tests.coded import EVERY
from tests.lockstep import Fleet, NetTask, difference, job
from tests.sockets import direct_members

COUNT = 300_001
SOON_S = 20.0
CODED = ("none", "bf16", "int8", "int4", "int4-128", "topk")


def normal(seed: int) -> torch.Tensor:
    return torch.randn(COUNT, generator=torch.Generator().manual_seed(seed)) * 1e-4


@pytest.mark.parametrize("codec", CODED)
def test_they_decode_to_the_same_bits(codec: str) -> None:
    one, values = EVERY[codec], normal(0)
    codes = torch.empty(one.bound(COUNT), dtype=torch.uint8)
    one.encode(values.cuda(), codes)
    here, there = torch.zeros(COUNT), torch.zeros(COUNT, device="cuda")
    one.add(codes, here)
    one.add(codes, there)
    assert torch.equal(there.cpu(), here)
    usual = torch.zeros(COUNT)
    one.encode(values, codes)
    one.add(codes, usual)
    assert float((here - values).norm()) <= 1.05 * float((usual - values).norm())


@pytest.mark.parametrize("zones", ["", "aba"])
@pytest.mark.parametrize("codec", CODED)
def test_members_exchange_them(codec: str, zones: str) -> None:
    rows = [normal(rank).cuda() for rank in range(3)]
    whole = torch.stack(rows).double().sum(0)
    totals = [torch.empty_like(row) for row in rows]
    with direct_members(3, zones=zones) as members:
        works = [
            member.reduce(row, total, EVERY[codec])
            for member, row, total in zip(members, rows, totals, strict=True)
        ]
        assert all(work.wait(SOON_S) for work in works)
        flags = [torch.ones(9, device="cuda") for _ in members]
        large = [torch.ones(9000, device="cuda") for _ in members]
        works = [m.all_reduce(f) for m, f in zip(members, flags, strict=True)]
        works += [m.all_reduce(f) for m, f in zip(members, large, strict=True)]
        assert all(work.wait(SOON_S) for work in works)
        told = [torch.full((7,), float(m.rank), device="cuda") for m in members]
        assert all(
            work.wait(SOON_S)
            for work in [m.broadcast(t, 1) for m, t in zip(members, told, strict=True)]
        )
    assert all(torch.equal(total, totals[0]) for total in totals)
    assert all(bool((one == 3.0).all()) for one in (*flags, *large))
    assert all(bool((one == 1.0).all()) for one in told)
    if codec != "none":  # what is not in the sum is kept
        whole -= torch.stack(rows).double().sum(0)
    torch.testing.assert_close(totals[0].double(), whole, rtol=0, atol=1e-9)


@pytest.mark.parametrize("codec", ["bf16", "int8", "int4"])
def test_replicas_stay_bit_equal(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lockstep, "CPU", torch.device("cuda", 0))
    asked = job(sync={"codec": codec, "bucket_bytes": 1024})
    fleet = Fleet(asked, NetTask(double=False), (3, 3, 2))
    for number in range(20):
        fleet.step(number)
    assert all(difference(one.model, fleet.replicas[0].model) == 0.0 for one in fleet.replicas)
    assert all(one.residual_norm() > 0.0 for one in fleet.replicas)
