"""Committed steps are added up into reports; losses come a step later."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raycloud.clock import VirtualClock
from raycloud.commands import Form
from raycloud.errors import InternalError
from raycloud.events import MemberFailed, StepsCommitted
from raycloud.order import MicroBatch, Position, StepSpan
from raycloud.step.feed import Schedule
from raycloud.worker.tally import SampleAudit, StepCount, Tally
from tests.fellows import WAIT_S, Fellows
from tests.live_tasks import Steady
from tests.lockstep import job


def counted(step: int, **changes: float) -> StepCount:
    values: dict[str, float] = {
        "generation": 1,
        "weight": 10.0,
        "samples": 8,
        "micro_batches": 2,
        "norm": 0.5 + step,
        "learning_rate": 0.1 / (1 + step),
        "compute_s": 1.0,
        "data_s": 0.25,
        "exchange_s": 0.5,
        "bytes_sent": 100,
        "bytes_dense": 400,
    }
    fields = values | changes
    return StepCount(step=step, after=Position(epoch=1, offset=8 * step), **fields)  # type: ignore[arg-type]


def tally() -> tuple[Tally, VirtualClock]:
    clock = VirtualClock(100.0)
    return Tally(member=3, clock=clock), clock


def test_nothing_counted_is_no_report() -> None:
    empty, clock = tally()
    assert empty.report() is None
    empty.add_loss(1.0, 2.0)
    clock.advance(3.0)
    assert empty.report() is None
    empty.add(counted(0))
    made = empty.report()
    assert made is not None
    assert (made.loss, made.wall_s) == (1.0, 3.0)  # nothing was lost on the way
    assert empty.report() is None


def test_sums_and_lasts() -> None:
    sums, clock = tally()
    for step in (4, 5, 6):
        clock.advance(2.0)
        sums.add(counted(step, generation=step))
    made = sums.report()
    assert made is not None
    assert (made.member, made.generation, made.first_step, made.last_step) == (3, 6, 4, 7)
    assert (made.epoch, made.offset) == (1, 48)
    assert (made.weight, made.samples, made.micro_batches) == (30.0, 24, 6)
    assert (made.grad_norm, made.learning_rate) == (6.5, 0.1 / 7)
    assert (made.compute_s, made.data_s, made.exchange_s) == (3.0, 0.75, 1.5)
    assert (made.bytes_sent, made.bytes_dense) == (300, 1200)
    assert (made.wall_s, made.cpu_s) == (6.0, 6.0)


def test_a_report_has_the_losses_that_became_known_since_the_last() -> None:
    lags, _ = tally()
    lags.add(counted(0))
    first = lags.report()
    assert first is not None
    assert math.isnan(first.loss)  # of step 0, not known yet
    lags.add_loss(4.0, 1.0)  # of step 0
    lags.add(counted(1))
    lags.add_loss(1.0, 3.0)  # of step 1
    lags.add(counted(2))
    second = lags.report()
    assert second is not None
    assert second.loss == (4.0 * 1.0 + 1.0 * 3.0) / 4.0
    lags.add(counted(3))
    third = lags.report()
    assert third is not None
    assert third.loss == second.loss  # none became known: the last one stands


def test_age_is_since_the_last_report() -> None:
    aging, clock = tally()
    clock.advance(0.75)
    assert aging.age_s == 0.75
    assert aging.report() is None
    assert aging.age_s == 0.75
    aging.add(counted(0))
    aging.report()
    assert aging.age_s == 0.0


Dealt = Sequence[MicroBatch]

FAULTS: dict[str, Callable[[Dealt, StepSpan], Dealt]] = {
    "one is left out": lambda dealt, _: dealt[:-1],
    "none is computed": lambda _dealt, _: (),
    "one is taken of another member": lambda dealt, span: (*dealt[1:], _other(dealt, span)),
    "one is computed by two": lambda dealt, span: (*dealt, _other(dealt, span)),
}


def _other(dealt: Dealt, span: StepSpan) -> MicroBatch:
    return next(one for one in span.micro_batches if one not in dealt)


@pytest.mark.parametrize("fault", FAULTS)
def test_it_is_seen_before_the_step_counts(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Schedule.micro_batches

    def dealt(self: Schedule, span: StepSpan, rank: int) -> tuple[MicroBatch, ...]:
        mine = right(self, span, rank)
        return tuple(FAULTS[fault](mine, span)) if (span.step, rank) == (2, 1) else mine

    monkeypatch.setattr(Schedule, "micro_batches", dealt)
    fellows = Fellows(tmp_path, job(task=Steady, steps=6), 2, joining=0, task=Steady)
    fellows.form(Form(generation=0, members=(0, 1), shares=(4, 4), step=0))
    events = _until_all_have_failed(fellows)
    assert all(event.last_step <= 2 for event in events if isinstance(event, StepsCommitted))
    for failed in (event for event in events if isinstance(event, MemberFailed)):
        assert failed.error == "InternalError"
        assert "of the 8 micro-batches of step 2, or not each of them once" in failed.message


OTHERS: dict[str, Callable[[MicroBatch], MicroBatch]] = {
    "those of the step before": lambda one: replace(one, start=one.start - 8, stop=one.stop - 8),
    "one of them, and one of another member": lambda one: replace(
        one, start=one.start - 1, stop=one.stop - 1
    ),
}


@pytest.mark.parametrize("other", OTHERS)
def test_samples_that_are_not_the_steps_are_seen_when_it_is_reported(
    other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Schedule.micro_batches

    def dealt(self: Schedule, span: StepSpan, rank: int) -> tuple[MicroBatch, ...]:
        mine = right(self, span, rank)
        wrong = (span.step, rank) == (2, 1)
        return tuple(OTHERS[other](one) if wrong else one for one in mine)

    monkeypatch.setattr(Schedule, "micro_batches", dealt)
    fellows = Fellows(tmp_path, job(task=Steady, steps=6), 2, joining=0, task=Steady)
    fellows.form(Form(generation=0, members=(0, 1), shares=(4, 4), step=0))
    said = _until_some_have_failed(fellows, 1)
    failed = next(event for event in said if isinstance(event, MemberFailed))
    assert failed.error == "DealingError"
    assert "members have read other samples than these steps take" in failed.message


def test_members_take_turns_and_each_step_is_looked_up_by_one_of_them() -> None:
    asked: list[MicroBatch] = []

    class Known:
        def row_sum(self, some: Iterable[MicroBatch]) -> int:
            asked.extend(some)
            return sum(7 * (one.samples // 8) for one in asked)

    for rank in range(3):
        reads = SampleAudit(Known())  # type: ignore[arg-type]
        reads.enter(rank, 3)
        asked.clear()
        for step in range(600):
            span = StepSpan(step=step, epoch=0, start=8 * step, stop=8 * step + 8, micro_batch=1)
            reads.add(span, 7)
        reads.check()
        steps = [k for one in asked for k in range(one.start // 8, one.stop // 8)]
        assert steps == [step for step in range(600) if step // 64 % 3 == rank][:512]
        reads.check()  # nothing is looked up twice
        asked.clear()
        reads.add(replace(span, step=64 * rank), 8)
        with pytest.raises(InternalError, match=f"for steps {64 * rank} to {64 * rank} members"):
            reads.check()


def test_a_step_of_very_many_samples_is_looked_up_alone() -> None:
    asked: list[int] = []

    class Known:
        def row_sum(self, some: Iterable[MicroBatch]) -> int:
            asked.extend(one.samples for one in some)
            return 0

    reads = SampleAudit(Known())  # type: ignore[arg-type]
    for step in range(3):
        reads.add(
            StepSpan(step=step, epoch=step, start=0, stop=1_000_000, micro_batch=1_000), 1 << 32
        )
    reads.check()
    assert asked == [1_000_000]


def _until_all_have_failed(fellows: Fellows) -> list[Any]:
    return _until_some_have_failed(fellows, len(fellows.members))


def _until_some_have_failed(fellows: Fellows, some: int) -> list[Any]:
    said: list[Any] = []
    pause, end = threading.Event(), time.monotonic() + WAIT_S
    while sum(isinstance(event, MemberFailed) for event in said) < some:
        assert time.monotonic() < end, said
        for member in fellows.members:
            said += member.poll(0.0)
        pause.wait(0.005)
    return said
