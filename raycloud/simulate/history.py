"""History of a simulated run over all of its starts, and its outcome."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

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
    busy_s: float = 0.0


NOTHING = Kept(step=0, position=Position(), ledger={}, value=0, useful_s=0.0, generation=-1)


@dataclass(eq=False)
class History:
    """What is known of a run over all of its starts."""

    samples: int  # of the data by now
    lines: list[str] = field(default_factory=list)  # of its ledger's file
    kept: Kept | None = None  # the newest published checkpoint
    values: dict[int, int] = field(default_factory=dict)  # parameters in each, by step
    generation: int = 0  # the newest
    spawned: int = 0  # one past the newest member's number
    recoveries: int = 0
    generations: int = 0
    returned: int = 0  # processes that came back after they were given up
    mistaken: int = 0  # members that were given up, and were well
    wrong: list[str] = field(default_factory=list)  # broken promises
    marks: list[float] = field(default_factory=list)
    took_s: array[float] = field(default_factory=lambda: array("d"))  # of each decision
    worst: str = ""  # the longest decision's kind
    worst_s: float = 0.0

    @property
    def next_generation(self) -> int:
        """The first generation of the next start."""
        return 0 if self.kept is None else max(self.kept.generation, self.generation) + 1


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of one scenario; what is measured differs from time to time."""

    status: str  # `finished`, `stopped`, or `broken` where a promise was
    steps: int  # that count
    virtual_s: float
    faults: Mapping[str, int]  # by kind
    starts: int
    generations: int
    recoveries: int
    members: int  # one after the other
    returned: int  # processes that came back after they were given up
    mistaken: int  # members that were given up, and were well
    pauses_s: tuple[float, ...]  # in which nobody computed
    goodput: float  # the part of the time in which steps were computed that count
    busy_s: float  # that members computed such steps, together
    node_s: tuple[float, ...] = field(repr=False)  # that each node was there
    marks: tuple[float, ...]  # steps at the moments that were asked for, the present one's part too
    digest: str  # of the log; the same scenario has the same
    lines: int  # of the log
    tail: tuple[str, ...] = field(repr=False)
    broken: tuple[str, ...]  # promises
    decisions: int
    worst_s: float = field(compare=False)
    worst: str = field(compare=False)
    usual_s: float = field(compare=False)  # 999 of 1000 decisions took no longer

    def numbers(self) -> dict[str, Any]:
        """As plain values, without the log's lines and what is of each node."""
        left_out = {"tail", "node_s"}
        return {name: value for name, value in asdict(self).items() if name not in left_out}

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
