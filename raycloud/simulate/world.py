"""Virtual time, chance, and the log: each event and command in a line."""

from __future__ import annotations

import hashlib
import heapq
from array import array
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from operator import attrgetter
from typing import Any

import numpy as np

from raycloud.events import ChangeApplied, StepsCommitted
from raycloud.order import stream_seed

_TAIL = 60  # lines


class World:
    """Virtual time, chance and a log; at the same moment, what was asked for first happens first.

    The driver's clock has jumped `ahead_s`.
    """

    def __init__(self, seed: int) -> None:
        """Nothing happens before something is asked for."""
        self.now_s = 0.0
        self.ahead_s = 0.0
        self.chance = np.random.Generator(np.random.PCG64(stream_seed(seed, 1)))
        self.log = Log()
        self._acts: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, at_s: float, act: Callable[[], None]) -> None:
        """Let `act` happen at `at_s`, or now where that is past."""
        self._count += 1
        heapq.heappush(self._acts, (max(at_s, self.now_s), self._count, act))

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        """Let `act` happen so many seconds from now."""
        self.at(self.now_s + seconds, act)

    @property
    def clock_s(self) -> float:
        """What the driver's clock says."""
        return self.now_s + self.ahead_s

    @property
    def next_s(self) -> float:
        """When the next thing happens; infinite where nothing will."""
        return self._acts[0][0] if self._acts else float("inf")

    def happen(self) -> None:
        """Go on to the next thing, and let it happen."""
        self.now_s, _, act = heapq.heappop(self._acts)
        act()

    def between(self, low: float, high: float) -> float:
        """Some number from `low` to `high`."""
        return low + (high - low) * float(self.chance.random())

    def likely(self, chance: float) -> bool:
        """True with this chance."""
        return bool(self.chance.random() < chance)

    def below(self, number: int) -> int:
        """Some integer from 0 to below `number`."""
        return int(self.chance.integers(number))

    def some(self, number: int, of: int) -> list[int]:
        """So many different integers from 0 to below `of`, in any order."""
        return [int(i) for i in self.chance.permutation(of)[:number]]


class Log:
    """Every word and every decision as a line: a digest of all, and the last ones in `tail`."""

    def __init__(self) -> None:
        self.lines = 0
        self.tail: deque[str] = deque(maxlen=_TAIL)
        self._digest = hashlib.blake2b(digest_size=16)

    def add(self, line: str) -> None:
        """Add a line."""
        self.tail.append(line)
        self._take_in(f"{line}\n".encode())

    def count(self, *numbers: float) -> None:
        """Add a line that is nothing but numbers, and counts in the digest only."""
        self._take_in(array("d", numbers).tobytes())

    def _take_in(self, line: bytes) -> None:
        self.lines += 1
        self._digest.update(line)

    def digest(self) -> str:
        """Of all lines so far, in order: 32 hexadecimal digits."""
        return self._digest.hexdigest()


_SHOWN = 64  # entries

# What comes of each member, where they are too many to tell in words.
_NUMBERS: Mapping[type, Callable[[Any], tuple[int, ...]]] = {
    StepsCommitted: attrgetter("member", "generation", "first_step", "last_step", "micro_batches"),
    ChangeApplied: attrgetter("member", "change", "step"),
}


def few(numbers: tuple[float, ...]) -> str:
    """Numbers, the first ones where they are many."""
    shown = ", ".join(map(str, numbers[:_SHOWN]))
    return f"({shown}, ...)" if len(numbers) > _SHOWN else f"({shown})"


def numbers(event: StepsCommitted | ChangeApplied) -> tuple[int, ...]:
    """Such an event as a line of nothing but numbers."""
    return _NUMBERS[type(event)](event)


def short(record: Any) -> str:
    """An event or a command in one line, without what is long."""
    name = type(record).__name__
    if isinstance(record, StepsCommitted | ChangeApplied):
        return f"{name}{numbers(record)}"
    told = (f"{f.name}={_brief(getattr(record, f.name))}" for f in fields(record) if f.repr)
    return f"{name}({', '.join(told)})"


def _brief(value: Any) -> str:
    if is_dataclass(value):
        return short(value)
    if isinstance(value, tuple):
        return few(value)
    return "{...}" if isinstance(value, Mapping) and len(value) > 1 else repr(value)
