"""A generation that computes: steps in virtual time, many at once while nothing happens."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from raycloud.order import Position, Steps, deal
from raycloud.simulate.model import MASK, Piece, each, parts, pieces, total

_ROUNDING = 1e-6  # of a step
_FAR = 1 << 62

Counts = npt.NDArray[np.int64]


@dataclass(kw_only=True, eq=False)
class Lockstep:
    """The members of one generation, and how far they are.

    Attributes:
        cut: How the sequence is cut into steps.
        members: In order of rank.
        shares: Their micro-batches of a full step.
        formed_as: The generation as which they met.
        generation: The same, or that of their last new shares.
        first_step: Where they began.
        step: The step that they compute.
        at: Where the sequence stands before it.
        value: The parameters before it.
        begun_s: When they began to compute it; later than now: they still come together.
        step_s: How long a step takes.
        barrier: Before this step something is due.
        adopted: By rank, the micro-batches of the first step that each has kept or is to compute,
            where that is not what its share says.
        fresh: By rank, how many of those it has to compute.
        newcomers: Members that follow the others, and take the state from them meanwhile.
        idle: Members that write nothing: newcomers, and those that have no share yet.
        stalled_s: Since when one of them stands still; None: nobody does.
        saved_step: The step of their last checkpoint.
        ticket: What was planned under an older one is void.
        useful_s: Seconds in which steps were computed.
    """

    cut: Steps
    members: tuple[int, ...]
    shares: tuple[int, ...]
    formed_as: int
    generation: int
    first_step: int
    step: int
    at: Position
    value: int
    begun_s: float
    step_s: float
    barrier: int = _FAR
    adopted: Sequence[Sequence[int]] | None = None
    fresh: Sequence[int] = ()
    newcomers: frozenset[int] = frozenset()
    idle: frozenset[int] = frozenset()
    stalled_s: float | None = None
    saved_step: int = -1
    ticket: int = 0
    useful_s: float = 0.0
    micro: Counts = field(init=False)
    told: Counts = field(init=False)

    def __post_init__(self) -> None:
        """Nothing is computed yet."""
        self.micro = np.zeros(len(self.members), np.int64)
        self.told = self.micro.copy()
        self._dealt: dict[int, tuple[Counts, Counts]] = {}

    @property
    def barrier_s(self) -> float:
        """When they come to the barrier, unless something happens."""
        return self.begun_s + (self.barrier - self.step) * self.step_s

    def advance(self, now_s: float) -> None:
        """Commit all steps that have ended by now, up to the barrier."""
        if self.stalled_s is not None:
            now_s = self.stalled_s
        if now_s < self.begun_s:
            return
        ended = int((now_s - self.begun_s) / self.step_s + _ROUNDING)
        steps = min(ended, self.barrier - self.step)
        if steps > 0:
            self.commit(steps)
            self.begun_s += steps * self.step_s
            self.useful_s += steps * self.step_s

    def commit(self, steps: int) -> None:
        """Every member adds what its micro-batches of these steps are worth."""
        if self.adopted is not None:
            self._commit_adopted(self.adopted)
            steps -= 1
        for piece in pieces(self.cut, self.step, self.at, steps):
            counts, bounds = self.dealt(piece.samples)
            self.value = (self.value + total(parts(piece, bounds))) & MASK
            self.micro += counts * piece.steps
            self.step += piece.steps
            self.at = self.cut.position_after(0, piece.end)

    def once_more(self) -> Lockstep:
        """The same, once the present step is committed; this one stays where it is."""
        twin = copy.copy(self)
        twin.micro = self.micro.copy()
        twin.commit(1)
        return twin

    def reshare(self, generation: int, shares: tuple[int, ...], step_s: float) -> None:
        """Other shares from the present step on."""
        self.generation, self.shares, self.step_s = generation, shares, step_s
        self._dealt = {}

    def present(self) -> Piece:
        """The present step."""
        span = self.cut.span(self.step, self.at)
        return Piece(self.step, span.epoch, span.start, 1, span.samples)

    def owned(self) -> list[Sequence[int]]:
        """By rank, the micro-batches of the present step that each has kept or is to compute."""
        if self.adopted is not None:
            return list(self.adopted)
        counts, _ = self.dealt(self.present().samples)
        ends = np.cumsum(counts).tolist()
        return [range(end - n, end) for end, n in zip(ends, counts.tolist(), strict=True)]

    def dealt(self, samples: int) -> tuple[Counts, Counts]:
        """By rank, micro-batches of a step of so many samples, and the bounds of their samples."""
        known = self._dealt.get(samples)
        if known is None:
            count = -(-samples // self.cut.micro_batch)
            full = samples == self.cut.global_batch
            counts = np.array(self.shares if full else deal(self.shares, count), np.int64)
            bounds = np.zeros(len(counts) + 1, np.int64)
            np.cumsum(counts * self.cut.micro_batch, out=bounds[1:])
            known = self._dealt[samples] = counts, np.minimum(bounds, samples)
        return known

    def _commit_adopted(self, adopted: Sequence[Sequence[int]]) -> None:
        piece = self.present()
        worth = each(piece, self.cut.micro_batch)
        for taken in adopted:
            self.value = (self.value + total(worth[list(taken)])) & MASK
        self.micro += np.array(self.fresh, np.int64)
        self.step += 1
        self.at = self.cut.position_after(0, piece.end)
        self.adopted = None
