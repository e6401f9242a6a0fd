"""Shares: fitted, equal, and when new ones are better."""

from __future__ import annotations

import pickle
from dataclasses import replace
from itertools import product
from random import Random
from time import perf_counter

import numpy as np
import pytest

from raycloud.errors import PlacementError
from raycloud.planner.shares import better_shares, equal_shares, fit_shares, step_seconds
from raycloud.planner.speed import Speed, Speeds


def even(micro_batch_s: float, fixed_s: float = 0.0, most: int | None = None) -> Speed:
    """A worker, briefly."""
    return Speed(fixed_s=fixed_s, micro_batch_s=micro_batch_s, max_micro_batches=most)


def test_equal_workers_get_equal_shares_and_the_lower_index_the_remainder() -> None:
    assert fit_shares([even(1.0)] * 3, 8) == (3, 3, 2)


def test_shares_follow_speed() -> None:
    assert fit_shares([even(1.0), even(2.0), even(4.0)], 14) == (8, 4, 2)


def test_the_fixed_part_counts() -> None:
    assert fit_shares([even(1.0), even(1.0, fixed_s=4.0)], 8) == (6, 2)


def test_limits_bind_and_the_rest_goes_elsewhere() -> None:
    assert fit_shares([even(1.0, most=2), even(3.0)], 6) == (2, 4)


def test_fewer_micro_batches_than_workers_go_to_the_fastest() -> None:
    assert fit_shares([even(3.0), even(1.0), even(2.0)], 1) == (0, 1, 0)


def test_a_slow_worker_keeps_one_while_that_costs_little() -> None:
    assert fit_shares([even(1.0), even(5.7)], 4) == (3, 1)


def test_a_worker_that_holds_up_the_step_is_left_out() -> None:
    assert fit_shares([even(1.0), even(5.8)], 4) == (4, 0)


def test_only_those_are_left_out_that_hold_up_the_step() -> None:
    # the optimum (5, 5, 0, 0) takes 5 s; worker 2 would end at 5.5 s, worker 3 at 50 s
    assert fit_shares([even(1.0), even(1.0), even(5.5), even(50.0)], 10) == (5, 4, 1, 0)


def test_a_worker_that_can_hold_nothing_gets_nothing() -> None:
    assert fit_shares([even(1.0), even(1.0, most=0)], 4) == (4, 0)


def test_workers_that_take_no_time_are_no_trouble() -> None:
    assert sum(fit_shares([even(0.0), even(0.0), even(1.0)], 7)) == 7


def test_limits_below_the_step_are_refused_with_numbers_and_a_remedy() -> None:
    with pytest.raises(PlacementError) as caught:
        fit_shares([even(1.0, most=4), even(1.0, most=2)], 12)
    assert "12 micro-batches" in caught.value.message
    assert "at most 6 together (4 + 2)" in caught.value.message
    assert "global_batch" in caught.value.hint
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_many_limits_are_not_all_listed() -> None:
    with pytest.raises(PlacementError, match=r"at most 9 together \(1 \+ .* \+ \.\.\.\)"):
        fit_shares([even(1.0, most=1)] * 9, 10)


@pytest.mark.parametrize(("workers", "micro_batches"), [(0, 4), (2, 0)])
def test_nothing_to_share_is_refused(workers: int, micro_batches: int) -> None:
    with pytest.raises(ValueError, match="need a worker and a micro-batch"):
        fit_shares([even(1.0)] * workers, micro_batches)


def test_ten_thousand_workers_are_quick() -> None:
    speeds = [even(1.0 + (i * 7919 % 1000) / 500, fixed_s=(i % 13) / 10) for i in range(10_000)]
    begun_s = perf_counter()
    shares = fit_shares(speeds, 100_000)
    assert perf_counter() - begun_s < 1.0  # takes about 0.02 s
    assert sum(shares) == 100_000
    assert min(shares) >= 1


def test_step_seconds_is_the_slowest_and_idle_workers_do_not_count() -> None:
    assert (
        step_seconds([even(1.0, fixed_s=0.5), even(2.0), even(0.0, fixed_s=99.0)], (3, 1, 0)) == 3.5
    )


def test_step_seconds_wants_one_share_per_speed() -> None:
    with pytest.raises(ValueError, match="argument"):
        step_seconds([even(1.0)], (1, 1))


def test_equal_shares_refuse_no_members() -> None:
    assert equal_shares(4, 2) == (1, 1, 0, 0)
    with pytest.raises(ValueError, match="over 0 members"):
        equal_shares(0, 2)


def test_better_shares_need_the_gain() -> None:
    speeds = [even(1.0), even(1.04)]
    assert fit_shares(speeds, 100) == (51, 49)
    assert better_shares((50, 50), speeds, 100) is None
    assert better_shares((50, 50), speeds, 100, gain=0.01) == (51, 49)


def test_the_gain_is_held_against_the_exchange_too() -> None:
    speeds = Speeds.of([even(1.0), even(2.0)])
    assert better_shares((4, 4), speeds, 8, gain=0.2) == (6, 2)  # 8 s become 6
    assert better_shares((4, 4), replace(speeds, beside_s=1.9), 8, gain=0.2) == (6, 2)
    assert better_shares((4, 4), replace(speeds, beside_s=2.1), 8, gain=0.2) is None


def test_who_is_slow_is_left_out_by_what_all_of_a_step_gains() -> None:
    speeds = Speeds.of([even(0.1), even(0.6)])  # 0.4 s without the second, else 0.6
    assert fit_shares(speeds, 4) == (4, 0)
    assert fit_shares(replace(speeds, beside_s=0.05), 4) == (4, 0)
    assert fit_shares(replace(speeds, beside_s=0.1), 4) == (3, 1)


def test_who_is_fed_slowly_gets_no_more_than_comes_beside_the_step() -> None:
    quick = Speeds.of([even(0.01), even(0.01)])
    assert fit_shares(quick, 10) == (5, 5)
    slow = replace(quick, feed_s=np.array([0.0, 0.5]), beside_s=1.0)
    assert fit_shares(slow, 10) == (8, 2)  # a third one would be there 0.5 s too late
    assert fit_shares(slow.in_parts(2), 20) == (16, 4)


@pytest.mark.parametrize("seed", range(40))
def test_no_other_shares_are_shorter_where_data_is_waited_for(seed: int) -> None:
    chance = Random(seed)
    count, total = chance.randint(1, 3), chance.randint(3, 9)
    workers = Speeds.of(
        [even(chance.uniform(0.0, 1.0), fixed_s=chance.uniform(0.0, 2.0)) for _ in range(count)]
    )
    feed_s = np.array([chance.choice((0.0, chance.uniform(0.0, 2.0))) for _ in range(count)])
    workers = replace(workers, feed_s=feed_s, beside_s=chance.uniform(0.0, 4.0))
    shares = fit_shares(workers, total)
    # each has one, where that does not make the step half as long again
    least = [min(share, 1) for share in shares]
    every = product(*(range(one, total + 1) for one in least))
    best_s = min(workers.step_s(np.array(some)) for some in every if sum(some) == total)
    assert sum(shares) == total
    assert workers.step_s(np.array(shares)) == pytest.approx(best_s)


def test_better_shares_are_none_when_nothing_would_change() -> None:
    assert better_shares((4, 4), [even(1.0), even(1.0)], 8, gain=0.0) is None


def test_impossible_shares_are_replaced_whatever_the_gain() -> None:
    speeds = [even(1.0, most=3), even(1.0)]
    assert better_shares((4, 4), speeds, 8) == (3, 5)
    assert better_shares((2, 2), [even(1.0), even(1.0)], 8) == (4, 4)


def test_better_shares_want_one_share_per_speed() -> None:
    with pytest.raises(ValueError, match="argument"):
        better_shares((4,), [even(1.0), even(1.0)], 8)


@pytest.mark.parametrize(
    ("name", "value"),
    [("fixed_s", -1.0), ("micro_batch_s", float("nan")), ("fixed_s", float("inf"))],
)
def test_a_speed_is_seconds(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        Speed(**{"fixed_s": 0.0, "micro_batch_s": 1.0, name: value})


def test_a_limit_is_a_count() -> None:
    with pytest.raises(ValueError, match="max_micro_batches"):
        even(1.0, most=-1)
