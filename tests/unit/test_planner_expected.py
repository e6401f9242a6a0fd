"""What is expected of a worker's next step: the forecast that errs least, from the fit on."""

from __future__ import annotations

import math
import random

import pytest

from benchmarks.forecast import EXPECTED, FOLLOWS, estimated, fractional, trace, undisturbed
from raycloud.planner.expected import FITTED, ExpectedSpeed
from raycloud.planner.speed import Speed, SpeedEstimate
from tests.unit.test_planner_speed import TRACES

PRIOR = Speed(fixed_s=0.1, micro_batch_s=0.1, max_micro_batches=9)


def test_before_the_first_step_it_is_the_prior() -> None:
    expected = ExpectedSpeed(PRIOR)
    assert (expected.speed, expected.fit, expected.using) == (PRIOR, PRIOR, FITTED)
    assert expected.error == 0.0


def test_where_nothing_was_computed_nothing_is_learned() -> None:
    expected = ExpectedSpeed(PRIOR)
    assert not expected.observe(0, 0, 0.0)
    assert expected.speed == PRIOR
    with pytest.raises(ValueError, match="observe"):
        expected.observe(1, 1, math.nan)


@pytest.mark.parametrize("scatter", [0.02, 0.1])
def test_where_seconds_only_scatter_the_fit_or_a_mean_is_used(scatter: float) -> None:
    chance, expected = random.Random(3), ExpectedSpeed(PRIOR)
    for _ in range(200):
        expected.observe(4, 1, 0.5 * chance.lognormvariate(0.0, scatter))
    assert expected.using in {FITTED, "EWMA(0.3)", "median(9)"}
    assert expected.speed.seconds(4) == pytest.approx(0.5, rel=scatter)
    assert expected.error == pytest.approx(0.8 * scatter, rel=0.2)  # of a normal: sqrt(2 / pi)


def test_where_seconds_wander_the_last_one_is_nearer() -> None:
    chance, expected, fit = random.Random(3), ExpectedSpeed(PRIOR), SpeedEstimate(PRIOR)
    level, off, fit_off = 0.0, 0.0, 0.0
    for step in range(400):
        level += chance.gauss(0.0, 0.08) - 0.05 * level
        seconds = 0.5 * math.exp(level)
        if step > 50:
            off += abs(expected.speed.seconds(4) / seconds - 1.0)
            fit_off += abs(fit.speed.seconds(4) / seconds - 1.0)
        expected.observe(4, 1, seconds)
        fit.observe(4, 1, seconds)
    assert expected.using in {"last value", "EWMA(0.6)"}
    assert off < 0.8 * fit_off
    assert expected.errors[FITTED] > expected.error == expected.errors[expected.using]


def test_another_share_is_no_other_pace() -> None:
    """What is forecast is brought to one share by the fit's own proportions."""
    expected = ExpectedSpeed(PRIOR)
    for step in range(60):
        share = (2, 4, 8)[step % 3]
        expected.observe(share, 1, PRIOR.seconds(share))
    assert expected.error < 1e-6
    assert expected.speed.seconds(6) == pytest.approx(PRIOR.seconds(6), rel=1e-6)


@pytest.mark.parametrize("grey", [True, False])
def test_a_change_of_the_machine_is_known_as_soon_as_the_fit_knows_it(grey: bool) -> None:
    """Whichever forecast is used: they start again from the fit's new level."""
    chance = random.Random(3)
    expected, fit = ExpectedSpeed(PRIOR, grey=grey), SpeedEstimate(PRIOR)
    for slow, steps in ((1.0, 60), (3.0, 5), (1.0, 5)):
        for _ in range(steps):
            seconds = 0.5 * slow * chance.lognormvariate(0.0, 0.03)
            told = expected.observe(4, 1, seconds)
            assert told == fit.observe(4, 1, seconds)
        assert expected.speed.seconds(4) == pytest.approx(0.5 * slow, rel=0.06)


def test_no_forecast_is_further_from_the_fit_than_twice() -> None:
    expected = ExpectedSpeed(PRIOR)
    for step in range(30):
        expected.observe(4, 1, 0.5 * 1.05**step)
    expected.observe(4, 1, 0.001)
    assert 0.5 <= expected.speed.seconds(4) / expected.fit.seconds(4) <= 2.0


def test_the_same_seconds_give_the_same_speed() -> None:
    chance = random.Random(7)
    seconds = [chance.lognormvariate(0.0, 0.2) for _ in range(100)]
    told = []
    for _ in range(2):
        expected = ExpectedSpeed(PRIOR)
        for one in seconds:
            expected.observe(4, 1, one)
        told.append((expected.fixed_s, expected.micro_batch_s, expected.using))
    assert told[0] == told[1]


@pytest.mark.parametrize("job", [1, 2, 4])
def test_on_real_stragglers_shares_of_any_size_gain_what_the_last_value_does(job: int) -> None:
    path = TRACES / f"job_{job}_norm.csv"
    if not path.exists():
        pytest.skip("no real straggler traces beside the repository (shared/data/straggler)")
    seconds = trace(path)
    said, _ = estimated(seconds, FOLLOWS[EXPECTED])
    gains = fractional(seconds, {"lag-1": seconds[:-1], EXPECTED: said})
    assert gains[EXPECTED] >= 0.9 * gains["lag-1"]


@pytest.mark.parametrize("scatter", [0.03, 0.08])
def test_where_nothing_happens_no_share_changes_in_500_steps(scatter: float) -> None:
    assert [undisturbed(FOLLOWS[EXPECTED], scatter, seed) for seed in range(2)] == [0, 0]
