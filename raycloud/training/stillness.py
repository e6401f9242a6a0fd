"""Whether a member's computing thread stands still: a process may answer, and yet never go on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raycloud.clock import Clock

TOLD_FROM_S = 1.0
_BETWEEN_S = 1.5  # longer between two looks: this process stood still itself, or its machine


@dataclass(frozen=True, slots=True)
class Still:
    """In the midst of computing a thread has used no processor time for so many seconds."""

    seconds: float


class Watch:
    """Looks at a thread now and then.

    A slow machine, or a busy one, gives a thread some processor time; one that waits for a lock
    that nobody opens, or for a file that does not come, uses none at all.

    Args:
        clock: For seconds, and the thread's own.
        thread: Its identity.
        computing: Whether it has anything to compute, and nobody to wait for.
    """

    def __init__(self, clock: Clock, thread: int, computing: Callable[[], bool]) -> None:
        """It moves."""
        self._clock, self._thread, self._computing = clock, thread, computing
        self._used_s, self._still_s = -1.0, 0.0
        self._looked_s = clock.monotonic_s()

    def look(self) -> list[Still]:
        """What is to be told: nothing, mostly."""
        now_s, used_s = self._clock.monotonic_s(), self._clock.thread_cpu_s(self._thread)
        between_s, self._looked_s = now_s - self._looked_s, now_s
        if used_s > self._used_s or not self._computing():
            self._still_s = 0.0
        else:
            self._still_s += min(between_s, _BETWEEN_S)
        self._used_s = used_s
        return [Still(self._still_s)] if self._still_s >= TOLD_FROM_S else []
