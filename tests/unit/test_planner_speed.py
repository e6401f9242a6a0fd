"""The speed estimate: hiccups, lasting changes, noise, both parts of the model, real stragglers."""

from __future__ import annotations

import csv
import random
from collections import defaultdict
from pathlib import Path

import pytest

from raycloud.planner.shares import better_shares, equal_shares, fit_shares, step_seconds
from raycloud.planner.speed import Speed, SpeedEstimate

TRACES = Path(__file__).parents[2].parent / "shared" / "data" / "straggler"
PRIOR = Speed(fixed_s=0.001, micro_batch_s=0.002, max_micro_batches=64)


def feed(
    estimate: SpeedEstimate, truth: Speed, share: int, times: int, factor: float = 1.0
) -> None:
    """Show `times` observations of ten steps each."""
    for _ in range(times):
        estimate.observe(share * 10, 10, truth.seconds(share) * 10 * factor)


def test_before_any_observation_the_prior_stands() -> None:
    assert SpeedEstimate(PRIOR).speed == PRIOR


def test_the_memory_limit_is_kept() -> None:
    estimate = SpeedEstimate(PRIOR)
    feed(estimate, PRIOR, 4, 3, factor=1.1)
    assert estimate.speed.max_micro_batches == 64


@pytest.mark.parametrize("hiccup", [10.0, 0.1, 3.0])
def test_one_hiccup_moves_no_share(hiccup: float) -> None:
    estimate, other = SpeedEstimate(PRIOR), SpeedEstimate(PRIOR)
    feed(estimate, PRIOR, 8, 5)
    before = estimate.speed
    feed(estimate, PRIOR, 8, 1, factor=hiccup)
    assert estimate.speed == before
    assert better_shares((8, 8), [estimate.speed, other.speed], 16) is None
    feed(estimate, PRIOR, 8, 1)
    assert estimate.speed.seconds(8) == pytest.approx(PRIOR.seconds(8), rel=1e-6)


def test_a_lasting_slow_down_is_followed_within_three_observations() -> None:
    estimate, other = SpeedEstimate(PRIOR), SpeedEstimate(PRIOR)
    feed(estimate, PRIOR, 8, 5)
    feed(estimate, PRIOR, 8, 3, factor=2.0)
    assert estimate.speed.seconds(8) == pytest.approx(2 * PRIOR.seconds(8), rel=0.01)
    new = better_shares((8, 8), [estimate.speed, other.speed], 16)
    assert new is not None
    assert new[0] < 8 < new[1]


def test_a_lasting_slow_down_is_followed_soon_after_a_hiccup_too() -> None:
    estimate = SpeedEstimate(PRIOR)
    feed(estimate, PRIOR, 8, 5)
    feed(estimate, PRIOR, 8, 1, factor=10.0)
    feed(estimate, PRIOR, 8, 1)
    feed(estimate, PRIOR, 8, 5, factor=2.0)
    assert estimate.speed.seconds(8) == pytest.approx(2 * PRIOR.seconds(8), rel=0.1)


@pytest.mark.parametrize(
    ("step_s", "factor", "which"),
    [(1.0, 4.0, 1), (0.45, 4.0, 2), (0.2, 4.0, 3), (2.0, 1.6, 3), (1.0, 2.1, 1)],
)
def test_what_has_taken_long_and_far_too_long_is_no_hiccup(
    step_s: float, factor: float, which: int
) -> None:
    """Steps of seconds: three of them would be most of what the slow-down lasts."""
    truth = Speed(fixed_s=0.0, micro_batch_s=step_s / 8)
    estimate = SpeedEstimate(truth)
    for _ in range(5):
        assert not estimate.observe(8, 1, step_s)
    told = []
    for number in range(1, 4):
        told.append(estimate.observe(8, 1, step_s * factor))
        now = factor if number >= which else 1.0
        assert estimate.speed.seconds(8) == pytest.approx(step_s * now, rel=0.01)
    assert told == [number == which for number in range(1, 4)]  # said once
    assert estimate.speed.seconds(8) == pytest.approx(step_s * factor, rel=0.01)


def test_the_third_in_a_row_is_one_of_three_however_long_all_have_taken() -> None:
    estimate = SpeedEstimate(Speed(fixed_s=0.0, micro_batch_s=0.1))
    for _ in range(6):
        estimate.observe(4, 1, 0.4)
    told = [estimate.observe(4, 1, seconds) for seconds in (0.64, 0.64, 0.85, 0.64)]
    assert told == [False, False, True, False]
    assert estimate.speed.seconds(4) == pytest.approx(0.64, rel=0.05)


def test_those_just_before_count_that_were_less_than_twice_off() -> None:
    estimate = SpeedEstimate(Speed(fixed_s=0.0, micro_batch_s=0.2))
    for _ in range(6):
        estimate.observe(4, 1, 0.8)
    assert [estimate.observe(4, 1, seconds) for seconds in (1.2, 2.0)] == [False, True]


def test_three_short_reports_are_believed_but_make_no_haste() -> None:
    quick = Speed(fixed_s=0.0, micro_batch_s=0.01)
    estimate = SpeedEstimate(quick)
    told = [estimate.observe(4, 1, 0.16) for _ in range(3)]
    assert told == [False, False, False]
    assert estimate.speed.seconds(4) == pytest.approx(0.16, rel=0.01)
    told = [estimate.observe(4, 1, 0.8) for _ in range(3)]
    assert told == [False, False, True]


def test_a_machine_that_changes_in_the_midst_of_a_long_step() -> None:
    """Seconds of a real one that fell to a quarter of its quota, got less to do, and came back."""
    estimate = SpeedEstimate(Speed(fixed_s=0.012, micro_batch_s=0.237))
    for seconds in (1.10, 1.00, 1.06, 1.02):
        estimate.observe(4, 1, seconds)
    assert estimate.observe(4, 1, 3.61)  # partly at the old speed
    estimate.observe(4, 1, 6.05)
    assert estimate.speed.seconds(4) == pytest.approx(6.05, rel=0.05)
    for seconds in (1.57, 1.49, 1.58, 1.55, 1.65, 1.53):
        estimate.observe(1, 1, seconds)
    assert estimate.speed.seconds(1) == pytest.approx(1.55, rel=0.05)
    told = [estimate.observe(1, 1, seconds) for seconds in (0.54, 0.26, 0.26)]
    assert told == [True, True, False]  # no hiccup makes a machine faster
    assert estimate.speed.seconds(4) == pytest.approx(1.03, rel=0.1)


def test_a_share_taken_on_while_slow_tells_nothing_false_about_larger_ones() -> None:
    """A real one's seconds: it was throttled within a step, and computed one micro-batch until it
    was fast again. With the old speed between its old share's seconds and the new share's, seven
    micro-batches looked like 0.9 s, and were 1.21 s."""
    estimate = SpeedEstimate(Speed(fixed_s=0.03, micro_batch_s=0.168))
    for seconds in (0.72, 0.70, 0.69, 0.71, 0.75, 0.70, 2.23, 3.45):
        estimate.observe(4, 1, seconds)
    for seconds in (1.32, 1.23, 1.25, 1.14, 1.40, 1.09, 1.04, 1.16, 1.39, 1.17):
        estimate.observe(1, 1, seconds)
    assert estimate.speed.seconds(1) == pytest.approx(1.2, rel=0.05)
    assert estimate.speed.seconds(4) > 3.9
    assert estimate.observe(2, 2, 1.01)
    assert estimate.observe(2, 2, 0.42)
    assert estimate.speed.seconds(4) == pytest.approx(0.70, rel=0.1)
    assert estimate.speed.seconds(7) == pytest.approx(1.21, rel=0.1)


@pytest.mark.parametrize(("seconds", "recalled"), [(0.22, True), (0.5, False)])
def test_who_takes_the_seconds_of_before_is_as_before(seconds: float, recalled: bool) -> None:
    """While it was slow its fixed part was larger: that ended with it."""
    before, slow = Speed(fixed_s=0.02, micro_batch_s=0.18), Speed(fixed_s=1.0, micro_batch_s=0.7)
    estimate = SpeedEstimate(before)
    for share, speed, times in ((4, before, 5), (4, slow, 2), (1, slow, 6), (2, slow, 6)):
        for _ in range(times):
            estimate.observe(share, 1, speed.seconds(share))
    assert estimate.speed.seconds(4) == pytest.approx(slow.seconds(4), rel=0.1)
    assert estimate.observe(1, 1, seconds)
    assert (estimate.speed.fixed_s == pytest.approx(0.02, rel=0.01)) is recalled
    assert estimate.speed.seconds(1) == pytest.approx(seconds, rel=0.15)


def test_a_slope_at_its_end_takes_nothing_from_the_level() -> None:
    """What a slope above 1 would have explained is none of the level's error."""
    estimate = SpeedEstimate(Speed(fixed_s=0.0, micro_batch_s=0.25))
    for seconds in (1.0, 1.0, 4.0, 6.0):
        estimate.observe(4, 1, seconds)
    for seconds in (1.57, 1.49, 1.58, 1.55, 1.65, 1.53) * 3:
        estimate.observe(1, 1, seconds)
        assert estimate.speed.seconds(1) == pytest.approx(1.56, rel=0.07)


def test_a_long_hiccup_is_found_out_by_the_next_observation() -> None:
    estimate = SpeedEstimate(Speed(fixed_s=0.0, micro_batch_s=0.25))
    told = [estimate.observe(4, 1, seconds) for seconds in (1.0, 1.0, 4.0, 1.0, 1.0)]
    assert told == [False, False, True, True, False]
    assert estimate.speed.seconds(4) == pytest.approx(1.0, rel=0.05)


def test_a_recovery_is_followed_too() -> None:
    estimate = SpeedEstimate(PRIOR)
    feed(estimate, PRIOR, 8, 6, factor=2.0)
    feed(estimate, PRIOR, 8, 4)
    assert estimate.speed.seconds(8) == pytest.approx(PRIOR.seconds(8), rel=0.03)


def test_half_life_is_that_of_a_small_change() -> None:
    estimate = SpeedEstimate(PRIOR)
    feed(estimate, PRIOR, 8, 100)
    feed(estimate, PRIOR, 8, 4, factor=1.1)
    assert estimate.speed.seconds(8) == pytest.approx(1.05 * PRIOR.seconds(8), rel=0.003)


def test_two_hiccups_on_opposite_sides_are_two_hiccups() -> None:
    estimate = SpeedEstimate(PRIOR)
    feed(estimate, PRIOR, 8, 5)
    for factor in (4.0, 0.2, 4.0, 0.2):
        feed(estimate, PRIOR, 8, 1, factor=factor)
    assert estimate.speed.seconds(8) == pytest.approx(PRIOR.seconds(8), rel=0.01)


def test_a_worker_that_always_alternates_is_not_taken_for_hiccups() -> None:
    estimate = SpeedEstimate(PRIOR)
    feed(estimate, PRIOR, 8, 3)
    for _ in range(30):
        feed(estimate, PRIOR, 8, 1, factor=2.0)
        feed(estimate, PRIOR, 8, 1)
    assert 1.2 < estimate.speed.seconds(8) / PRIOR.seconds(8) < 1.7


def test_one_share_keeps_the_ratio_of_the_parts() -> None:
    estimate = SpeedEstimate(PRIOR)
    feed(estimate, PRIOR, 8, 20, factor=1.5)
    assert estimate.speed.fixed_s == pytest.approx(1.5 * 0.001, rel=0.01)
    assert estimate.speed.micro_batch_s == pytest.approx(1.5 * 0.002, rel=0.01)


def test_several_shares_tell_the_parts_apart() -> None:
    truth = Speed(fixed_s=1.0, micro_batch_s=0.1)
    estimate = SpeedEstimate(
        Speed(fixed_s=0.0, micro_batch_s=0.225)
    )  # right at 8, for the wrong reason
    for share in (8, 4, 6, 8, 12, 8):
        feed(estimate, truth, share, 6)
    assert estimate.speed.fixed_s == pytest.approx(1.0, rel=0.1)
    assert estimate.speed.micro_batch_s == pytest.approx(0.1, rel=0.1)


def test_a_prior_that_is_far_off_does_not_hide_the_parts() -> None:
    """A share beside the first one is further from the fit than a gate: is it the slope?"""
    truth = Speed(fixed_s=4.0, micro_batch_s=1.0)
    estimate = SpeedEstimate(Speed(fixed_s=0.0, micro_batch_s=1.0))
    for share in (1, 2, 1, 2, 1, 2):
        for _ in range(4):
            estimate.observe(share, 1, truth.seconds(share))
    assert estimate.speed.fixed_s == pytest.approx(4.0, rel=0.05)
    assert estimate.speed.micro_batch_s == pytest.approx(1.0, rel=0.05)


def test_a_slow_down_right_after_a_new_share_is_no_news_about_the_slope() -> None:
    estimate = SpeedEstimate(PRIOR)
    for share in (8, 6, 8, 6):
        feed(estimate, PRIOR, share, 5)
    feed(estimate, PRIOR, 4, 5, factor=2.0)
    assert estimate.speed.fixed_s == pytest.approx(0.002, rel=0.15)
    assert estimate.speed.micro_batch_s == pytest.approx(0.004, rel=0.15)


def test_a_short_last_step_counts_by_what_it_computed() -> None:
    estimate = SpeedEstimate(PRIOR)
    for _ in range(20):  # nine steps of 8 and one of 3
        estimate.observe(75, 10, 9 * PRIOR.seconds(8) + PRIOR.seconds(3))
    assert estimate.speed.seconds(8) == pytest.approx(PRIOR.seconds(8), rel=1e-6)


@pytest.mark.parametrize(
    ("micro_batches", "steps", "compute_s"), [(0, 5, 0.1), (0, 0, 0.0), (5, 1, 0.0)]
)
def test_where_nothing_was_computed_nothing_is_learned(
    micro_batches: int, steps: int, compute_s: float
) -> None:
    estimate = SpeedEstimate(PRIOR)
    estimate.observe(micro_batches, steps, compute_s)
    assert estimate.speed == PRIOR


@pytest.mark.parametrize(
    ("micro_batches", "steps", "compute_s"),
    [(-1, 1, 1.0), (1, -1, 1.0), (1, 1, -1.0), (1, 1, float("nan"))],
)
def test_what_is_no_measurement_is_refused(
    micro_batches: int, steps: int, compute_s: float
) -> None:
    with pytest.raises(ValueError, match="observe"):
        SpeedEstimate(PRIOR).observe(micro_batches, steps, compute_s)


def test_a_prior_of_no_seconds_is_refused() -> None:
    with pytest.raises(ValueError, match="prior"):
        SpeedEstimate(Speed(fixed_s=0.0, micro_batch_s=0.0))


def test_noise_does_not_move_shares_about() -> None:
    noise = random.Random(5)
    speeds = [Speed(fixed_s=0.05, micro_batch_s=s) for s in (0.1, 0.1, 0.2)]
    estimates = [SpeedEstimate(speed) for speed in speeds]
    shares = fit_shares(speeds, 40)
    changes = 0
    for _ in range(300):
        for estimate, speed, share in zip(estimates, speeds, shares, strict=True):
            estimate.observe(share, 1, speed.seconds(share) * noise.lognormvariate(0.0, 0.08))
        new = better_shares(shares, [estimate.speed for estimate in estimates], 40)
        changes, shares = changes + (new is not None), new or shares
    assert changes <= 12
    assert step_seconds(speeds, shares) <= 1.1 * step_seconds(speeds, fit_shares(speeds, 40))


def trace(job: int) -> list[list[float]]:
    """Mini-batch times of a real job, one row per moment, one column per worker."""
    path = TRACES / f"job_{job}_norm.csv"
    if not path.exists():
        pytest.skip("no real straggler traces beside the repository (shared/data/straggler)")
    rows: dict[int, dict[int, float]] = defaultdict(dict)
    with path.open() as lines:
        for line in csv.DictReader(lines):
            rows[int(line["time"])][int(line["worker"])] = float(line["batch_time_norm"])
    workers = max(map(len, rows.values()))
    return [[row[w] for w in sorted(row)] for _, row in sorted(rows.items()) if len(row) == workers]


@pytest.mark.parametrize(
    ("job", "at_most", "perfect"),
    [(1, 0.98, 0.92), (2, 0.95, 0.91), (4, 0.32, 0.27)],
    ids=["a straggler emerges", "a few differ", "strongly uneven"],
)
def test_real_stragglers_cost_less_than_with_equal_shares(
    job: int, at_most: float, perfect: float
) -> None:
    """Shares follow the trace one moment late; seconds relative to equal shares.

    `perfect` (shares that know each moment in advance) shows that the trace is read as meant.
    """
    rows = trace(job)
    per_worker = 16
    total = per_worker * len(rows[0])

    def speeds_of(row: list[float]) -> list[Speed]:
        return [Speed(fixed_s=0.0, micro_batch_s=x / per_worker) for x in row]

    estimates = [SpeedEstimate(speed) for speed in speeds_of(rows[0])]
    shares = fit_shares(speeds_of(rows[0]), total)
    equal_s = ours_s = perfect_s = 0.0
    changes = 0
    for row in rows[1:]:
        speeds = speeds_of(row)
        equal_s += step_seconds(speeds, equal_shares(len(row), total))
        ours_s += step_seconds(speeds, shares)
        perfect_s += step_seconds(speeds, fit_shares(speeds, total))
        for estimate, speed, share in zip(estimates, speeds, shares, strict=True):
            estimate.observe(share, 1, speed.seconds(share))
        new = better_shares(shares, [estimate.speed for estimate in estimates], total)
        changes, shares = changes + (new is not None), new or shares
    assert perfect_s / equal_s == pytest.approx(perfect, abs=0.01)
    assert ours_s / equal_s <= at_most
    assert changes <= len(rows) / 20
