"""A generation that computes in lockstep, in an exact integer model of training.

The parameters are one integer modulo 2^64. Step s of epoch e, which takes the samples [i, j), adds
h(e, s) * (p(j) - p(i)): h scatters, and p is a polynomial without a constant term, so that every
sample counts by its place, epoch and step, and any cut of a step into ranges adds up to the same.
What many alike steps add is a closed form, by the sums of h(e, s) * i^k over them. So months of
steps are exact and cheap, and many are taken at once while nothing happens.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from raycloud.order import EpochSizes, Position, Steps, deal, mix, whole_shares

MASK = (1 << 64) - 1
Words = npt.NDArray[np.uint64]

_A, _B, _C = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9  # of p
_M, _N = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # those of `mix`


@dataclass(frozen=True, slots=True)
class Piece:
    """Alike steps in a row: `steps` of them from `step` on, of `samples` each, within `epoch`."""

    step: int
    epoch: int
    offset: int
    steps: int
    samples: int

    @property
    def end(self) -> Position:
        """Right after the last sample."""
        return Position(epoch=self.epoch, offset=self.offset + self.steps * self.samples)


def pieces(cut: Steps, step: int, at: Position, steps: int) -> Iterator[Piece]:
    """The next `steps` steps, from `step` at `at` on.

    >>> cut = Steps(samples=10, global_batch=4, micro_batch=2)
    >>> for piece in pieces(cut, 7, Position(offset=4), 4):
    ...     print(piece.step, piece.epoch, piece.offset, piece.steps, piece.samples)
    7 0 4 1 4
    8 0 8 1 2
    9 1 0 2 4
    """
    while steps:
        span = cut.span(step, at)
        alike = 1
        if span.samples == cut.global_batch:
            alike = min(steps, (cut.samples_in(span.epoch) - span.start) // cut.global_batch)
        piece = Piece(step, span.epoch, span.start, alike, span.samples)
        yield piece
        step, steps, at = step + alike, steps - alike, piece.end


def parts(piece: Piece, bounds: npt.NDArray[np.int64]) -> Words:
    """What each member's samples of all steps of `piece` add together.

    Of the samples of a step, member r takes [bounds[r], bounds[r + 1]).
    """
    steps = np.arange(piece.steps, dtype=np.uint64)
    scattered = _scattered(piece.epoch, steps + np.uint64(piece.step))
    at = steps * np.uint64(piece.samples) + np.uint64(piece.offset)
    sums = [scattered.sum(), (scattered * at).sum(), (scattered * at * at).sum()]
    d = bounds.astype(np.uint64)
    # p(at + d) - p(at), sorted by powers of `at`.
    grown = (
        d * (np.uint64(_A) + d * (np.uint64(_B) + d * np.uint64(_C))),
        d * (np.uint64(2 * _B & MASK) + d * np.uint64(3 * _C & MASK)),
        d * np.uint64(3 * _C & MASK),
    )
    whole = np.zeros(len(d), np.uint64)
    for total, growth in zip(sums, grown, strict=True):
        whole += np.uint64(total) * growth
    apart: Words = whole[1:] - whole[:-1]
    return apart


def each(piece: Piece, micro_batch: int) -> Words:
    """What each micro-batch of the first step of `piece` adds."""
    starts = np.arange(0, piece.samples, micro_batch)
    bounds = np.append(starts, piece.samples)
    return parts(Piece(piece.step, piece.epoch, piece.offset, 1, piece.samples), bounds)


def total(values: Words) -> int:
    """Their sum."""
    return int(values.sum()) & MASK


def undisturbed(
    at: Sequence[int], *, sizes: EpochSizes, global_batch: int, drop_last: bool
) -> dict[int, tuple[int, int]]:
    """One loop that knows of nobody: the parameters and the samples taken after each of `at` steps.

    >>> sizes = EpochSizes(10, later=((1, 12),))
    >>> [taken for _, taken in undisturbed([3, 6, 7], sizes=sizes, global_batch=4, drop_last=False)
    ...  .values()]
    [10, 22, 26]
    """
    value, taken, epoch, offset, found = 0, 0, 0, 0, dict[int, tuple[int, int]]()
    samples = sizes.at(0)
    least, due = global_batch if drop_last else 1, set(at)
    if 0 in due:
        found[0] = 0, 0
    for step in range(max(due, default=0)):
        while samples - offset < least:
            epoch, offset, samples = epoch + 1, 0, sizes.at(epoch + 1)
        stop = min(offset + global_batch, samples)
        scattered = mix(mix(epoch + 1) + step)
        value = (value + scattered * (_worth(stop) - _worth(offset))) & MASK
        taken, offset = taken + stop - offset, stop
        if step + 1 in due:
            found[step + 1] = value, taken
    return found


def _worth(sample: int) -> int:
    """p: what the samples before this one are worth."""
    return sample * (_A + sample * (_B + sample * _C))


def _scattered(epoch: int, steps: Words) -> Words:
    """h: `mix(mix(epoch + 1) + step)` of each step, as the loop has it."""
    h: Words = steps + np.uint64(mix(epoch + 1))
    h = (h ^ (h >> np.uint64(30))) * np.uint64(_M)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(_N)
    return h ^ (h >> np.uint64(31))


_ROUNDING = 1e-6  # of a step
_FAR = 1 << 62

Counts = npt.NDArray[np.int64]
Seconds = npt.NDArray[np.float64]


@dataclass(kw_only=True, eq=False)
class Lockstep:
    """The members of one generation, and how far they are.

    Those that `adopted` something take, by rank, these micro-batches of the first step, of which
    `fresh` are still to be computed. Newcomers follow the others and take the state meanwhile;
    those that are `idle` write nothing: newcomers, and who has no share yet.
    """

    cut: Steps
    members: tuple[int, ...]
    shares: tuple[float, ...]
    formed_as: int  # the generation as which they met
    generation: int  # the same, or that of their last new shares
    first_step: int
    step: int
    at: Position
    value: int
    begun_s: float  # later than now: they still come together
    step_s: float
    barrier: int = _FAR  # before this step something is due
    adopted: Sequence[Sequence[int]] | None = None
    fresh: Sequence[int] = ()
    newcomers: frozenset[int] = frozenset()
    idle: frozenset[int] = frozenset()
    stalled_s: float | None = None  # since when one of them stands still
    saved_step: int = -1
    ticket: int = 0  # what was planned under an older one is void
    useful_s: float = 0.0  # in which steps were computed
    micro: Counts = field(init=False)
    told: Counts = field(init=False)
    # By rank, of a step as things are: seconds that do not depend on the share, and of each.
    fixed_s: Seconds = field(init=False)
    micro_s: Seconds = field(init=False)
    computed_s: Seconds = field(init=False)  # by rank, as `micro`
    told_s: Seconds = field(init=False)

    def __post_init__(self) -> None:
        """Nothing is computed yet."""
        self.micro = np.zeros(len(self.members), np.int64)
        self.told = self.micro.copy()
        self.fixed_s, self.micro_s = (np.zeros(len(self.members)) for _ in range(2))
        self.computed_s, self.told_s = self.fixed_s.copy(), self.fixed_s.copy()
        self._dealt: dict[int, tuple[Counts, Counts]] = {}

    @property
    def barrier_s(self) -> float:
        """When they come to the barrier, unless something happens."""
        return self.begun_s + (self.barrier - self.step) * self.step_s

    @property
    def kept(self) -> int:
        """Micro-batches of the first step that were computed before they met."""
        adopted = 0 if self.adopted is None else sum(map(len, self.adopted))
        return adopted - sum(self.fresh) if adopted else 0

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
            self.computed_s += piece.steps * self._takes_s(counts)
            self.step += piece.steps
            self.at = self.cut.position_after(0, piece.end)

    def once_more(self) -> Lockstep:
        """The same, once the present step is committed; this one stays where it is."""
        twin = copy.copy(self)
        twin.micro, twin.computed_s = self.micro.copy(), self.computed_s.copy()
        twin.commit(1)
        return twin

    def reshare(self, generation: int, shares: tuple[float, ...], step_s: float) -> None:
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
            counts = np.array(whole_shares(self.shares, 0) if full else deal(self.shares, count))
            bounds = np.zeros(len(counts) + 1, np.int64)
            np.cumsum(counts * self.cut.micro_batch, out=bounds[1:])
            known = self._dealt[samples] = counts, np.minimum(bounds, samples)
        return known

    def _takes_s(self, counts: Counts) -> Seconds:
        """By rank, how long so many micro-batches of a step take now."""
        return np.where(counts > 0, self.fixed_s + counts * self.micro_s, 0.0)

    def _commit_adopted(self, adopted: Sequence[Sequence[int]]) -> None:
        piece = self.present()
        worth = each(piece, self.cut.micro_batch)
        for taken in adopted:
            self.value = (self.value + total(worth[list(taken)])) & MASK
        fresh = np.array(self.fresh, np.int64)
        self.micro += fresh
        self.computed_s += self._takes_s(fresh)
        self.step += 1
        self.at = self.cut.position_after(0, piece.end)
        self.adopted = None
