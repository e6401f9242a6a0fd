"""Which sample stands at which place of an epoch.

The permutation is a keyed bijection computed on demand, so that any member can look up any place of
an epoch of any length without storing the epoch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

from raycloud.order.layout import Lanes
from raycloud.order.permutation import ROUNDS, permute
from raycloud.order.seeds import stream_seed

if TYPE_CHECKING:
    from raycloud.order.layout import Layout

Ids = npt.NDArray[np.int64]


class _Whole:
    """An epoch permuted as a whole, or not at all."""

    def __init__(self, samples: int, seed: int, *, shuffle: bool) -> None:
        self._seed = seed
        self._shuffle = shuffle
        self._size = np.array([samples], np.uint64)
        half = max(1, ((samples - 1).bit_length() + 1) // 2)  # equal halves, always
        self._bits = np.array([[half], [half]], np.uint64)

    def ids(self, epoch: int, start: int, stop: int) -> Ids:
        if not self._shuffle or start == stop:
            return np.arange(start, stop, dtype=np.int64)
        keys = np.array([stream_seed(self._seed, epoch, r) for r in range(ROUNDS)], np.uint64)
        places = np.arange(start, stop, dtype=np.uint64)
        return permute(places, self._size, self._bits, keys[:, None]).astype(np.int64)


class Order:
    """The canonical sequence of sample ids of every epoch.

    It is the same for every member and every number of them. May be read from several threads.

    Args:
        samples: Number of samples of one epoch, at least 1.
        seed: The job's seed.
        shuffle: Permute each epoch anew; otherwise ids stand in their own order.
        layout: Shuffle so that reads stay together; None permutes the epoch as a whole.

    Attributes:
        samples: Of the first extent; see `extended`.
    """

    def __init__(
        self, *, samples: int, seed: int, shuffle: bool = True, layout: Layout | None = None
    ) -> None:
        """Check the length; of an epoch nothing is computed yet."""
        self.samples = samples
        self.seed = seed
        self.shuffle = shuffle
        self._extents: tuple[_Extent, ...] = (_Extent(0, samples, seed, layout, shuffle=shuffle),)

    def ids(self, epoch: int, start: int, stop: int) -> Ids:
        """Sample ids at offsets [start, stop) of `epoch`, shape (stop - start,).

        >>> order = Order(samples=10, seed=0)
        >>> sorted(order.ids(3, 0, 10).tolist()) == list(range(10))
        True

        Raises:
            IndexError: The range reaches outside the epoch.
        """
        extent = self._within(epoch, start, stop)
        return extent.sequence.ids(epoch, start, stop)

    def partitions_ahead(self, epoch: int, start: int, stop: int) -> Ids:
        """Partitions that offsets [start, stop) of `epoch` read from, for fetching them ahead.

        A window's rows are mixed, so all its partitions are named once the range reaches it; empty
        partitions are left out. In a shuffled epoch those needed soonest come first. Without a
        layout there are none.

        >>> from raycloud.order import Layout
        >>> layout = Layout(partitions=(0, 4, 8, 12, 16), lanes=2, run=2, window=1)
        >>> order = Order(samples=16, seed=0, layout=layout)
        >>> sorted(set((order.ids(0, 0, 4) // 4).tolist()))
        [0, 3]
        >>> order.partitions_ahead(0, 0, 4).tolist()
        [0, 3]

        Raises:
            IndexError: The range reaches outside the epoch.
        """
        extent = self._within(epoch, start, stop)
        if isinstance(extent.sequence, Lanes):
            return extent.sequence.ahead(epoch, start, stop)
        if extent.layout is None or start == stop:
            return np.empty(0, np.int64)
        starts = np.array(extent.layout.partitions)
        touched = (starts[:-1] < stop) & (starts[1:] > start) & (starts[:-1] < starts[1:])
        return np.flatnonzero(touched)

    def lanes_in(self, epoch: int) -> int:
        """Lanes that `epoch` is read in; 0 without a layout or unshuffled."""
        sequence = self._extent(epoch).sequence
        return sequence.layout.lanes if isinstance(sequence, Lanes) else 0

    def lane_partitions(self, epoch: int, lane: int) -> Ids:
        """The partitions of `lane` in the order in which `epoch` reads them.

        They are the same in every epoch (of an extent), in another order.

        Raises:
            IndexError: The epoch has no such lane.
        """
        sequence, lanes = self._extent(epoch).sequence, self.lanes_in(epoch)
        if not isinstance(sequence, Lanes) or not 0 <= lane < lanes:
            raise IndexError(f"lane {lane} of epoch {epoch}, which has {lanes} lanes")
        return sequence.partitions(epoch, lane)

    @property
    def newest_from(self) -> int:
        """The first epoch of the newest samples and layout; 0 where nothing was extended."""
        return self._extents[-1].epoch

    def samples_in(self, epoch: int) -> int:
        """Number of samples of `epoch`."""
        return self._extent(epoch).samples

    def extended(self, epoch: int, samples: int, layout: Layout | None) -> Self:
        """The order of data that has grown: from `epoch` on it has `samples` and `layout`.

        Earlier epochs stay as they are. Of two changes at the same epoch the later one holds. A
        partition keeps its lane if the new layout adds partitions behind the old ones.

        >>> order = Order(samples=4, seed=0).extended(2, 6, None)
        >>> order.samples_in(1), order.samples_in(2), order.samples
        (4, 6, 4)

        Raises:
            ValueError: `epoch` lies before the newest change or is the first, or the data shrinks.
        """
        newest = self._extents[-1]
        if epoch < max(1, newest.epoch):
            raise ValueError(
                f"data can grow from epoch {max(1, newest.epoch)} on, not from epoch {epoch}"
            )
        if samples < newest.samples:
            raise ValueError(
                f"data can only grow: it has {newest.samples} samples, and from epoch {epoch} on "
                f"would have {samples}"
            )
        kept = tuple(extent for extent in self._extents if extent.epoch < epoch)
        grown = type(self)(
            samples=self.samples,
            seed=self.seed,
            shuffle=self.shuffle,
            layout=self._extents[0].layout,
        )
        added = _Extent(epoch, samples, self.seed, layout, shuffle=self.shuffle)
        grown._extents = (*kept, added)  # noqa: SLF001 (its own kind)
        return grown

    def _within(self, epoch: int, start: int, stop: int) -> _Extent:
        extent = self._extent(epoch)
        if not 0 <= start <= stop <= extent.samples:
            raise IndexError(f"offsets [{start}, {stop}) outside an epoch of {extent.samples}")
        return extent

    def _extent(self, epoch: int) -> _Extent:
        for extent in reversed(self._extents):
            if extent.epoch <= epoch:
                return extent
        return self._extents[0]


class _Extent:
    """What holds from `epoch` on."""

    def __init__(
        self, epoch: int, samples: int, seed: int, layout: Layout | None, *, shuffle: bool
    ) -> None:
        if samples < 1:
            raise ValueError(f"an epoch needs at least one sample, got samples={samples}")
        if layout is not None and layout.samples != samples:
            raise ValueError(
                f"the layout's partitions hold {layout.samples} rows, but samples={samples}"
            )
        self.epoch = epoch
        self.samples = samples
        self.layout = layout
        self.sequence: Lanes | _Whole
        if layout is not None and shuffle:
            self.sequence = Lanes(layout, seed)
        else:
            self.sequence = _Whole(samples, seed, shuffle=shuffle)
