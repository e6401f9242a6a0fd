"""Stragglers and stalls, seen while a share is computed: who waits for its end has lost a step."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raycloud.clock import Clock

_LONG_S = 2.0  # nothing shorter is far longer than usual: it may be a hiccup
_SOON_S, _IN_A_ROW = 0.5, 4  # ... but for that of so many shares of a round in a row
_FAR = 2.0  # times as long
_LOOKS_S = 0.5  # two looks that are closer say little of the pace of now
_TICK_S = 1e-9  # less processor time than any clock can tell
_STEPS = 8  # that tell what is usual in the first round
_MOST = 4.0  # times what has passed: what does not go on at all is a stall
_STALL_S = 1.0  # no stall is told before
_BETWEEN_S = 1.5  # longer between two looks: this process stood still itself, or its machine


@dataclass(frozen=True, slots=True)
class Straggling:
    """A share of `micro_batches` that is being computed is likely to take so many `seconds`.

    Attributes:
        rest_s: Of a round: what all shares are likely to take that follow this one in it.
        usual_s: What those would take at the usual pace. 0.0, both: none follow in a round.
    """

    micro_batches: int
    seconds: float
    rest_s: float = 0.0
    usual_s: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class _Span:
    """A share, and two clocks: when it was begun, or how long it has taken."""

    micro_batches: int
    at_s: float
    cpu_s: float


class _RoundSoFar:
    """Shares of one round: what they take, beside what those of the round before have taken.

    Args:
        usual_s: Seconds of a micro-batch in the round before, or in steps; 0.0: there are none.

    Attributes:
        left: Steps that are left of it, that included which is computed.
    """

    def __init__(self, usual_s: float) -> None:
        self.usual_s, self.left = usual_s, 0
        self._micro_batches, self._took_s = 0, 0.0
        # Seconds of a micro-batch in the last shares. Replaced whole: others look meanwhile.
        self._paces_s = (0.0,) * (_IN_A_ROW - 1)

    @property
    def micro_batch_s(self) -> float:
        """Seconds of a micro-batch in it; 0.0 before there is any."""
        return self._took_s / self._micro_batches if self._micro_batches else 0.0

    def add(self, micro_batches: int, took_s: float) -> None:
        """A share of it is done."""
        self._micro_batches += micro_batches
        self._took_s += took_s
        if micro_batches:
            self._paces_s = (*self._paces_s[1:], took_s / micro_batches)

    def late_s(self, micro_batches: int) -> float:
        """Seconds of computing from which on there is something to tell of the present share.

        One slow share alone is a hiccup; two of three are none, and so many in a row count sooner.
        """
        if not (self.usual_s and micro_batches):
            return math.inf
        ahead_s = self.usual_s * (self._micro_batches + micro_batches) - self._took_s
        slow = [pace_s >= _FAR * self.usual_s for pace_s in self._paces_s]
        share_s = _FAR * self.usual_s * micro_batches  # where this one is slow, too
        two_s = 0.0 if all(slow[-2:]) else share_s if any(slow[-2:]) else math.inf
        row_s = share_s if all(slow) else math.inf
        return min(max(two_s, _LONG_S + ahead_s), max(row_s, _SOON_S + ahead_s))

    def look(self, micro_batches: int, took_s: float) -> list[Straggling]:
        """What is to be told while the share of a step is computed."""
        if took_s < self.late_s(micro_batches):
            return []
        *_, before_s, last_s = self._paces_s
        _, pace_s, _ = sorted((before_s, last_s, took_s / micro_batches))
        pace_s = max(pace_s, last_s)  # of the share under way only a part has passed
        left = micro_batches * (self.left - 1)
        usual_s = self.usual_s * left
        return [Straggling(micro_batches, pace_s * micro_batches, pace_s * left, usual_s)]


class StragglerWatch:
    """Compares a share that is computed with the one before. One thread computes, another may look.

    On a CPU that has become slow a process gets less processor time in a second than it did before:
    so it is known how long the rest will take. Of a GPU nothing is known here: its work is begun
    long before it is done. `longest_s` is the most that a share has taken; None before the first
    one.

    In a round nobody waits for the end of a share, but for that of the last: there a member is late
    by what all shares of the round have taken, and goes on as in two of the last three.

    Args:
        clock: Of wall and processor time.
        meets: All wait for the end of a round; else its shares count one by one.
    """

    def __init__(self, clock: Clock, *, meets: bool = True) -> None:
        self._clock, self._meets = clock, meets
        self._now: _Span | None = None
        self._usual: _Span | None = None
        self._round: _RoundSoFar | None = None  # of the round that is computed
        self._round_s = 0.0  # seconds of a micro-batch in the round before; 0.0: there is none
        self._steps_s: deque[float] = deque(maxlen=_STEPS)  # ... in the last steps before rounds
        self._looked: tuple[_Span, float, float] | None = None
        self._told = False  # something, of what is computed now
        self._waits = False
        self.longest_s: float | None = None

    @property
    def computing(self) -> bool:
        """In the midst of a share, and waiting for nobody."""
        return self._now is not None and not self._waits

    def begin(self, micro_batches: int, left: int = 0) -> None:
        """A share is computed from now on; of one of 0 nothing is told, whatever is done in it.

        Args:
            micro_batches: Of the share.
            left: Steps that are left of a round, this one included; 0: it is no part of one.
        """
        left = left if self._meets else 0
        if (so_far := self._round) is not None and not 0 < left < so_far.left:  # it is over
            self._round_s, self._round = so_far.micro_batch_s or so_far.usual_s, None
        if left:
            self._round = so_far = self._round or _RoundSoFar(self._round_usual_s())
            so_far.left = left
        self._now = _Span(micro_batches, self._clock.monotonic_s(), self._clock.cpu_s())
        self._told = False

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Meanwhile others are waited for: that is no part of the share."""
        at_s, cpu_s = self._clock.monotonic_s(), self._clock.cpu_s()
        self._waits = True
        try:
            yield
        finally:
            if (now := self._now) is not None:
                took_s, used_s = self._since(at_s, cpu_s)
                self._now = _Span(now.micro_batches, now.at_s + took_s, now.cpu_s + used_s)
            self._waits = False

    def end(self, *, done: bool) -> None:
        """It is not computed any more: it is `done`, or was given up."""
        began, self._now = self._now, None
        if began is None or not done:
            return
        took_s, cpu_s = self._since(began.at_s, began.cpu_s)
        self.longest_s = max(self.longest_s or 0.0, took_s)
        if began.micro_batches and took_s > 0.0:
            self._usual = _Span(began.micro_batches, took_s, cpu_s)
        if self._round is not None:
            self._round.add(began.micro_batches, took_s)
        elif began.micro_batches:
            self._steps_s.append(took_s / began.micro_batches)

    def look(self) -> list[Straggling]:
        """What is to be told: nothing, mostly. To be asked about once a second."""
        # First whether it waits: what it has waited is in `_now` before that ends.
        waits, before = self._waits, self._looked
        now, usual = self._now, self._usual
        if now is None or usual is None or waits:
            return []
        at_s, cpu_s = self._clock.monotonic_s(), self._clock.cpu_s()
        if (so_far := self._round) is not None:
            found = so_far.look(now.micro_batches, at_s - now.at_s)
            self._told |= bool(found)
            return found
        self._looked = now, at_s, cpu_s
        usual_s = usual.at_s * now.micro_batches / usual.micro_batches
        took_s = at_s - now.at_s
        if took_s < self._late_s(now, usual):
            return []
        since_s, used_s = now.at_s, now.cpu_s
        if before is not None and before[0] is now and at_s - before[1] >= _LOOKS_S:
            since_s, used_s = before[1:]
        likely_s = usual_s * (usual.cpu_s / usual.at_s) * (at_s - since_s)
        likely_s /= max(cpu_s - used_s, likely_s / (_MOST * took_s), _TICK_S)
        self._told = True
        return [Straggling(now.micro_batches, max(took_s, likely_s))]

    def told(self) -> bool:
        """Whether something was told of what is computed now."""
        return self._told

    def late_in_s(self) -> float:
        """Seconds until there may be something to tell for the first time of what is computed now.

        Infinite where nothing is computed, or it has been late for a while.
        """
        waits = self._waits
        now, usual = self._now, self._usual
        if now is None or usual is None or waits:
            return math.inf
        in_s = now.at_s + self._late_s(now, usual) - self._clock.monotonic_s()
        return in_s if in_s > 0.0 else math.inf

    def _round_usual_s(self) -> float:
        """Of a micro-batch: the first round is compared with the steps before it."""
        if self._round_s or len(self._steps_s) < _STEPS:
            return self._round_s
        return median(self._steps_s)

    def _late_s(self, now: _Span, usual: _Span) -> float:
        """Seconds of computing from which on a share takes far longer than usual."""
        if (so_far := self._round) is not None:
            return so_far.late_s(now.micro_batches)
        if not now.micro_batches:
            return math.inf
        return max(_LONG_S, _FAR * usual.at_s * now.micro_batches / usual.micro_batches)

    def _since(self, at_s: float, cpu_s: float) -> tuple[float, float]:
        return self._clock.monotonic_s() - at_s, self._clock.cpu_s() - cpu_s


@dataclass(frozen=True, slots=True)
class Stalled:
    """In the midst of computing a thread has used no processor time for so many seconds."""

    seconds: float


class StallWatch:
    """Looks now and then whether a thread, by its native id, uses any processor time.

    A slow machine, or a busy one, gives a thread some; one that waits for a lock that nobody opens,
    or for a file that does not come, uses none at all. Where computing a step has taken long
    before, it may stand still for twice that time, `usual_s`: None while none is computed, or that
    is not known.
    """

    def __init__(self, clock: Clock, thread: int, usual_s: Callable[[], float | None]) -> None:
        self._clock, self._thread, self._usual_s = clock, thread, usual_s
        self._used_s, self._still_s = -1.0, 0.0
        self._looked_s = clock.monotonic_s()

    def look(self) -> list[Stalled]:
        """What is to be told: nothing, mostly."""
        now_s, used_s = self._clock.monotonic_s(), self._clock.thread_cpu_s(self._thread)
        between_s, self._looked_s = now_s - self._looked_s, now_s
        usual_s = self._usual_s()
        if used_s > self._used_s or usual_s is None or used_s == math.inf:  # or it has ended
            self._still_s = 0.0
        else:
            self._still_s += min(between_s, _BETWEEN_S)
        self._used_s = used_s
        told = usual_s is not None and self._still_s >= max(_STALL_S, 2.0 * usual_s)
        return [Stalled(self._still_s)] if told else []
