"""How long steps take, as control knows it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raycloud.control.data import StepSeconds
from raycloud.events import StepsCommitted
from raycloud.order import Position
from tests.control_events import committed


def told(member: int, first: int, last: int, wall_s: float) -> StepsCommitted:
    report = committed(member, first, last, generation=0, at=Position(offset=last), computed=0)
    return replace(report, wall_s=wall_s)


def test_a_step_takes_as_long_as_most_of_the_last_five_say() -> None:
    took = StepSeconds()
    assert took.usual_s == 0.0
    for step, wall_s in enumerate([1.0, 1.0, 9.0, 1.0, 0.1, 1.0, 1.0]):
        took.note(told(0, step, step + 1, wall_s))
        assert took.usual_s == 1.0
    took.note(told(0, 7, 11, 8.0))  # four steps
    took.note(told(0, 11, 12, 2.0))
    took.note(told(0, 12, 13, 2.0))
    assert took.usual_s == pytest.approx(2.0)


def test_what_several_members_tell_of_a_step_counts_once() -> None:
    took = StepSeconds()
    for step in range(3):
        took.note(told(0, step, step + 1, 1.0))
    for member in range(5):
        took.note(told(member, 3, 4, 60.0))
    took.note(told(0, 4, 4, 5.0))  # no step
    assert took.usual_s == 1.0


def test_steps_that_are_taken_back_are_computed_again() -> None:
    took = StepSeconds()
    for step in range(10):
        took.note(told(0, step, step + 1, 1.0))
    took.go_back(4)
    assert took.usual_s == 1.0
    for step in range(4, 7):
        took.note(told(1, step, step + 1, 3.0))
    assert took.usual_s == 3.0
