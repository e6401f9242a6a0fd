"""A step that ends whoever computes it ends the run; one that machines leave in the midst of, not.

What of a step members have when they meet tells them apart: it grows, or it does not.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from raycloud.control.data import Progress
from raycloud.control.recovery import Recovery
from raycloud.order import Ledger, Position, Steps

WHOLE = 12  # micro-batches of a step
MOST = 8  # see `ControlSettings.losing`
APART_S = 3.0


def losses(recovery: Recovery, kept: list[int]) -> int:
    """Members are lost, meet, and have so many micro-batches: how many losses end the run."""
    for number, count in enumerate(kept, 1):
        recovery.call(100.0 * number, same=False, met=True, lost=True, apart_s=APART_S)
        if recovery.losing >= MOST:
            return number
        recovery.note_met(count)
    return 0


@given(st.integers(0, WHOLE), st.lists(st.integers(0, WHOLE), min_size=MOST, max_size=40))
def test_where_a_part_of_the_step_is_never_there_the_run_ends(top: int, kept: list[int]) -> None:
    """However much of the others' work goes with those that are lost."""
    never_more = [top, *(min(top, count) for count in kept)]
    assert losses(Recovery(), never_more) == MOST


@given(st.lists(st.integers(0, WHOLE), min_size=MOST * (WHOLE + 2), max_size=MOST * (WHOLE + 2)))
def test_it_ends_after_some_losses_whatever_members_say(kept: list[int]) -> None:
    assert losses(Recovery(), kept) > 0


@given(st.integers(1, 5))
def test_as_long_as_more_of_the_step_is_there_each_time_it_goes_on(each: int) -> None:
    """Machines stay for less than a step takes, and leave one after the other."""
    assert losses(Recovery(), [n // each for n in range(WHOLE * each)]) == 0


def test_a_step_that_is_committed_begins_the_count_anew() -> None:
    recovery = Recovery()
    assert losses(recovery, [3] * (MOST - 1)) == 0
    recovery.progress()
    assert losses(recovery, [3] * (MOST - 1)) == 0
    assert losses(recovery, [3]) == 1


@given(st.lists(st.integers(0, 20), min_size=1, max_size=60))
def test_only_going_back_to_no_later_checkpoint_is_no_progress(backs: list[int]) -> None:
    """All compute up to the same step, and are lost, again and again: with later checkpoints."""
    steps = Steps(samples=1000, global_batch=8, micro_batch=1)
    progress = Progress(
        steps=steps, step=0, position=Position(), ledger=Ledger(samples=1000), generation=0
    )
    latest, expected = 0, 0
    for generation, back in enumerate(backs, 1):
        progress.commit_to(21)
        step = max(back, latest)
        progress.go_back(step, Ledger.from_state(progress.ledger_at(step)), generation)
        expected, latest = (1 if step > latest else expected + 1), step
        assert progress.returns == expected
    progress.commit_to(22)
    assert progress.returns == 0
