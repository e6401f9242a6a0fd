"""What has become of a job's members together, so that not all are looked at each time."""

from __future__ import annotations

from dataclasses import dataclass, field

from raycloud.control.tables import MemberState


@dataclass(kw_only=True, slots=True)
class Turns:
    """Counts what becomes of members; they say so themselves.

    Attributes:
        count: How often one has come, joined or gone: what is known of who is there is old.
        states: How many are in each state.
        present: The numbers of those that are not gone, in order.
        new: Those of them that have not joined.
        leaving: Those of them that are going to leave.
        heard_s: All of them were heard last then, or later.
    """

    count: int = 0
    states: dict[MemberState, int] = field(default_factory=lambda: dict.fromkeys(MemberState, 0))
    present: dict[int, None] = field(default_factory=dict)
    new: dict[int, None] = field(default_factory=dict)
    leaving: set[int] = field(default_factory=set)
    heard_s: float = float("inf")

    def come(self, number: int, state: MemberState, heard_s: float, *, joined: bool) -> None:
        """A member is asked for."""
        self.count += 1
        self.states[state] += 1
        self.present[number] = None
        self.heard_s = min(self.heard_s, heard_s)
        if not joined:
            self.new[number] = None

    def join(self, number: int) -> None:
        """It computes."""
        self.count += 1
        self.new.pop(number, None)

    def part(self, number: int) -> None:
        """It has no state any more that counts."""
        self.count += 1
        self.new[number] = None

    def move(self, before: MemberState, after: MemberState) -> None:
        """One is in another state."""
        self.states[before] -= 1
        self.states[after] += 1

    def go(self, number: int) -> None:
        """It is gone."""
        self.count += 1
        self.leaving.discard(number)
        self.present.pop(number, None)
        self.new.pop(number, None)
