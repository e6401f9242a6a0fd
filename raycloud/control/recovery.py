"""What is known of a generation that broke, until the next has committed a step."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(kw_only=True, slots=True)
class Recovery:
    """A generation broke, and no step is committed since.

    Attributes:
        detected_s: When it was known.
        cause: The reason of the first loss, or of the broken exchange.
        lost: Who, in the order in which it was known.
    """

    detected_s: float
    cause: str
    lost: list[int] = field(default_factory=list)
