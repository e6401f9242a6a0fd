"""Reading samples: how a data set is asked for many, and where in the sequence they stand.

What may be gone at the next try, as a lost connection is, is tried again a little later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from operator import getitem
from typing import TYPE_CHECKING, Any

from raycloud.data import patience
from raycloud.data.patience import patiently

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from raycloud.order import MicroBatch, Order
    from raycloud.task import Samples

Range = tuple[int, int, int]
"""An epoch, and samples [start, stop) of it."""

PAUSE = patience.wait

_KEPT = 64  # ranges


class View:
    """The samples as they are known at one time. Thread-safe.

    Attributes:
        order: Which sample stands where.
        read: Many samples by their ids.
        as_rows: Whether they come as `Rows`.
    """

    def __init__(self, samples: Samples, order: Order) -> None:
        """Look up how samples are read."""
        self.order = order
        self._known: dict[Range, npt.NDArray[np.int64]] = {}
        self.read = reader(samples)
        self.as_rows = hasattr(samples, "gather")
        self._want: Callable[[npt.NDArray[np.int64]], None] | None = getattr(samples, "want", None)

    def ids(self, one: Range) -> npt.NDArray[np.int64]:
        """The samples of a range."""
        known = self._known.pop(one, None)
        return self.order.ids(*one) if known is None else known

    def hint(self, ranges: Iterable[Range], later: int) -> None:
        """Say that what stands `later` places after these will be read, if that is of use.

        What was looked up for that is kept, since most of it will be asked for as it is.
        """
        if self._want is None:
            return
        for one in ranges:
            ahead = moved(one, later, self.order)
            self._known[ahead] = ids = self.order.ids(*ahead)
            self._want(ids)
        while len(self._known) > _KEPT:  # others were asked for: the shares have changed
            with suppress(KeyError, RuntimeError):  # another thread is at it too
                del self._known[next(iter(self._known))]


def reader(samples: Samples) -> Callable[[npt.NDArray[np.int64]], Any]:
    """How to read many samples: as rows, by the data set's `__getitems__`, or one by one."""
    gather: Callable[[npt.NDArray[np.int64]], Any] | None = getattr(samples, "gather", None)
    if gather is not None:
        return gather  # of our own, which reads files
    many = getattr(samples, "__getitems__", None)
    if many is not None:
        return lambda ids: patiently(lambda: many(ids.tolist()), PAUSE)
    return lambda ids: [patiently(partial(getitem, samples, i), PAUSE) for i in ids.tolist()]


def joined(micro_batches: Iterable[MicroBatch]) -> list[Range]:
    """Where these lie, neighbours joined: an order is asked less often."""
    found: list[Range] = []
    for m in micro_batches:
        if found and found[-1][0] == m.epoch and found[-1][2] == m.start:
            found[-1] = (m.epoch, found[-1][1], m.stop)
        else:
            found.append((m.epoch, m.start, m.stop))
    return found


def moved(one: Range, later: int, order: Order) -> Range:
    """The range `later` places on, cut at the end of its epoch."""
    epoch, start, stop = one[0], one[1] + later, one[2] + later
    while start >= (length := order.samples_in(epoch)):
        epoch, start, stop = epoch + 1, start - length, stop - length
    return epoch, start, min(stop, length)
