"""Members that were lost by silence alone, and whose processes may come back."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(kw_only=True, slots=True)
class Away:
    """Whose process and place are kept although others go on without it.

    Attributes:
        since_s: By member that is away: since when.
        returns: By member that is what a process has come back as: how often it has come back.
        vacant: Who was lost since the last tick by its end, so that its place may be another's.
    """

    since_s: dict[int, float] = field(default_factory=dict)
    returns: dict[int, int] = field(default_factory=dict)
    vacant: list[int] = field(default_factory=list)

    def __contains__(self, number: int) -> bool:
        """Whether this member is away."""
        return number in self.since_s
