"""Keyed permutations that are computed place by place, and the numbers that key them.

A Feistel network with cycle walking (Black and Rogaway, "Ciphers with arbitrary finite domains",
CT-RSA 2002): any place of a permutation of any length, without storing the others. Numbers come
from SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA
2014), read at any place of its stream.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from raycloud.order.seeds import mix

Unsigned = npt.NDArray[np.uint64]

ROUNDS = 6
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FEW = 8  # places
_ONE = np.uint64(1)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def numbers(seed: int, count: int) -> Unsigned:
    """The first `count` numbers of SplitMix64's stream from `seed`: all differ, shape (count,).

    >>> [hex(number) for number in numbers(0, 2).tolist()]
    ['0xe220a8397b1dcdaf', '0x6e789e6aa1b965f4']
    """
    return scatter(np.uint64(seed) + np.arange(1, count + 1, dtype=np.uint64) * _GAMMA)


def permute(places: Unsigned, sizes: Unsigned, bits: Unsigned, keys: Unsigned) -> Unsigned:
    """Where each of `places` stands in the permutation of [0, size) that its keys select.

    Args:
        places: Shape (n,), each below its size.
        sizes: Lengths of the permutations, shape (n,), or (1,) where all are the same one.
        bits: Of the network's left and right half, shape (2, n) or (2, 1): together they span at
            least `size` places, and the fewer beyond it the faster.
        keys: Shape (ROUNDS, n) or (ROUNDS, 1).

    >>> size, bits = np.array([10], np.uint64), np.array([[2], [2]], np.uint64)
    >>> keys = numbers(7, ROUNDS)[:, None]
    >>> sorted(permute(np.arange(10, dtype=np.uint64), size, bits, keys).tolist())
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """
    if len(sizes) == 1 and len(places) <= _FEW:
        one = _One(int(sizes[0]), bits, keys)
        return np.array([one.place(place) for place in places.tolist()], np.uint64)
    out = _encrypt(places, bits, keys)
    at = np.flatnonzero(out >= sizes)
    least = _FEW if len(sizes) == 1 else 0
    while at.size > least:  # those that fell beyond their size walk on until they are within
        if len(sizes) > 1:
            walked = _encrypt(out[at], bits[:, at], keys[:, at])
            beyond = walked >= sizes[at]
        else:
            walked = _encrypt(out[at], bits, keys)
            beyond = walked >= sizes
        out[at] = walked
        at = at[beyond]
    if at.size:
        one = _One(int(sizes[0]), bits, keys)
        out[at] = [one.walked(value) for value in out[at].tolist()]
    return out


def scatter(values: Unsigned) -> Unsigned:
    """`seeds.mix` on an array; products wrap at 64 bits on purpose."""
    first, second, third = _SHIFTS
    scattered: Unsigned = values ^ (values >> first)
    scattered *= _FACTORS[0]
    scattered ^= scattered >> second
    scattered *= _FACTORS[1]
    scattered ^= scattered >> third
    return scattered


class _One:
    """One permutation, for a place at a time: so few that arrays would cost more than they save."""

    def __init__(self, size: int, bits: Unsigned, keys: Unsigned) -> None:
        left, right = bits[:, 0].tolist()
        self._size, self._shift = size, right
        self._left, self._right = (1 << left) - 1, (1 << right) - 1
        rounds = keys[:, 0].tolist()
        self._rounds = list(zip(rounds[::2], rounds[1::2], strict=True))

    def place(self, value: int) -> int:
        """Where one place stands."""
        return self.walked(self._encrypt(value))

    def walked(self, value: int) -> int:
        """The first one within the size, from an encrypted one on."""
        while value >= self._size:
            value = self._encrypt(value)
        return value

    def _encrypt(self, value: int) -> int:
        left, right = value >> self._shift, value & self._right
        for even, odd in self._rounds:
            left ^= mix(right ^ even) & self._left
            right ^= mix(left ^ odd) & self._right
        joined: int = (left << self._shift) | right
        return joined


def _encrypt(values: Unsigned, bits: Unsigned, keys: Unsigned) -> Unsigned:
    left_mask, right_mask = (_ONE << bits) - _ONE
    left, right = values >> bits[1], values & right_mask
    for even, odd in zip(keys[::2], keys[1::2], strict=True):
        left ^= scatter(right ^ even) & left_mask
        right ^= scatter(left ^ odd) & right_mask
    joined: Unsigned = (left << bits[1]) | right
    return joined
