"""The change that is on its way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raycloud.commands import Change


@dataclass(kw_only=True, slots=True)
class Outstanding:
    """A change that was sent ahead and is not yet in force everywhere.

    Attributes:
        applied: The members that switched, with the step at whose start they did: the same.
        in_force: Somebody has, or computes already as it says: so will all others.
    """

    number: int
    members: tuple[int, ...]
    change: Change
    applied: dict[int, int] = field(default_factory=dict)
    in_force: bool = False
    _of: tuple[tuple[int, ...], frozenset[int]] = ((), frozenset())  # these members, in no order

    @property
    def everywhere(self) -> bool:
        """Every member has switched."""
        return len(self.applied) >= len(self.members) and self.applied.keys() >= self._within()

    def concerns(self, number: int) -> bool:
        """It was sent to this member."""
        return number in self._within()

    def _within(self) -> frozenset[int]:
        if self._of[0] is not self.members:
            self._of = self.members, frozenset(self.members)
        return self._of[1]
