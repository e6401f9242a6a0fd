"""Ratios between contestants, paired by repeat, and how sure they are. Pure.

Two contestants of one repeat ran one after the other, so what the machine was like at that time
divides out. A ratio is a product of influences, so its logarithm is what is averaged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """A ratio over all repeats.

    Attributes:
        count: Number of pairs.
        median: Of the pairs' ratios.
        mean: Their geometric mean.
        low: Lower end of the 95% confidence interval of the mean; None from a single pair.
        high: Upper end.
    """

    count: int
    median: float
    mean: float
    low: float | None
    high: float | None


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """The ratio of `ours` to `theirs`, pair by pair, with Student's interval of the mean logarithm.

    >>> round(paired_ratio([2.0, 8.0], [1.0, 2.0]).mean, 6)
    2.828427

    Raises:
        ValueError: No pair, or a value that is not positive.
    """
    if not ours or min(*ours, *theirs) <= 0:
        raise ValueError(f"ratios need pairs of positive numbers, got {ours} and {theirs}")
    logs = sorted(math.log(a / b) for a, b in zip(ours, theirs, strict=True))
    count = len(logs)
    mean = math.fsum(logs) / count
    low = high = None
    if count > 1:
        variance = math.fsum((x - mean) ** 2 for x in logs) / (count - 1)
        half = student_quantile(0.975, count - 1) * math.sqrt(variance / count)
        low, high = math.exp(mean - half), math.exp(mean + half)
    median = (logs[(count - 1) // 2] + logs[count // 2]) / 2
    return Ratio(count=count, median=math.exp(median), mean=math.exp(mean), low=low, high=high)


def student_quantile(probability: float, degrees: int) -> float:
    """The quantile of Student's t distribution, by bisection; for probabilities in [0.5, 1).

    >>> round(student_quantile(0.975, 4), 3)
    2.776
    """
    if not 0.5 <= probability < 1 or degrees < 1:
        raise ValueError(f"no quantile for probability {probability} at {degrees} degrees")
    low, high = 0.0, 1.0
    while student_cdf(high, degrees) < probability:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        if student_cdf(middle, degrees) < probability:
            low = middle
        else:
            high = middle
    return high


def student_cdf(t: float, degrees: int) -> float:
    """P(T <= t) for t >= 0, in closed form.

    Abramowitz and Stegun, "Handbook of Mathematical Functions", 26.7.3 and 26.7.4.

    >>> student_cdf(0.0, 3)
    0.5
    """
    angle = math.atan(t / math.sqrt(degrees))
    cosine2, sine = math.cos(angle) ** 2, math.sin(angle)
    if degrees == 1:
        return 0.5 + angle / math.pi
    odd = degrees % 2
    term = math.cos(angle) if odd else 1.0
    total = term
    for k in range(2 + odd, degrees - 1, 2):
        term *= (k - 1) / k * cosine2
        total += term
    if odd:
        return 0.5 + (angle + sine * total) / math.pi
    return 0.5 + sine * total / 2
