"""Micro-batches that end whoever computes them, by what members know where they meet."""

from __future__ import annotations

import pytest

from raycloud.recovery.poison import Suspects

STEP = 7


def story(suspects: Suspects, *meetings: tuple[tuple[int, ...], tuple[int, ...]]) -> list[object]:
    """What is suspect at each meeting of `members` who miss `missing`; dealt to them in turn."""
    found: list[object] = []
    for members, missing in meetings:
        gone = suspects.meet(members, planned=False)
        found.append(suspects.found(STEP, missing, gone))
        suspects.deal(tuple(missing[r :: len(members)] for r in range(len(members))))
    return found


def started(most: int, members: tuple[int, ...] = (0, 1, 2, 3)) -> Suspects:
    suspects = Suspects("skip")
    suspects._most = most
    assert suspects.meet(members, planned=False) == ()
    assert suspects.found(3, (0, 1, 2, 3, 4, 5, 6, 7), ()) == ()
    return suspects


def test_what_was_dealt_to_one_that_is_lost_too_is_suspect() -> None:
    # Of 2 and 3, which 0 had, member 2 takes 3, and is lost; 4 was its own before.
    assert story(started(2), ((1, 2, 3), (2, 3, 1)), ((1, 3), (3, 4))) == [(), (3,)]
    several = ((1, 2, 3), (2, 3, 1)), ((1, 3), (3, 4)), ((3,), (3, 5))
    assert story(started(3), *several) == [(), (), (3,)]


def test_two_that_are_lost_at_once_are_one_loss() -> None:
    assert story(started(2), ((2, 3), (0, 1, 2, 3))) == [()]


def test_what_survivors_had_not_come_to_is_nobodys_fault() -> None:
    suspects, owners = started(2), {0: 0, 1: 0, 2: 1, 3: 1}
    gone = suspects.meet((1, 2, 3), planned=False)
    assert suspects.found(STEP, (0, 1, 2, 3), gone, owners) == ()  # in the midst of a round
    suspects.deal(((2, 0), (3, 1), ()))
    gone = suspects.meet((1, 3), planned=False)
    assert suspects.found(STEP, (1, 3), gone, owners) == (1,)


def test_each_step_begins_anew() -> None:
    suspects = started(2)
    story(suspects, ((1, 2, 3), (2, 3, 1)))
    gone = suspects.meet((1, 3), planned=False)
    assert gone == (2,)
    assert suspects.found(STEP + 1, (2, 3), gone) == ()


def test_who_had_no_share_is_no_loss() -> None:
    suspects = started(1)
    assert suspects.meet((0, 1, 2), idle=(3,), planned=False) == ()
    assert suspects.meet((0, 1), idle=(3,), planned=False) == (2,)


def test_who_leaves_as_planned_is_not_lost() -> None:
    suspects = started(1)
    assert suspects.meet((1, 2, 3), planned=True) == ()
    assert suspects.found(STEP, (0, 1), ()) == ()


@pytest.mark.parametrize("lost", [(1, 3), (1, 2)])
def test_what_a_meeting_that_broke_was_to_deal_is_nobodys(lost: tuple[int, ...]) -> None:
    suspects = started(2)
    gone = suspects.meet((1, 2, 3), planned=False)
    assert suspects.found(STEP, (2, 3), gone) == ()
    gone = suspects.meet(lost, planned=False)  # before anything was dealt
    assert suspects.found(STEP, (2, 3), gone) == ()


def test_a_connection_that_broke_is_no_loss() -> None:
    assert story(started(1), ((0, 1, 2, 3), (2, 3))) == [()]
