"""What a member says to its driver, kept until that has written it down.

A driver that is killed may take words with it that it had fetched. So each has a number, and is
told again to the next driver unless the log has it: none is lost, and none is written twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from raycloud.events import MemberLeaving

if TYPE_CHECKING:
    from raycloud.events import Event, MemberReady


@dataclass(frozen=True, slots=True)
class Word:
    """One of a member's words.

    Attributes:
        member: Whose.
        number: Its words are counted from 1.
        event: What it says.
    """

    member: int
    number: int
    event: Event


class Words:
    """A member's words that may not be in the log yet, in order. Not thread-safe.

    Args:
        member: Whose.
    """

    def __init__(self, member: int) -> None:
        """Nothing is said."""
        self._member = member
        self._kept: deque[Word] = deque()
        self._said = self._told = 0

    @property
    def untold(self) -> bool:
        """Whether there are words that this driver has not been told."""
        return self._told < self._said

    def add(self, events: Iterable[Event]) -> None:
        """The member says these."""
        for event in events:
            self._said += 1
            self._kept.append(Word(self._member, self._said, event))

    def tell(self, written: int) -> list[Word]:
        """What the driver has not been told; it has written down all up to number `written`."""
        self._forget(written)
        found = [word for word in self._kept if word.number > self._told]
        self._told = self._said
        return found

    def again(self, written: int) -> None:
        """Another driver is there, and the log ends with number `written`: tell it the rest."""
        self._forget(written)
        self._told = min(written, self._said)

    def another(self, member: int) -> Words:
        """The process's words as another member: of those before, that its machine goes counts."""
        found = Words(member)
        told = [word.event for word in self._kept]
        found.add(replace(e, member=member) for e in told if isinstance(e, MemberLeaving))
        return found

    def _forget(self, written: int) -> None:
        while self._kept and self._kept[0].number <= written:
            self._kept.popleft()


@dataclass(frozen=True, kw_only=True, slots=True)
class Survivor:
    """A member that has the state of the training, and goes on while no driver is there.

    Attributes:
        member: Its number.
        ready: What it said of itself when it could compute.
        members: Those of the generation that it met as last, by rank.
        generation: That generation.
        newest: The newest generation that it knows of, also one that is planned.
        changes: The highest number of a change that it was sent.
        grown: The data has grown since it began.
    """

    member: int
    ready: MemberReady
    members: tuple[int, ...]
    generation: int
    newest: int
    changes: int
    grown: bool
