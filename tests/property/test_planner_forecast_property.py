"""Forecasts of any loads: finite, never negative, and of no unit."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycloud.planner.forecast import Forecast, Forecaster, admissible_shift, forecasters

LOADS = st.one_of(
    st.just(0.0), st.floats(0.0, 100.0), st.floats(0.0, 1.7e308), st.floats(0.0, 1e-300)
)
SERIES = st.lists(LOADS, max_size=30)
KINDS: list[Callable[[], Forecaster | Forecast]] = [
    *((lambda at=at: forecasters()[at]) for at in range(len(forecasters()))),  # type: ignore[misc]
    Forecast,
]
every_kind = pytest.mark.parametrize("make", KINDS, ids=lambda make: make().name)


@every_kind
@given(series=SERIES, ahead=st.integers(1, 200))
def test_forecasts_are_finite_and_not_negative(
    make: Callable[[], Forecaster | Forecast], series: list[float], ahead: int
) -> None:
    one = make()
    for value in series:
        one.observe(value)
        for said in (one.forecast(), one.forecast(ahead)):
            assert 0 <= said < math.inf


@every_kind
@given(value=LOADS, times=st.integers(1, 30), ahead=st.integers(1, 20))
def test_what_is_constant_stays(
    make: Callable[[], Forecaster | Forecast], value: float, times: int, ahead: int
) -> None:
    one = make()
    for _ in range(times):
        one.observe(value)
    assert one.forecast(ahead) == pytest.approx(value, rel=1e-9)


@every_kind
@given(
    series=st.lists(st.one_of(st.just(0.0), st.floats(1e-3, 1e3)), max_size=30),
    power=st.integers(-20, 20),
)
def test_another_unit_gives_the_same_forecast_in_it(
    make: Callable[[], Forecaster | Forecast], series: list[float], power: int
) -> None:
    """By powers of two, so that not even the last digit rounds otherwise."""
    one, other, unit = make(), make(), 2.0**power
    for value in series:
        one.observe(value)
        other.observe(unit * value)
        assert other.forecast() == unit * one.forecast()
    assert one.name == other.name


@given(series=st.lists(st.floats(0.0, 1.0), min_size=3, max_size=12))
def test_a_shift_makes_every_ratio_admissible(series: list[float]) -> None:
    shift = admissible_shift(series)
    shifted = [value + shift for value in series]
    if not max(series):
        return
    widest = math.exp(2 / (len(series) + 1))
    for one, other in pairwise(shifted):
        assert max(one, other) <= widest * min(one, other) * (1 + 1e-9)
