"""Forecast of a load by a grey Markov chain, beside simple ones; the one that errs least is used.

A load is any series of values >= 0 of one node: seconds of a micro-batch, percent of a GPU in use.
The grey model GM(1,1) is Deng's ("Control problems of grey systems", 1982); its correction by a
Markov chain over the states of its residuals is the usual grey Markov chain. It suits series that
are near an exponential, and few are: so `Forecast` follows the errors of all and says which it
uses. Nothing here reads a clock or draws a number: the same values give the same forecast.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

_LEAST = 4  # values below which a grey model is no more than the last value
_EXPONENT = 60.0  # an exponent beyond it is cut: nothing overflows, and the bounds below hold
_BEYOND = 2.0  # a grey forecast is at most this many times the largest value of its window
_SURELY_BELOW = 0.9  # of a relative residual: a forecast is divided by what is left of one


@dataclass(frozen=True, slots=True)
class GreyModel:
    """GM(1,1) of a series x0(1..n): dx1/dt + a x1 = b, with x1 the running sums of x0.

    With z(k) = (x1(k) + x1(k-1)) / 2, least squares of x0(k) = b - a z(k) over k = 2..n give a and
    b, and the model is x(1) = x0(1), x(k) = (1 - e^a) (x0(1) - b/a) e^(-a (k-1)).

    >>> model = GreyModel.fit([100, 120, 145, 175, 210])
    >>> round(model.a, 6), round(model.b, 5), round(model.value(6), 4)
    (-0.185626, 90.56997, 251.9713)

    Attributes:
        a: The development coefficient: values shrink by e^-a from one to the next.
        b: The grey input; the mean of x0(2..n) where a is 0.
        first: x0(1).
    """

    a: float
    b: float
    first: float

    @classmethod
    def fit(cls, values: Sequence[float]) -> GreyModel:
        """The model of a series.

        Raises:
            ValueError: Fewer than three values, which do not tell a from b.
        """
        if len(values) < 3:  # noqa: PLR2004 - two unknowns, and the first value is none's equation
            raise ValueError(f"a grey model takes three values at least, got {len(values)}")
        first, count = values[0], len(values) - 1
        running = first
        z_sum = zz_sum = y_sum = zy_sum = 0.0
        for y in values[1:]:
            z = running + y / 2
            running += y
            z_sum, zz_sum = z_sum + z, zz_sum + z * z
            y_sum, zy_sum = y_sum + y, zy_sum + z * y
        spread = count * zz_sum - z_sum * z_sum
        if spread <= 0:  # nothing but zeros after the first
            return cls(0.0, y_sum / count, first)
        a = (z_sum * y_sum - count * zy_sum) / spread
        return cls(a, (y_sum + a * z_sum) / count, first)

    def value(self, k: int) -> float:
        """x(k) of the model: the first is 1, the last it was fitted to n, and n + 1 the next."""
        if k <= 1:
            return self.first
        a = self.a
        grows = math.expm1(a) / a if a else 1.0  # so that a near 0 loses no digits
        decay = math.exp(min(-a * (k - 1), _EXPONENT))
        return (self.b - self.first * a) * grows * decay


def admissible_shift(values: Sequence[float]) -> float:
    """What to add to each value, so that a grey model may be fitted: 0 where it may as they are.

    Every ratio x(k-1) / x(k) has to lie within e^(-2/(n+1)) and e^(2/(n+1)).

    >>> admissible_shift([71.1, 72.4, 72.4, 72.1, 71.4])
    0.0
    >>> round(admissible_shift([8000, 5261, 4657, 4728, 4325]), 1)
    1662.4
    """
    widest = math.exp(2.0 / (len(values) + 1))
    shift = 0.0
    for one, other in pairwise(values):
        low, high = (one, other) if one < other else (other, one)
        if high >= widest * low and high > 0:
            shift = max(shift, (high - widest * low) / (widest - 1.0))
            shift += high * 1e-9  # a bound is not within
    return shift


@dataclass(frozen=True, slots=True)
class ResidualChain:
    """Markov chain over states of relative residuals r = (x - model) / x.

    States are intervals of one width. Where a state was never left, the chain goes on by how often
    each was seen.

    >>> chain = ResidualChain.of([0, 1.8655, -4.5967, 2.7968, -0.2550], 4, low=-5, high=3)
    >>> chain.expected(1), chain.expected(2)
    (2.0, -2.0)

    Attributes:
        middles: Of the states.
        transitions: P, a row for each state; each sums to 1.
        now: The state that the last residual is in.
    """

    middles: tuple[float, ...]
    transitions: tuple[tuple[float, ...], ...]
    now: int

    @classmethod
    def of(
        cls,
        residuals: Sequence[float],
        states: int,
        *,
        low: float | None = None,
        high: float | None = None,
    ) -> ResidualChain:
        """Count the transitions; states lie between the least and the largest, or as said."""
        low = min(residuals) if low is None else low
        high = max(residuals) if high is None else high
        width = (high - low) / states
        if width <= 0:
            return cls((low,), ((1.0,),), 0)
        seen = [min(max(int((r - low) / width), 0), states - 1) for r in residuals]
        marginal = tuple(seen.count(state) / len(seen) for state in range(states))
        counts = [[0] * states for _ in range(states)]
        for before, after in pairwise(seen):
            counts[before][after] += 1
        rows = tuple(
            tuple(count / total for count in row) if (total := sum(row)) else marginal
            for row in counts
        )
        return cls(tuple(low + (i + 0.5) * width for i in range(states)), rows, seen[-1])

    def distribution(self, ahead: int) -> tuple[float, ...]:
        """Of the states after so many steps: pi = e_now P^ahead."""
        states = range(len(self.middles))
        chance = [float(state == self.now) for state in states]
        for _ in range(ahead):
            chance = [sum(chance[i] * self.transitions[i][j] for i in states) for j in states]
        return tuple(chance)

    def expected(self, ahead: int) -> float:
        """The mean of the states' middles by that distribution."""
        return sum(p * m for p, m in zip(self.distribution(ahead), self.middles, strict=True))


class Forecaster(Protocol):
    """What follows one series of values >= 0; before the first value it forecasts 0."""

    @property
    def name(self) -> str:
        """As a log says it."""

    def observe(self, value: float) -> None:
        """Take in the next value, finite and >= 0."""

    def forecast(self, ahead: int = 1) -> float:
        """The value after so many more; finite and >= 0."""

    def forget(self) -> None:
        """What was observed tells nothing about what comes."""


class LastValue:
    """The last value stays."""

    name = "last value"

    def __init__(self) -> None:
        self._value = 0.0

    def observe(self, value: float) -> None:
        """Take in the next value."""
        self._value = value

    def forecast(self, ahead: int = 1) -> float:  # noqa: ARG002 - the same for each
        """The last value."""
        return self._value

    def forget(self) -> None:
        """There is none."""
        self._value = 0.0


class Ewma:
    """Exponentially weighted moving average: m <- m + weight (x - m), from the first value on."""

    def __init__(self, weight: float = 0.3) -> None:
        if not 0 < weight <= 1:
            raise ValueError(f"weight takes a number in (0, 1], got {weight!r}")
        self.name = f"EWMA({weight:g})"
        self._weight = weight
        self._mean: float | None = None

    def observe(self, value: float) -> None:
        """Take in the next value."""
        mean = value if self._mean is None else self._mean
        self._mean = (1.0 - self._weight) * mean + self._weight * value

    def forecast(self, ahead: int = 1) -> float:  # noqa: ARG002 - the same for each
        """The average."""
        return self._mean or 0.0

    def forget(self) -> None:
        """There is none."""
        self._mean = None


class _Window:
    """The newest values."""

    def __init__(self, window: int, least: int) -> None:
        if window < least:
            raise ValueError(f"window takes {least} values at least, got {window!r}")
        self._values: deque[float] = deque(maxlen=window)

    def observe(self, value: float) -> None:
        """Take in the next value."""
        self._values.append(value)

    def forget(self) -> None:
        """There are none."""
        self._values.clear()


class MovingMedian(_Window):
    """The median of a window: of all constants, it has the least absolute error there."""

    def __init__(self, window: int = 9) -> None:
        super().__init__(window, 1)
        self.name = f"median({window})"

    def forecast(self, ahead: int = 1) -> float:  # noqa: ARG002 - the same for each
        """The median."""
        ordered = sorted(self._values)
        if not ordered:
            return 0.0
        half, odd = divmod(len(ordered), 2)
        return ordered[half] if odd else ordered[half - 1] / 2 + ordered[half] / 2


class Grey(_Window):
    """GM(1,1) of a window, whose values are shifted by a constant where it is not admissible."""

    def __init__(self, window: int = 8) -> None:
        super().__init__(window, _LEAST)
        self.name = f"grey({window})"

    def forecast(self, ahead: int = 1) -> float:
        """The model's; the last value where there are too few, or all are 0."""
        values = list(self._values)
        top = max(values, default=0.0)
        if len(values) < _LEAST or not top or min(values) == top:
            return values[-1] if values else 0.0
        scaled = [value / top for value in values]  # so sums of squares neither over- nor underflow
        shift = admissible_shift(scaled)
        shifted = [value + shift for value in scaled]
        model = GreyModel.fit(shifted)
        said = self._corrected(model, shifted, model.value(len(values) + ahead), ahead) - shift
        return min(top * min(max(said, 0.0), _BEYOND), sys.float_info.max)

    def _corrected(
        self,
        model: GreyModel,  # noqa: ARG002 - the others are the subclass's
        values: Sequence[float],  # noqa: ARG002
        said: float,
        ahead: int,  # noqa: ARG002
    ) -> float:
        return said


class GreyMarkov(Grey):
    """Grey Markov chain: GM(1,1), corrected by the state that its residual is likely to be in."""

    def __init__(self, window: int = 12, states: int = 4) -> None:
        super().__init__(window)
        if states < 1:
            raise ValueError(f"states takes a count >= 1, got {states!r}")
        self.name = f"grey Markov({window})"
        self._states = states

    def _corrected(
        self, model: GreyModel, values: Sequence[float], said: float, ahead: int
    ) -> float:
        residuals = [(x - model.value(k)) / x for k, x in enumerate(values, 1)]
        expected = ResidualChain.of(residuals, self._states).expected(ahead)
        return said / (1.0 - min(expected, _SURELY_BELOW))


def forecasters() -> tuple[Forecaster, ...]:
    """Those that `Forecast` follows, in the order in which one is preferred to its equals."""
    return MovingMedian(), Ewma(0.3), Ewma(0.6), LastValue(), Grey(), GreyMarkov()


class Forecast:
    """Of several forecasters the one with the lowest rolling error of one step.

    An error counts half after `half_life` more values. Another one is chosen where its error is
    lower by a part of `margin`, so that equals do not take turns, and `least` errors are known.

    >>> forecast = Forecast()
    >>> told = [forecast.observe(100 * 1.1**k) for k in range(20)]
    >>> [name for name in told if name], round(forecast.forecast() / 1.1**20, 1)
    (['last value', 'grey Markov(12)'], 100.0)

    Attributes:
        name: Of the one that is used.
        errors: By name, mean absolute errors of one step, newer ones weighted more.
    """

    def __init__(
        self,
        followed: Sequence[Forecaster] | None = None,
        *,
        half_life: float = 60.0,
        margin: float = 0.02,
        least: int = 1,
    ) -> None:
        self._followed = forecasters() if followed is None else tuple(followed)
        if not self._followed:
            raise ValueError("followed takes one forecaster at least, got none")
        self._keeps = 0.5 ** (1.0 / half_life)
        self._margin, self._lacking = margin, least  # errors before another one may be chosen
        self._errors = [0.0] * len(self._followed)
        self._weight = 0.0
        self._seen = False
        self._used = 0

    @property
    def name(self) -> str:
        """Of the one that is used."""
        return self._followed[self._used].name

    @property
    def errors(self) -> dict[str, float]:
        """By name, the rolling mean absolute error of one step; 0 before there is one."""
        weight = self._weight or 1.0
        named = zip(self._followed, self._errors, strict=True)
        return {one.name: error / weight for one, error in named}

    @property
    def error(self) -> float:
        """That of the one that is used."""
        return self._errors[self._used] / (self._weight or 1.0)

    def observe(self, value: float) -> str | None:
        """Take in the next value.

        Returns:
            The name of the one that is used from here on, where that is another than before.

        Raises:
            ValueError: A value that is negative or not finite.
        """
        if not 0 <= value < math.inf:
            raise ValueError(f"observe() takes a finite load >= 0, got {value!r}")
        if self._seen:
            self._weight = self._keeps * self._weight + (1.0 - self._keeps)
        for at, one in enumerate(self._followed):
            if self._seen:
                off = abs(one.forecast() - value)
                self._errors[at] = self._keeps * self._errors[at] + (1.0 - self._keeps) * off
            one.observe(value)
        self._lacking -= self._seen
        self._seen = True
        if self._lacking > 0:
            return None
        best = min(range(len(self._errors)), key=self._errors.__getitem__)
        if self._errors[best] >= (1.0 - self._margin) * self._errors[self._used]:
            return None
        self._used = best
        return self.name

    def forecast(self, ahead: int = 1) -> float:
        """That of the one that is used; finite and >= 0."""
        return self._followed[self._used].forecast(ahead)

    def restart(self, value: float) -> None:
        """The series goes on from `value`, and those before tell nothing; errors stay as known."""
        for one in self._followed:
            one.forget()
            one.observe(value)
