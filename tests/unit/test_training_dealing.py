"""A fault in dealing micro-batches ends the run before the step counts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from raycloud.commands import Form
from raycloud.events import MemberFailed, StepsCommitted
from raycloud.order import MicroBatch, StepSpan
from raycloud.training.schedule import Schedule
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


def _until_all_have_failed(fellows: Fellows) -> list[Any]:
    said: list[Any] = []
    pause, end = threading.Event(), time.monotonic() + WAIT_S
    while sum(isinstance(event, MemberFailed) for event in said) < len(fellows.members):
        assert time.monotonic() < end, said
        for member in fellows.members:
            said += member.poll(0.0)
        pause.wait(0.005)
    return said
