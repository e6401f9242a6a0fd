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
    that nobody opens, or for a file that does not come, uses none at all. Where computing a step
    has taken long before, it may stand still for twice that time: it may be waiting for something.

    Args:
        clock: For seconds, and the thread's own.
        thread: Its identity.
        usual_s: The longest that a step has taken to compute, while one is being computed; None
            while none is, or where that is not known yet.
    """

    def __init__(self, clock: Clock, thread: int, usual_s: Callable[[], float | None]) -> None:
        """It moves."""
        self._clock, self._thread, self._usual_s = clock, thread, usual_s
        self._used_s, self._still_s = -1.0, 0.0
        self._looked_s = clock.monotonic_s()

    def look(self) -> list[Still]:
        """What is to be told: nothing, mostly."""
        now_s, used_s = self._clock.monotonic_s(), self._clock.thread_cpu_s(self._thread)
        between_s, self._looked_s = now_s - self._looked_s, now_s
        usual_s = self._usual_s()
        if used_s > self._used_s or usual_s is None:
            self._still_s = 0.0
        else:
            self._still_s += min(between_s, _BETWEEN_S)
        self._used_s = used_s
        told = usual_s is not None and self._still_s >= max(TOLD_FROM_S, 2.0 * usual_s)
        return [Still(self._still_s)] if told else []
