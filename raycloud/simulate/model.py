"""An exact integer model of training: what a step adds to the parameters.

The parameters are one integer modulo 2^64. Step s of epoch e, which takes the samples [i, j), adds
h(e, s) * (p(j) - p(i)): h scatters, and p is a polynomial without a constant term, so that every
sample counts by its place, epoch and step, and any cut of a step into ranges adds up to the same.
What many alike steps add is a closed form, by the sums of h(e, s) * i^k over them. So months of
steps are exact and cheap.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from raycloud.order import EpochSizes, Position, Steps, mix

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

    Args:
        piece: The steps.
        bounds: Of the samples of a step, member r takes [bounds[r], bounds[r + 1]).
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
    """One loop that knows of nobody: the parameters after so many steps, and the samples taken.

    Args:
        at: After how many steps, rising.
        sizes: Samples of every epoch.
        global_batch: Samples of a step.
        drop_last: Leave out the short last step of an epoch.

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
