"""How long faults held a training up, from commits whose gaps are worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.racing.capacity import Change
from benchmarks.racing.commits import Commit
from benchmarks.racing.pauses import Fault, pauses, relieves


def commits(*times_s: float) -> list[Commit]:
    return [Commit(t_s=float(t), update=i, samples=1) for i, t in enumerate(times_s)]


def lengths(
    noted: Sequence[Commit], faults_s: Sequence[float], end_s: float, reliefs: Sequence[bool] = ()
) -> list[float | None]:
    return [pause.pause_s for pause in pauses(noted, faults_s, end_s, reliefs)]


def test_a_pause_is_the_longest_gap_less_a_step_at_the_new_capacity() -> None:
    """Steps of 1 s until 5; a gap of 8 s; then steps of 2 s; the second fault holds nobody up."""
    noted = commits(1, 2, 3, 4, 5, 13, 15, 17, 19, 21)
    assert lengths(noted, [5.5, 17.5], end_s=20.0) == [8 - 2, 0]


def test_a_fault_does_not_pay_for_the_next_one() -> None:
    """A gap of 5 s by the first, steps of 1 s, and 20 s by the second, which falls in a step."""
    noted = commits(*range(11), *range(15, 41), *range(60, 71))
    assert lengths(noted, [10.5, 40.5], end_s=70.0) == [5 - 1, 20 - 1]


def test_who_is_held_up_already_when_the_next_fault_comes_pays_too() -> None:
    noted = commits(*range(11), 12, 40, *range(41, 51))
    assert lengths(noted, [10.5, 30.5], end_s=50.0) == [28 - 1, 28 - 1]


def test_a_fault_that_nothing_followed_has_no_pause_but_a_reason() -> None:
    (pause,) = pauses(commits(*range(5)), [4.5], end_s=6.0)
    assert (pause.pause_s, pause.reason) == (None, "no update was committed after it")
    assert pauses([], [4.5], end_s=60.0)[0].reason == "nothing was committed"


def test_one_late_commit_and_then_nothing_is_no_recovery() -> None:
    noted = commits(*range(11), 10.6)
    (pause,) = pauses(noted, [10.5], end_s=60.0)
    assert (pause.pause_s, pause.reason) == (None, "no update for 49 s until the end")
    assert lengths(noted, [10.5, 50.0], end_s=60.0) == [None, None], "nor is it one for the next"


def test_an_open_gap_counts_where_it_is_the_longest_and_longer_than_three_steps() -> None:
    noted = commits(*range(11), *range(30, 41))
    assert lengths(noted, [10.5], end_s=43.0) == [20 - 1], "three steps"
    assert lengths(noted, [10.5], end_s=59.0) == [20 - 1], "shorter than the closed one"
    assert lengths(noted, [10.5], end_s=61.0) == [None]
    assert lengths(noted, [10.5, 40.5], end_s=70.0) == [20 - 1, None], "the second one's"


def test_two_faults_in_one_gap_are_paid_by_both() -> None:
    assert lengths(commits(0, 1, 11, 12, 13), [2.0, 3.0], end_s=13.0) == [9.0, 9.0]


def test_a_gap_with_a_fault_and_its_relief_is_paid_by_the_fault() -> None:
    noted = commits(*range(11), *range(34, 61))
    assert lengths(noted, [10.5, 30.0], 60.0, [False, True]) == [23.0, 0.0]
    assert lengths(noted, [10.5, 30.0], 60.0) == [23.0, 23.0]
    hung = commits(*range(11))
    assert lengths(hung, [10.5, 30.0], 60.0, [False, True]) == [None, 0.0], "without an end too"


def test_what_a_relief_itself_costs_is_its_own() -> None:
    """5 s by the freeze, then steps of 1 s without it, and 8 s when it comes back."""
    noted = commits(*range(11), *range(15, 31), *range(38, 61))
    assert lengths(noted, [10.5, 30.5], 60.0, [False, True]) == [5 - 1, 8 - 1]


@pytest.mark.parametrize(
    ("what", "relief"),
    [
        ("thaw n2", True),
        ("mend n3", True),
        ("add n1, add n2", True),
        ("add n1, kill-node n2", False),
        ("cut n4 (in)", False),
        ("kill-process n1", False),
        ("rate n1", False),
        ("throttle n1 (0.4 cores)", True),
        ("throttle n2 (0.1 cores)", False),
        ("throttle n3 (0.1 cores)", False),
    ],
)
def test_reliefs_are_told_from_faults(what: str, relief: bool) -> None:
    """n1 was slow and is fast again, n2 is slowed, and of n3 nothing is known."""
    changes = [
        Change(t_s=0.0, node="n1", part=1.0),
        Change(t_s=0.0, node="n2", part=1.0),
        Change(t_s=20.0, node="n1", part=0.25),
        Change(t_s=40.0, node="n1", part=1.0),
        Change(t_s=40.0, node="n2", part=0.25),
    ]
    assert relieves(Fault(t_s=40.0, what=what), changes) == relief


times = st.floats(0, 100, allow_nan=False)


@given(
    st.lists(times, max_size=20).map(sorted),
    st.lists(times, max_size=4).map(sorted),
    times,
    st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_pauses_are_never_negative_and_one_per_fault(
    noted: list[float], faults: list[float], end_s: float, reliefs: list[bool]
) -> None:
    held = pauses(commits(*noted), faults, end_s, reliefs)
    assert len(held) == len(faults)
    assert all((p.pause_s is None) == bool(p.reason) for p in held)
    assert all(p.pause_s is None or p.pause_s >= 0 for p in held)
