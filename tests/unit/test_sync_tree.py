"""Replicas that exchange by zones, over real sockets: bit for bit a plain simulation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

import pytest

from raycloud.net import zones
from raycloud.net.zones import Zones
from raycloud.spec import Job
from tests.coded import simulated_by_zones
from tests.lockstep import Fleet, difference, job
from tests.sockets import direct_members
from tests.unit.test_sync_coded import residual_of, simulation, single

STEPS = 12


@pytest.fixture(autouse=True)
def _cut_finely(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """So that messages of a small model are cut, too."""
    caches = zones.pieces_of, zones.routes_of
    for cache in caches:
        cache.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(zones, "ALIGNED", 8)
        yield
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def asked(codec: str) -> Job:
    return job(sync={"codec": codec, "topology": "tree", "bucket_bytes": 2048})


def connect(fleet: Fleet, stack: ExitStack, zones: str) -> None:
    """Its gradients go over sockets, by these zones."""
    members = stack.enter_context(direct_members(len(zones), zones=zones))
    for replica, member in zip(fleet.replicas, members, strict=True):
        replica.connect(member)


@pytest.mark.parametrize(
    ("zones", "shares"), [("aba", (3, 3, 2)), ("abab", (2, 3, 2, 1)), ("abcc", (2, 2, 2, 2))]
)
@pytest.mark.parametrize("codec", ["int4", "int8", "bf16"])
def test_it_is_bit_for_bit_what_one_process_simulates(
    codec: str, zones: str, shares: tuple[int, ...], stack: ExitStack
) -> None:
    fleet = Fleet(asked(codec), single(), shares)
    connect(fleet, stack, zones)
    for number in range(STEPS):
        fleet.step(number)
    by_zones = partial(simulated_by_zones, zones=Zones.of(zones))
    expected = simulation(asked(codec), single(), shares, STEPS, by_zones)
    assert max(difference(one.model, expected) for one in fleet.replicas) == 0.0
    assert bool(residual_of(fleet).any())


def test_without_a_codec_it_is_exact(stack: ExitStack) -> None:
    fleet, ring = Fleet(asked("none"), single(), (3, 3, 2)), Fleet(job(), single(), (3, 3, 2))
    connect(fleet, stack, "aba")
    for number in range(STEPS):
        fleet.step(number)
        ring.step(number)
    assert [difference(one.model, fleet.replicas[0].model) for one in fleet.replicas] == [0.0] * 3
    assert difference(fleet.replicas[0].model, ring.replicas[0].model) < 1e-5
