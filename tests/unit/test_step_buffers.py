"""Buffers that raycloud knows no rule for: averaged over replicas, reported, never silently."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from raycloud.step.commit import collect, commit
from raycloud.step.stateful import Commit
from raycloud.step.statistics import RunningStatistics
from tests.lockstep import Fleet, NetTask, difference, job, never, plain_loop
from tests.loopback import Loopback
from tests.nets import BuiltTask, Counting

BOTH = pytest.mark.parametrize("replaced", [False, True], ids=["in place", "replaced"])


def counting(*, replaced: bool, after: int = 0) -> BuiltTask:
    return BuiltTask(lambda: Counting(after=after, replaced=replaced))


@BOTH
def test_changing_buffers_are_found_by_name(replaced: bool) -> None:
    (replica,) = Fleet(job(), counting(replaced=replaced), (8,)).replicas
    assert replica.statistics.changing == ("seen", "passes")
    assert Fleet(job(), NetTask(norm=True), (8,)).replicas[0].statistics.changing == ()


@BOTH
def test_one_replica_is_a_single_process(replaced: bool) -> None:
    asked, task = job(), counting(replaced=replaced)
    fleet = Fleet(asked, task, (8,))
    for step in range(6):
        fleet.step(step)
    assert difference(fleet.replicas[0].model, plain_loop(asked, task, 6)) <= 1e-12


@BOTH
def test_replicas_end_with_the_same_mean(replaced: bool) -> None:
    fleet = Fleet(job(), counting(replaced=replaced), (4, 4))
    works = fleet.compute(0)
    models = [replica.model for replica in fleet.replicas]
    own = [model.get_buffer("seen").clone() for model in models]
    assert not torch.equal(*own)
    for replica, work in zip(fleet.replicas, works, strict=True):
        collect(replica, 0, never)
        commit(replica, work)
    mean, other = (model.get_buffer("seen") for model in models)
    assert torch.equal(mean, other)
    share = works[0].weight / (works[0].weight + works[1].weight)
    torch.testing.assert_close(mean, own[0] * share + own[1] * (1 - share), rtol=1e-12, atol=1e-12)
    assert [int(model.get_buffer("passes")) for model in models] == [4, 4]
    assert torch.equal(models[0].get_buffer("table"), torch.arange(6.0).double())


@given(
    weights=st.lists(st.floats(0.01, 100.0), min_size=2, max_size=5),
    count=st.integers(-(2**62), 2**62),
)
def test_a_count_that_all_agree_on_stays_what_it_is(weights: list[float], count: int) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.tensor(count))
            self.register_buffer("flag", torch.tensor(False))

    models = [Counts() for _ in weights]
    every = [RunningStatistics(model) for model in models]
    for model, statistics in zip(models, every, strict=True):
        statistics.begin_trial()
        model.get_buffer("count").add_(1)
        model.get_buffer("flag").fill_(True)
        statistics.end_trial(torch.tensor(0.0), lambda: torch.tensor(0.0))
        statistics.stage()
        model.get_buffer("count").add_(7)
        model.get_buffer("flag").fill_(True)
    for statistics, transport, weight in zip(
        every, Loopback(len(weights)).members, weights, strict=True
    ):
        statistics.launch(transport, 1.0 / sum(weights), weight)
    for model, statistics in zip(models, every, strict=True):
        statistics.collect(never)
        statistics.commit(Commit(step=0, count=1))
        assert int(model.get_buffer("count")) == count + 7
        assert bool(model.get_buffer("flag"))
