"""How long a decision takes, in processor seconds, told at little cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raycloud.clock import Clock

_SHORT_S = 0.001
_OLD_S = 0.0005


class Stopwatch:
    """Measures one thing after the other.

    To ask for processor seconds takes as long as a short decision. So what takes less than a
    millisecond by the clock is told by the clock, which never says less; of what takes longer the
    processor seconds are told, others being busy here, too: at most 0.5 ms too many.

    Args:
        clock: Whose seconds.
    """

    def __init__(self, clock: Clock) -> None:
        """Nothing is measured yet."""
        self._clock = clock
        self._began_s = 0.0
        self._asked_s = float("-inf")  # when processor seconds were asked for,
        self._cpu_s = 0.0  # and what they were

    def begin(self) -> None:
        """From now on."""
        self._began_s = now_s = self._clock.monotonic_s()
        if now_s - self._asked_s > _OLD_S:
            self._asked_s, self._cpu_s = now_s, self._clock.cpu_s()

    def took_s(self) -> float:
        """How long it took since `begin`."""
        took_s = self._clock.monotonic_s() - self._began_s
        if took_s < _SHORT_S:
            return took_s
        self._asked_s = float("-inf")
        return min(took_s, self._clock.cpu_s() - self._cpu_s)
