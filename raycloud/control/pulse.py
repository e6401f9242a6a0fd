"""How late a member answers, and how unlikely it is that it still will: the phi accrual detector.

Source: Hayashibara, Defago, Yared, Katayama, "The phi accrual failure detector", SRDS 2004, with
a mean and a variance that forget (West 1979) in place of a window.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_FORGETS = 1 / 32  # the weight of the newest answer
_FIRST_STD_S = 0.3  # before much is known
_LEAST_STD_S = 0.1


@dataclass(slots=True)
class Pulse:
    """The lateness of one member's answers, in seconds: a mean and a variance.

    >>> pulse = Pulse()
    >>> pulse.phi(0.0) < 1 < 8 < pulse.phi(2.0)
    True
    """

    mean_s: float = 0.0
    variance: float = _FIRST_STD_S**2

    def answered(self, late_s: float) -> None:
        """An answer came, this much later than it was due; 0 if in time."""
        off = late_s - self.mean_s
        self.mean_s += _FORGETS * off
        self.variance = (1 - _FORGETS) * (self.variance + _FORGETS * off * off)

    def phi(self, late_s: float) -> float:
        """-log10 of the chance that an answer which is this late by now is still on its way."""
        std_s = max(_LEAST_STD_S, math.sqrt(self.variance))
        chance = 0.5 * math.erfc((late_s - self.mean_s) / (std_s * math.sqrt(2.0)))
        return -math.log10(chance) if chance > 0.0 else math.inf
