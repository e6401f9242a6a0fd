"""How late a member answers, and how unlikely it is that it still will: the phi accrual detector.

Source: Hayashibara, Defago, Yared, Katayama, "The phi accrual failure detector", SRDS 2004, with
a mean and a variance that forget (West 1979) in place of a window.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from raycloud.control.numbered import Places, Seconds, room_for

_FORGETS = 1 / 32  # the weight of the newest answer
_FIRST_STD_S = 0.3  # before much is known
_LEAST_STD_S = 0.1
_NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class Pulse:
    """The lateness of one member's answers, in seconds: a mean and a variance.

    >>> pulse = Pulse()
    >>> pulse.phi(0.0) < 1 < 8 < pulse.phi(2.0)
    True
    """

    mean_s: float = 0.0
    variance: float = _FIRST_STD_S**2

    def phi(self, late_s: float) -> float:
        """-log10 of the chance that an answer which is this late by now is still on its way."""
        std_s = max(_LEAST_STD_S, math.sqrt(self.variance))
        chance = 0.5 * math.erfc((late_s - self.mean_s) / (std_s * math.sqrt(2.0)))
        return -math.log10(chance) if chance > 0.0 else math.inf


class Pulses:
    """Those of all members, in arrays: thousands answer each second.

    >>> pulses = Pulses()
    >>> for second in range(99):
    ...     pulses.answered({3: 0.0, 7: 2.0}, float(second), most_s=9.0)
    >>> pulses.of(7).phi(2.0) < 1 < 8 < pulses.of(3).phi(2.0)
    True
    >>> pulses.answered({7: 2.0}, 99.0, most_s=9.0)
    >>> pulses.heard_since(98.0, (3, 7)), pulses.heard_s(3)
    (1, 98.0)
    """

    def __init__(self) -> None:
        """Nobody is known."""
        self._mean_s: Seconds = np.zeros(0)
        self._variance: Seconds = np.zeros(0)
        self._heard_s: Seconds = np.zeros(0)

    def begin(self, members: Collection[int]) -> None:
        """Nothing is known of the answers of these, or not any more."""
        at = self._at(members)
        self._mean_s[at], self._variance[at] = 0.0, _FIRST_STD_S**2

    def answered(self, late_s: Mapping[int, float], now_s: float, *, most_s: float) -> None:
        """Answers came, each this much later than it was due, but no later than `most_s`."""
        at = self._at(late_s)
        late = np.minimum(np.fromiter(late_s.values(), np.float64, len(late_s)), most_s)
        mean_s = self._mean_s[at]
        off = late - mean_s
        self._heard_s[at] = now_s
        self._mean_s[at] = mean_s + _FORGETS * off
        self._variance[at] = (1 - _FORGETS) * (self._variance[at] + _FORGETS * off * off)

    def of(self, member: int) -> Pulse:
        """What is known of its answers."""
        if member >= len(self._mean_s):
            return Pulse()
        return Pulse(float(self._mean_s[member]), float(self._variance[member]))

    def heard_s(self, member: int) -> float:
        """When it has answered last; before all time if it has not."""
        return float(self._heard_s[member]) if member < len(self._heard_s) else _NEVER

    def heard_since(self, since_s: float, members: Collection[int]) -> int:
        """How many of `members` have answered after `since_s`."""
        at = self._at(members)
        return int((self._heard_s[at] > since_s).sum())

    def _at(self, members: Collection[int]) -> Places:
        """Their places; there are some for all."""
        at = np.fromiter(members, np.intp, len(members))
        if (last := int(at.max(initial=-1))) >= len(self._mean_s):
            self._mean_s = room_for(last, self._mean_s)
            self._variance = room_for(last, self._variance, fill=_FIRST_STD_S**2)
            self._heard_s = room_for(last, self._heard_s, fill=_NEVER)
        return at
