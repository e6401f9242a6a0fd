"""Trying a member out: what is read for it, and what it says of the task."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from raycloud.clock import SystemClock, VirtualClock
from raycloud.order import Layout, Order
from raycloud.step.collate import Collate
from raycloud.step.replica import Replica
from raycloud.worker.calibration import Calibration
from tests.lockstep import CPU, NetTask, job

LAYOUT = Layout(partitions=tuple(range(0, 257, 8)), lanes=8, run=2, window=1)


class Asked:
    """Samples that remember what was asked for."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples
        self.ids: list[int] = []

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        self.ids.append(index)
        return self.samples[index]


def trial(
    task: NetTask, samples: Any, order: Order, *, member: int = 0, clock: Any = None, **asked: Any
) -> Calibration:
    clock = clock or SystemClock()
    wanted = job(elastic={"min_workers": 1, "max_workers": 2, "shares": "auto"}, **asked)
    collate = Collate(task, samples, order, pinned=False)
    replica = Replica(wanted, task, device=CPU, steps=5, clock=clock)
    return Calibration(wanted, replica, collate, member=member, clock=clock)


def rows_of(member: int, layout: Layout | None) -> set[int]:
    task = NetTask(samples=256, dropout=0.0, branch=False)
    samples = Asked(task.data(None).train)
    trial(task, samples, Order(samples=256, seed=1, layout=layout), member=member).speed()
    return set(samples.ids)


@pytest.mark.parametrize("member", [0, 3, 9])
def test_of_blocks_one_lane_is_read(member: int) -> None:
    order = Order(samples=256, seed=1, layout=LAYOUT)
    lane = set(order.lane_partitions(0, member % 8).tolist())
    read = rows_of(member, LAYOUT)
    assert len(read) == 8  # four micro-batches of two, and they are of different steps
    assert {row // 8 for row in read} <= lane


def test_other_samples_are_read_from_the_start_of_the_sequence() -> None:
    order = Order(samples=256, seed=1)
    assert rows_of(5, None) == set(order.ids(0, 0, 8).tolist())


def test_too_few_blocks_for_that_are_read_from_the_start_too() -> None:
    layout = Layout(partitions=tuple(range(0, 33, 4)), lanes=8, run=2, window=1)
    task = NetTask(samples=32, dropout=0.0, branch=False)
    samples = Asked(task.data(None).train)
    order = Order(samples=32, seed=1, layout=layout)
    trial(task, samples, order, member=3).speed()
    assert set(samples.ids) == set(order.ids(0, 0, 8).tolist())


def test_fixed_seconds_are_told_from_those_of_a_micro_batch() -> None:
    clock = VirtualClock()

    class Slow(NetTask):
        def loss(self, model: Any, batch: Any) -> Any:
            clock.advance(1.0 + 0.25 * len(batch[1]) / 2)
            return super().loss(model, batch)

    task = Slow(dropout=0.0, branch=False)
    samples = task.data(None).train
    made = trial(task, samples, Order(samples=70, seed=1), clock=clock, fuse=8)
    assert made.speed() == (pytest.approx(1.0), pytest.approx(0.25))


@pytest.mark.parametrize(
    ("fuse", "took", "known"),
    [
        (8, [9.0, 0.3, 0.6], (0.2, 0.1)),  # four in a pass
        (8, [9.0, 0.3, 7.0], (0.0, 0.3)),  # for the first time: it says nothing
        (8, [9.0, 0.3, 0.2], (0.285, 0.015)),
        (8, [9.0, 1.0, 1.7], (0.3, 0.7)),  # two of them, and all four take more than two seconds
        (8, [9.0, 1.0, 1.1, 1.3], (0.9, 0.1)),  # two of them, and then all four
        (8, [9.0, 5.0], (0.0, 5.0)),  # a single one
        (2, [9.0, 0.3, 0.4], (0.0, 0.2)),  # two passes of two
        (1, [9.0, 0.3], (0.0, 0.3)),
    ],
)
def test_whom_others_wait_for_is_measured_briefly(
    fuse: int, took: list[float], known: tuple[float, float]
) -> None:
    clock, seconds = VirtualClock(), iter(took)

    class Counted(NetTask):
        def loss(self, model: Any, batch: Any) -> Any:
            clock.advance(next(seconds))  # no more passes than these
            return super().loss(model, batch)

    task = Counted(dropout=0.0, branch=False)
    made = trial(task, task.data(None).train, Order(samples=70, seed=1), clock=clock, fuse=fuse)
    assert made.joining_speed() == pytest.approx(known)
    assert next(seconds, None) is None


@pytest.mark.parametrize(
    ("fixed_s", "micro_batch_s", "fuse", "computed"),
    [
        (0.0, 0.3, 8, 4),
        (0.0, 0.9, 8, 2),
        (0.0, 5.0, 8, 1),
        (0.0, 0.3, 2, 2),
        (0.0, 0.3, 1, 1),
        (0.7, 0.3, 8, 4),
        (1.2, 0.3, 8, 2),
        (3.0, 0.3, 8, 1),
    ],
)
def test_who_joins_computes_what_it_will_in_its_first_step(
    fixed_s: float, micro_batch_s: float, fuse: int, computed: int
) -> None:
    """Four micro-batches of two are half a step, but two seconds are enough."""
    sizes: list[int] = []

    class Sized(NetTask):
        def loss(self, model: Any, batch: Any) -> Any:
            sizes.append(len(batch[1]))
            return super().loss(model, batch)

    task = Sized(dropout=0.0, branch=False)
    order = Order(samples=70, seed=1)
    trial(task, task.data(None).train, order, fuse=fuse).warm_up(fixed_s, micro_batch_s)
    assert sizes == [2 * computed]


@pytest.mark.parametrize("fuse", [1, 2, 3])
def test_no_pass_is_larger_than_the_job_allows(fuse: int) -> None:
    sizes: set[int] = set()

    class Sized(NetTask):
        def loss(self, model: Any, batch: Any) -> Any:
            sizes.add(len(batch[1]))
            return super().loss(model, batch)

    task = Sized(dropout=0.0, branch=False)
    made = trial(task, task.data(None).train, Order(samples=70, seed=1), fuse=fuse)
    made.warm_up(*made.speed())
    assert max(sizes) == 2 * fuse


def test_what_a_first_pass_and_a_busy_moment_cost_is_left_out() -> None:
    clock, seconds = VirtualClock(), iter([9.0, 0.3, 0.05, 0.05, 0.05, 0.05, 5.0, 0.2, 0.1, 0.4])

    class Uneven(NetTask):
        def loss(self, model: Any, batch: Any) -> Any:
            clock.advance(next(seconds, 0.1))
            return super().loss(model, batch)

    task = Uneven(dropout=0.0, branch=False)
    made = trial(task, task.data(None).train, Order(samples=70, seed=1), clock=clock, fuse=8)
    fixed_s, micro_batch_s = made.speed()
    assert fixed_s + 4 * micro_batch_s == pytest.approx(0.1)


def test_a_task_that_draws_from_a_global_generator_is_refused() -> None:
    class Draws(NetTask):
        def batch(self, samples: Any, rng: Any) -> Any:
            np.random.rand()
            return super().batch(samples, rng)

    task = Draws()
    with pytest.raises(Exception, match="drew from a global random generator"):
        trial(task, task.data(None).train, Order(samples=70, seed=1)).speed()


def test_who_goes_on_as_another_is_not_refused_for_what_others_draw() -> None:
    """Whoever else computes in this process seeds that generator, and `speed` has looked before."""

    class Beside(NetTask):
        def batch(self, samples: Any, rng: Any) -> Any:
            np.random.rand()
            return super().batch(samples, rng)

    task = Beside(dropout=0.0, branch=False)
    trial(task, task.data(None).train, Order(samples=70, seed=1), fuse=8).warm_up(0.0, 0.1)
