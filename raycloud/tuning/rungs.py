"""Rungs: who goes on, of several objectives, and on the way to a target.

Asynchronous successive halving (Li et al., "A System for Massively Parallel Hyperparameter Tuning",
MLSys 2020). Of several objectives trials are ranked by non-dominated sorting (Deb et al., "A Fast
and Elitist Multiobjective Genetic Algorithm: NSGA-II", 2002) in place of one number. To a target,
which is to be reached with the least of something, they are compared where they have spent as much.
"""

from __future__ import annotations

import math
from collections.abc import Collection

Values = tuple[float, ...]  # of the objectives; less is better


def beats(one: Values, other: Values) -> bool:
    """Whether it is as good in all, and better in one.

    >>> beats((1.0, 2.0), (1.0, 3.0)), beats((1.0, 2.0), (0.0, 3.0)), beats((1.0,), (1.0,))
    (True, False, False)
    """
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))


def before(values: Values, others: Collection[Values]) -> int:
    """How many of the others are in earlier fronts: those that no other beats are the first one.

    >>> before((2.0, 2.0), [(1.0, 1.0), (0.0, 3.0), (3.0, 0.0), (4.0, 4.0)])
    3
    >>> before((2.0, 2.0), [(0.0, 3.0), (3.0, 0.0), (4.0, 4.0)])
    0
    """
    left, gone = [*others, values], 0
    while True:
        first = [one for one in left if not any(beats(other, one) for other in left)]
        if values in first:
            return gone
        left = [one for one in left if one not in first]
        gone += len(first)


class Rungs:
    """Each rung is `reduction` times as far as the one before; at each one in so many goes on.

    All of a front go on that begins among those: no other is better than they are. Who comes to a
    rung is compared with those that came before it.

    Args:
        grace: Where the first rung is.
        reduction: At least 2.
    """

    def __init__(self, grace: int, reduction: int) -> None:
        self._grace, self._reduction = grace, reduction
        self._come: dict[int, dict[str, Values]] = {}  # who has come to a rung, and with what

    def goes_on(self, trial: str, far: int, values: Values) -> bool:
        """Whether a trial that has come so far, with these values, goes on.

        >>> rungs = Rungs(10, 2)
        >>> [rungs.goes_on(n, 10, (v, v)) for n, v in (("a", 2.0), ("b", 3.0), ("c", 1.0))]
        [True, False, True]
        >>> rungs.goes_on("a", 19, (9.0, 9.0)), rungs.goes_on("a", 20, (9.0, 9.0))
        (True, True)
        """
        rung = self._grace
        if far < rung:
            return True
        while far >= rung * self._reduction:
            rung *= self._reduction
        come = self._come.setdefault(rung, {})
        if trial in come:
            return True
        come[trial] = values
        others = [one for number, one in come.items() if number != trial]
        return before(values, others) * self._reduction < len(come)


class SpentRungs:
    """Rungs of what is spent on the way to a target: powers of `reduction`, of any unit.

    At each one in so many goes on: those whose measure is best by then. A measure between two looks
    is taken to lie on the line between them. Who has not come through its grace is not ended, but
    counts for the others.

    Args:
        reduction: At least 2.
    """

    def __init__(self, reduction: int) -> None:
        self._reduction = reduction
        self._last: dict[str, tuple[float, float]] = {}  # by trial: spent, and its measure then
        self._come: dict[int, dict[str, float]] = {}  # by rung: who has come, with which measure
        self._through: dict[str, int] = {}  # by trial the highest rung that it came through

    def goes_on(self, trial: str, spent: float, badness: float, *, graced: bool) -> bool:
        """Whether a trial goes on that has spent so much, with this measure, less is better.

        >>> rungs = SpentRungs(2)
        >>> rungs.goes_on("a", 6.0, 3.0, graced=True), rungs.goes_on("b", 7.0, 3.5, graced=True)
        (True, False)
        >>> rungs.goes_on("c", 5.0, 3.6, graced=False), rungs.goes_on("c", 10.0, 2.1, graced=True)
        (True, True)
        """
        newest = math.floor(math.log(spent, self._reduction)) if spent > 0.0 else None
        before = self._last.get(trial)
        self._last[trial] = spent, badness
        if newest is None:
            return True
        oldest = newest
        if before is not None and before[0] > 0.0:
            oldest = math.floor(math.log(before[0], self._reduction)) + 1
        for rung in range(oldest, newest + 1):
            at = float(self._reduction) ** rung
            known = badness if before is None else _between(before, (spent, badness), at)
            self._come.setdefault(rung, {}).setdefault(trial, known)
        if not graced or self._through.get(trial) == newest:
            return True
        come = self._come[newest]
        better = sum(one < come[trial] for one in come.values())
        goes_on = better * self._reduction < len(come)
        if goes_on:
            self._through[trial] = newest
        return goes_on


def _between(one: tuple[float, float], other: tuple[float, float], at: float) -> float:
    """The value at a place on the line through two points, of which the first lies before it."""
    part = (at - one[0]) / (other[0] - one[0]) if other[0] > one[0] else 1.0
    return one[1] + part * (other[1] - one[1])
