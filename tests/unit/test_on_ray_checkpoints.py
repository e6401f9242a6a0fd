"""What the driver asks of a store: beside its own work, in few calls, and tried again."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raycloud.checkpoint import (
    LimitedStore,
    StoreError,
    encode,
    open_store,
    split_names,
    steps,
)
from raycloud.checkpoint.payload import write_part
from raycloud.clock import SystemClock
from raycloud.commands import Publish
from raycloud.events import CheckpointFailed, CheckpointPublished, Event, Noticed
from raycloud.on_ray.checkpoints import CheckpointPublisher
from tests.live import asked

WAIT_S = 20.0


class Counting:
    """A store that counts its calls, can be kept shut, and can fail."""

    def __init__(self, place: Path) -> None:
        self.store = open_store(place)
        self.calls: Counter[str] = Counter()
        self.open = threading.Event()
        self.open.set()
        self.failing = ""

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.store, name)
        if not callable(found):
            return found

        def call(*args: Any, **options: Any) -> Any:
            self.calls[name] += 1
            assert self.open.wait(WAIT_S)
            if name == self.failing:
                raise StoreError(f"{name}: the place is not there", hint="wait")
            return found(*args, **options)

        return call


@pytest.fixture
def store(tmp_path: Path) -> Counting:
    return Counting(tmp_path)


@pytest.fixture
def publishing(store: Counting) -> Any:
    job = asked("Steady", 1, checkpoint={"keep": 1})
    session: Any = SimpleNamespace(clock=SystemClock(), asked=job, job=job, checkpoints="here")
    one = CheckpointPublisher(LimitedStore(store), session)
    yield one
    one.close(WAIT_S)


def written(store: Counting, step: int, parts: int) -> Publish:
    tensors = {f"parameter/{n}": torch.full((3,), float(step)) for n in range(80)}
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
    values = encode({"epoch": 0, "offset": 0, "generation": 0, "fuse": 1, "pass_size": 1})
    told = {}
    for rank, names in enumerate(split_names(sizes, parts)):
        mine = {name: tensors[name] for name in names}
        record = write_part(store.store, step=step, rank=rank, parts=parts, tensors=mine)
        told[rank, 0] = {"rank": rank, "record": record, "values": values}
    return Publish(step=step, parts=told)


def heard(
    publishing: CheckpointPublisher, kind: type[Event], more: list[Event] | None = None
) -> Any:
    """The next event of a kind; those that come with it go to `more`."""
    turn, clock = threading.Event(), SystemClock()
    until_s = clock.monotonic_s() + WAIT_S
    while clock.monotonic_s() < until_s:
        events = publishing.poll()
        if more is not None:
            more += events
        for event in events:
            if isinstance(event, kind):
                return event
        turn.wait(0.002)
    raise AssertionError(f"no {kind.__name__}")


def settled(publishing: CheckpointPublisher, more: list[Event] | None = None) -> None:
    """Wait until what was asked for before is done."""
    mark = CheckpointFailed(step=0, why="a mark")
    publishing.find_back(lambda: (mark, []))  # type: ignore[arg-type, return-value]
    heard(publishing, CheckpointFailed, more)


def test_it_asks_as_little_of_many_parts_as_of_one(
    store: Counting, publishing: CheckpointPublisher
) -> None:
    calls = []
    for first, parts in ((1, 1), (3, 40)):
        for step in (first, first + 1):
            store.calls.clear()
            publishing.publish(written(store, step, parts), samples=100, ledger={})
            settled(publishing)
        calls.append(dict(store.calls))
    assert calls[0] == calls[1]
    assert sum(calls[0].values()) <= 5
    assert steps(store.store) == [4]


def test_the_driver_waits_for_none_of_it(store: Counting, publishing: CheckpointPublisher) -> None:
    store.open.clear()
    publishing.publish(written(store, 1, 2), samples=100, ledger={})
    assert publishing.busy
    assert publishing.poll() == []
    store.open.set()
    assert heard(publishing, CheckpointPublished).step == 1


def test_what_could_not_be_published_is_told_and_the_next_one_is(
    store: Counting, publishing: CheckpointPublisher
) -> None:
    store.failing = "write"
    publishing.publish(written(store, 1, 2), samples=100, ledger={})
    failed = heard(publishing, CheckpointFailed)
    assert (failed.step, failed.damaged) == (1, False)
    assert "the place is not there" in failed.why
    store.failing = ""
    publishing.publish(written(store, 2, 2), samples=100, ledger={})
    assert heard(publishing, CheckpointPublished).step == 2


def test_a_deletion_that_fails_is_told_once_and_done_later(
    store: Counting, publishing: CheckpointPublisher
) -> None:
    store.failing, told = "remove_all", list[Event]()
    for step in (1, 2, 3):
        publishing.publish(written(store, step, 1), samples=100, ledger={})
        heard(publishing, CheckpointPublished, told)
    settled(publishing, told)
    assert steps(store.store) == [1, 2, 3]
    store.failing = ""
    publishing.publish(written(store, 4, 1), samples=100, ledger={})
    settled(publishing, told)
    assert steps(store.store) == [4]
    [notice] = [event for event in told if isinstance(event, Noticed)]
    assert "could not be removed" in notice.what
