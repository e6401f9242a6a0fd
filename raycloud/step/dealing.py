"""Whether members read, between them, each sample of a step once.

Each sample has a code, and members tell each other, on the control lane, the sum of the codes of
what they have read for a step. Any of them can say what it must come to, since the order of the
samples is known to all. That takes as long as looking up the samples of a member's own share, so
members do it in turns, and of a few samples a second.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from raycloud.errors import DealingError
from raycloud.order import MicroBatch

if TYPE_CHECKING:
    from raycloud.order import StepSpan
    from raycloud.step.collate import Collate

Codes = npt.NDArray[np.uint64]

ROWS = 1 << 32  # sums are modulo this, so that those of 2**21 members are exact as a float64

_SHIFT = np.uint64(32)
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio (Knuth, TAOCP 3, 6.4)
_IN_TURN = 64  # steps
_MOST = 4096  # samples that are looked up for one report; those of one step always are


def codes_of(ids: npt.NDArray[np.int64]) -> Codes:
    """A code below `ROWS` of each sample: sums of other samples are other ones, but by chance."""
    return (ids.astype(np.uint64) + np.uint64(1)) * _FACTOR >> _SHIFT


def row_sum_of(codes: Codes) -> int:
    """The sum of some codes."""
    return int(codes.sum()) % ROWS


def row_sum(ids: npt.NDArray[np.int64]) -> int:
    """The sum of the codes of some samples.

    >>> row_sum(np.array([3, 1, 2])) == row_sum(np.array([1, 2, 3])) != row_sum(np.array([2, 2, 2]))
    True
    """
    return row_sum_of(codes_of(ids))


class Reads:
    """What members have read for committed steps, of which this one looks some up.

    Args:
        collate: Knows which samples a step takes.
    """

    def __init__(self, collate: Collate) -> None:
        """Nothing is committed yet."""
        self._collate = collate
        self._rank, self._size = 0, 1
        self.forget()

    def enter(self, rank: int, size: int) -> None:
        """Be one of `size` members that take turns."""
        self._rank, self._size = rank, size

    def forget(self) -> None:
        """What was committed is not to be looked up."""
        self._spans: list[StepSpan] = []
        self._samples = self._sum = 0

    def add(self, span: StepSpan, rows: int) -> None:
        """A step is committed, of which all members together have told `rows`."""
        own = span.step // _IN_TURN % self._size == self._rank
        if own and (not self._spans or self._samples + span.samples <= _MOST):
            self._spans.append(span)
            self._samples += span.samples
            self._sum += rows

    def check(self) -> None:
        """Look up what was committed since the last time.

        Raises:
            DealingError: Members have read other samples, or not each of them once.
        """
        spans, told = self._spans, self._sum % ROWS
        if not spans:
            return
        self.forget()
        if self._collate.row_sum(_joined(spans)) % ROWS != told:
            raise DealingError(
                f"for steps {spans[0].step} to {spans[-1].step} members have read other samples "
                "than these steps take, or not each of them once"
            )


def _joined(spans: Iterable[StepSpan]) -> list[MicroBatch]:
    """Where steps lie, neighbours joined: an order is asked less often."""
    found: list[MicroBatch] = []
    for s in spans:
        if found and (found[-1].epoch, found[-1].stop) == (s.epoch, s.start):
            found[-1] = replace(found[-1], stop=s.stop)
        else:
            found.append(MicroBatch(index=0, epoch=s.epoch, start=s.start, stop=s.stop))
    return found
