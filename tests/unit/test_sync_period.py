"""How many steps a round has, chosen by what members have seen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raycloud.sync.period import Choice, Seen, choose, in_common

FIRST = Choice(0, 1, 16)


def seen(exposed_s: float, hidden_s: float = 0.0, *, step_s: float = 1.0, period: int = 1) -> Seen:
    """Ten exchanges of one member, each so long, after steps of so many seconds."""
    return Seen(
        exchanges=10,
        steps=10 * period,
        wall_s=10 * (step_s * period + exposed_s),
        exposed_s=10 * exposed_s,
        hidden_s=10 * hidden_s,
    )


@pytest.mark.parametrize(
    ("exposed_s", "hidden_s", "period"),
    [
        (0.0, 0.9, 1),
        (0.08, 0.2, 1),
        (0.09, 0.0, 8),
        (0.09, 0.2, 8),
        (0.6, 0.0, 16),
        (5.0, 0.0, 16),
    ],
)
def test_the_fewest_steps_that_leave_little(exposed_s: float, hidden_s: float, period: int) -> None:
    choice, why = choose(FIRST, [seen(exposed_s, hidden_s)] * 2)
    assert (choice.number, choice.period, choice.most) == (1, period, 16)
    assert "an exchange takes" in why


def test_who_waits_least_tells_what_an_exchange_costs() -> None:
    """The others wait for that one, too."""
    slow, fast = seen(0.01), seen(0.7, step_s=0.31)
    assert choose(FIRST, [fast, slow])[0].period == 1
    assert choose(FIRST, [fast, fast])[0].period == 16


def test_what_couriers_take_of_the_processors_counts() -> None:
    shared = replace(seen(0.05), lost_s=10 * 0.15)
    choice, why = choose(FIRST, [shared] * 2)
    assert choice.period == 8  # 0.2 s of 0.85 s
    assert why == "an exchange takes 0.2 s, computing a step 0.85 s"


def test_little_that_was_seen_decides_nothing() -> None:
    few = replace(seen(0.5), exchanges=7)
    assert choose(FIRST, [seen(0.5), few]) == (FIRST, "")
    assert choose(FIRST, [seen(0.5)]) == (FIRST, "")  # alone, there is no exchange
    assert choose(FIRST, [Seen(), Seen()]) == (FIRST, "")
    assert choose(FIRST, [seen(0.5), Seen()])[0].period == 16  # one that follows has seen nothing


def test_a_choice_is_kept_where_another_would_be_hardly_better() -> None:
    now = Choice(1, 8, 16)
    for exposed_s in (0.13, 0.3, 0.47):
        assert choose(now, [seen(exposed_s, period=8)] * 2) == (now, "")
    assert choose(now, [seen(0.5, period=8)] * 2)[0] == Choice(2, 16, 16)
    assert choose(now, [seen(0.1, period=8)] * 2) == (now, "")  # there are no shorter rounds
    assert choose(now, [seen(0.06, period=8)] * 2)[0] == Choice(2, 1, 16)
    again = Choice(2, 1, 16)
    assert choose(again, [seen(0.05)] * 2) == (again, "")


def directions(common: float, members: int = 4, size: float = 3.0) -> list[Seen]:
    """Rounds whose directions are orthogonal but for a part that is the same on all members."""
    part = 1 / members
    mean = size * (common + (1 - common) * part)
    one = replace(seen(0.3, period=8), own=part * size, alone=part**2 * size, mean=mean)
    return [one] * members


def test_a_round_takes_no_longer_than_two_minutes() -> None:
    assert choose(FIRST, [seen(10.0, step_s=14.0)] * 2)[0].period == 8
    assert choose(FIRST, [seen(10.0, step_s=16.0)] * 2)[0].period == 1
    slower = [seen(10.0, step_s=14.0, period=16)] * 2
    assert choose(Choice(1, 16, 16), slower)[0].period == 8


def test_there_are_no_rounds_where_they_have_little_in_common() -> None:
    now = Choice(3, 8, 16)
    assert in_common(directions(0.35)) == pytest.approx(0.35)
    assert choose(now, directions(0.21)) == (now, "")
    choice, why = choose(now, directions(0.1))
    assert choice == Choice(4, 1, 1)
    assert "10% in common" in why
    assert choose(choice, [seen(5.0)] * 2) == (choice, "")
