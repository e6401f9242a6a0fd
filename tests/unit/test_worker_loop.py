"""The loop of a member that is alone: what it reports, saves and applies, and at which step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest
import torch

from raycloud.checkpoint import decode
from raycloud.checkpoint.store import LocalStore
from raycloud.clock import VirtualClock
from raycloud.commands import Extend, Halt, Reshare, Save
from raycloud.errors import InternalError, TaskError, TransportError
from raycloud.events import (
    ChangeApplied,
    EvaluationPart,
    Event,
    GenerationFormed,
    Noticed,
    PartWritten,
    StepsCommitted,
)
from raycloud.net.lane import Lane
from raycloud.order import Layout, Order, Position, Steps
from raycloud.recovery.rendezvous import HOST
from raycloud.spec import Job
from raycloud.step import commit
from raycloud.step.collate import Collate
from raycloud.step.replica import Replica
from raycloud.sync.gradients import Exchanged
from raycloud.task import Splits
from raycloud.worker import loop
from raycloud.worker.context import Changes, LoopContext, Membership
from raycloud.worker.dataset import layout_of
from raycloud.worker.loop import Loop
from raycloud.worker.saver import Saver
from raycloud.worker.tally import SampleAudit
from tests.lockstep import CPU, Fleet, NetTask, difference, feeding, job
from tests.loopback import Loopback

STEPS = 9


class Alone:
    """A loop with all its parts."""

    def __init__(self, root: Path, asked: Job, task: NetTask | None = None) -> None:
        task = task or NetTask()
        samples = task.data(None).train
        clock = VirtualClock()  # stands still: no report is made because of the time
        self.events: list[Event] = []
        self.changes = Changes(feed_depth=asked.data.prefetch_steps)
        self.replica = Replica(asked, task, device=CPU, steps=50, clock=clock)
        self.replica.connect(Loopback(1).members[0])
        order = Order(samples=len(samples), seed=asked.seed)
        saver = Saver(LocalStore(root), member=6, clock=clock, report=self.events.append)
        parts = LoopContext(
            host=HOST,
            job=asked,
            steps=Steps(
                samples=len(samples),
                global_batch=asked.global_batch,
                micro_batch=asked.micro_batch,
            ),
            replica=self.replica,
            collate=Collate(task, samples, order, pinned=False),
            saver=saver,
            changes=self.changes,
            clock=clock,
            report=self.events.append,
            extend=lambda *_: None,
            evaluate=lambda step, seat: self.events.append(
                EvaluationPart(member=seat.member, step=step, states={})
            ),
        )
        seat = Membership(
            members=(6,),
            rank=0,
            generation=1,
            shares=(8,),
            step=0,
            position=Position(),
            last_step=STEPS,
        )
        self.seat = seat
        self.loop = Loop(parts, seat)
        self.loop.enter(seat, Lane(Loopback(1).members[0]))
        self.saver = saver

    def run(self) -> bool:
        finished = self.loop.run()
        self.saver.wait()
        return finished

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def steps_of(self, kind: type[Any]) -> list[int]:
        return [event.step for event in self.of(kind)]


def test_the_loop_computes_what_the_steps_do(tmp_path: Path) -> None:
    alone = Alone(tmp_path, job())
    fleet = Fleet(job(), NetTask(), (8,))
    losses = [fleet.step(step) for step in range(STEPS)]
    assert alone.run()
    assert difference(alone.replica.model, fleet.replicas[0].model) == 0
    reports = alone.of(StepsCommitted)
    assert [r.first_step for r in reports] == [0, *[r.last_step for r in reports[:-1]]]
    assert reports[-1].last_step == STEPS
    assert sum(r.samples for r in reports) == 4 * 16 + 6 + 4 * 16  # an epoch of 70, and more
    assert (reports[-1].epoch, reports[-1].offset) == (1, 64)
    assert not any(math.isnan(r.loss) for r in reports)
    assert reports[0].last_step == 1
    assert reports[0].loss == pytest.approx(losses[0], rel=1e-12)


def test_every_so_many_steps_and_at_the_end(tmp_path: Path) -> None:
    asked = job(checkpoint={"every_steps": 4}, evaluate={"every_steps": 3})
    alone = Alone(tmp_path, asked)
    alone.run()
    assert alone.steps_of(PartWritten) == [4, 8, 9]
    assert alone.steps_of(EvaluationPart) == [3, 6, 9]
    again = Alone(tmp_path / "again", asked)
    again.loop.enter(replace(again.seat, measured=3), Lane(Loopback(1).members[0]))
    again.run()
    assert again.steps_of(EvaluationPart) == [6, 9]  # after 3 all members have
    values = decode(alone.of(PartWritten)[0].part["values"])
    assert (values["step"], values["epoch"], values["offset"]) == (4, 0, 64)
    assert values["optimizer"]["groups"][0]["betas"] == (0.9, 0.999)


def test_a_save_that_was_asked_for(tmp_path: Path) -> None:
    alone = Alone(tmp_path, job(checkpoint={"every_steps": 1}))
    alone.changes.prepare(1, Save())
    assert alone.run()
    assert alone.of(ChangeApplied) == [ChangeApplied(member=6, change=1, step=1)]
    assert alone.steps_of(PartWritten) == list(range(1, 10))  # none of them twice


def test_a_halt_saves_and_ends(tmp_path: Path) -> None:
    alone = Alone(tmp_path, job())
    alone.changes.prepare(1, Save())
    alone.changes.prepare(2, Halt(reason="asked"))
    assert not alone.run()
    assert alone.loop.step == 2
    assert alone.steps_of(PartWritten) == [1, 2]
    assert alone.steps_of(ChangeApplied) == [1, 2]
    assert alone.of(StepsCommitted)[-1].last_step == 2
    fleet = Fleet(job(), NetTask(), (8,))
    losses = [fleet.step(step) for step in range(2)]
    assert [r.loss for r in alone.of(StepsCommitted)] == pytest.approx(losses, rel=1e-12)
    assert not feeding(alone.loop._feed)


@pytest.mark.parametrize("ahead", [1, 3])
def test_new_shares_begin_a_generation(
    tmp_path: Path, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "all_places", lambda _: ANY)  # half is computed
    monkeypatch.setattr(SampleAudit, "check", lambda _reads: None)
    asked = job(data={"prefetch_steps": ahead})
    alone = Alone(tmp_path, asked)
    alone.loop._feed.close()
    seat = replace(alone.seat, members=(6, 7), shares=(4, 4))  # the other's part goes nowhere
    alone.loop.enter(seat, Lane(Loopback(1).members[0]))
    alone.changes.prepare(1, Reshare(generation=2, shares=(7, 1)))
    alone.run()
    (formed,) = alone.of(GenerationFormed)
    assert formed == GenerationFormed(generation=2, members=(6, 7), shares=(7, 1), first_step=1)
    assert alone.steps_of(ChangeApplied) == [1]  # what was collated ahead is collated anew
    reports = alone.of(StepsCommitted)
    assert all(r.generation == (1 if r.last_step <= 1 else 2) for r in reports)
    short = 3  # of them in the last step of an epoch
    assert sum(r.micro_batches for r in reports) == 4 + 7 * 7 + short
    assert reports[-1].generation == 2


def test_samples_that_weigh_nothing_are_refused(tmp_path: Path) -> None:
    class Weightless(NetTask):
        def weight(self, batch: Any, samples: int) -> float:
            return 0.0

    alone = Alone(tmp_path, job(), Weightless())
    with pytest.raises(TaskError, match="step 0 weigh nothing together"):
        alone.run()
    assert not feeding(alone.loop._feed)


def test_what_the_task_raises_ends_the_loop_and_its_feed(tmp_path: Path) -> None:
    class Raises(NetTask):
        def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
            raise ValueError("a bad day")

    alone = Alone(tmp_path, job(), Raises())
    with pytest.raises(TaskError, match="a bad day"):
        alone.run()
    assert not feeding(alone.loop._feed)


def test_a_step_that_others_have_committed_is_told_like_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = Alone(tmp_path, job())
    collect = commit.collect

    def breaks(replica: Replica, step: int, abandoned: Callable[[], bool]) -> Exchanged:
        if step == 3:
            raise TransportError("a peer is gone")
        return collect(replica, step, abandoned)

    monkeypatch.setattr(commit, "collect", breaks)
    with pytest.raises(TransportError):
        alone.loop.run()
    assert alone.of(StepsCommitted)[-1].last_step == 3
    kept = alone.replica.kept
    assert kept is not None
    assert len(kept.micro_batches) == 8
    alone.loop.take_step()
    alone.loop.learn_loss(0.25)
    alone.replica.discard()
    at = Steps(samples=70, global_batch=16, micro_batch=2).position_after(4, Position())
    seat = replace(alone.seat, generation=2, step=4, position=at)
    alone.loop.enter(seat, Lane(Loopback(1).members[0]))
    assert alone.loop.run()
    reports = alone.of(StepsCommitted)
    assert [r.first_step for r in reports] == [0, *[r.last_step for r in reports[:-1]]]
    assert {r.generation for r in reports if r.last_step <= 4} == {1}
    assert {r.generation for r in reports if r.first_step >= 4} == {2}
    assert sum(r.samples for r in reports) == 4 * 16 + 6 + 4 * 16
    assert not any(math.isnan(r.loss) for r in reports)


def test_only_the_step_that_was_computed_can_be_taken(tmp_path: Path) -> None:
    alone = Alone(tmp_path, job())
    with pytest.raises(InternalError, match="without this member's part"):
        alone.loop.take_step()
    alone.loop._feed.close()


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

    def __init__(self, root: Path, **asked: Any) -> None:
        self.task = GrowingTask()
        wanted = job(data={"prefetch_steps": 1}, fuse=1, **asked)
        super().__init__(root, wanted, self.task)
        self.loop._feed.close()
        self.task.taken.clear()
        parts, seat = self.loop._context, self.loop.seat
        self.collate = parts.collate
        length = wanted.steps or parts.steps.until_epoch(wanted.epochs or 1, Position())
        self.extended: list[int] = []
        self.lasts: list[int] = []
        parts = replace(
            parts,
            extend=self.extend,
            evaluate=lambda step, seat: self.lasts.append(seat.last_step),
        )
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


def test_a_checkpoint_keeps_the_layout_of_an_epoch_in_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Order, "layout_in", lambda *_: LAYOUT)
    alone = Growing(tmp_path, steps=5, checkpoint={"every_steps": 2})
    alone.run()
    kept = {e.step: decode(e.part["values"]).get("layout") for e in alone.of(PartWritten)}
    assert {step: layout_of(record) for step, record in kept.items()} == {
        2: LAYOUT,
        4: LAYOUT,
        5: None,  # the epoch is over: the next one has a layout of its own
    }
    assert not alone.of(EvaluationPart)
