"""The feed makes steps ahead, no further than it may, and ends when told."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from raycloud.clock import SystemClock, VirtualClock
from raycloud.errors import InternalError, TaskError
from raycloud.order import MicroBatch, Order, Position, Steps, StepSpan
from raycloud.step.collate import Collate, Making, Passes
from raycloud.step.feed import Feed, Piece, Schedule
from raycloud.step.randomness import Randomness
from tests.lockstep import CPU, NetTask, feeding

STEPS = Steps(samples=40, global_batch=8, micro_batch=4)
PATIENCE_S = 10.0


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


class Waits(Identity):
    """Holds back the steps whose first sample is in `gates`, until their event is set."""

    def __init__(self, gates: dict[int, threading.Event]) -> None:
        super().__init__()
        self.gates = gates
        self.began = {first: threading.Event() for first in range(0, 40, 4)}

    def batch(self, samples: Sequence[Any], rng: np.random.Generator | None) -> Any:
        self.began[samples[0]].set()
        if samples[0] in self.gates:
            assert self.gates[samples[0]].wait(PATIENCE_S)
        return super().batch(samples, rng)


class Hinted:
    """Samples that take hints."""

    def __init__(self) -> None:
        self.wanted: list[list[int]] = []

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        return index

    def prefetch(self, ids: np.ndarray[Any, Any]) -> None:
        self.wanted.append(ids.tolist())


def whole(span: StepSpan) -> tuple[MicroBatch, ...]:
    return span.micro_batches


def feed(
    *,
    choose: Callable[[StepSpan], tuple[MicroBatch, ...]] = whole,
    steps: int | None = None,
    depth: int = 2,
    fuse: Callable[[], int] = lambda: 1,
    task: NetTask | None = None,
    samples: Any = range(40),
    making: Making | None = None,
) -> Feed:
    order = Order(samples=40, seed=0, shuffle=False)
    cut = replace(STEPS, global_batch=(making and making.batch) or 8)
    return Feed(
        Collate(task or Identity(), samples, order, pinned=False, making=making),
        choose,
        itertools.islice(cut.walk(0, Position()), steps),
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
        assert not feeding(one)


@pytest.mark.parametrize("threads", [1, 3])
def test_steps_come_in_order_with_their_samples(threads: int, feeds: list[Feed]) -> None:
    feeds.append(feed(steps=7, depth=4, making=Making(threads=threads)))
    assert len(feeds[0]._threads) == threads
    for step in range(7):
        work = feeds[0].take()
        assert work.span.step == step
        ids = [int(i) for one in work.passes for i in one.batch]
        assert ids == [(8 * step + i) % 40 for i in range(8)]
        assert (work.weight, work.micro_batches) == (8.0, 2)
    with pytest.raises(InternalError, match="after the last one"):
        feeds[0].take()


def test_steps_that_are_made_out_of_order_come_in_order(feeds: list[Feed]) -> None:
    gates = {0: threading.Event()}
    task = Waits(gates)
    feeds.append(feed(depth=3, task=task, making=Making(threads=2)))
    assert task.began[16].wait(PATIENCE_S)  # steps 1 and 2 are made while step 0 is not
    gates[0].set()
    assert [feeds[0].take().span.step for _ in range(5)] == [0, 1, 2, 3, 4]


def test_there_are_no_more_threads_than_steps_in_flight(feeds: list[Feed]) -> None:
    feeds.append(feed(depth=2, making=Making(threads=8)))
    assert len(feeds[0]._threads) == 2


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


def test_shares_in_parts_take_one_more_micro_batch_in_some_steps() -> None:
    cut = Steps(samples=36, global_batch=8, micro_batch=1)
    schedule = Schedule(Piece(step=0, generation=0, shares=(4.5, 3.5)))
    at, counts = Position(), []
    for step in range(5):
        span = cut.span(step, at)
        mine, others = (schedule.micro_batches(span, rank) for rank in (0, 1))
        assert (*mine, *others) == span.micro_batches
        counts.append((len(mine), len(others)))
        at = cut.after(span)
    assert counts == [(5, 3), (4, 4), (5, 3), (4, 4), (3, 1)]  # the last is an epoch's short one


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_it_runs_ahead_to_its_depth_and_no_further(
    depth: int, threads: int, feeds: list[Feed]
) -> None:
    taken, asked = 0, []
    reached = threading.Event()

    def choose(span: StepSpan) -> tuple[MicroBatch, ...]:
        asked.append((span.step, taken))
        if span.step == depth - 1:
            reached.set()
        return span.micro_batches

    feeds.append(feed(choose=choose, depth=depth, making=Making(threads=threads)))
    assert reached.wait(PATIENCE_S)  # `depth` are in flight before anything is taken
    for _ in range(20):
        taken += 1  # before the call: what is asked meanwhile may already count on it
        feeds[0].take()
    assert [step for step, _ in asked] == list(range(len(asked)))  # once a span, in order
    assert all(step < before + depth for step, before in asked)


def test_closing_ends_the_threads_while_all_is_ready() -> None:
    reached = threading.Event()

    def choose(span: StepSpan) -> tuple[MicroBatch, ...]:
        if span.step == 1:
            reached.set()
        return span.micro_batches

    one = feed(choose=choose, depth=2)
    assert reached.wait(PATIENCE_S)
    one.close()
    assert not feeding(one)
    one.close()


def test_closing_leaves_out_what_is_not_begun() -> None:
    gates = {0: threading.Event()}
    task = Waits(gates)
    one = feed(depth=3, task=task)
    assert task.began[0].wait(PATIENCE_S)
    closing = threading.Thread(target=one.close)
    closing.start()
    assert one._over.wait(PATIENCE_S)
    gates[0].set()
    closing.join(PATIENCE_S)
    assert not feeding(one)
    assert not task.began[8].is_set()


def test_closing_ends_a_thread_that_has_failed_with_nobody_asking() -> None:
    for torn in (0, 9, 17):
        one = feed(task=Identity(torn), depth=1)
        one.close()
        assert not feeding(one)


@pytest.mark.parametrize("threads", [1, 3])
def test_what_the_task_raises_surfaces_with_its_place(threads: int, feeds: list[Feed]) -> None:
    feeds.append(feed(task=Identity(13), depth=3, making=Making(threads=threads)))
    assert feeds[0].take().span.step == 0
    with pytest.raises(TaskError, match=r"sample 13 is torn \(epoch 0, samples \[12, 16\)"):
        feeds[0].take()


def test_what_reading_raises_surfaces(feeds: list[Feed]) -> None:
    feeds.append(feed(samples=range(10)))
    assert feeds[0].take().span.step == 0
    with pytest.raises(TaskError, match="reading the samples raised IndexError"):
        feeds[0].take()


def test_what_choosing_raises_surfaces_at_its_step(feeds: list[Feed]) -> None:
    def choose(span: StepSpan) -> tuple[MicroBatch, ...]:
        if span.step == 1:
            raise InternalError("no share of step 1")
        return span.micro_batches

    feeds.append(feed(choose=choose, depth=3))
    assert feeds[0].take().span.step == 0
    with pytest.raises(InternalError, match="no share"):
        feeds[0].take()


def test_hints_are_given_once_a_step_and_well_ahead(feeds: list[Feed]) -> None:
    samples = Hinted()
    feeds.append(feed(samples=samples, choose=lambda span: span.micro_batches[:1]))
    for _ in range(6):
        feeds[0].take()
    feeds[0].close()
    # 8 steps of 8 samples later, in the next epoch of 40: from sample 24 on
    first = [24, 32, 0, 8, 16, 24]
    assert samples.wanted[:6] == [list(range(at, at + 4)) for at in first]


def test_the_short_last_step_of_an_epoch_gives_no_hint(feeds: list[Feed]) -> None:
    """Three steps of 12, and one of 4: who computes that reads other parts in whole steps."""
    samples = Hinted()
    made = feed(
        samples=samples, choose=lambda span: span.micro_batches[:1], making=Making(batch=12)
    )
    feeds.append(made)
    for _ in range(8):
        made.take()
    made.close()
    first = [24, 0, 12] * 2  # 8 whole steps later
    assert samples.wanted[:6] == [list(range(at, at + 4)) for at in first]


def test_seeds_are_of_the_place_and_not_of_what_ran_before() -> None:
    randomness = Randomness(CPU)
    randomness.seed(5)
    before, first = randomness.torch_state(), torch.rand(3)
    assert randomness.torch_state() != before
    torch.rand(7)
    randomness.seed(5)
    assert randomness.torch_state() == before
    assert torch.equal(torch.rand(3), first)


def test_what_stands_in_for_numpys_generator_is_never_freed() -> None:
    seen: list[Any] = []
    numpys: Any = np.random
    for _ in range(2):
        randomness = Randomness(CPU)
        randomness.seed(5, everything=True)
        seen.append(numpys.get_bit_generator())
        randomness.release()
    assert seen[0] is seen[1]
    assert numpys.get_bit_generator() is not seen[0]


class Opens:
    """A clock whose first reading lets a thread go."""

    def __init__(self, clock: VirtualClock, may_go: threading.Event) -> None:
        self.clock, self.may_go = clock, may_go

    def monotonic_s(self) -> float:
        now_s = self.clock.monotonic_s()
        self.may_go.set()
        return now_s

    def unix_s(self) -> float:
        return 0.0

    cpu_s = unix_s


def test_waiting_is_measured(feeds: list[Feed]) -> None:
    clock, may_go = VirtualClock(), threading.Event()

    def choose(span: StepSpan) -> tuple[MicroBatch, ...]:
        assert may_go.wait(PATIENCE_S)
        clock.advance(1.5)
        return span.micro_batches

    order = Order(samples=40, seed=0)
    spans = [STEPS.span(0, Position())]
    feeds.append(
        Feed(
            Collate(Identity(), range(40), order, pinned=False),
            choose,
            spans,
            fuse=lambda: 1,
            depth=1,
            clock=Opens(clock, may_go),
        )
    )
    feeds[0].take()
    assert feeds[0].waited_s == 1.5


def test_reading_and_collating_are_measured(feeds: list[Feed]) -> None:
    clock = VirtualClock()

    class Slow(Identity):
        def batch(self, samples: Sequence[Any], rng: np.random.Generator | None) -> Any:
            clock.advance(0.5)
            return super().batch(samples, rng)

    class Samples:
        def __len__(self) -> int:
            return 40

        def __getitems__(self, ids: list[int]) -> list[int]:
            clock.advance(0.25)
            return ids

    order = Order(samples=40, seed=0)
    collate = Collate(Slow(), Samples(), order, pinned=False, clock=clock)  # type: ignore[arg-type]
    feeds.append(
        Feed(collate, whole, [STEPS.span(0, Position())], fuse=lambda: 1, depth=1, clock=clock)
    )
    passes = feeds[0].take().passes
    assert [(one.read_s, one.collate_s) for one in passes] == [(0.25, 0.5)] * 2


class Elsewhere:
    """Other processes that make passes; here their work is done when a test says so."""

    future: type[Future[Passes]] = Future

    def __init__(self, collate: Collate, enough: int) -> None:
        self.collate, self.enough = collate, enough
        self.asked: list[tuple[tuple[MicroBatch, ...], int, Future[Passes]]] = []
        self.reached = threading.Event()

    def submit(self, micro_batches: tuple[MicroBatch, ...], fuse: int) -> Future[Passes]:
        made = self.future()
        self.asked.append((micro_batches, fuse, made))
        if len(self.asked) == self.enough:
            self.reached.set()
        return made

    def help(self) -> bool:
        return False

    def extend(self, version: int, epoch: int, layout: Any) -> None:
        raise AssertionError("no data grows here")

    def deliver(self, which: int) -> None:
        micro_batches, fuse, made = self.asked[which]
        made.set_result(self.collate.passes(micro_batches, fuse))


def test_passes_that_are_made_elsewhere_are_all_in_flight_and_come_in_order(
    feeds: list[Feed],
) -> None:
    order = Order(samples=40, seed=0, shuffle=False)
    elsewhere = Elsewhere(Collate(Identity(), range(40), order, pinned=False), 3)
    feeds.append(feed(depth=3, fuse=lambda: 2, making=Making(elsewhere=elsewhere)))
    assert elsewhere.reached.wait(PATIENCE_S)
    assert len(elsewhere.asked) == 3
    for which in (2, 0, 1):
        elsewhere.deliver(which)
    works = [feeds[0].take() for _ in range(3)]
    assert [work.span.step for work in works] == [0, 1, 2]
    assert [work.passes[0].batch.tolist() for work in works] == [
        list(range(8 * step, 8 * step + 8)) for step in range(3)
    ]
    feeds[0].close()  # does not wait for what nobody delivers
    assert not feeding(feeds[0])


def test_what_fails_elsewhere_surfaces(feeds: list[Feed]) -> None:
    order = Order(samples=40, seed=0, shuffle=False)
    elsewhere = Elsewhere(Collate(Identity(), range(40), order, pinned=False), 1)
    feeds.append(feed(depth=1, making=Making(elsewhere=elsewhere), steps=1))
    assert elsewhere.reached.wait(PATIENCE_S)
    elsewhere.asked[0][2].set_exception(TaskError("a collator died"))
    with pytest.raises(TaskError, match="a collator died"):
        feeds[0].take()


class Alike(Future[Passes]):
    """Equal to any other, as values may be."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Alike)

    __hash__ = None  # type: ignore[assignment]


def test_what_is_given_up_is_told_apart_by_what_it_is() -> None:
    order = Order(samples=40, seed=0, shuffle=False)
    elsewhere = Elsewhere(Collate(Identity(), range(40), order, pinned=False), 3)
    elsewhere.future = Alike
    one = feed(depth=3, making=Making(elsewhere=elsewhere), steps=3)
    assert elsewhere.reached.wait(PATIENCE_S)
    elsewhere.deliver(1)
    one._flight[1].result(PATIENCE_S)
    closing = threading.Thread(target=one.close, daemon=True)
    closing.start()
    closing.join(PATIENCE_S)  # it waits for threads, and those for what is not given up
    assert not closing.is_alive()
    assert [made.cancelled() for _, _, made in elsewhere.asked] == [True, False, True]
