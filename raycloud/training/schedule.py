"""Which shares hold from which step on: what lets a feed run ahead of a change."""

from __future__ import annotations

from dataclasses import dataclass

from raycloud.errors import InternalError
from raycloud.order import MicroBatch, StepSpan, assign


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
    """

    def __init__(self, first: Piece) -> None:
        """Start with one piece that has no end."""
        self._pieces: tuple[Piece, ...] = (first,)

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
        assignment = assign(self.at(span.step).shares, len(every))
        return tuple(every[k] for k in assignment.of(rank))
