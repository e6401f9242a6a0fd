"""AdaScale: gains by closed form, the same on every member, in checkpoints, through a loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from raycloud.clock import SystemClock
from raycloud.errors import SpecError, TaskError
from raycloud.order import assign
from raycloud.spec import Job
from raycloud.step.adascale import AdaScale, gain
from raycloud.step.commit import collect, commit
from raycloud.step.replica import Replica
from raycloud.sync.gradients import noise_of
from raycloud.task import Splits
from tests.lockstep import CPU, Fleet, NetTask, job, never

RATE, SAMPLES, WARM = 0.01, 70, 6


class Slope(nn.Module):
    """A vector: its loss is its product with a sample, whose gradient is that sample."""

    def __init__(self) -> None:
        super().__init__()
        self.at = nn.Parameter(torch.zeros(5, dtype=torch.float64))


class SlopeTask(NetTask):
    """Samples are gradients, with a mean and a known noise."""

    def __init__(self, noise: float = 1.0) -> None:
        super().__init__()
        rng = np.random.default_rng(5)
        self.points = 0.5 + noise * rng.normal(size=(SAMPLES, 5))

    def model(self) -> nn.Module:
        return Slope()

    def data(self, path: str | None) -> Splits:
        return Splits(train=list(self.points))

    def batch(self, samples: Sequence[Any], rng: Any) -> Any:
        return torch.from_numpy(np.stack(samples))

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        found: torch.Tensor = (batch @ model.at).mean()
        return found

    def weight(self, batch: Any, samples: int) -> float:
        return float(samples)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=RATE)

    def scheduler(self, optimizer: torch.optim.Optimizer, steps: int) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up)


def warm_up(step: int) -> float:
    return min(1.0, (1 + step) / WARM)


def scaled(**asked: Any) -> Job:
    elastic = {"min_workers": 2, "max_workers": 8}
    told = {"rate_scaling": "adascale", "base_batch": 4, "clip_norm": None, "elastic": elastic}
    return job(**{**told, **asked})


def part(replica: Replica) -> AdaScale:
    assert replica.adascale is not None
    return replica.adascale


def by_hand(task: SlopeTask, fleet: Fleet, steps: int) -> tuple[np.ndarray, list[float], float]:
    """What numpy says: where the vector is, the gain of each update, and the progress."""
    where, gains, progress = np.zeros(5), [], 0.0
    variance = signal = 0.0
    at, order, ratio = fleet.position, fleet.order, 4.0
    for number in range(steps):
        span = fleet.span(number, at)
        at = fleet.steps.after(span)
        every = span.micro_batches
        dealt = assign(fleet.shares, len(every))
        means, parts = [], []
        for rank in range(len(fleet.shares)):
            mine = [every[k] for k in dealt.of(rank)]
            ids = [i for m in mine for i in order.ids(m.epoch, m.start, m.stop)]
            if ids:
                means.append(task.points[ids].mean(axis=0))
                parts.append(len(ids) / span.samples)
        mean = sum(w * g for w, g in zip(parts, means, strict=True))
        squares = sum(w * (g @ g) for w, g in zip(parts, means, strict=True))
        own = (squares - mean @ mean) / (len(parts) - 1)
        keep = min(1 - ratio / 1000, 1 - 1 / (number + 1))
        variance = keep * variance + (1 - keep) * own * len(every) / 8
        signal = keep * signal + (1 - keep) * (mean @ mean - own)
        v, s = max(variance, 0.0), max(signal, 0.0)
        gains.append((ratio * v + s) / (v + s))
        where = where - RATE * warm_up(int(progress)) * gains[-1] * mean
        progress += gains[-1]
    return where, gains, progress


@pytest.mark.parametrize("shares", [(4, 4), (5, 2, 1)])
def test_updates_and_warm_up_are_those_of_the_closed_form(shares: tuple[int, ...]) -> None:
    task = SlopeTask()
    fleet = Fleet(scaled(), task, shares)
    where, gains, progress = by_hand(task, fleet, 9)  # past the short last step of an epoch
    assert 1.0 < min(gains) < max(gains) < 4.0
    for number in range(9):
        fleet.step(number)
        assert part(fleet.replicas[0]).gain == pytest.approx(gains[number], rel=1e-12)
    for replica in fleet.replicas:
        assert replica.model.at.detach().numpy() == pytest.approx(where, rel=1e-12)
        assert part(replica).progress == pytest.approx(progress, rel=1e-12)
        assert replica.scheduler.last_epoch == int(progress) > WARM  # sooner than in as many steps
        group = replica.optimizer.param_groups[0]
        assert group["lr"] == RATE  # of the smaller batch: only for an update it is more
        assert replica.learning_rate == pytest.approx(RATE * gains[-1], rel=1e-12)


def test_members_have_the_same_bits_and_a_loss_changes_that_not() -> None:
    fleet = Fleet(scaled(), NetTask(sgd=True), (3, 3, 2))
    for number in range(3):
        fleet.step(number)
    fleet.lose(1, 3, during="gradients")
    for number in range(4, 6):
        fleet.step(number)
    one, other = (part(replica).values() for replica in fleet.replicas)
    assert one == other
    assert one["measurements"] == 6


def test_no_noise_gains_nothing_and_noise_alone_all() -> None:
    still = Fleet(scaled(), SlopeTask(noise=0.0), (4, 4))
    still.step(0)
    assert part(still.replicas[0]).gain == pytest.approx(1.0)
    assert gain(4.0, 2.0, -1.0) == 4.0  # an estimate may be below zero
    assert gain(4.0, -1.0, 2.0) == 1.0


def test_a_member_alone_goes_by_what_was_known() -> None:
    fleet = Fleet(scaled(), SlopeTask(), (4, 4))
    fleet.step(0)
    known = part(fleet.replicas[0]).values()
    fleet.join(fleet.replicas[:1], (8,))
    fleet.step(1)
    found = part(fleet.replicas[0]).values()
    assert found["progress"] > known["progress"]
    assert {**found, "progress": 0} == {**known, "progress": 0}


def test_the_schedule_ends_with_the_steps_and_a_notice_says_so() -> None:
    fleet = Fleet(scaled(), SlopeTask(noise=3.0), (4, 4))
    told: list[str] = []
    fleet.replicas[0].notice = lambda what, _: told.append(what)
    for number in range(30):
        fleet.step(number)
    assert part(fleet.replicas[0]).progress > 50.0
    assert fleet.replicas[0].scheduler.last_epoch == 50
    assert [what for what in told if "the schedule is over" in what] == told[-1:]


def test_a_resumed_run_goes_on_bitwise() -> None:
    fleet = Fleet(scaled(), NetTask(sgd=True), (5, 3))
    for number in range(4):
        fleet.step(number)
    first = fleet.replicas[0]
    resumed = Fleet(scaled(), NetTask(sgd=True), (5, 3))
    for replica in resumed.replicas:
        tensors = {name: tensor.clone() for name, tensor in first.state.tensors().items()}
        replica.state.load(tensors, first.state.values())
    assert resumed.replicas[0].learning_rate == first.learning_rate
    resumed.position = fleet.position
    for number in range(4, 8):
        assert fleet.step(number) == resumed.step(number)
    there, here = (one.replicas[1].state for one in (fleet, resumed))
    assert there.values()["parts"]["adascale"] == here.values()["parts"]["adascale"]
    again = here.tensors()
    assert all(torch.equal(tensor, again[name]) for name, tensor in there.tensors().items())


def test_a_run_that_begins_to_go_by_it_stands_where_its_schedule_does() -> None:
    plain = Fleet(scaled(rate_scaling="none"), SlopeTask(), (4, 4))
    for number in range(3):
        plain.step(number)
    state = plain.replicas[0].state
    taken = Fleet(scaled(), SlopeTask(), (4, 4)).replicas[0]
    taken.state.load(state.tensors(), state.values())
    assert part(taken).progress == 3.0
    back = Fleet(scaled(rate_scaling="none"), SlopeTask(), (4, 4)).replicas[0]
    back.state.load(taken.state.tensors(), taken.state.values())  # and the other way round


def test_who_commits_later_finds_what_was_measured() -> None:
    fleet = Fleet(scaled(), SlopeTask(), (4, 4))
    works = fleet.compute(0)
    for replica in fleet.replicas:
        collect(replica, 0, never)
    exchange = fleet.replicas[0].gradients
    found, kept = exchange.measured, exchange.sums(exchange.room())
    assert found is not None
    for replica, work in zip(fleet.replicas, works, strict=True):
        commit(replica, work)
    exchange.measured = None
    exchange.install_gradients(kept)
    assert exchange.measured == found


def test_the_estimates_are_right_in_the_mean() -> None:
    rng, parts = np.random.default_rng(1), np.array([0.5, 0.25, 0.25])
    mean, batch, sigma = np.full(40, 0.1), 32, 1.5
    found = []
    for _ in range(4000):
        each = [mean + sigma / np.sqrt(w * batch) * rng.normal(size=40) for w in parts]
        whole = sum(w * g for w, g in zip(parts, each, strict=True))
        squares = sum(w * (g @ g) for w, g in zip(parts, each, strict=True))
        found.append(noise_of(float(squares), 3.0, float(np.linalg.norm(whole))))
    variance, signal = np.mean([one for one in found if one is not None], axis=0)
    assert variance == pytest.approx(40 * sigma**2 / batch, rel=0.02)
    assert signal == pytest.approx(mean @ mean, rel=0.1)


def test_rows_that_travel_apart_are_refused() -> None:
    class Rows(NetTask):
        def model(self) -> nn.Module:
            return nn.Sequential(nn.Embedding(9, 3, sparse=True), nn.Linear(3, 1))

        def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
            return torch.optim.SGD(model.parameters(), lr=0.1)

    with pytest.raises(TaskError, match="adascale measures the noise"):
        Replica(scaled(), Rows(), device=CPU, steps=5, clock=SystemClock())


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"base_batch": None}, "base_batch"),
        ({"base_batch": 32}, "is for larger batches"),
        ({"elastic": {"min_workers": 1, "max_workers": 4}}, "of several workers"),
        ({"sync": {"period": 8, "topology": "direct"}}, "sync.period = 8"),
        ({"sync": {"codec": "int8", "topology": "direct"}}, "sync.codec = int8"),
    ],
)
def test_where_the_noise_is_not_measured_it_is_refused(asked: Any, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        scaled(**asked)
