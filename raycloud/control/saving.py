"""When a checkpoint is due, where the job leaves that to us."""

from __future__ import annotations

import math
from dataclasses import dataclass

_SELDOM_S = 6 * 3600.0  # between two losses, before any is known; counts as one
_COST_S = 1.0  # of a checkpoint, before one was made
_LEAST_S, _MOST_S = 30.0, 3600.0


def interval_s(cost_s: float, between_losses_s: float) -> float:
    """Seconds of training between two checkpoints with the least time lost to either.

    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
    Future Generation Computer Systems 22 (2006): with C the cost and M the time between losses,
    sqrt(2CM) (1 + sqrt(C / 2M) / 3 + C / 18M) - C where C < 2M, and M otherwise; its first term
    is Young's (1974).

    >>> round(interval_s(60.0, 86_400.0)), round(interval_s(0.05, 6 * 3600.0), 1)
    (3180, 46.4)
    """
    cost_s = max(cost_s, 1e-3)
    if cost_s >= 2 * between_losses_s:
        return between_losses_s
    ratio = cost_s / (2 * between_losses_s)
    young_s = math.sqrt(2 * cost_s * between_losses_s)
    return young_s * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


@dataclass(kw_only=True, slots=True)
class Saving:
    """Follows what checkpoints cost and how often members are lost.

    Attributes:
        began_s: When the run began.
        losses: How many members were lost since.
    """

    began_s: float
    losses: int = 0
    _cost_s: float = 0.0
    _saved_s: float | None = None
    _before_s: float | None = None  # when the one before that was
    _under_way: bool = False

    def wrote(self, blocked_s: float, write_s: float) -> None:
        """A member has written its part: the slowest one counts, older ones less and less."""
        self._cost_s = max(blocked_s + write_s, 0.9 * self._cost_s)

    def asked(self, now_s: float) -> None:
        """A checkpoint was asked for: there is no other until it is published."""
        self._before_s, self._saved_s, self._under_way = self._saved_s, now_s, True

    def published(self, now_s: float) -> None:
        """One is complete."""
        self._saved_s, self._under_way = now_s, False

    def dropped(self) -> None:
        """Those that were under way never will be: members met anew."""
        if self._under_way:
            self._saved_s, self._under_way = self._before_s, False

    def due(self, now_s: float) -> bool:
        """Whether another one is worth it now."""
        if self._under_way:  # a place that is slow to write to would never be done
            return False
        since_s = self.began_s if self._saved_s is None else self._saved_s
        between_s = (_SELDOM_S + now_s - self.began_s) / (1 + self.losses)
        after_s = interval_s(self._cost_s or _COST_S, between_s)
        return now_s - since_s >= min(max(after_s, _LEAST_S), _MOST_S)
