"""Rungs of several objectives: who goes on is decided by who is beaten in all of them.

Asynchronous successive halving (Li et al., "A System for Massively Parallel Hyperparameter Tuning",
MLSys 2020), where trials are ranked by non-dominated sorting (Deb et al., "A Fast and Elitist
Multiobjective Genetic Algorithm: NSGA-II", 2002) in place of one number.
"""

from __future__ import annotations

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
