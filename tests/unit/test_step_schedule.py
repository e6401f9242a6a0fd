"""Changes sent ahead: due once, at one step everywhere, beyond what a feed has asked for."""

from __future__ import annotations

from collections import deque
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycloud.commands import Change, Extend, Halt, Reshare, Save
from raycloud.errors import InternalError
from raycloud.order import Position, Steps
from raycloud.step.feed import Course, Piece, Schedule
from raycloud.worker.context import Changes, Due

STEPS = Steps(samples=100, global_batch=8, micro_batch=1)


def reshare(generation: int, *shares: int) -> Reshare:
    return Reshare(generation=generation, shares=shares)


def indices(schedule: Schedule, step: int, rank: int) -> list[int]:
    return [m.index for m in schedule.micro_batches(STEPS.span(step, Position()), rank)]


def test_a_piece_holds_until_the_next() -> None:
    schedule = Schedule(Piece(step=3, generation=1, shares=(4, 4)))
    schedule.add(Piece(step=7, generation=2, shares=(6, 2)))
    assert [schedule.at(step).generation for step in (3, 6, 7, 100)] == [1, 1, 2, 2]
    assert indices(schedule, 6, 0) == [0, 1, 2, 3]
    assert indices(schedule, 7, 0) == [0, 1, 2, 3, 4, 5]
    assert indices(schedule, 7, 1) == [6, 7]


def test_a_step_before_the_schedule_is_our_own_fault() -> None:
    with pytest.raises(InternalError, match="step 2 lies before"):
        Schedule(Piece(step=3, generation=1, shares=(1,))).at(2)


def test_a_late_change_is_refused() -> None:
    schedule = Schedule(Piece(step=3, generation=1, shares=(4, 4)))
    schedule.add(Piece(step=7, generation=2, shares=(6, 2)))
    with pytest.raises(InternalError, match="would lie before"):
        schedule.add(Piece(step=6, generation=3, shares=(1, 7)))
    assert schedule.at(6).generation == 1


def test_the_first_step_may_go_on_from_what_is_kept() -> None:
    first = Piece(step=3, generation=1, shares=(4, 4))
    schedule = Schedule(first, (), {3: ((6,), (7, 2))})
    assert indices(schedule, 3, 0) == [6]
    assert indices(schedule, 3, 1) == [7, 2]
    assert indices(schedule, 4, 0) == [0, 1, 2, 3]


@given(st.lists(st.integers(0, 3), max_size=8), st.integers(1, 5))
def test_no_piece_is_forgotten_that_a_feed_may_ask_for(gaps: list[int], depth: int) -> None:
    schedule = Schedule(Piece(step=0, generation=1, shares=(8,)))
    changes = Changes(feed_depth=depth)
    step, pieces = 0, [(0, 1)]
    for number, gap in enumerate(gaps, start=1):
        changes.prepare(number, reshare(number + 1, 8))
        step += gap if number > 1 else 0
        before = {asked: schedule.at(asked) for asked in range(max(0, step - depth), step + 1)}
        due = changes.agree(step)
        assert isinstance(due.change, Reshare)
        schedule.add(Piece(step=due.step, generation=due.change.generation, shares=(8,)))
        pieces.append((due.step, due.change.generation))
        assert all(schedule.at(asked) == piece for asked, piece in before.items())
        for asked in range(step + 1, step + depth + 3):
            assert schedule.at(asked).generation == [g for s, g in pieces if s <= asked][-1]
        step += 1


@pytest.mark.parametrize("depth", [1, 2, 64])
def test_data_grows_beyond_all_that_a_feed_may_have_asked_for(depth: int) -> None:
    changes = Changes(feed_depth=depth)
    changes.prepare(1, Extend(version=1, samples=120))
    # Step 10 is computed, `depth` are ready, and one more is being collated.
    assert changes.agree(10).step == 10 + depth + 2


@pytest.mark.parametrize("change", [reshare(2, 5, 3), Save(), Halt(reason="asked")])
def test_all_else_takes_effect_at_the_next_step(change: Change) -> None:
    changes = Changes(feed_depth=5)
    changes.prepare(1, change)
    assert changes.agree(10) == Due(number=1, step=11, change=change)


def test_a_change_is_due_once() -> None:
    changes = Changes(feed_depth=2)
    changes.prepare(1, Extend(version=1, samples=9))
    changes.agree(0)
    assert [changes.due(step) for step in range(4)] == [[]] * 4
    (due,) = changes.due(4)
    assert due.number == 1
    assert changes.due(4) == []
    assert changes.due(5) == []


def test_changes_are_agreed_in_the_order_of_their_numbers() -> None:
    changes = Changes(feed_depth=1)
    assert not changes.next_at_hand
    changes.prepare(2, Save())
    assert not changes.next_at_hand  # the first has not come
    changes.prepare(1, reshare(2, 1))
    assert changes.next_at_hand
    assert changes.agree(0).number == 1
    assert changes.next_at_hand
    assert changes.agree(1).number == 2
    assert not changes.next_at_hand
    assert [(due.number, due.step) for due in changes.due(9)] == [(1, 1), (2, 2)]


def test_what_is_settled_is_never_due() -> None:
    """All but growth: another may have taken that in."""
    changes = Changes(feed_depth=2)
    for number, change in enumerate([reshare(1, 8), Extend(version=1, samples=9), Save()], 1):
        changes.prepare(number, change)
        changes.agree(0)
    changes.prepare(4, Save())
    assert (changes.agreed, changes.due_step()) == (3, 1)
    changes.settle(4)
    changes.prepare(4, Save())  # late
    assert changes.agreed == 4
    assert not changes.next_at_hand
    assert [due.number for due in changes.due(100)] == [2]
    changes.prepare(5, Save())
    assert changes.agree(7).number == 5


def test_a_change_that_others_found_all_to_hold() -> None:
    changes = Changes(feed_depth=2)
    changes.prepare(1, Extend(version=1, samples=9))
    assert changes.agree_on(12) == Due(number=1, step=12, change=Extend(version=1, samples=9))
    assert (changes.agreed, changes.due_step()) == (1, 12)
    assert changes.due(11) == []
    assert len(changes.due(12)) == 1
    assert changes.due_step() == -1


def test_changes_due_at_one_step_come_in_order() -> None:
    changes = Changes(feed_depth=1)
    changes.prepare(1, Extend(version=1, samples=9))
    changes.prepare(2, Save())
    changes.agree(0)
    changes.agree(2)
    assert [due.number for due in changes.due(3)] == [1, 2]


# ---- the course


def course(*, epochs: int | None = 3, last_step: int = 39, at: Position | None = None) -> Course:
    """Of 100 samples, 8 a step: 13 steps an epoch."""
    return Course(STEPS, step=0, at=at or Position(), last_step=last_step, epochs=epochs)


def test_growth_reaches_the_first_epoch_that_begins_then() -> None:
    one = course()
    assert [one.growth_at(step) for step in (2, 12, 13, 14)] == [1, 1, 1, 2]
    resumed = course(at=Position(epoch=4, offset=88))
    assert [resumed.growth_at(step) for step in (0, 1, 2, 3)] == [5, 5, 5, 6]


def test_a_length_in_epochs_grows_with_the_data() -> None:
    one = course()
    assert one.grow(1, 120)
    assert (one.last_step, one.steps.later) == (13 + 15 + 15, ((1, 120),))
    assert one.grow(2, 130)
    assert one.last_step == 13 + 15 + 17
    assert not one.grow(3, 140)
    assert one.last_step == 13 + 15 + 17


@pytest.mark.parametrize(("last_step", "seen"), [(13, False), (14, True), (40, True)])
def test_a_length_in_steps_stays(last_step: int, seen: bool) -> None:
    one = course(epochs=None, last_step=last_step)
    assert one.grow(1, 120) is seen
    assert one.last_step == last_step


def test_an_epoch_that_a_feed_has_begun_does_not_grow() -> None:
    one = course()
    spans = one.walk(0, Position())
    assert [next(spans).epoch for _ in range(14)] == [0] * 13 + [1]
    with pytest.raises(InternalError, match="cannot grow from epoch 1 on: a feed has begun epoch"):
        one.grow(1, 120)
    one.grow(2, 120)


@given(
    st.integers(1, 40),
    st.integers(1, 12),
    st.integers(1, 4),
    st.integers(1, 5),
    st.dictionaries(st.integers(0, 40), st.integers(1, 15), max_size=5),
    st.booleans(),
)
def test_a_feed_that_runs_ahead_takes_every_sample_once(
    samples: int,
    global_batch: int,
    depth: int,
    epochs: int,
    grows: dict[int, int],
    in_steps: bool,
) -> None:
    """A loop and its feed, `depth` ahead; members agree on growth at the steps of `grows`."""
    cut = Steps(samples=samples, global_batch=global_batch, micro_batch=1)
    length = cut.until_epoch(epochs, Position())
    one = Course(cut, step=0, at=Position(), last_step=length, epochs=None if in_steps else epochs)
    changes, spans, step, number = Changes(feed_depth=depth), one.walk(0, Position()), 0, 0
    flight = deque(islice(spans, depth))
    taken = []
    while step < one.last_step:
        taken.append(flight.popleft())
        flight.extend(islice(spans, 1))
        if step in grows:
            number, samples = number + 1, samples + grows[step]
            changes.prepare(number, Extend(version=number, samples=samples))
            due = changes.agree(step)
            before = one.steps
            epoch = one.growth_at(due.step)
            one.grow(epoch, samples)
            first = before.until_epoch(epoch, Position())
            assert due.step <= first < due.step + before.per_epoch(epoch - 1)
        step += 1
    assert not flight
    assert next(spans, None) is None
    assert [span.step for span in taken] == list(range(one.last_step))
    assert taken == list(islice(one.steps.walk(0, Position()), one.last_step))
    if not in_steps:
        assert one.steps.position_after(step, Position()) == Position(epoch=epochs)
