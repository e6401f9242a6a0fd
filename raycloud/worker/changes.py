"""Changes that the driver sent ahead, and the step at which each takes effect."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import assert_never

from raycloud.commands import Change, Extend, Halt, Meet, Reshare, Save


@dataclass(frozen=True, kw_only=True, slots=True)
class Due:
    """Change `number` takes effect before `step` is computed."""

    number: int
    step: int
    change: Change


class Changes:
    """Written by the actor's thread that receives a change, read by the loop.

    Args:
        feed_depth: Steps that a feed may have asked for ahead of the one computed. Grown data
            takes effect beyond them: an epoch that is begun keeps its samples.
    """

    def __init__(self, *, feed_depth: int) -> None:
        """Nothing is prepared."""
        self._feed_depth = feed_depth
        self._lock = threading.Lock()
        self._prepared: dict[int, Change] = {}
        self._agreed = 0
        self._generation = -1  # the newest that a change was to begin
        self._due: list[Due] = []

    def prepare(self, number: int, change: Change) -> None:
        """Hold change `number` at hand. Numbers count from 1, without gaps.

        An `Extend` is at hand once the grown data can be read here.
        """
        with self._lock:
            if number > self._agreed:
                self._prepared[number] = change
            if isinstance(change, Reshare | Meet):
                self._generation = max(self._generation, change.generation)

    def settle(self, number: int) -> None:
        """Changes up to `number` are over: in force everywhere, or withdrawn by the driver.

        Data that has grown is never withdrawn.
        """
        with self._lock:
            self._agreed = max(self._agreed, number)
            self._prepared = {n: c for n, c in self._prepared.items() if n > self._agreed}
        self._due = [d for d in self._due if d.number > number or isinstance(d.change, Extend)]

    @property
    def agreed(self) -> int:
        """Number of the newest change that all were found to hold; 0 before the first."""
        with self._lock:
            return self._agreed

    @property
    def newest(self) -> tuple[int, int]:
        """The highest number of a change that came here, and the newest generation in one; -1."""
        with self._lock:
            return max([self._agreed, *self._prepared]), self._generation

    def due_step(self) -> int:
        """The step at which the newest agreed change takes effect; -1 where it has."""
        return next((d.step for d in self._due if d.number == self._agreed), -1)

    @property
    def next_at_hand(self) -> bool:
        """Whether the change after the last agreed one is prepared here."""
        with self._lock:
            return self._agreed + 1 in self._prepared

    def agree(self, step: int) -> Due:
        """At `step` all members were found to hold the next change: fix when it takes effect."""
        with self._lock:
            ahead = self._ahead(self._prepared[self._agreed + 1])
        return self.agree_on(step + ahead)

    def agree_on(self, due_step: int) -> Due:
        """All members hold the next change: it takes effect before `due_step`."""
        with self._lock:
            self._agreed += 1
            change = self._prepared.pop(self._agreed)
        due = Due(number=self._agreed, step=due_step, change=change)
        self._due.append(due)
        return due

    def _ahead(self, change: Change) -> int:
        match change:
            case Extend():
                return self._feed_depth + 2  # the queue, the one being collated, the one computed
            case Reshare() | Save() | Halt() | Meet():
                return 1
            case _:
                assert_never(change)

    def due(self, step: int) -> list[Due]:
        """What takes effect before `step`; asked once a step."""
        now = [d for d in self._due if d.step <= step]
        self._due = [d for d in self._due if d.step > step]
        return now
