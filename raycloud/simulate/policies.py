"""Shares by several policies, played against the batch times of a trace, and backups within a step.

Each moment of the trace is one step. What a policy expects of a moment it knows from those before
it; the first moment is known to all, and is no part of what is counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from raycloud.planner.forecast import Forecast
from raycloud.planner.shares import equal_shares, fit_shares
from raycloud.planner.speed import NO_LIMIT, Speed, SpeedEstimate, Speeds
from raycloud.simulate.backups import backed_up

Values = npt.NDArray[np.float64]

FORESIGHT, LAST = "perfect foresight", "lag-1"
OWN = ("speed estimate", "forecast")  # raycloud's
_EQUAL, _ONCE = "equal", "fit once"


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    """What a policy saves, as parts of the time of computing with equal shares.

    Attributes:
        policy: Its name.
        fractional: With parts of micro-batches.
        whole: With whole ones.
        backed_up: With whole ones and backups; None: none were asked for.
        elsewhere: The part of all micro-batches that then count elsewhere.
    """

    policy: str
    fractional: float
    whole: float
    backed_up: float | None = None
    elsewhere: float | None = None

    def record(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


def expectations(seconds: Values) -> dict[str, Values]:
    """By policy, what is expected of each moment from the second on; a column for each worker.

    Args:
        seconds: Of a micro-batch: a row for each moment, a column for each worker.
    """
    later = seconds[1:]
    return {
        _EQUAL: np.ones_like(later),
        _ONCE: np.broadcast_to(seconds[0], later.shape),
        LAST: seconds[:-1],
        OWN[0]: _by_column(seconds, _Estimated),
        OWN[1]: _by_column(seconds, _Forecast),
        FORESIGHT: later,
    }


def levelled(expected: Values) -> Values:
    """Shares of any size with which all would end at once; those of a row sum to its workers.

    >>> levelled(np.array([[1.0, 3.0]])).tolist()
    [[1.5, 0.5]]
    """
    per_s = 1.0 / expected
    shares: Values = per_s * (expected.shape[1] / per_s.sum(axis=1, keepdims=True))
    return shares


def play(
    seconds: Values, micro_batches: int, *, backs_up: Sequence[int] = (), most: int = 0
) -> list[Played]:
    """Every policy, by these batch times.

    Args:
        seconds: Of a micro-batch: a row for each moment, a column for each worker.
        micro_batches: Of a step.
        backs_up: For each worker the one that it backs up; see `step.speculation.ring`.
        most: Micro-batches that each offers to its backup; 0: there are no backups.

    >>> slow = np.array([[1.0, 1.0], [1.0, 3.0], [1.0, 3.0], [1.0, 3.0]])
    >>> [(one.policy, round(one.whole, 2)) for one in play(slow, 8)][2:6:3]
    [('lag-1', 0.33), ('perfect foresight', 0.5)]

    Raises:
        ValueError: There are fewer than two moments.
    """
    if len(seconds) < 2:  # noqa: PLR2004 - of the first one nothing was known before
        raise ValueError(f"a trace takes two moments at least, got {len(seconds)}")
    later = seconds[1:]
    least_s = later.max(axis=1).sum()  # with equal parts, a micro-batch each
    shares = {
        name: list(_whole(said, micro_batches)) for name, said in expectations(seconds).items()
    }
    equal_s = _took_s(later, shares[_EQUAL])
    found = []
    for name, said in expectations(seconds).items():
        one = Played(
            policy=name,
            fractional=1.0 - float((levelled(said) * later).max(axis=1).sum() / least_s),
            whole=1.0 - _took_s(later, shares[name]) / equal_s,
        )
        if most:
            one = _with_backups(one, later, shares[name], equal_s, backs_up, most)
        found.append(one)
    return found


def _with_backups(
    one: Played,
    seconds: Values,
    shares: Sequence[Sequence[int]],
    equal_s: float,
    backs_up: Sequence[int],
    most: int,
) -> Played:
    took_s, elsewhere, total = 0.0, 0, 0
    for row, counts in zip(seconds.tolist(), shares, strict=True):
        speeds = [Speed(fixed_s=0.0, micro_batch_s=each_s) for each_s in row]
        step = backed_up(speeds, counts, backs_up, most=most)
        took_s, elsewhere, total = (
            took_s + step.seconds,
            elsewhere + step.elsewhere,
            total + sum(counts),
        )
    return Played(
        policy=one.policy,
        fractional=one.fractional,
        whole=one.whole,
        backed_up=1.0 - took_s / equal_s,
        elsewhere=elsewhere / total,
    )


def _whole(expected: Values, micro_batches: int) -> Iterator[tuple[int, ...]]:
    """Whole shares by what is expected of each moment; equal ones where all is the same."""
    workers = expected.shape[1]
    none_s, limit = np.zeros(workers), np.full(workers, NO_LIMIT, np.int64)
    for row in expected:
        if (row == row[0]).all():
            yield equal_shares(workers, micro_batches)
        else:
            yield fit_shares(Speeds(none_s, row, limit), micro_batches)


def _took_s(seconds: Values, shares: Sequence[Sequence[int]]) -> float:
    return float((np.array(shares) * seconds).max(axis=1).sum())


class _Estimated:
    """What control goes by: `SpeedEstimate`."""

    def __init__(self, first_s: float) -> None:
        self._estimate = SpeedEstimate(Speed(fixed_s=0.0, micro_batch_s=first_s))

    def next_s(self, took_s: float) -> float:
        self._estimate.observe(1, 1, took_s)
        return self._estimate.micro_batch_s


class _Forecast:
    """The forecaster that has erred least so far."""

    def __init__(self, _: float) -> None:
        self._forecast = Forecast()

    def next_s(self, took_s: float) -> float:
        self._forecast.observe(took_s)
        return self._forecast.forecast(1)


def _by_column(seconds: Values, make: type[_Estimated | _Forecast]) -> Values:
    columns = []
    for column in seconds.T.tolist():
        one = make(column[0])
        columns.append([one.next_s(took_s) for took_s in column[:-1]])
    return np.array(columns).T
