"""Where a run's time went: parts that add up, whatever befell it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycloud.events import (
    CheckpointPublished,
    Event,
    GenerationFormed,
    MemberLost,
    MemberSpawned,
    Recovered,
    RunFinished,
    RunStarted,
    StepsCommitted,
)
from raycloud.report.goodput import Goodput, Parts
from tests.logs import commit, entries, formed

START = RunStarted(job="a", version="1")


def fold(told: list[tuple[float, Event]]) -> Parts:
    goodput = Goodput()
    for t, event in told:
        goodput.apply(t, event)
    return goodput.parts()


def later(member: int, first: int, last: int, *, generation: int, **more: float) -> StepsCommitted:
    return replace(commit(member, first, last), generation=generation, **more)


def test_a_run_without_faults() -> None:
    parts = fold(entries())  # 10 steps of half a second, one a second, by two members
    assert parts.computing_s == pytest.approx(2 * 10 * 0.25)
    assert parts.data_s == pytest.approx(2 * 10 * 0.05)
    assert parts.exchange_s == pytest.approx(2 * 10 * 0.1)
    assert parts.starting_s == pytest.approx(2 * 3.5)  # from 1 s to half a second before 5 s
    assert parts.recovering_s == parts.lost_s == 0.0
    assert parts.whole_s == pytest.approx(2 * (16 - 1))
    record = parts.to_record()
    assert record["goodput"] == pytest.approx(5.0 / 30.0)
    assert record["whole_s"] == pytest.approx(sum(record[name] for name in Parts.__annotations__))


def test_the_control_lane_is_told_apart() -> None:
    one = replace(commit(0, 0, 4), lane_s=0.1)
    parts = fold([(0.0, START), (1.0, MemberSpawned(member=0)), (5.0, one)])
    assert (parts.exchange_s, parts.lane_s) == (pytest.approx(0.3), 0.1)


def test_a_loss_and_the_way_back() -> None:
    """Member 1 dies at 4 s, is missed at 6 s; member 0 commits its next step at 9 s."""
    told: list[tuple[float, Event]] = [
        (0.0, START),
        (0.0, MemberSpawned(member=0)),
        (0.0, MemberSpawned(member=1)),
        (1.0, formed(0, 0, 1)),
        (3.0, later(0, 0, 4, generation=0, wall_s=2.0, compute_s=1.2)),
        (3.0, later(1, 0, 4, generation=0, wall_s=2.0, compute_s=1.2)),
        (6.0, MemberLost(member=1, reason="frozen")),
        # its exchange hung for 2 s, and it had computed another step before
        (6.1, later(0, 4, 5, generation=0, wall_s=3.1, compute_s=0.5, data_s=0.0, exchange_s=0.1)),
        (8.0, formed(1, 0, first=5)),
        (9.0, later(0, 5, 6, generation=1, wall_s=2.9, compute_s=0.5, data_s=0, exchange_s=0.0)),
        (9.0, Recovered(generation=1, lost=(1,), cause="", detected_s=6.0, resumed_s=9.0)),
        (10.0, later(0, 6, 8, generation=1, wall_s=1.0, compute_s=0.9, data_s=0, exchange_s=0.0)),
        (12.0, RunFinished(status="finished", steps=8)),
    ]
    parts = fold(told)
    assert parts.recovering_s == pytest.approx((3.1 - 0.6) + (2.9 - 0.5))
    assert parts.lost_s == pytest.approx(3.0)
    assert parts.computing_s == pytest.approx(1.2 + 1.2 + 0.5 + 0.5 + 0.9)
    assert parts.starting_s == pytest.approx(2.0)
    assert parts.whole_s == pytest.approx(12.0 + 6.0)


def test_a_recovery_that_is_told_before_the_others_report() -> None:
    told: list[tuple[float, Event]] = [
        (0.0, MemberSpawned(member=0)),
        (0.0, MemberSpawned(member=1)),
        (2.0, later(0, 0, 1, generation=0, wall_s=2.0)),
        (2.0, later(1, 0, 1, generation=0, wall_s=2.0)),
        (7.0, later(0, 1, 2, generation=1, wall_s=5.0)),
        (7.0, Recovered(generation=1, lost=(), cause="", detected_s=3.0, resumed_s=7.0)),
        (7.2, later(1, 1, 2, generation=1, wall_s=5.2)),
    ]
    parts = fold(told)
    assert parts.recovering_s == pytest.approx(5.0 + 5.2 - 2 * 0.4)
    assert parts.beside_s == pytest.approx(2 * 1.6 + 0.2)  # and what the first waited at the end


def test_steps_that_a_resume_takes_back_are_lost() -> None:
    told = [entry for entry in entries(status="failed") if entry[1] != CheckpointPublished]
    resumed = [
        *(e for e in told if not isinstance(e[1], CheckpointPublished)),
        (told[-1][0] + 10, replace(START, resumed_from_step=4)),
    ]
    before, after = fold(told), fold(resumed)
    assert after.lost_s == pytest.approx(2 * 6 * (0.25 + 0.05 + 0.1))
    assert after.computing_s == pytest.approx(2 * 4 * 0.25)
    assert after.whole_s == pytest.approx(before.whole_s)  # nobody was there in between


def test_steps_before_a_checkpoint_stay() -> None:
    told = [*entries(), (100.0, replace(START, resumed_from_step=10))]
    assert fold(told).lost_s == 0.0


def test_who_has_left_is_not_waited_for() -> None:
    told: list[tuple[float, Event]] = [
        (0.0, MemberSpawned(member=0)),
        (0.0, MemberSpawned(member=1)),
        (1.0, formed(0, 0, 1)),
        (2.0, later(0, 0, 1, generation=0)),
        (2.0, later(1, 0, 1, generation=0)),
        (4.0, formed(1, 0)),
        (4.5, later(1, 1, 2, generation=0)),  # its last words
        (10.0, later(0, 1, 9, generation=1, wall_s=8.0)),
    ]
    assert fold(told).whole_s == pytest.approx(10.0 + 4.5)


def test_who_was_let_go_without_a_step_is_not_waited_for() -> None:
    told: list[tuple[float, Event]] = [
        (0.0, MemberSpawned(member=0)),
        (0.0, MemberSpawned(member=1)),
        (0.0, MemberSpawned(member=2)),
        (1.0, formed(0, 0)),
        (2.0, formed(1, 0, 1)),  # it follows
        (4.0, formed(2, 0)),
        (10.0, later(0, 0, 9, generation=2, wall_s=9.0)),
    ]
    parts = fold(told)
    assert parts.whole_s == pytest.approx(10.0 + 4.0 + 10.0)  # the third may still come
    assert parts.starting_s == pytest.approx(1.0 + 4.0 + 10.0)


def test_who_was_put_off_and_comes_again_is_there() -> None:
    told: list[tuple[float, Event]] = [
        (0.0, MemberSpawned(member=0)),
        (0.0, MemberSpawned(member=1)),
        (1.0, formed(0, 0, 1)),
        (2.0, formed(1, 0)),
        (3.0, formed(2, 0, 1)),
        (4.0, MemberLost(member=1, reason="")),
        (5.0, formed(3, 0)),
        (6.0, formed(4, 0, 1)),  # as an echo may say
        (7.0, later(0, 0, 1, generation=4, wall_s=1.0)),
    ]
    parts = fold(told)
    assert (parts.lost_s, parts.whole_s) == (pytest.approx(4.0), pytest.approx(7.0 + 4.0))


def test_a_newcomer_that_dies_before_its_first_step_is_lost() -> None:
    told: list[tuple[float, Event]] = [
        (0.0, MemberSpawned(member=0)),
        (5.0, MemberLost(member=0, reason="")),
        (9.0, RunFinished(status="failed", steps=0)),
    ]
    parts = fold(told)
    assert (parts.lost_s, parts.whole_s) == (5.0, 5.0)


SECONDS = st.floats(min_value=0.0, max_value=5.0)
HAPPENING = st.one_of(
    st.builds(
        lambda member, wall, compute, exchange, lane, generation: later(
            member, 0, 1, generation=generation, wall_s=wall, compute_s=compute,
            exchange_s=exchange, lane_s=lane,
        ),
        st.integers(0, 3), SECONDS, SECONDS, SECONDS, SECONDS, st.integers(0, 3),
    ),
    st.builds(lambda member: MemberLost(member=member, reason=""), st.integers(0, 3)),
    st.builds(
        lambda generation, members: formed(generation, *sorted(members)),
        st.integers(0, 3), st.sets(st.integers(0, 3)),
    ),
    st.builds(
        lambda generation, took: Recovered(
            generation=generation, lost=(), cause="", detected_s=0.0, resumed_s=took
        ),
        st.integers(0, 3), SECONDS,
    ),
    st.just(CheckpointPublished(step=1, path="", state_bytes=0, write_s=0.0)),
)  # fmt: skip


@given(st.lists(st.tuples(SECONDS, HAPPENING), max_size=30))
def test_the_parts_are_the_whole_whatever_comes(told: list[tuple[float, Event]]) -> None:
    """Each worker's time from its spawning to its end is in exactly one part."""
    goodput, t = Goodput(), 100.0
    for member in range(4):
        goodput.apply(t, MemberSpawned(member=member))
    ends: dict[int, float] = {}
    for wait_s, event in told:
        t += wait_s
        goodput.apply(t, event)
        if isinstance(event, MemberLost):
            ends.setdefault(event.member, t)
    parts = goodput.parts()
    for name in Parts.__annotations__:
        assert getattr(parts, name) >= -1e-9
    most = sum(t - 100.0 for _ in range(4))
    assert parts.whole_s <= most + 1e-6
    if not any(isinstance(event, GenerationFormed | StepsCommitted) for _, event in told):
        assert parts.whole_s == pytest.approx(sum(ends.get(m, t) - 100.0 for m in range(4)))
    if not any(isinstance(event, GenerationFormed | MemberLost) for _, event in told):
        assert parts.whole_s == pytest.approx(most)
