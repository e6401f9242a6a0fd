"""`sync.period: auto`: how many steps a round has, by what exchanges have taken in the run itself.

After each step it is as long as what of an exchange is not hidden takes little of a step; else the
fewest steps, 8 or a larger power of two, that leave little of it. Where what members do in rounds
has little in common, there are none any more: most of it is lost in the mean, and of shorter rounds
more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import NamedTuple

HARDLY = 0.08  # of a step may the exchange of each take
_AIM = 0.04  # of a round, where the exchange of each step takes more than that
_SHORTER_BELOW, _LONGER_ABOVE = 0.015, 0.06  # of a round: else it stays as it is
_COMMON = 0.15  # of what members do in a round, at least
_FEWEST = 8  # steps of a round: shorter ones cost more of the loss than longer ones
_EXCHANGES = 8  # that are looked at, at least
_LOOK_STEPS, _LOOK_ROUNDS = 16, 4
_LONGEST_S = 120.0  # that a round may take: changes wait for its end, and fewer workers take longer


@dataclass(frozen=True, slots=True, order=True)
class Choice:
    """What is in force: the same on all members.

    Attributes:
        number: Counts choices; of two members' the higher counts.
        period: Steps of a round; 1: there are none.
        most: It becomes no longer than that.
    """

    number: int
    period: int
    most: int

    @property
    def look_steps(self) -> int:
        """Steps until the next look."""
        return max(_LOOK_STEPS, _LOOK_ROUNDS * self.period)


@dataclass(slots=True)
class Seen:
    """One member's sums over exchanges of one generation under one choice.

    Attributes:
        exchanges: How many; 0 of a member that only follows.
        steps: In them all.
        wall_s: That they took.
        exposed_s: Of that the exchanges, as far as nothing hid them.
        hidden_s: What went on of them while this member computed.
        lost_s: By which computing was slower for them, where they shared its processors.
        own: The squared norm of what it gave, by its weight in the sum.
        mean: That of the mean of all.
        alone: That of its part of the mean.
    """

    exchanges: int = 0
    steps: int = 0
    wall_s: float = 0.0
    exposed_s: float = 0.0
    hidden_s: float = 0.0
    lost_s: float = 0.0
    own: float = 0.0
    mean: float = 0.0
    alone: float = 0.0

    @classmethod
    def of(cls, row: Sequence[float]) -> Seen:
        """What another member has told of it."""
        return cls(int(row[0]), int(row[1]), *row[2:])

    def told(self) -> tuple[float, ...]:
        """All of it, as numbers."""
        return tuple(map(float, astuple(self)))


def in_common(rows: Sequence[Seen]) -> float:
    """How much of what members do in a round they have in common: 0, nothing, to 1.

    Of directions without anything in common the mean has the squared norm sum(w^2 |d|^2), of equal
    ones sum(w |d|^2), where w are the members' weights and sum(w) = 1.

    >>> [round(in_common([Seen(1, 8, own=2.0, mean=m, alone=1.0)] * 2), 2) for m in (2.0, 3.0)]
    [0.0, 0.5]
    """
    whole, floor = sum(one.own for one in rows), sum(one.alone for one in rows)
    if len({one.exchanges for one in rows}) > 1:  # one of them has come to it later
        return 1.0
    return (rows[0].mean - floor) / (whole - floor) if whole > floor else 1.0


def lost_s(computing_s: float, cpu_s: float, courier_s: float) -> float:
    """By how much computing was slower for what exchanges took of the processors.

    Where there is a processor for each thread, by nothing. Else the thread that computes, in so
    many seconds, stood still for what others used; of all that the process had of the processors,
    couriers had their part.

    >>> [round(lost_s(1.2, cpu_s, 0.03), 3) for cpu_s in (1.23, 1.2, 0.24)]
    [0.0, 0.03, 0.15]
    """
    stood_s = max(0.0, computing_s - (cpu_s - courier_s))
    return min(stood_s, computing_s * courier_s / cpu_s) if cpu_s > 0.0 else 0.0


class Taken(NamedTuple):
    """Seconds of a step without exchange; of an exchange; and of it what is not hidden."""

    step_s: float
    exchange_s: float
    exposed_s: float


def taken(rows: Sequence[Seen]) -> Taken:
    """What steps and exchanges take, by members that have seen some.

    >>> taken([Seen(10, 10, wall_s=14.0, exposed_s=6.0, hidden_s=2.0)])
    Taken(step_s=0.8, exchange_s=0.8, exposed_s=0.6)
    """
    last = min(rows, key=lambda one: one.exposed_s)  # waits least: that is what it costs
    cost_s = (last.exposed_s + last.lost_s) / last.exchanges
    step_s = max((last.wall_s - last.exposed_s - last.lost_s) / last.steps, 1e-9)
    return Taken(step_s, cost_s + last.hidden_s / last.exchanges, cost_s)


def choose(now: Choice, every: Sequence[Seen]) -> tuple[Choice, str]:
    """The next choice by what all members have seen; and why, where it is another one.

    >>> slow = Seen(10, 10, wall_s=14.0, exposed_s=6.0, hidden_s=2.0)
    >>> choose(Choice(0, 1, 16), [slow, Seen(10, 10, wall_s=14.0, exposed_s=9.0)])
    (Choice(number=1, period=16, most=16), 'an exchange takes 0.8 s, computing a step 0.8 s')
    """
    rows = [one for one in every if one.exchanges]
    if (
        len(every) == 1
        or not rows
        or min(one.exchanges for one in rows) < min(_EXCHANGES, now.look_steps // now.period)
    ):
        return now, ""
    step_s, whole_s, cost_s = taken(rows)
    most = min(now.most, 1 << max(0, int(_LONGEST_S / step_s).bit_length() - 1))
    why = f"an exchange takes {whole_s:.2g} s, computing a step {step_s:.2g} s"
    if now.period == 1:
        if cost_s <= HARDLY * (step_s + cost_s):
            return _next(now, 1, f"{why}, of which {cost_s:.2g} s are not hidden")
        return _next(now, _fewest(whole_s / step_s, most), why)
    if (common := in_common(rows)) < _COMMON:
        why = f"what workers do in a round has only {max(common, 0.0):.0%} in common"
        return Choice(now.number + 1, 1, 1), why
    share = whole_s / (now.period * step_s)
    if _SHORTER_BELOW < share < _LONGER_ABOVE and now.period <= most:
        return now, ""
    return _next(now, 1 if whole_s <= HARDLY * step_s else _fewest(whole_s / step_s, most), why)


def _next(now: Choice, period: int, why: str) -> tuple[Choice, str]:
    if period == now.period and now.number:
        return now, ""
    return Choice(now.number + 1, period, now.most), why


def _fewest(ratio: float, most: int) -> int:
    """The fewest steps of which an exchange takes little; at most so many, 1 where that is too few.

    >>> [_fewest(ratio, 32) for ratio in (0.05, 0.5, 9.0)], _fewest(9.0, 4)
    ([8, 16, 32], 1)
    """
    period = _FEWEST
    while period < most and ratio > _AIM * period:
        period *= 2
    return period if period <= most else 1
