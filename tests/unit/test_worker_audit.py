"""A fault in dealing micro-batches, or in reading their samples, ends the run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raycloud.commands import Form
from raycloud.errors import InternalError
from raycloud.events import MemberFailed, StepsCommitted
from raycloud.order import MicroBatch, StepSpan
from raycloud.step.feed import Schedule
from raycloud.worker.tally import SampleAudit
from tests.fellows import WAIT_S, Fellows
from tests.live_tasks import Steady
from tests.lockstep import job

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
