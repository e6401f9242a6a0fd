"""What is known of a run over all of its starts."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raycloud.order import Position


@dataclass(frozen=True, slots=True)
class Kept:
    """A published checkpoint: what a later start goes on from."""

    step: int
    position: Position
    ledger: dict[str, Any]
    value: int
    useful_s: float
    generation: int


@dataclass(eq=False)
class Story:
    """What is known of a run over all of its starts.

    Attributes:
        samples: Of the data by now, with all that were added.
        lines: Of its ledger's file.
        kept: The newest published checkpoint.
        values: The parameters in each published checkpoint, by step.
        generation: The newest.
        spawned: One past the newest member's number.
        recoveries: How often training went on after a generation broke.
        generations: How many were formed.
        returned: How often a process came back that was given up.
        mistaken: How often a member was given up that was well.
        wrong: Which promises were broken.
        took_s: Processor seconds of each decision.
        worst: The longest decision's kind.
    """

    samples: int
    lines: list[str] = field(default_factory=list)
    kept: Kept | None = None
    values: dict[int, int] = field(default_factory=dict)
    generation: int = 0
    spawned: int = 0
    recoveries: int = 0
    generations: int = 0
    returned: int = 0
    mistaken: int = 0
    wrong: list[str] = field(default_factory=list)
    took_s: array[float] = field(default_factory=lambda: array("d"))
    worst: str = ""
    worst_s: float = 0.0

    @property
    def next_generation(self) -> int:
        """Number of the first generation of the next start."""
        return 0 if self.kept is None else max(self.kept.generation, self.generation) + 1
