"""Which sample stands at which place of an epoch.

The permutation is a keyed bijection computed on demand (a Feistel network with cycle walking:
Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002), so that any member can
look up any place of an epoch of any length without storing the epoch.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from raycloud.order.seeds import stream_seed

_ROUNDS = 6


class Order:
    """The canonical sequence of sample ids of every epoch.

    Args:
        samples: Number of samples of one epoch, at least 1.
        seed: The job's seed.
        shuffle: Permute each epoch anew; otherwise ids stand in their own order.
    """

    def __init__(self, *, samples: int, seed: int, shuffle: bool = True) -> None:
        """Check the length; nothing is computed yet."""
        if samples < 1:
            raise ValueError(f"an epoch needs at least one sample, got samples={samples}")
        self.samples = samples
        self.seed = seed
        self.shuffle = shuffle
        self._half_bits = np.uint64(max(1, ((samples - 1).bit_length() + 1) // 2))

    def ids(self, epoch: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Sample ids at offsets [start, stop) of `epoch`, shape (stop - start,).

        >>> order = Order(samples=10, seed=0)
        >>> sorted(order.ids(3, 0, 10).tolist()) == list(range(10))
        True

        Raises:
            IndexError: The range reaches outside the epoch.
        """
        if not 0 <= start <= stop <= self.samples:
            raise IndexError(f"offsets [{start}, {stop}) outside an epoch of {self.samples}")
        places = np.arange(start, stop, dtype=np.uint64)
        if self.shuffle and places.size:
            places = self._permute(places, epoch)
        return places.astype(np.int64)

    def _permute(self, places: npt.NDArray[np.uint64], epoch: int) -> npt.NDArray[np.uint64]:
        keys = [np.uint64(stream_seed(self.seed, epoch, r)) for r in range(_ROUNDS)]
        out = self._encrypt(places, keys)
        outside = np.flatnonzero(out >= self.samples)
        while outside.size:  # the domain is < 4 x samples, so a few walks suffice
            out[outside] = self._encrypt(out[outside], keys)
            outside = outside[out[outside] >= self.samples]
        return out

    def _encrypt(
        self, values: npt.NDArray[np.uint64], keys: list[np.uint64]
    ) -> npt.NDArray[np.uint64]:
        bits = self._half_bits
        low_mask = (np.uint64(1) << bits) - np.uint64(1)
        left, right = values >> bits, values & low_mask
        for key in keys:
            left, right = right, left ^ (_scatter(right ^ key) & low_mask)
        return (left << bits) | right


def _scatter(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """`seeds.mix` on an array; products wrap at 64 bits on purpose."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
