"""Evaluations of the held-out samples are put together, also where members are lost on the way."""

from __future__ import annotations

from raycloud.events import EvaluationPart
from raycloud.metrics import Mean
from raycloud.run.driver import Evaluations


def part(member: int, step: int, value: float, generation: int = 0) -> EvaluationPart:
    states = {"loss": Mean(total=value, weight=1.0).state()}
    return EvaluationPart(
        member=member, step=step, states=states, generation=generation, replica=member
    )


def keys(*replicas: int) -> tuple[tuple[int, int], ...]:
    return tuple((replica, 0) for replica in replicas)


def test_the_whole_comes_with_the_last_part() -> None:
    measures = Evaluations()
    assert measures.add(part(0, 4, 1.0), keys(0, 1)) is None
    whole = measures.add(part(1, 4, 3.0), keys(0, 1))
    assert whole is not None
    assert (whole.step, whole.metrics) == (4, {"loss": 2.0})


def test_what_was_measured_with_a_lost_member_is_measured_again() -> None:
    measures = Evaluations()
    for member in (0, 1):
        assert measures.add(part(member, 4, 9.0), keys(0, 1, 2)) is None
    assert measures.add(part(0, 4, 1.0, generation=1), keys(0, 1), 1) is None
    assert measures.add(part(2, 4, 9.0), keys(0, 1), 1) is None  # late
    whole = measures.add(part(1, 4, 3.0, generation=1), keys(0, 1), 1)
    assert whole is not None
    assert whole.metrics == {"loss": 2.0}


def test_what_was_complete_stays() -> None:
    measures = Evaluations()
    assert measures.add(part(0, 4, 1.0), keys(0)) is not None
    assert measures.add(part(0, 4, 1.0, generation=1), keys(0), 1) is None
    assert measures.add(part(0, 8, 1.0, generation=1), keys(0), 1) is not None
