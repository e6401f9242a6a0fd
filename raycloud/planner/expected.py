"""How long one worker is going to compute: the fit to all it did, corrected by a forecast.

`SpeedEstimate` says what a worker's seconds are. Where they wander, what comes next is nearer to
the last of them than to a mean, or to the grey Markov chain's next one; where they scatter it is
the other way round. So several forecasts are followed, the fit among them, and the one with the
lowest rolling error of one step is used.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from raycloud.planner.forecast import Ewma, Forecast, GreyMarkov, LastValue, MovingMedian
from raycloud.planner.speed import Speed, SpeedEstimate

if TYPE_CHECKING:
    from raycloud.planner.forecast import Forecaster

FITTED = "fit"  # the name of the fit among forecasts

_MARGIN = 0.05  # a forecast is used instead of another one where it errs less by this part
_LEAST = 8  # values before any is used but the fit
_FARTHEST = 2.0  # times the fit, or less: beyond it the fit itself sees a new level
_NEW_LEVEL = math.log(1.25)  # by which a fit moves in one step only where the level is another


class _Fit:
    """The fit to all values: whoever observes says what it is."""

    name = FITTED

    def __init__(self) -> None:
        self.level_s = 0.0

    def observe(self, value: float) -> None:
        """The fit has taken it in already."""

    def forecast(self, ahead: int = 1) -> float:  # noqa: ARG002 - the same for each
        """The fit."""
        return self.level_s

    def forget(self) -> None:
        """The fit knows by itself."""


class ExpectedSpeed:
    """One worker's `Speed` in its next step, followed while the run goes on.

    What is forecast is the worker's pace: the seconds which the first share observed would take,
    T(b1). An observation of another share is brought to that by the fit's own proportions. Where
    the fit finds a new level, all forecasts start again from there, so a change of the machine is
    answered as soon as the fit answers it.

    >>> expected = ExpectedSpeed(Speed(fixed_s=0.0, micro_batch_s=1.0))
    >>> for step in range(40):  # it wanders from half a second to one and a half, and back
    ...     wanders_s = 1.0 + 0.5 * math.sin(step / 4)
    ...     told = expected.observe(micro_batches=1, steps=1, compute_s=wanders_s)
    >>> expected.using, round(expected.fit.seconds(1), 2)
    ('last value', 1.02)
    >>> round(expected.speed.seconds(1), 2), round(1.0 + 0.5 * math.sin(10.0), 2)
    (0.84, 0.73)

    Args:
        prior: What a short probe measured; see `SpeedEstimate`.
        grey: Follow a grey Markov chain, too, which takes longer than all others together.

    Attributes:
        fixed_s: As expected of the next step.
        micro_batch_s: The same.
    """

    def __init__(self, prior: Speed, *, grey: bool = True) -> None:
        self._estimate, self._fit = SpeedEstimate(prior), _Fit()
        followed: list[Forecaster] = [self._fit, MovingMedian(), Ewma(0.3), Ewma(0.6), LastValue()]
        if grey:
            followed.append(GreyMarkov())
        self._forecast = Forecast(followed, margin=_MARGIN, least=_LEAST)
        self._most = prior.max_micro_batches
        self._unit = 0.0  # b1; 0 before the first observation
        self.fixed_s, self.micro_batch_s = prior.fixed_s, prior.micro_batch_s

    @property
    def speed(self) -> Speed:
        """As expected of the next step; the prior before the first."""
        return Speed(
            fixed_s=self.fixed_s, micro_batch_s=self.micro_batch_s, max_micro_batches=self._most
        )

    @property
    def fit(self) -> Speed:
        """The fit to all steps so far, whichever forecast is used."""
        return self._estimate.speed

    @property
    def using(self) -> str:
        """The name of the forecast that is used."""
        return self._forecast.name

    @property
    def error(self) -> float:
        """Its rolling mean absolute error of one step, as a part of the seconds."""
        return self._forecast.error / self._fit.level_s if self._unit else 0.0

    @property
    def errors(self) -> dict[str, float]:
        """The same of each, by name."""
        level_s = self._fit.level_s or 1.0
        return {name: error / level_s for name, error in self._forecast.errors.items()}

    def observe(self, micro_batches: int, steps: int, compute_s: float) -> bool:
        """Take in what this worker did in some steps: see `SpeedEstimate.observe`."""
        estimate = self._estimate
        if micro_batches > 0 and steps > 0 and 0 < compute_s < math.inf:
            share = micro_batches / steps
            self._unit = self._unit or share
            before_s = self._level_s()
            fitted_s = estimate.fixed_s + share * estimate.micro_batch_s
            self._forecast.observe(compute_s / steps * (before_s / fitted_s))
            told = estimate.observe(micro_batches, steps, compute_s)
            after_s = self._level_s()
            if abs(math.log(after_s / before_s)) > _NEW_LEVEL:
                self._forecast.restart(after_s)
            said_s = min(max(self._forecast.forecast(), after_s / _FARTHEST), after_s * _FARTHEST)
            self.fixed_s = estimate.fixed_s * said_s / after_s
            self.micro_batch_s = estimate.micro_batch_s * said_s / after_s
            return told
        return estimate.observe(micro_batches, steps, compute_s)

    def _level_s(self) -> float:
        """T(b1) of the fit."""
        estimate = self._estimate
        self._fit.level_s = estimate.fixed_s + self._unit * estimate.micro_batch_s
        return self._fit.level_s
