"""Forecasts: the grey model and its Markov chain by known numbers, the choice, real series."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import forecast as measured
from raycloud.planner.forecast import (
    Ewma,
    Forecast,
    Forecaster,
    Grey,
    GreyMarkov,
    GreyModel,
    LastValue,
    MovingMedian,
    ResidualChain,
    admissible_shift,
)
from tests.unit.test_planner_speed import TRACES

DATA = TRACES.parent
FALLING = [8000.0, 5261.0, 4657.0, 4728.0, 4325.0]


def near(*values: float) -> object:
    return pytest.approx(values, abs=1e-4)


@pytest.mark.parametrize(
    ("values", "a", "b", "fit"),
    [
        (
            (71.1, 72.4, 72.4, 72.1, 71.4, 72.0, 71.6),
            0.002344,
            72.6573,
            (71.1, 72.4057, 72.2362, 72.0671, 71.8984, 71.7301, 71.5622, 71.3946),
        ),
        (
            (100.0, 120.0, 145.0, 175.0, 210.0),
            -0.185626,
            90.56997,
            (100.0, 119.9184, 144.3784, 173.8275, 209.2834, 251.9713, 303.3663, 365.2444),
        ),
    ],
    ids=["level", "rising"],
)
def test_grey_model_is_the_published_one(
    values: tuple[float, ...], a: float, b: float, fit: tuple[float, ...]
) -> None:
    model = GreyModel.fit(values)
    assert (model.a, model.b) == (pytest.approx(a, abs=1e-6), pytest.approx(b, abs=1e-4))
    assert tuple(model.value(k) for k in range(1, len(fit) + 1)) == near(*fit)
    assert admissible_shift(values) == 0
    rolling = Grey(window=len(values))
    for value in values:
        rolling.observe(value)
    assert rolling.forecast() == pytest.approx(fit[len(values)], abs=1e-4)


def test_residual_states_correct_the_model() -> None:
    model = GreyModel.fit(FALLING)
    assert (model.a, model.b) == (
        pytest.approx(0.058177, abs=1e-6),
        pytest.approx(5779.903, abs=1e-3),
    )
    fit = [model.value(k) for k in range(1, 8)]
    said = [8000, 5162.854, 4871.066, 4595.769, 4336.030, 4090.972, 3859.763]
    assert fit == pytest.approx(said, abs=2e-3)  # the third decimal was cut, not rounded
    residuals = [100 * (x - model.value(k)) / x for k, x in enumerate(FALLING, 1)]
    assert tuple(residuals) == near(0, 1.8655, -4.5967, 2.7968, -0.2550)
    chain = ResidualChain.of(residuals, 4, low=-5, high=3)
    states = [ResidualChain.of(residuals[:n], 4, low=-5, high=3).now + 1 for n in range(1, 6)]
    assert states == [3, 4, 1, 4, 3]
    corrected = [fit[4 + ahead] / (1 - chain.expected(ahead) / 100) for ahead in (1, 2)]
    assert corrected == pytest.approx([4174.461, 3784.081], abs=1e-3)
    assert chain.transitions[1] == (0.2, 0.0, 0.4, 0.4)  # a state that none was in


def test_chain_of_two_states_after_some_steps() -> None:
    chain = ResidualChain((0.0, 1.0), ((2 / 3, 1 / 3), (0.0, 1.0)), 0)
    for ahead in range(1, 6):
        stays = (2 / 3) ** ahead
        assert chain.distribution(ahead) == pytest.approx((stays, 1 - stays))
        assert chain.expected(ahead) == pytest.approx(1 - stays)


def test_what_is_not_admissible_is_shifted_until_it_is() -> None:
    shift = admissible_shift(FALLING)
    assert 1662 < shift < 1663  # (8000 + c) / (5261 + c) = e^(1/3)
    shifted = [value + shift for value in FALLING]
    assert admissible_shift(shifted) == pytest.approx(0, abs=1e-3)
    rolling = Grey(window=5)
    for value in FALLING:
        rolling.observe(value)
    expected = GreyModel.fit(shifted).value(6) - shift
    assert rolling.forecast() == pytest.approx(expected)
    assert rolling.forecast() != pytest.approx(GreyModel.fit(FALLING).value(6), rel=1e-3)


def test_model_without_growth_is_the_mean_of_all_but_the_first() -> None:
    model = GreyModel.fit([3.0, 5.0, 5.0, 5.0])
    assert (model.a, model.value(2), model.value(9)) == near(0.0, 5.0, 5.0)


def test_two_values_are_no_model() -> None:
    with pytest.raises(ValueError, match="three values at least, got 2"):
        GreyModel.fit([1.0, 2.0])


@pytest.mark.parametrize(
    ("one", "said"),
    [(LastValue(), 8.0), (Ewma(0.5), 5.5), (MovingMedian(3), 4.0), (Grey(), 8.0)],
    ids=lambda value: str(getattr(value, "name", value)),
)
def test_short_histories(one: Forecaster, said: float) -> None:
    assert one.forecast() == 0
    for value in (2.0, 4.0, 8.0):
        one.observe(value)
    assert one.forecast() == said
    assert one.forecast(ahead=5) == said


def test_the_one_that_errs_least_is_used_and_named() -> None:
    forecast = Forecast([LastValue(), MovingMedian(5)])
    assert forecast.name == "last value"
    told = [forecast.observe(90.0 if k % 5 == 4 else 10.0) for k in range(20)]
    assert [name for name in told if name] == ["median(5)"]
    assert forecast.forecast() == 10
    assert forecast.errors["median(5)"] < forecast.errors["last value"]
    told = [forecast.observe(1000.0 * k) for k in range(20)]
    assert [name for name in told if name] == ["last value"]
    assert forecast.forecast() == 19_000


def test_grey_is_used_where_loads_grow_by_a_factor() -> None:
    forecast = Forecast()
    for k in range(25):
        forecast.observe(1.05**k)
    assert forecast.name.startswith("grey")
    assert forecast.forecast() == pytest.approx(1.05**25, rel=1e-3)
    assert forecast.forecast(ahead=5) == pytest.approx(1.05**29, rel=1e-2)


def test_equals_do_not_take_turns() -> None:
    forecast = Forecast([LastValue(), Ewma(0.999)])
    assert not any(forecast.observe(k % 7) for k in range(200))


def test_it_starts_again_where_the_series_does_and_keeps_the_errors() -> None:
    forecast = Forecast()
    for step in range(40):
        forecast.observe(100.0 + step % 2)
    name, errors = forecast.name, forecast.errors
    forecast.restart(300.0)
    assert (forecast.name, forecast.errors, forecast.forecast()) == (name, errors, 300.0)
    assert forecast.error == errors[name]


def test_none_is_chosen_before_enough_errors_are_known() -> None:
    forecast = Forecast(least=5)
    told = [forecast.observe(100 * 1.1**k) for k in range(10)]
    assert [name is not None for name in told].index(True) == 5  # after the first value, five


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_what_is_no_load_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="finite load >= 0"):
        Forecast().observe(value)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Ewma(0.0), "weight"),
        (lambda: MovingMedian(0), "window"),
        (lambda: Grey(3), "window"),
        (lambda: GreyMarkov(12, 0), "states"),
        (lambda: Forecast([]), "followed"),
    ],
    ids=["weight", "median", "grey", "states", "none"],
)
def test_settings_that_make_no_sense_are_refused(make: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()  # type: ignore[operator]


def test_of_real_gpu_loads_it_is_near_the_best_fixed_one_and_below_the_last_value() -> None:
    path = DATA / "cluster" / "gpu_duty_cycle.parquet"
    if not path.exists():
        pytest.skip("no real GPU loads beside the repository (shared/data/cluster)")
    errors = measured.errors(measured.loads(path)[::4], aheads=(1,))["1"]
    chosen = errors.pop(measured.CHOSEN)
    assert chosen < errors["last value"]
    assert chosen <= 1.02 * min(errors.values())


@pytest.mark.parametrize("job", measured.JOBS)
def test_real_stragglers_with_parts_of_micro_batches(job: int) -> None:
    path = TRACES / f"job_{job}_norm.csv"
    if not path.exists():
        pytest.skip("no real straggler traces beside the repository (shared/data/straggler)")
    seconds = measured.trace(path)[:400]
    gains = measured.fractional(seconds, measured.levels(seconds))
    assert gains["perfect foresight"] > gains["lag-1"] > 0
    assert gains[measured.CHOSEN] >= 0.9 * gains["lag-1"]
    assert all(one <= gains["perfect foresight"] for one in gains.values())


def test_shares_by_the_last_value_are_what_they_are_by_hand() -> None:
    """Two workers: 1 and 3 seconds, then 1 and 1: three quarters of the work takes 1.5 as long."""
    gains = measured.fractional(
        np.array([[1.0, 3.0], [1.0, 1.0]]), {"lag-1": np.array([[1.0, 3.0]])}
    )
    assert gains == {"lag-1": pytest.approx(-0.5)}
