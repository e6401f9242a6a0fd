"""What befell the members of a generation, until they, or others, have committed a step again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raycloud.commands import Back


@dataclass(kw_only=True, slots=True)
class Recovery:
    """A generation broke, and no step is committed since.

    Attributes:
        detected_s: When it was known.
        cause: The reason of the first loss, or of the broken exchange.
        lost: Who, in the order in which it was known.
        back: The checkpoint that all load before they meet, where nobody has had the state any
            more; None: those that are left go on in place, or it is not found yet.
        found_s: When it was found.
        lost_steps: How many steps that takes back.
        failures: How often members have failed by an error of their own since, each incident once.
        followed: Members that may have had a part of a state, and are not as they began.
    """

    detected_s: float
    cause: str
    lost: list[int] = field(default_factory=list)
    back: Back | None = None
    found_s: float = 0.0
    lost_steps: int = 0
    failures: int = 0
    followed: tuple[int, ...] = ()

    @property
    def begins(self) -> bool:
        """There is no checkpoint: all begin at the beginning, and have to be new."""
        return self.back is not None and self.back.step == 0
