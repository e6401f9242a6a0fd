"""History of a simulated run over all of its starts, and its outcome."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
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
class History:
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


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of one scenario. What is measured in processor seconds differs from time to time.

    Attributes:
        status: `finished`, `stopped`, or `broken` where a promise was.
        steps: Steps that count.
        virtual_s: Seconds from the beginning to the end.
        faults: How many of each kind.
        starts: How often the run was started.
        generations: How many there were.
        recoveries: How often training went on after a generation broke.
        members: How many there were, one after the other.
        returned: How often a process came back that was given up.
        mistaken: How often a member was given up that was well.
        pauses_s: How long nobody computed, each time.
        goodput: The part of the time in which steps were computed that count.
        digest: Of the log; the same scenario has the same.
        lines: Of the log.
        tail: Its last lines.
        broken: Which promises.
        decisions: How often control was asked.
        worst_s: Its longest decision, in processor seconds.
        worst: Which that was.
        usual_s: 999 of 1000 decisions took no longer.
    """

    status: str
    steps: int
    virtual_s: float
    faults: Mapping[str, int]
    starts: int
    generations: int
    recoveries: int
    members: int
    returned: int
    mistaken: int
    pauses_s: tuple[float, ...]
    goodput: float
    digest: str
    lines: int
    tail: tuple[str, ...] = field(repr=False)
    broken: tuple[str, ...]
    decisions: int
    worst_s: float = field(compare=False)
    worst: str = field(compare=False)
    usual_s: float = field(compare=False)

    def numbers(self) -> dict[str, Any]:
        """As plain values, without the log's lines."""
        return {name: value for name, value in asdict(self).items() if name != "tail"}

    def told(self) -> Iterator[str]:
        """As people read it, line by line."""
        days, pauses = self.virtual_s / 86400, sorted(self.pauses_s)
        faults = ", ".join(f"{kind} {count}" for kind, count in sorted(self.faults.items()))
        yield f"{self.status} after {self.steps} steps, {days:.3g} virtual days"
        yield f"faults: {faults or 'none'}"
        yield (
            f"{self.starts} starts, {self.generations} generations, {self.recoveries} recoveries, "
            f"{self.members} members one after the other, {self.returned} back from silence, "
            f"{self.mistaken} given up that were well"
        )
        if pauses:
            half = pauses[len(pauses) // 2]
            yield f"{len(pauses)} pauses: median {half:.1f} s, longest {pauses[-1]:.1f} s"
        yield f"goodput: {self.goodput:.4f}"
        yield (
            f"{self.decisions} decisions: longest {self.worst_s * 1e3:.1f} ms ({self.worst}), "
            f"99.9% within {self.usual_s * 1e3:.2f} ms"
        )
        yield f"log: {self.lines} lines, digest {self.digest}"
        for promise in self.broken:
            yield f"BROKEN: {promise}"
