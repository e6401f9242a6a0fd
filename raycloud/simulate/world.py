"""Virtual time, chance, and the log: each event and command in a line."""

from __future__ import annotations

import hashlib
import heapq
from array import array
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, assert_never

import numpy as np

from raycloud.commands import Form, Meet, Prepare, Publish, Release, Reshare, Spawn
from raycloud.events import ChangeApplied, GenerationFormed, PartWritten, StepsCommitted
from raycloud.order import stream_seed

if TYPE_CHECKING:
    from raycloud.commands import Command
    from raycloud.events import Event

_TAIL = 60  # lines
_BATCH = 2000  # lines from one look at the digest to the next


class World:
    """Time that stands still until something happens.

    What happens at the same moment happens in the order in which it was asked for.

    Args:
        seed: Of everything that is left to chance.

    Attributes:
        now_s: Seconds since the beginning.
        ahead_s: How far the driver's clock has jumped ahead.
        chance: Where all that is left to chance comes from.
        log: All that happened.
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
    """Every word and every decision as a line: a digest of all, and the last ones.

    Attributes:
        lines: How many there were.
        tail: The last ones, but for numbers.
    """

    def __init__(self) -> None:
        self.lines = 0
        self.tail: deque[str] = deque(maxlen=_TAIL)
        self._digest = hashlib.blake2b(digest_size=16)
        self._pending: list[bytes] = []
        self._numbers: list[float] = []  # that come after those

    def add(self, line: str) -> None:
        """Add a line."""
        self.tail.append(line)
        self._add_numbers()
        self._pending.append(f"{line}\n".encode())
        self._count()

    def count(self, *numbers: float) -> None:
        """Add a line that is nothing but numbers, and counts in the digest only."""
        self._numbers += numbers
        self._count()

    def _count(self) -> None:
        self.lines += 1
        if self.lines % _BATCH == 0:
            self._take_in()

    def _add_numbers(self) -> None:
        if self._numbers:
            self._pending.append(array("d", self._numbers).tobytes())
            self._numbers.clear()

    def digest(self) -> str:
        """Of all lines so far, in order: 32 hexadecimal digits."""
        self._take_in()
        return self._digest.hexdigest()

    def _take_in(self) -> None:
        self._add_numbers()
        self._digest.update(b"".join(self._pending))
        self._pending.clear()


_SHOWN = 64


def few(numbers: tuple[int, ...]) -> str:
    """Numbers, the first ones where they are many."""
    shown = ", ".join(map(str, numbers[:_SHOWN]))
    return f"({shown}, ...)" if len(numbers) > _SHOWN else f"({shown})"


def numbers(event: StepsCommitted | ChangeApplied) -> tuple[int, ...]:
    """What comes of each member, one after the other, where they are too many to tell in words."""
    match event:
        case StepsCommitted():
            steps = event.first_step, event.last_step
            return event.member, event.generation, *steps, event.micro_batches
        case ChangeApplied():
            return event.member, event.change, event.step
        case _:
            assert_never(event)


def short(record: Event | Command) -> str:
    """A record in one line, without what is long."""
    match record:
        case StepsCommitted() | ChangeApplied() | PartWritten():
            return _of_all(record)
        case Form():
            of = f"step={record.step}, settled={record.settled}"
            named = f"members={few(record.members)}, shares={few(record.shares)}"
            return f"Form(generation={record.generation}, {of}, {named})"
        case Prepare():
            to = f"members={few(record.members)}"
            return f"Prepare(number={record.number}, {to}, {_change(record)})"
        case Publish():
            replicas = tuple(replica for replica, _ in record.parts)
            return f"Publish(step={record.step}, parts={few(replicas)})"
        case Spawn():
            return f"Spawn(members={few(record.members)}, joins={record.joins})"
        case Release():
            return f"Release(members={few(record.members)})"
        case GenerationFormed():
            of = f"first_step={record.first_step}, members={few(record.members)}"
            return f"GenerationFormed(generation={record.generation}, {of})"
        case _:
            return repr(record)


def _of_all(record: StepsCommitted | ChangeApplied | PartWritten) -> str:
    """What each member says, one after the other."""
    match record:
        case StepsCommitted():
            steps = f"{record.first_step} to {record.last_step}, {record.micro_batches}"
            return f"{record.member} committed {steps} micro-batches as {record.generation}"
        case ChangeApplied():
            return f"{record.member} applied change {record.change} at step {record.step}"
        case PartWritten():
            part = f"{record.part} of step {record.step}"
            return f"{record.member} wrote {part} as {record.generation}"
        case _:
            assert_never(record)


def _change(prepare: Prepare) -> str:
    match prepare.change:
        case Reshare(generation=generation, shares=shares):
            return f"Reshare(generation={generation}, shares={few(shares)})"
        case Meet(generation=generation, members=members):
            return f"Meet(generation={generation}, members={few(members)})"
        case change:
            return repr(change)
