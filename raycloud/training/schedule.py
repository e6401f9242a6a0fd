"""What is to come, step by step: what lets a feed run ahead of a change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raycloud.errors import InternalError
from raycloud.order import Assignment, MicroBatch, Position, Steps, StepSpan, assign

if TYPE_CHECKING:
    from raycloud.training.locality import Held

Adopted = tuple[tuple[int, ...], ...]  # for each rank, indices of micro-batches


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """From `step` on, `generation` computes `shares`, one a rank."""

    step: int
    generation: int
    shares: tuple[int, ...]


class Schedule:
    """The shares of every step from the present on.

    Written by the loop, read by the feed's thread: a reader sees the list before or after a change,
    never in between, and a change always lies ahead of every step that a feed may already have
    asked for.

    Args:
        first: The present.
        held: For each lane, the bytes of its rows that each rank's node holds: ranks are dealt what
            their nodes hold. The same on all ranks. Empty: ranks are dealt contiguous runs.
        adopted: For the first step, which micro-batches each rank computes, where that step goes on
            from what survivors of the generation before have kept; None: as in every other.
    """

    def __init__(self, first: Piece, held: Held = (), adopted: Adopted | None = None) -> None:
        """Start with one piece that has no end."""
        self._pieces: tuple[Piece, ...] = (first,)
        self._held = held
        self._adopted = adopted
        self._dealt: dict[tuple[tuple[int, ...], int], Assignment] = {}

    def at(self, step: int) -> Piece:
        """The piece that `step` belongs to."""
        for piece in reversed(self._pieces):
            if piece.step <= step:
                return piece
        raise InternalError(f"step {step} lies before the schedule {self._pieces}")

    def add(self, piece: Piece) -> None:
        """A change ahead. No piece is forgotten: they are few, and a feed may need an old one."""
        if piece.step < self._pieces[-1].step:
            raise InternalError(f"a change to {piece} would lie before {self._pieces[-1]}")
        self._pieces = (*self._pieces, piece)

    def micro_batches(self, span: StepSpan, rank: int) -> tuple[MicroBatch, ...]:
        """What the member of `rank` computes of `span`, in canonical order."""
        every = span.micro_batches
        if self._adopted is not None and span.step == self._pieces[0].step:
            return tuple(every[k] for k in self._adopted[rank])
        asked = self.at(span.step).shares, len(every)
        if asked not in self._dealt:  # a few: the shares of each piece, full and short steps
            self._dealt[asked] = assign(*asked, self._held or None)
        return tuple(every[k] for k in self._dealt[asked].of(rank))


class Course:
    """The spans of all steps of this start, also where the data grows on the way.

    Written by the loop, read by the feed's thread: a reader sees the steps before or after a
    growth, never in between, and a growth reaches only epochs of which no feed can have asked for a
    step. Where the job's length is a number of epochs, growth makes it longer.

    Args:
        steps: The cut of the sequence.
        step: The first step.
        at: Where the sequence stands before it.
        last_step: One past the last step.
        epochs: The job's length, where it is a number of epochs.
    """

    def __init__(
        self, steps: Steps, *, step: int, at: Position, last_step: int, epochs: int | None
    ) -> None:
        """Start at `step`."""
        self._first_step, self._first_position = step, at
        self._epochs = epochs
        self._now = (steps, last_step)
        self._begun = -1  # the newest epoch that a walk has reached

    @property
    def steps(self) -> Steps:
        """The cut of the sequence, as it is known now."""
        return self._now[0]

    @property
    def last_step(self) -> int:
        """One past the last step, as it is known now."""
        return self._now[1]

    def walk(self, step: int, at: Position) -> Iterator[StepSpan]:
        """All spans from `step`, which stands `at`; growth is taken in while this goes on."""
        while step < self.last_step:
            span = self.steps.span(step, at)
            self._begun = span.epoch
            yield span
            step, at = step + 1, self.steps.after(span)

    def growth_at(self, step: int) -> int:
        """The first epoch that growth reaches which takes effect before `step`."""
        return self._position_at(step).next_epoch

    def grow(self, epoch: int, samples: int) -> bool:
        """From `epoch` on, an epoch has `samples` samples.

        Returns:
            Whether this start will see any of them.

        Raises:
            InternalError: A walk has begun that epoch.
        """
        if epoch <= self._begun:
            raise InternalError(
                f"the data cannot grow from epoch {epoch} on: a feed has begun epoch {self._begun}"
            )
        steps, last_step = self._now
        steps = steps.grown(epoch, samples)
        if self._epochs is not None:
            left = steps.until_epoch(self._epochs, self._first_position)
            last_step = self._first_step + left
        self._now = (steps, last_step)
        return epoch < self._position_at(last_step).next_epoch

    def _position_at(self, step: int) -> Position:
        return self.steps.position_after(step - self._first_step, self._first_position)
