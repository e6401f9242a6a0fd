"""Which sample stands at which place of an epoch.

The permutation is a keyed bijection computed on demand, so that any member can look up any place of
an epoch of any length without storing the epoch.
"""

from __future__ import annotations

from copy import copy
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
        self.samples, self._seed, self._shuffle = samples, seed, shuffle
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
        samples: Of the first epoch; see `extended`.
    """

    def __init__(
        self, *, samples: int, seed: int, shuffle: bool = True, layout: Layout | None = None
    ) -> None:
        """Check the length; of an epoch nothing is computed yet."""
        self.samples = samples
        self.seed = seed
        self.shuffle = shuffle
        # By the first epoch of each.
        self._extents: tuple[tuple[int, Lanes | _Whole], ...] = (
            (0, self._sequence_of(samples, layout)),
        )

    def ids(self, epoch: int, start: int, stop: int) -> Ids:
        """Sample ids at offsets [start, stop) of `epoch`, shape (stop - start,).

        >>> order = Order(samples=10, seed=0)
        >>> sorted(order.ids(3, 0, 10).tolist()) == list(range(10))
        True

        Raises:
            IndexError: The range reaches outside the epoch.
        """
        sequence = self._at(epoch)
        if not 0 <= start <= stop <= sequence.samples:
            raise IndexError(f"offsets [{start}, {stop}) outside an epoch of {sequence.samples}")
        return sequence.ids(epoch, start, stop)

    def partitions(self, epoch: int) -> Ids:
        """Partitions with rows, in the order in which a shuffled `epoch` reads their windows.

        Without a layout, or unshuffled, there are none.
        """
        sequence = self._at(epoch)
        if isinstance(sequence, Lanes):
            return sequence.partitions(epoch)
        return np.empty(0, np.int64)

    def layout_in(self, epoch: int) -> Layout | None:
        """The layout that `epoch` is shuffled by; None: it is a whole."""
        sequence = self._at(epoch)
        return sequence.layout if isinstance(sequence, Lanes) else None

    def lanes_in(self, epoch: int) -> int:
        """Lanes that `epoch` is read in; 0 without a layout or unshuffled."""
        layout = self.layout_in(epoch)
        return 0 if layout is None else layout.lanes

    def lane_partitions(self, epoch: int, lane: int) -> Ids:
        """The partitions of `lane` in the order in which `epoch` reads them.

        They are the same in every epoch until the data grows, in another order.

        Raises:
            IndexError: The epoch has no such lane.
        """
        sequence, lanes = self._at(epoch), self.lanes_in(epoch)
        if not isinstance(sequence, Lanes) or not 0 <= lane < lanes:
            raise IndexError(f"lane {lane} of epoch {epoch}, which has {lanes} lanes")
        return sequence.lane(epoch, lane)

    @property
    def extents(self) -> tuple[tuple[int, int, Layout | None], ...]:
        """From which epoch on it has how many samples, and which layout: each change in turn.

        >>> Order(samples=4, seed=0).extended(2, 6, None).extents
        ((0, 4, None), (2, 6, None))
        """
        return tuple((f, one.samples, self.layout_in(f)) for f, one in self._extents)

    @property
    def newest_from(self) -> int:
        """The first epoch of the newest samples and layout; 0 where nothing was extended."""
        return self._extents[-1][0]

    def samples_in(self, epoch: int) -> int:
        """Number of samples of `epoch`."""
        return self._at(epoch).samples

    def extended(self, epoch: int, samples: int, layout: Layout | None) -> Self:
        """The order of data that has grown: from `epoch` on it has `samples` and `layout`.

        Of two changes at the same epoch the later one holds. A partition keeps its lane if the new
        layout adds partitions behind the old ones.

        >>> order = Order(samples=4, seed=0).extended(2, 6, None)
        >>> order.samples_in(1), order.samples_in(2), order.samples
        (4, 6, 4)

        Raises:
            ValueError: `epoch` lies before the newest change or is the first, or the data shrinks.
        """
        first, newest = self._extents[-1]
        if epoch < max(1, first):
            raise ValueError(f"data can grow from epoch {max(1, first)} on, not from epoch {epoch}")
        if samples < newest.samples:
            raise ValueError(
                f"data can only grow: it has {newest.samples} samples, and from epoch {epoch} on "
                f"would have {samples}"
            )
        grown = copy(self)
        kept = self._extents if first < epoch else self._extents[:-1]
        grown._extents = (*kept, (epoch, self._sequence_of(samples, layout)))  # noqa: SLF001 - a copy
        return grown

    def _sequence_of(self, samples: int, layout: Layout | None) -> Lanes | _Whole:
        if samples < 1:
            raise ValueError(f"an epoch needs at least one sample, got samples={samples}")
        if layout is not None and layout.samples != samples:
            raise ValueError(
                f"the layout's partitions hold {layout.samples} rows, but samples={samples}"
            )
        if layout is not None and self.shuffle:
            return Lanes(layout, self.seed)
        return _Whole(samples, self.seed, shuffle=self.shuffle)

    def _at(self, epoch: int) -> Lanes | _Whole:
        later = (one for first, one in reversed(self._extents) if first <= epoch)
        return next(later, self._extents[0][1])
