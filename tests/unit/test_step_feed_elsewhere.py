"""Passes that other processes make: all in flight at once, taken in order, given up at the end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from raycloud.errors import TaskError
from raycloud.order import MicroBatch, Order
from raycloud.step.collate import Collate, Making, Passes
from raycloud.step.feed import Feed
from tests.lockstep import feeding
from tests.unit.test_step_feed import PATIENCE_S, Identity, feed


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

    def extend(self, version: int, epoch: int, layout: Any) -> None:
        raise AssertionError("no data grows here")

    def deliver(self, which: int) -> None:
        micro_batches, fuse, made = self.asked[which]
        made.set_result(self.collate.passes(micro_batches, fuse))


@pytest.fixture
def feeds() -> Iterator[list[Feed]]:
    """Feeds to close when the test is over."""
    made: list[Feed] = []
    yield made
    for one in made:
        one.close()
        assert not feeding(one)


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
