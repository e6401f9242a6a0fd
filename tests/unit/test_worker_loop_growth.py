"""The loop of a member whose data grows: which samples it takes, how far, and what it keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raycloud.checkpoint import decode
from raycloud.commands import Extend
from raycloud.errors import InternalError
from raycloud.events import ChangeApplied, EvaluationPart, Noticed, PartWritten, StepsCommitted
from raycloud.net.lane import Lane
from raycloud.order import Layout, Position
from raycloud.task import Splits
from raycloud.worker.dataset import layout_of
from raycloud.worker.loop import Loop
from tests.lockstep import NetTask, job
from tests.loopback import Loopback
from tests.unit.test_worker_loop import Alone

LAYOUT = Layout(partitions=(0, 20, 40, 60, 70), lanes=2, run=8, window=1)


class GrowingTask(NetTask):
    """Remembers which samples it was asked to batch; of 90, it begins with 70."""

    def __init__(self) -> None:
        super().__init__(samples=90)
        self.taken: list[int] = []
        points: Any = super().data(None).train
        self.all: list[Any] = [(*point, i) for i, point in enumerate(points)]

    def data(self, path: str | None) -> Splits:
        return Splits(train=self.all[:70])

    def batch(self, samples: Sequence[Any], rng: np.random.Generator | None) -> Any:
        self.taken += [s[2] for s in samples]
        return super().batch(samples, rng)


class Growing(Alone):
    """A loop alone whose data grows to 90 samples in the first step."""

    def __init__(self, root: Path, *, can_grow: bool = True, **asked: Any) -> None:
        self.task = GrowingTask()
        wanted = job(data={"prefetch_steps": 1}, fuse=1, **asked)
        super().__init__(root, wanted, self.task)
        self.loop._feed.close()
        self.task.taken.clear()
        parts, seat = self.loop._parts, self.loop.seat
        parts = replace(parts, extend=self.extend if can_grow else None, layout=lambda _: LAYOUT)
        self.collate = parts.collate
        length = wanted.steps or parts.steps.until_epoch(wanted.epochs or 1, Position())
        self.extended: list[int] = []
        self.lasts: list[int] = []
        parts = replace(parts, evaluate=lambda step, seat: self.lasts.append(seat.last_step))
        seat = replace(seat, last_step=length)
        self.loop = Loop(parts, seat)
        self.loop.enter(seat, Lane(Loopback(1).members[0]))
        self.changes.prepare(1, Extend(version=1, samples=90))

    def extend(self, change: Extend, epoch: int) -> None:
        self.collate.extend(self.task.all, epoch, None)
        self.extended.append(epoch)


def test_the_next_epoch_has_the_new_samples_and_the_run_is_as_long(tmp_path: Path) -> None:
    alone = Growing(tmp_path, steps=None, epochs=3)
    assert alone.run()
    # The feed is 1 ahead: agreed in step 0, in force from step 3 on, for what begins after it.
    assert alone.of(ChangeApplied) == [ChangeApplied(member=6, change=1, step=3)]
    assert alone.extended == [1]
    taken = alone.task.taken
    assert Counter(taken[:70]) == Counter(range(70))
    assert Counter(taken[70:160]) == Counter(taken[160:]) == Counter(range(90))
    assert alone.steps_of(PartWritten) == [5 + 6 + 6]
    assert alone.lasts == [17]
    reports = alone.of(StepsCommitted)
    assert reports[-1].last_step == 17
    assert (reports[-1].epoch, reports[-1].offset) == (3, 0)
    assert not alone.of(Noticed)


def test_a_run_that_ends_before_says_so(tmp_path: Path) -> None:
    alone = Growing(tmp_path, steps=5)
    alone.run()
    (noticed,) = alone.of(Noticed)
    assert "ends before epoch 1" in noticed.what
    assert Counter(alone.task.taken) == Counter(range(70))
    assert alone.lasts == [5]


def test_a_run_of_so_many_steps_takes_them_up_and_stays_as_long(tmp_path: Path) -> None:
    alone = Growing(tmp_path, steps=11)
    alone.run()
    assert not alone.of(Noticed)
    assert alone.loop.step == 11
    assert Counter(alone.task.taken[70:]) == Counter(range(90))


def test_data_that_cannot_grow_is_our_own_fault(tmp_path: Path) -> None:
    with pytest.raises(InternalError, match="came for data that cannot grow"):
        Growing(tmp_path, can_grow=False).run()


def test_a_checkpoint_keeps_the_layout_of_an_epoch_in_progress(tmp_path: Path) -> None:
    alone = Growing(tmp_path, steps=5, checkpoint={"every_steps": 2})
    alone.run()
    kept = {e.step: decode(e.part["values"]).get("layout") for e in alone.of(PartWritten)}
    assert {step: layout_of(record) for step, record in kept.items()} == {
        2: LAYOUT,
        4: LAYOUT,
        5: None,  # the epoch is over: the next one has a layout of its own
    }
    assert not alone.of(EvaluationPart)
