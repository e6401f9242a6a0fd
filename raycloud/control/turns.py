"""What has become of a job's members together, so that not all are looked at each time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from raycloud.control.tables import MemberState

if TYPE_CHECKING:
    from raycloud.control.state import Member


@dataclass(kw_only=True, slots=True)
class Turns:
    """Counts what becomes of members; they say so themselves.

    Attributes:
        count: How often one has come, joined or gone: what is known of who is there is old.
        states: How many are in each state.
        present: Those that are not gone, by number, in order.
        new: The numbers of those of them that have not joined.
        leaving: How many of them are going to leave.
    """

    count: int = 0
    states: dict[MemberState, int] = field(default_factory=lambda: dict.fromkeys(MemberState, 0))
    present: dict[int, Member] = field(default_factory=dict)
    new: dict[int, None] = field(default_factory=dict)
    leaving: int = 0

    def come(self, member: Member) -> None:
        """A member is asked for."""
        self.count += 1
        self.states[member.state] += 1
        self.present[member.number] = member
        if not member.joined:
            self.new[member.number] = None

    def join(self, number: int) -> None:
        """It computes."""
        self.count += 1
        self.new.pop(number, None)

    def move(self, before: MemberState, after: MemberState) -> None:
        """One is in another state."""
        self.states[before] -= 1
        self.states[after] += 1

    def go(self, number: int, *, leaving: bool) -> None:
        """It is gone."""
        self.count += 1
        self.leaving -= leaving
        self.present.pop(number, None)
        self.new.pop(number, None)
