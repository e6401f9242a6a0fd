"""Rounds: steps between two exchanges, and where each of them ends."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from raycloud.order.steps import MicroBatch, Position, Steps, StepSpan


@dataclass(frozen=True, slots=True)
class Round:
    """Steps that follow each other, and whose updates are exchanged together: at least one.

    Their micro-batches are numbered through: the `spans` say where those of each step begin.
    """

    spans: tuple[StepSpan, ...]

    @classmethod
    def of(cls, spans: Iterable[StepSpan]) -> Round:
        """The round of these steps.

        >>> from raycloud.order import Position, Steps
        >>> steps = Steps(samples=10, global_batch=4, micro_batch=2)
        >>> round_at(steps, 2, Position(offset=8), 4).micro_batches[-1]
        MicroBatch(index=2, epoch=1, start=2, stop=4)
        """
        found = tuple(spans)
        firsts = accumulate((len(one.micro_batches) for one in found), initial=0)
        return cls(tuple(replace(one, first=n) for one, n in zip(found, firsts, strict=False)))

    @property
    def step(self) -> int:
        """Its first step."""
        return self.spans[0].step

    @property
    def samples(self) -> int:
        """Number of samples."""
        return sum(one.samples for one in self.spans)

    @property
    def micro_batches(self) -> tuple[MicroBatch, ...]:
        """Those of all steps, in canonical order."""
        return tuple(m for one in self.spans for m in one.micro_batches)


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundEnds:
    """Where rounds end: so each member, and a resumed run, knows it by arithmetic.

    Attributes:
        period: Steps of a round, at most; without reads it ends before a multiple of that.
        reads: After multiples of these something reads the state: there a round ends. The steps
            from one to the next are in as few rounds as can be, of about as many steps each.
        warm_steps: So many steps come first that are no part of a round.
        grow: The first of them end after 4, 8, 16 ... steps: what speeds are is known soon.
        stop: Where a round that is under way ends, whatever else holds; 0: nowhere.
    """

    period: int
    reads: tuple[int, ...] = ()
    warm_steps: int = 0
    grow: bool = False
    stop: int = 0

    def after(self, step: int, last_step: int) -> int:
        """One past the last step of what is exchanged at once, and begins with `step`.

        >>> ends = RoundEnds(period=4, reads=(6,), warm_steps=1)
        >>> [ends.after(step, last_step=9) for step in (0, 1, 4, 6, 8)]
        [1, 4, 6, 9, 9]
        >>> [RoundEnds(period=8, reads=(10,)).after(step, 99) for step in (0, 5, 10)]
        [5, 10, 15]
        >>> RoundEnds(period=4, stop=3).after(0, last_step=9)
        3
        >>> growing = RoundEnds(period=32, grow=True)
        >>> [growing.after(step, last_step=99) for step in (0, 4, 9, 16, 32)]
        [4, 8, 16, 32, 64]
        """
        if self.alone(step):
            return min(step + 1, last_step)
        if step < self.stop:
            return min(self.stop, last_step)
        ends = [self._cut(step) if self.reads else (step // self.period + 1) * self.period]
        if self.grow and step < self.period:
            ends.append(1 << max(2, step.bit_length()))
        return min(last_step, *ends)

    def _cut(self, step: int) -> int:
        """Where the round of `step` ends, by what reads the state before and after it."""
        first = max(self.warm_steps, *(step // every * every for every in self.reads))
        size = min((step // every + 1) * every for every in self.reads) - first
        rounds = -(-size // self.period)
        number = (step - first) * rounds // size + 1
        return first + -(-number * size // rounds)

    def alone(self, step: int) -> bool:
        """Whether `step` is exchanged by itself, and is no part of a round."""
        return self.period == 1 or step < self.warm_steps

    def at(self, step: int, steps: Steps, at: Position, last_step: int) -> StepSpan | Round | None:
        """The step or round that begins with `step`, which stands `at`; None past the last."""
        if step >= last_step:
            return None
        if self.alone(step):
            return steps.span(step, at)
        return round_at(steps, step, at, self.after(step, last_step))


def round_at(steps: Steps, step: int, at: Position, end: int) -> Round:
    """The round of steps [step, end), the first of which stands `at`."""
    spans = []
    while step < end:
        spans.append(span := steps.span(step, at))
        step, at = step + 1, steps.after(span)
    return Round.of(spans)
