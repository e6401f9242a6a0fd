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


def round_at(steps: Steps, step: int, at: Position, end: int) -> Round:
    """The round of steps [step, end), the first of which stands `at`."""
    spans = []
    while step < end:
        spans.append(span := steps.span(step, at))
        step, at = step + 1, steps.after(span)
    return Round.of(spans)


def end_of_round(step: int, every: Iterable[int], last_step: int) -> int:
    """One past the last step of the round that begins with `step`.

    A round ends before each multiple of one of `every`: of the period, and of the numbers of steps
    after which something reads the state. So each member, and a resumed run, knows it.

    >>> [end_of_round(step, (4, 6), last_step=9) for step in (0, 4, 6, 8)]
    [4, 6, 8, 9]
    """
    return min(last_step, *((step // many + 1) * many for many in every))
