"""By how much another machine's clock is ahead, from a few questions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raycloud.clock import Clock

QUESTIONS = 5


def ahead(clock: Clock, ask: Callable[[], float]) -> tuple[float, float]:
    """Seconds by which another clock is ahead, and how wrong that may be.

    The answer is taken to be from the middle of the quickest round trip, as in NTP (RFC 5905,
    section 8); it is wrong by at most half of that trip.

    Args:
        clock: This machine's.
        ask: Gets the other's unix time, in seconds.

    >>> from raycloud.clock import VirtualClock
    >>> clock = VirtualClock(100.0)
    >>> def ask():
    ...     clock.advance(0.5)  # on its way
    ...     answer = clock.unix_s() + 3.0
    ...     clock.advance(0.5)  # on its way back
    ...     return answer
    >>> ahead(clock, ask)
    (3.0, 0.5)
    """
    best = (0.0, float("inf"))
    for _ in range(QUESTIONS):
        asked_s, began_s = clock.unix_s(), clock.monotonic_s()
        answer_s = ask()
        half_s = (clock.monotonic_s() - began_s) / 2
        if half_s < best[1]:
            best = (answer_s - asked_s - half_s, half_s)
    return best
