"""Fragments that travel within rounds: bit for bit what one process simulates; nobody is missed."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from raycloud.spec import Job
from raycloud.step.fragments import in_fragments
from raycloud.step.replica import Replica
from tests.fragments import FragmentFleet, Simulation
from tests.lockstep import NetTask, difference, job, plain_loop
from tests.rounds import RoundFleet

ENDS = (16, 21, 22, 32, 40)  # some of them early, and with a fragment on its way


def streamed(codec: str = "none", outer: str = "mean", stream: int = 2, **more: Any) -> Job:
    sync = {"period": 4, "codec": codec, "outer": outer, "bucket_bytes": 1024, "stream": stream}
    if codec == "topk":
        sync["ratio"] = 8
    return job(sync=sync, **more)


def single(**more: Any) -> NetTask:
    return NetTask(double=False, **more)


def alike(fleet: FragmentFleet) -> bool:
    """All members have the same parameters, momentum and buffers."""
    first = fleet.replicas[0]
    shared = [tuple(one.rounds.tensors().values()) for one in fleet.replicas if one.rounds]
    return all(difference(one.model, first.model) == 0.0 for one in fleet.replicas) and all(
        torch.equal(a, b) for one in shared for a, b in zip(one, shared[0], strict=True)
    )


@pytest.mark.parametrize(
    ("shares", "stream", "codec", "outer"),
    [
        ((8,), 2, "none", "nesterov"),
        ((5, 3), 2, "none", "mean"),
        ((5, 3), 2, "int4", "nesterov"),
        ((3, 3, 2), 4, "none", "nesterov"),
        ((3, 3, 2), 4, "int4", "mean"),
        ((3, 3, 2), 4, "topk", "nesterov"),
        ((5, 3, 0), 2, "int4", "nesterov"),
    ],
)
def test_it_is_bit_for_bit_what_one_process_simulates(
    shares: tuple[int, ...], stream: int, codec: str, outer: str
) -> None:
    asked = streamed(codec, outer, stream)
    fleet = FragmentFleet(asked, single(), shares)
    expected = Simulation(asked, single(), shares)
    step = 0
    for end in ENDS:
        fleet.round(step, end)
        expected.round(end)
        step = end
        assert alike(fleet)
        assert difference(fleet.replicas[0].model, expected.model) == 0.0


def test_where_no_fragment_has_its_turn_rounds_are_as_without() -> None:
    fleet: RoundFleet
    ends = []
    for kind, stream in ((RoundFleet, 1), (FragmentFleet, 2)):
        fleet = kind(streamed(stream=stream), single(), (5, 3))
        for step in range(0, 8, 2):
            fleet.round(step, step + 2)
        ends.append(fleet.replicas[0].model)
    assert difference(*ends) == 0.0


class Odometer:
    """How far a replica's own steps have moved its parameters."""

    def __init__(self, replica: Replica) -> None:
        assert replica.rounds is not None
        self._take = replica.rounds.take_step
        self._parameters = list(replica.model.parameters())
        self.moved = [torch.zeros_like(p, dtype=torch.float64) for p in self._parameters]
        replica.rounds.take_step = self._measured  # type: ignore[method-assign] - to look on

    def _measured(self, step: int, at: int) -> None:
        before = [p.detach().double() for p in self._parameters]
        self._take(step, at)
        for moved, was, p in zip(self.moved, before, self._parameters, strict=True):
            moved.add_(was - p.detach().double())


@pytest.mark.parametrize("codec", ["none", "int4"])
@pytest.mark.parametrize("after", [1, 2, 3, 9, 16])
def test_a_member_that_is_lost_in_a_round_is_not_missed(after: int, codec: str) -> None:
    """What its survivors have moved, and what they make of its part, counts once each."""
    fleet = FragmentFleet(streamed(codec), single(), (3, 3, 2))
    fleet.round(0, 16)
    start = _double(fleet)
    kept = _kept_by(fleet, without=1)
    meters = [Odometer(replica) for replica in fleet.replicas]
    del meters[1]
    fleet.lose_in_round(1, 16, 32, after=after)
    end = 16 + after
    assert alike(fleet)
    weights = [one.rounds.weight for one in fleet.replicas if one.rounds is not None]
    parts = [weight / sum(weights) for weight in weights]
    own = [
        sum(w * m.moved[k] for w, m in zip(parts, meters, strict=True)) for k in range(len(start))
    ]
    moved = [was - p for was, p in zip(start, _double(fleet), strict=True)]
    applied, due = _flat(fleet, moved), _flat(fleet, own)
    torch.testing.assert_close(applied + _kept_by(fleet), due + kept, rtol=0, atol=1e-6)
    fleet.round(end, 36)
    assert alike(fleet)
    assert difference(fleet.replicas[0].model, plain_loop(job(), single(), 36)) < 0.2


def _double(fleet: FragmentFleet) -> list[torch.Tensor]:
    return [p.detach().double().clone() for p in fleet.replicas[0].model.parameters()]


def _flat(fleet: FragmentFleet, of: list[Any]) -> torch.Tensor:
    """These, of which each is one parameter's, in the order of buckets."""
    first = fleet.replicas[0]
    named = {n: one for one, (n, _) in zip(of, first.model.named_parameters(), strict=True)}
    names = [name for bucket in first.gradients.buckets for name in bucket.names]
    return torch.cat([named[name].flatten() for name in names])


def _kept_by(fleet: FragmentFleet, without: int | None = None) -> torch.Tensor:
    own = [
        r.residual.own_tensors()["flat"].double()
        for k, r in enumerate(fleet.replicas)
        if r.residual and k != without
    ]
    return torch.stack(own).sum(0) if own else torch.zeros(1, dtype=torch.float64)


def test_where_all_hold_a_change_the_round_ends_after_the_next_turn() -> None:
    fleet = FragmentFleet(streamed(), single(), (5, 3))
    for replica, behind in zip(fleet.replicas, (True, False), strict=True):
        assert replica.fragments is not None
        replica.fragments._behind = partial(bool, behind)
    fleet.round(0, 16)
    assert [one.stop for one in fleet.replicas] == [0, 0]
    for replica in fleet.replicas:
        assert replica.fragments is not None
        replica.fragments._behind = lambda: False
    fleet.compute_steps(fleet.whole(16, 32), until=2)
    assert [one.stop for one in fleet.replicas] == [20, 20]


def test_fragments_have_about_equal_bytes() -> None:
    replica = FragmentFleet(streamed(stream=4), single(), (8,)).replicas[0]
    buckets = replica.gradients.buckets
    for count in (1, 2, 4):
        groups = in_fragments(buckets, count)
        assert [b for some in groups for b in some] == buckets
        assert len(groups) == count
    first, second = in_fragments(buckets, 2)
    sizes = [sum(b.payload_bytes for b in some) for some in (first, second)]
    assert max(sizes) - min(sizes) <= max(b.payload_bytes for b in buckets)
