"""What came of a simulated run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


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
