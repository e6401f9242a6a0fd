"""Running statistics are those of a single process, however a step is split."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import raycloud
from raycloud.errors import TaskError
from raycloud.step.commit import collect, commit
from raycloud.step.stateful import Commit
from raycloud.step.statistics import RunningStatistics
from tests.lockstep import Fleet, NetTask, difference, job, never, plain_loop
from tests.loopback import Loopback
from tests.nets import BuiltTask, Counting, Frozen, Normed, Sometimes
from tests.tiers import variants

SHARES = [(8,), (5, 3), (8, 0), (3, 3, 2)]


class Unused(Normed):
    """Has batch normalisation, and does not apply it."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.first(x))
        return out


class Untracked(Normed):
    """Batch normalisation without running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8, track_running_stats=False)


class Shared(Normed):
    """One batch normalisation under two names."""

    def __init__(self) -> None:
        super().__init__(times=2)
        self.again = self.norm


MODELS: dict[str, Callable[[], nn.Module]] = {
    "momentum 0.1": Normed,
    "momentum 1": lambda: Normed(momentum=1.0),
    "momentum 0": lambda: Normed(momentum=0.0),
    "cumulative": lambda: Normed(momentum=None),
    "twice": lambda: Normed(times=2),
    "cumulative twice": lambda: Normed(momentum=None, times=2),
    "shared": Shared,
    "frozen": Frozen,
    "unused": Unused,
    "untracked": Untracked,
}


@pytest.mark.parametrize("shares", variants(*((shares,) for shares in reversed(SHARES))), ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_any_split_is_the_single_process(name: str, shares: tuple[int, ...]) -> None:
    asked, task = job(), BuiltTask(MODELS[name])
    fleet = Fleet(asked, task, shares)
    for step in range(7):  # the fifth is short: 6 samples of 70
        fleet.step(step)
    alone = plain_loop(asked, task, 7)
    for replica in fleet.replicas:
        assert difference(replica.model, alone) <= 1e-12
        for (key, mine), theirs in zip(
            replica.model.state_dict().items(), alone.state_dict().values(), strict=True
        ):
            if key.endswith("num_batches_tracked"):
                assert torch.equal(mine, theirs), key


@pytest.mark.parametrize("name", MODELS)
def test_a_step_that_has_to_wait_leaves_the_statistics_as_they_were(name: str) -> None:
    """Held to it by `Fleet.lose`; and the step that goes on is the single process's."""
    asked, task = job(), BuiltTask(MODELS[name])
    fleet = Fleet(asked, task, (4, 2, 2))
    for step in range(7):
        if step in (2, 5):
            fleet.lose(1, step, during="gradients")
        else:
            fleet.step(step)
    alone = plain_loop(asked, task, 7)
    for replica in fleet.replicas:
        assert difference(replica.model, alone) <= 1e-12


@pytest.mark.parametrize("replaced", [False, True])
def test_other_buffers_wait_too(replaced: bool) -> None:
    def made() -> Fleet:
        fleet = Fleet(job(), BuiltTask(lambda: Counting(replaced=replaced)), (4, 4))
        fleet.step(0)
        return fleet

    fleet, undisturbed = made(), made()
    one, other = fleet.replicas[0], undisturbed.replicas[0]
    before = {name: t.clone() for name, t in one.state.tensors().items()}
    fleet.hubs[0].cut("a member died")
    fleet.compute(1)
    passes = int(one.model.get_buffer("passes"))
    for _ in range(2):  # the second is without effect
        one.suspend()
        assert all(torch.equal(t, before[name]) for name, t in one.state.tensors().items())
    one.statistics.resume()
    assert int(one.model.get_buffer("passes")) == passes
    fleet.replicas[1].suspend()
    fleet.join(fleet.replicas, (4, 4))
    works = fleet.compute(1, adopted=((), ()))
    for replica, work in zip(fleet.replicas, works, strict=True):
        collect(replica, 1, never)
        commit(replica, work)
    undisturbed.step(1)
    assert difference(one.model, other.model) <= 1e-12


def test_unused_cumulative_statistics_stay_where_they_are() -> None:
    class UnusedCumulative(Unused):
        def __init__(self) -> None:
            super().__init__(momentum=None)

    fleet = Fleet(job(), BuiltTask(UnusedCumulative), (5, 3))
    fleet.step(0)
    norm = fleet.replicas[0].model.norm
    assert isinstance(norm, nn.BatchNorm1d)
    assert int(norm.num_batches_tracked or 0) == 0
    assert norm.running_mean is not None
    assert not norm.running_mean.any()


def test_frozen_statistics_are_not_touched() -> None:
    fleet = Fleet(job(), BuiltTask(Frozen), (5, 3))
    norm = fleet.replicas[0].model.norm
    assert isinstance(norm, nn.BatchNorm1d)
    before = [buffer.clone() for buffer in norm.buffers()]
    versions = [buffer._version for buffer in norm.buffers()]
    fleet.step(0)
    assert all(map(torch.equal, norm.buffers(), before))
    assert [buffer._version for buffer in norm.buffers()] == versions


def test_statistics_that_are_applied_now_and_then_are_refused() -> None:
    fleet = Fleet(job(), BuiltTask(Sometimes), (8,))
    with pytest.raises(TaskError, match=r"'norm' was applied [01] times in one") as refused:
        fleet.step(0)
    assert "running statistics" in refused.value.hint


@pytest.mark.parametrize("pattern", ["0000000+", "+000000", "0+", "+0"])
def test_the_first_micro_batch_sets_how_often_statistics_are_applied(pattern: str) -> None:
    model = Normed()
    statistics = RunningStatistics(model)
    statistics.stage()

    def micro_batch(index: int) -> None:
        statistics.before()
        if pattern[index] == "+":
            model.norm(torch.randn(4, 8))
        statistics.after(index, len(pattern))

    odd = max(pattern.index("+"), pattern.index("0"))
    for index in range(odd):
        micro_batch(index)
    micro_batch(odd)
    with pytest.raises(TaskError, match="'norm' was applied"):
        statistics.collect(never)


class Deep(nn.Module):
    """Several layers, each normalised."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        layers = [(nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6)) for _ in range(depth)]
        self.body = nn.Sequential(*chain.from_iterable(layers))
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.body(x))
        return out


def test_a_step_reads_as_often_from_a_gpu_whatever_its_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each number that is read makes a GPU stand still: not per layer, micro-batch or bucket."""
    reads: list[Path] = []

    def counted(method: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        def read(tensor: Tensor) -> Any:
            reads.append(Path(sys._getframe(1).f_code.co_filename))
            return method(tensor)

        return read

    def reads_of_a_step(depth: int, micro_batches: int, buckets: int) -> int:
        task, asked = BuiltTask(partial(Deep, depth)), job(global_batch=2 * micro_batches)
        fleet = Fleet(asked, task, (micro_batches,))
        assert len(fleet.replicas[0].gradients.buckets) == buckets
        fleet.step(0)
        with monkeypatch.context() as patch:
            for name in ("item", "tolist", "cpu", "__int__", "__float__", "__bool__", "numpy"):
                patch.setattr(Tensor, name, counted(getattr(Tensor, name)))
            reads.clear()
            fleet.step(1)
        # Not those of the task, of a weight on the CPU, and of Adam, which counts its steps there.
        return sum(Path(raycloud.__file__).parent in path.parents for path in reads)

    assert reads_of_a_step(8, 6, 4) == reads_of_a_step(1, 2, 2) <= 5


def test_statistics_without_a_variance_are_refused() -> None:
    norm = nn.BatchNorm1d(2)
    norm.running_var = None
    with pytest.raises(TaskError, match="'0' tracks a running mean without"):
        RunningStatistics(nn.Sequential(norm))


def test_per_batch_says_whether_fusing_would_change_the_result() -> None:
    assert RunningStatistics(Normed()).per_batch
    assert not RunningStatistics(Frozen().train()).per_batch
    assert not RunningStatistics(nn.Linear(1, 1)).per_batch
    assert RunningStatistics(Untracked()).per_batch


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
