"""Ratios and their intervals."""

from __future__ import annotations

import math

import pytest

from benchmarks.statistics import paired_ratio, student_cdf, student_quantile


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (9, 2.2622), (10, 2.2281), (120, 1.9799)],
)
def test_quantiles_are_those_of_the_tables(degrees: int, expected: float) -> None:
    assert student_quantile(0.975, degrees) == pytest.approx(expected, abs=5e-5)


def test_quantile_inverts_cdf() -> None:
    for degrees in (1, 2, 3, 4, 7, 8):
        for probability in (0.5, 0.6, 0.9, 0.999):
            t = student_quantile(probability, degrees)
            assert student_cdf(t, degrees) == pytest.approx(probability, abs=1e-9)


@pytest.mark.parametrize(("probability", "degrees"), [(0.4, 3), (1.0, 3), (0.9, 0)])
def test_no_such_quantile(probability: float, degrees: int) -> None:
    with pytest.raises(ValueError, match="no quantile"):
        student_quantile(probability, degrees)


def test_what_the_machine_does_to_both_divides_out() -> None:
    ratio = paired_ratio([1.1, 2.2, 5.5], [1.0, 2.0, 5.0])
    assert ratio.count == 3
    for value in (ratio.mean, ratio.median, ratio.low, ratio.high):
        assert value == pytest.approx(1.1)


def test_interval_by_hand() -> None:
    ratio = paired_ratio([math.e, math.e**3], [1.0, 1.0])  # logarithms 1 and 3
    assert ratio.mean == pytest.approx(math.e**2)
    assert ratio.low == pytest.approx(math.exp(2 - 12.7062), rel=1e-3)
    assert ratio.high == pytest.approx(math.exp(2 + 12.7062), rel=1e-3)


def test_swapping_inverts() -> None:
    ours, theirs = [1.0, 1.3, 0.9, 1.1], [1.2, 1.1, 1.0, 0.7]
    there, back = paired_ratio(ours, theirs), paired_ratio(theirs, ours)
    assert there.low is not None
    assert back.high is not None
    assert there.mean * back.mean == pytest.approx(1)
    assert there.median * back.median == pytest.approx(1)
    assert there.low * back.high == pytest.approx(1)


def test_a_single_pair_has_no_interval() -> None:
    ratio = paired_ratio([3.0], [2.0])
    assert (ratio.mean, ratio.median) == pytest.approx((1.5, 1.5))
    assert (ratio.low, ratio.high) == (None, None)


@pytest.mark.parametrize(("ours", "theirs"), [([], []), ([1.0], [0.0]), ([1.0, 2.0], [1.0])])
def test_refused(ours: list[float], theirs: list[float]) -> None:
    with pytest.raises(ValueError, match=r"positive|zip"):
        paired_ratio(ours, theirs)
