"""The tail of a member's step, which another member may compute as well: whose result counts.

The first one's, and once. What this member has begun counts here, since it cannot be called back;
what it has not begun counts where it was done first. So one lock in one process decides, and there
is nothing to be agreed on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raycloud.clock import Clock

_LOOK_UP_S = 0.05
_PATIENCE = 2.0  # times what the backup is likely to take


class Tail:
    """What of a step its backup may compute as well.

    Two threads call it: the one that computes, and one that hears the backup.

    Args:
        clock: For the seconds that are waited.

    Attributes:
        waited_s: Seconds that `begin` has waited, all together.
    """

    def __init__(self, clock: Clock) -> None:
        """Nothing may be computed by anyone else."""
        self._clock = clock
        self._changed = threading.Condition()
        self._step = -1
        self._open: set[int] = set()
        self._elsewhere: set[int] = set()
        self._started: dict[
            int, tuple[float, float]
        ] = {}  # when, and how long it is likely to take
        self.waited_s = 0.0

    def offer(self, step: int, indices: Iterable[int]) -> None:
        """A step begins, of which these are the tail."""
        with self._changed:
            self._step, self._open = step, set(indices)
            self._elsewhere, self._started = set(), {}

    def started(self, step: int, index: int, seconds: float) -> None:
        """The backup computes `index`, and is likely to take `seconds`."""
        with self._changed:
            if step == self._step and index in self._open:
                self._started[index] = self._clock.monotonic_s(), seconds

    def done(self, step: int, index: int) -> bool:
        """The backup has computed `index`; whether that counts, and then it counts nowhere else."""
        with self._changed:
            counts = step == self._step and index in self._open
            if counts:
                self._open.discard(index)
                self._elsewhere.add(index)
            self._started.pop(index, None)
            self._changed.notify_all()
            return counts

    def forsaken(self) -> None:
        """The backup is gone: nothing that it has started is waited for."""
        with self._changed:
            self._started.clear()
            self._changed.notify_all()

    def begin(self, index: int, own_s: float | None, abandoned: Callable[[], bool]) -> bool:
        """Whether this member is to compute `index`, which then counts here.

        Where the backup is at it, and likely to have it before this member would, it is waited for:
        not longer than twice what it is likely to take. Then both compute it.

        Args:
            index: Of the tail or not.
            own_s: What this member is likely to take; None: it does not know.
            abandoned: Says that the generation is over.
        """
        with self._changed:
            began_s = self._clock.monotonic_s()
            until_s = self._worth_waiting(index, began_s, own_s)
            while index in self._started and index in self._open:
                left_s = until_s - self._clock.monotonic_s()
                if left_s <= 0.0 or abandoned():
                    break
                self._changed.wait(min(left_s, _LOOK_UP_S))
            self.waited_s += self._clock.monotonic_s() - began_s
            self._open.discard(index)
            return index not in self._elsewhere

    def all_elsewhere(self, indices: Iterable[int]) -> bool:
        """Whether all of these were done elsewhere; then nothing of the step is open any more."""
        with self._changed:
            over = self._elsewhere.issuperset(indices)
            if over:
                self._open.clear()
            return over

    def close(self) -> frozenset[int]:
        """Nothing of the step is open any more; which were done elsewhere."""
        with self._changed:
            self._open.clear()
            return frozenset(self._elsewhere)

    def _worth_waiting(self, index: int, now_s: float, own_s: float | None) -> float:
        """Until when the backup is waited for."""
        if index not in self._started:
            return now_s
        started_s, likely_s = self._started[index]
        if own_s is not None and started_s + likely_s >= now_s + own_s:
            return now_s
        return started_s + _PATIENCE * likely_s
