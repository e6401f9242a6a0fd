"""How long one worker computes: the model of its seconds, and its fit while the run goes on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
import numpy.typing as npt

_NOISE = 0.05  # least relative scatter assumed of an observation; also the prior's
_NARROW_GATE = math.log(1.25)  # nothing closer to the fit than this (as a log ratio) is an outlier
_GATE_SCALES = 3.0  # standard deviations of an observation beyond which it is an outlier
_LASTING = 3  # outliers in a row, all slower or all faster, that make a new level
_LONG_S = 2.0  # ... or slower ones that have taken so long, if the last is off by more than
_FAR = math.log(2.0)  # this factor: with long steps, three would be a minute
_TOLD_S = 0.5  # seconds of computing that a new level has to rest on, to be told as one
_CLIPPED = math.log(3.0)  # one hiccup must not make the gate wide
_LEVEL_UNKNOWN = 2.0**2  # variance of the log level once it is known to have changed
_SLOPE_UNKNOWN = 0.3**2  # variance of the slope's part of the prior's seconds
_SLOPE_DRIFT = 0.003**2  # ... and what it gains per observation: a slope changes slowly
_SMALLEST_SLOPE = 0.05  # nobody computes for nothing, whatever a noisy fit says
_GAIN = 1.0 - 0.5 ** (1.0 / 4.0)  # of a steady level: an observation's weight halves in four
_WANDER = _GAIN**2 / (1.0 - _GAIN)  # a level that wanders by this part of the noise has that gain
_UNMEASURABLE_S = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """Seconds of one worker per step: T(b) = fixed_s + b * micro_batch_s for b > 0, and T(0) = 0.

    The model of LB-BSP (Chen et al., "Semi-dynamic load balancing: efficient distributed learning
    in non-dedicated environments", SoCC 2020): a fixed part per step, and one per unit of work.

    >>> speed = Speed(fixed_s=0.5, micro_batch_s=0.25)
    >>> speed.seconds(4), speed.seconds(0)
    (1.5, 0.0)

    Attributes:
        fixed_s: Seconds of a step that do not depend on the share, >= 0.
        micro_batch_s: Seconds per micro-batch, >= 0.
        max_micro_batches: Most micro-batches per step that this worker can hold; None: no limit.
    """

    fixed_s: float
    micro_batch_s: float
    max_micro_batches: int | None = None

    def __post_init__(self) -> None:
        """Refuse what is no time, with the number."""
        if not (0 <= self.fixed_s < math.inf and 0 <= self.micro_batch_s < math.inf):
            fixed = 0 <= self.fixed_s < math.inf
            name = "micro_batch_s" if fixed else "fixed_s"
            raise ValueError(f"{name} takes finite seconds >= 0, got {getattr(self, name)!r}")
        if self.max_micro_batches is not None and self.max_micro_batches < 0:
            raise ValueError(f"max_micro_batches takes a count >= 0, got {self.max_micro_batches}")

    def seconds(self, micro_batches: float) -> float:
        """T(b): seconds per step for a share of `micro_batches`."""
        return self.fixed_s + micro_batches * self.micro_batch_s if micro_batches > 0 else 0.0


class SpeedEstimate:
    """One worker's `Speed`, followed while the run goes on.

    With b1 the first share observed, or the first since the level was forgotten,
    T(b) = level * (1 + slope * (b / b1 - 1)): `level` is T(b1), and `slope` in [0, 1] the part of
    it that grows with the share, so that fixed_s and micro_batch_s are never negative. (log level,
    slope) is fitted to the logarithms of the observed seconds by weighted recursive least squares,
    as a Kalman filter: the level wanders, so that an observation's weight halves every four
    observations; the slope hardly does. So a machine that slows down does so for every share, and
    as long as one share only is seen the known ratio fixed_s : micro_batch_s is kept. Another share
    tells about the slope.

    An observation further from the fit than a gate (25%, or three standard deviations) is held
    back. One or two such are a hiccup, as a rule, and leave no trace in the fit; three in a row,
    all slower or all faster, are a new level: their median, taken over at once. So is one of more
    than twice the time, where it and slower ones just before it took two seconds at least: hardly a
    hiccup is as long; and one of less than half the time, where half a second at least was expected
    of it and faster ones before it: no hiccup makes a machine faster. The machine may have changed
    in the midst of it, so the next one is believed wherever it is; where that is not near it, it is
    a new level, too, and so on until one is near the last. Until then the level is forgotten each
    time: none tells about the slope.

    A machine that was slow for a while, and then takes the seconds again which the fit of before
    that expects, is as before: that fit is taken over, whatever the shares were meanwhile.

    >>> estimate = SpeedEstimate(Speed(fixed_s=0.1, micro_batch_s=0.1))
    >>> for seconds in (0.5, 0.5, 1.5, 0.5):  # four micro-batches a step, one hiccup
    ...     told = estimate.observe(micro_batches=4, steps=1, compute_s=seconds)
    >>> round(estimate.speed.seconds(4), 2)
    0.5
    >>> for _ in range(3):  # now twice as slow, to stay
    ...     told = estimate.observe(micro_batches=4, steps=1, compute_s=1.0)
    >>> round(estimate.speed.seconds(4), 2), round(estimate.speed.fixed_s, 2), told
    (1.0, 0.2, True)

    Args:
        prior: What a short probe measured; counts as one observation. Its seconds must not be 0.

    Attributes:
        fixed_s: Of the fit after all observations so far; the prior's before the first.
        micro_batch_s: The same.
    """

    def __init__(self, prior: Speed) -> None:
        if prior.seconds(1) <= 0:
            raise ValueError(f"the prior must take some time per micro-batch, got {prior}")
        self.fixed_s, self.micro_batch_s = prior.fixed_s, prior.micro_batch_s
        self._most = prior.max_micro_batches
        self._unit = 0.0  # b1; 0 before the first observation
        self._share = 0.0  # of the last observation that was believed
        self._log_level = 0.0
        self._slope = 0.0
        self._least_slope = 0.0
        self._covariance = (_NOISE**2, 0.0, _SLOPE_UNKNOWN)  # level, both, slope
        self._deviation = 0.0  # usual |log ratio| of an observation to the fit
        self._noise = _NOISE**2  # variance of an observation
        self._held: list[float] = []  # log ratios of outliers in a row, all on one side
        self._held_s = 0.0  # of computing, in them
        self._before: tuple[float, float, float] | None = None  # a slow-down: see `_new_level`
        # Of computing, in the last one, if that was believed at once or was not near such a one.
        self._doubted_s = 0.0

    @property
    def speed(self) -> Speed:
        """The fit after all observations so far; the prior before the first."""
        return Speed(
            fixed_s=self.fixed_s, micro_batch_s=self.micro_batch_s, max_micro_batches=self._most
        )

    def observe(self, micro_batches: int, steps: int, compute_s: float) -> bool:
        """Take in what this worker did in some steps.

        All three are sums, as `events.StepsCommitted` carries them: `micro_batches` computed by
        this worker in all of the `steps` steps, and the seconds of computing them. Where it
        computed nothing there is nothing to learn, and nothing changes.

        Returns:
            Whether the machine has turned out to be another than it was: a new level, seen for
            half a second of computing at least, or for what was expected to be as long.

        Raises:
            ValueError: A negative number, or seconds that are not finite.
        """
        if micro_batches < 0 or steps < 0 or not 0 <= compute_s < math.inf:
            raise ValueError(
                "observe() takes counts and finite seconds >= 0, got "
                f"micro_batches={micro_batches}, steps={steps}, compute_s={compute_s}"
            )
        if not (micro_batches and steps) or compute_s < _UNMEASURABLE_S:
            return False
        share = micro_batches / steps  # a fraction where an epoch's short last step is among them
        if not self._unit:
            self._at(share)
            self._share = share
        off = math.log(compute_s / steps / self._seconds(share))
        far, grown = abs(off), self._grown(share) if share != self._unit else 0.0
        said_s = compute_s if off > 0 else compute_s * math.exp(far)  # or would have taken
        if far <= _NARROW_GATE or far <= self._gate(grown):
            if self._held:
                self._drop_held()
            self._scatter(far)
            self._update(grown, off)
            self._share = share
            if not self._doubted_s:
                return far > _FAR and said_s >= _TOLD_S
            rests_on_s, self._doubted_s = said_s + self._doubted_s, 0.0
            if far > _NARROW_GATE and not self._recall(share, compute_s / steps):
                self._forget_level(share)
                self._doubted_s = said_s
            return far > _NARROW_GATE and rests_on_s >= _TOLD_S
        if self._held and (off > 0) != (self._held[0] > 0):
            self._drop_held()
        self._held_s = said_s + (self._held_s if self._held else 0.0)
        self._held.append(off)
        together_s = self._held_s if off < 0 or len(self._held) < _LASTING else said_s
        at_once = far > _FAR and together_s >= (_LONG_S if off > 0 else _TOLD_S)
        if len(self._held) < _LASTING and not at_once:
            return False
        self._new_level(share, off if at_once else median(self._held), doubtful=at_once)
        return self._held_s >= _TOLD_S

    def _new_level(self, share: float, off: float, *, doubtful: bool) -> None:
        """Take over an observation, exp(off) times the fit, that is none of the same machine."""
        self._held.clear()
        self._doubted_s = 0.0
        took_s = self._seconds(share) * math.exp(off)
        if off > 0:
            self._before = (self.fixed_s, self.micro_batch_s, self._covariance[2])  # of the slope
        elif self._recall(share, took_s):
            return
        self._doubt(share, off)
        self._update(self._grown(share), off)
        self._share = share
        if doubtful:
            self._forget_level(share)
            self._doubted_s = self._held_s

    def _recall(self, share: float, took_s: float) -> bool:
        """Take over the fit of before it became slow, if these seconds are those of then."""
        if self._before is None:
            return False
        fixed_s, micro_batch_s, slope = self._before
        if abs(math.log(took_s / (fixed_s + share * micro_batch_s))) > _NARROW_GATE:
            return False
        self.fixed_s, self.micro_batch_s, self._before = fixed_s, micro_batch_s, None
        self._at(share)
        self._share = share
        self._covariance = (self._noise, 0.0, slope)
        return True

    def _seconds(self, share: float) -> float:
        """T(share), of the fit."""
        return self.fixed_s + share * self.micro_batch_s

    def _at(self, share: float) -> None:
        """Express the fit by its level and slope at this share."""
        self._unit = share
        self._log_level = math.log(self._seconds(share))
        self._slope = share * self.micro_batch_s / self._seconds(share)
        self._least_slope = min(_SMALLEST_SLOPE, self._slope)

    def _grown(self, share: float) -> float:
        """Derivative of log T(share) by the slope."""
        more = share / self._unit - 1.0
        return more / (1.0 + self._slope * more)

    def _doubt(self, share: float, off: float) -> None:
        """Widen the covariance for a lasting observation that the fit does not explain.

        The machine changed, unless the share did and a slope between 0 and 1 would explain it: then
        it may be either, and the next return to a known share will tell.
        """
        level, both, slope = self._covariance
        ratio = math.log(self._seconds(share) / self._seconds(self._share)) + off
        low, high = sorted((0.0, math.log(share / self._share)))
        if low <= ratio <= high and share != self._share:
            known = self._grown(self._share)
            turn = (off / (self._grown(share) - known)) ** 2  # of the slope, about the known share
            level, both, slope = level + known * known * turn, both - known * turn, slope + turn
            self._covariance = (level + off * off, both, slope)
        else:
            self._forget_level(share)

    def _forget_level(self, share: float) -> None:
        """The level may be any, and is T(share) from now on, so that it alone is what is seen."""
        more = share / self._unit
        turned = (more / (1.0 + self._slope * (more - 1.0)) ** 2) ** 2  # of the slope's variance
        self._at(share)
        slope = min(self._covariance[2] * turned, _SLOPE_UNKNOWN)
        self._covariance = (_LEVEL_UNKNOWN, 0.0, slope)

    def _gate(self, grown: float) -> float:
        """How far an observation may be from the fit, as a log ratio, and still be believed."""
        level, both, slope = self._covariance
        expected = level + 2 * grown * both + grown * grown * slope + self._noise
        return max(_NARROW_GATE, _GATE_SCALES * math.sqrt(expected))

    def _drop_held(self) -> None:
        """What was held back was no new level; that it happens widens the gate."""
        for off in self._held:
            self._scatter(abs(off))
        self._held.clear()

    def _scatter(self, far: float) -> None:
        clipped = far if far < _CLIPPED else _CLIPPED
        self._deviation += _GAIN * (clipped - self._deviation)
        self._noise = (self._deviation if self._deviation > _NOISE else _NOISE) ** 2

    def _update(self, grown: float, off: float) -> None:
        """One step of the filter, for an observation exp(off) times the fit."""
        level, both, slope = self._covariance
        noise = self._noise
        to_level, to_slope = level + grown * both, both + grown * slope
        expected = to_level + grown * to_slope + noise
        self._log_level += to_level / expected * off
        drift = _SLOPE_DRIFT if slope < _SLOPE_UNKNOWN else 0.0
        level -= to_level * to_level / expected
        both -= to_level * to_slope / expected
        slope -= to_slope * to_slope / expected
        free = self._slope + to_slope / expected * off
        self._slope = min(max(free, self._least_slope), 1.0)
        if self._slope != free:  # the most likely level for the nearest slope that there can be
            self._log_level += both / slope * (self._slope - free)
        self._covariance = (level + noise * _WANDER, both, slope + drift)
        level_s = math.exp(self._log_level)
        self.fixed_s = level_s * (1.0 - self._slope)
        self.micro_batch_s = level_s * self._slope / self._unit


Counts = npt.NDArray[np.int64]
Seconds = npt.NDArray[np.float64]

NO_LIMIT = int(np.iinfo(np.int64).max)  # of what a worker holds
SAME = 1e-9  # of a time: what is closer is the same moment


@dataclass(frozen=True, slots=True)
class Speeds:
    """T_i(b) = max(fixed_s[i] + b * micro_batch_s[i], b * feed_s[i] - beside_s) of each worker i.

    The first is a `Speed`'s. Data is made ready all the time, also while members exchange: where it
    comes slowly a share is waited for.

    >>> slow = Speeds(np.zeros(2), np.ones(2), np.array([8, 8]), np.array([0.0, 2.0]), beside_s=3.0)
    >>> slow.seconds(np.array([4, 4])).tolist()
    [4.0, 5.0]
    >>> speeds = Speeds(np.array([2.0, 9.0]), np.array([1.0, 1.0]), np.array([8, 8]))
    >>> speeds.step_s(np.array([2, 0]))
    4.0

    Attributes:
        fixed_s: Seconds of a step that do not depend on the share.
        micro_batch_s: Seconds per micro-batch.
        limit: Most micro-batches per step that each can hold.
        feed_s: Seconds in which the data of a micro-batch is made ready; None: it is there.
        beside_s: Of a step, besides computing: the exchange.
    """

    fixed_s: Seconds
    micro_batch_s: Seconds
    limit: Counts
    feed_s: Seconds | None = None
    beside_s: float = 0.0

    @classmethod
    def of(cls, speeds: Sequence[Speed]) -> Speeds:
        """Those of the workers in this order."""
        most = (speed.max_micro_batches for speed in speeds)
        return cls(
            np.array([speed.fixed_s for speed in speeds], np.float64),
            np.array([speed.micro_batch_s for speed in speeds], np.float64),
            np.array([NO_LIMIT if limit is None else limit for limit in most], np.int64),
        )

    def __len__(self) -> int:
        """How many workers."""
        return len(self.fixed_s)

    def some(self, which: Counts) -> Speeds:
        """Those of some workers."""
        return replace(
            self,
            fixed_s=self.fixed_s[which],
            micro_batch_s=self.micro_batch_s[which],
            limit=self.limit[which],
            feed_s=None if self.feed_s is None else self.feed_s[which],
        )

    def in_parts(self, parts: int) -> Speeds:
        """By parts of micro-batches."""
        feed_s = None if self.feed_s is None else self.feed_s / parts
        return replace(self, micro_batch_s=self.micro_batch_s / parts, feed_s=feed_s)

    def seconds(self, shares: Counts) -> Seconds:
        """T(b) of each."""
        with np.errstate(over="ignore"):
            busy_s = self.fixed_s + shares * self.micro_batch_s
            if self.feed_s is not None:
                busy_s = np.maximum(busy_s, shares * self.feed_s - self.beside_s)
            return np.where(shares > 0, busy_s, 0.0)

    def next_s(self, worker: int, share: int) -> float:
        """T(b) of one, for a share above 0."""
        busy_s = float(self.fixed_s[worker] + share * self.micro_batch_s[worker])
        if self.feed_s is None:
            return busy_s
        return max(busy_s, float(share * self.feed_s[worker]) - self.beside_s)

    def within(self, seconds: float, most: int) -> Counts:
        """How many micro-batches each ends in so many seconds; at most these, and its limit."""
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            real = np.floor((seconds - self.fixed_s) / self.micro_batch_s)
            if self.feed_s is not None:
                real = np.fmin(real, np.floor((seconds + self.beside_s) / self.feed_s))
        real = np.nan_to_num(real, nan=most, posinf=most, neginf=0)
        counts = np.clip(real, 0, self.limit).astype(np.int64)
        counts -= (counts > 0) & (self.seconds(counts) > seconds)  # the quotient was rounded up
        return counts

    def least_s(self, micro_batches: int) -> float:
        """No shares take less, not even parts of micro-batches; 0 where that is not so simple."""
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            per_s = 1.0 / self.micro_batch_s
            least_s = float((micro_batches + (self.fixed_s * per_s).sum()) / per_s.sum())
        return (1 - SAME) * least_s if self.fixed_s.max() <= least_s < np.inf else 0.0

    def step_s(self, shares: Counts) -> float:
        """Seconds of the worker which ends last."""
        return float(self.seconds(shares).max())
