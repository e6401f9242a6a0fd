"""Looks at how many steps a round has: when they come, and that what was seen decides."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from raycloud.net.lane import Lane
from raycloud.sync.gradients import Exchanged
from raycloud.sync.period import Choice
from raycloud.worker.period import PeriodLooks, Processors, Took
from tests.loopback import Loopback

NOBODY_KNOWS = "Counting keeps 'step', of type int"


class Chosen:
    """Stands for rounds."""

    def __init__(self, choice: Choice, unaveraged: str = "") -> None:
        self.choice, self.unaveraged, self.adapts = choice, unaveraged, True
        self.weight = self.given = 1.0

    def take(self, choice: Choice) -> None:
        self.choice = choice


class Two(Lane):
    """A lane on which another member says the same."""

    def gather(self, values: Any) -> list[list[float]]:
        return [list(map(float, values))] * 2


def choices(
    rounds: Any, exchange_s: float, *, until: int, warm_steps: int = 0, common: float = 1.0
) -> list[tuple[int, Choice]]:
    """What is chosen where an exchange takes so long, and computing a step a second."""
    lane, looks, step, found = Two(Loopback(1).members[0]), PeriodLooks(rounds, warm_steps), 0, []
    looks.begin(0)
    while step < until:
        period = rounds.choice.period
        steps = 1 if step < warm_steps else period - step % period
        step += steps
        mean = 0.5 + 0.5 * common  # of two members' unit lengths
        exchanged = Exchanged(
            norm=mean**0.5, bytes_sent=1, agreed=False, exchange_s=exchange_s, overlap_s=0.0
        )
        took = Took(steps + exchange_s, float(steps))
        looks.see(steps, exchanged, 2.0, took, Processors(cpu_s=float(step)))
        before = rounds.choice
        looks.look(step, lane)
        if rounds.choice != before:
            found.append((step, rounds.choice))
    return found


@pytest.mark.parametrize("period", [2, 4, 8, 16])
def test_each_length_is_looked_at_again(period: int) -> None:
    rounds = Chosen(Choice(1, period, 16))
    [(step, choice), *_] = choices(rounds, 0.01, until=400)
    assert (choice.number, choice.period) == (2, 1)
    assert step <= 8 * max(period, 8)


def test_it_settles_on_one() -> None:
    rounds = Chosen(Choice(0, 1, 16))
    assert choices(rounds, 0.3, until=1000, warm_steps=40) == [(40, Choice(1, 8, 16))]


def test_rounds_with_nothing_in_common_end() -> None:
    rounds = Chosen(Choice(0, 1, 16))
    found = choices(rounds, 0.3, until=1000, common=0.0)
    assert [choice.period for _, choice in found] == [8, 1]
    assert found[-1][1] == Choice(2, 1, 1)


def test_an_optimizer_without_a_mean_stays_without_rounds() -> None:
    rounds = Chosen(Choice(0, 1, 16), NOBODY_KNOWS)
    assert [choice.period for _, choice in choices(rounds, 0.9, until=200)] == [1]
    looks = PeriodLooks(Chosen(Choice(0, 1, 16), NOBODY_KNOWS), 0)  # type: ignore[arg-type]
    for step in range(12):
        exchanged = Exchanged(norm=1.0, bytes_sent=1, agreed=False, exchange_s=0.9)
        looks.see(1, exchanged, 2.0, Took(1.9, 1.0), Processors(cpu_s=float(step)))
    assert looks.look(12, Two(Loopback(1).members[0]))
    told = looks.told(3, 5)
    assert (
        told.what
        == f"sync.period auto: an exchange after each step from step 12 on: {NOBODY_KNOWS}"
    )
    assert (told.member, told.detail) == (
        3,
        {"period": 1, "step": 12, "computing_s": 1.0, "generation": 5},
    )


def test_where_nothing_is_chosen_nothing_is_said() -> None:
    looks = PeriodLooks(None, 0)
    looks.see(1, SimpleNamespace(), 1.0, Took(1.0, 1.0), Processors())  # type: ignore[arg-type]
    assert not looks.look(1000, Two(Loopback(1).members[0]))
