"""The feed collates ahead, no further than it may, and ends when told."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from raycloud.clock import SystemClock, VirtualClock
from raycloud.errors import TaskError
from raycloud.order import MicroBatch, Order, Position, Steps, StepSpan
from raycloud.training.feed import Collate, Feed, random_state, seed_compute
from tests.lockstep import CPU, NetTask

STEPS = Steps(samples=40, global_batch=8, micro_batch=4)


class Identity(NetTask):
    """Samples are their own ids; one of them may be torn."""

    def __init__(self, torn: int | None = None) -> None:
        super().__init__()
        self.torn = torn

    def batch(self, samples: Sequence[Any], rng: np.random.Generator | None) -> Any:
        if self.torn in samples:
            raise ValueError(f"sample {self.torn} is torn")
        return torch.tensor(samples)

    def weight(self, batch: Any, samples: int) -> float:
        return float(samples)


def whole(span: StepSpan) -> tuple[MicroBatch, ...]:
    return span.micro_batches


def feed(
    *,
    choose: Callable[[StepSpan], tuple[MicroBatch, ...]] = whole,
    steps: int | None = None,
    depth: int = 2,
    fuse: Callable[[], int] = lambda: 1,
    torn: int | None = None,
    samples: Any = range(40),
) -> Feed:
    order = Order(samples=40, seed=0, shuffle=False)
    return Feed(
        Collate(Identity(torn), samples, order, pinned=False),
        choose,
        itertools.islice(STEPS.walk(0, Position()), steps),
        fuse=fuse,
        depth=depth,
        clock=SystemClock(),
    )


@pytest.fixture
def feeds() -> Iterator[list[Feed]]:
    """Feeds to close when the test is over."""
    made: list[Feed] = []
    yield made
    for one in made:
        one.close()
        assert not one._thread.is_alive()


def test_steps_come_in_order_with_their_samples(feeds: list[Feed]) -> None:
    feeds.append(feed(steps=7))
    for step in range(7):
        work = feeds[0].take()
        assert work.span.step == step
        ids = [int(i) for one in work.passes for i in one.batch]
        assert ids == [(8 * step + i) % 40 for i in range(8)]
        assert (work.weight, work.micro_batches) == (8.0, 2)
    feeds[0]._thread.join(10.0)
    assert not feeds[0]._thread.is_alive()


def test_a_member_takes_what_is_chosen_for_it(feeds: list[Feed]) -> None:
    feeds.append(feed(choose=lambda span: span.micro_batches[: span.step % 3], steps=3))
    works = [feeds[0].take() for _ in range(3)]
    assert [work.micro_batches for work in works] == [0, 1, 2]
    assert works[0].passes == ()
    assert works[0].weight == 0


def test_fusing_is_asked_for_each_step(feeds: list[Feed]) -> None:
    sizes = iter([1, 2, 1])
    feeds.append(feed(fuse=lambda: next(sizes), steps=3))
    assert [len(feeds[0].take().passes) for _ in range(3)] == [2, 1, 2]


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_it_runs_ahead_to_its_depth_and_no_further(depth: int, feeds: list[Feed]) -> None:
    taken, asked = 0, []
    reached = threading.Event()

    def choose(span: StepSpan) -> tuple[MicroBatch, ...]:
        asked.append((span.step, taken))
        if span.step == depth:
            reached.set()
        return span.micro_batches

    feeds.append(feed(choose=choose, depth=depth))
    assert reached.wait(10.0)  # `depth` are ready and one is in hand, before anything is taken
    for _ in range(20):
        taken += 1  # before the call: what is asked meanwhile may already count on it
        feeds[0].take()
    assert all(step <= before + depth for step, before in asked)


def test_closing_ends_the_thread_while_the_queue_is_full() -> None:
    reached = threading.Event()

    def choose(span: StepSpan) -> tuple[MicroBatch, ...]:
        if span.step == 2:
            reached.set()
        return span.micro_batches

    one = feed(choose=choose, depth=2)
    assert reached.wait(10.0)
    one.close()
    assert not one._thread.is_alive()
    one.close()


def test_closing_ends_a_thread_that_has_failed_with_nobody_asking() -> None:
    for torn in (0, 9, 17):
        one = feed(torn=torn, depth=1)
        one.close()
        assert not one._thread.is_alive()


def test_what_the_task_raises_surfaces_with_its_place(feeds: list[Feed]) -> None:
    feeds.append(feed(torn=13))
    assert feeds[0].take().span.step == 0
    with pytest.raises(TaskError, match=r"sample 13 is torn \(epoch 0, samples \[12, 16\)"):
        feeds[0].take()


def test_what_reading_raises_surfaces(feeds: list[Feed]) -> None:
    feeds.append(feed(samples=range(10)))
    assert feeds[0].take().span.step == 0
    with pytest.raises(TaskError, match="reading the samples raised IndexError"):
        feeds[0].take()


def test_seeds_are_of_the_place_and_not_of_what_ran_before() -> None:
    seed_compute(5, CPU)
    before, first = random_state(CPU), torch.rand(3)
    assert random_state(CPU) != before
    torch.rand(7)
    seed_compute(5, CPU)
    assert random_state(CPU) == before
    assert torch.equal(torch.rand(3), first)


def test_waiting_is_measured(feeds: list[Feed]) -> None:
    clock, may_go = VirtualClock(), threading.Event()

    def choose(span: StepSpan) -> tuple[MicroBatch, ...]:
        assert may_go.wait(10.0)
        clock.advance(1.5)
        return span.micro_batches

    class Opens:
        """A clock whose first reading lets the thread go."""

        def monotonic_s(self) -> float:
            now_s = clock.monotonic_s()
            may_go.set()
            return now_s

        def unix_s(self) -> float:
            return 0.0

        cpu_s = unix_s

    order = Order(samples=40, seed=0)
    spans = [STEPS.span(0, Position())]
    feeds.append(
        Feed(
            Collate(Identity(), range(40), order, pinned=False),
            choose,
            spans,
            fuse=lambda: 1,
            depth=1,
            clock=Opens(),
        )
    )
    feeds[0].take()
    assert feeds[0].waited_s == 1.5
