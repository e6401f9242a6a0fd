"""Keyed permutations that are computed place by place, and the numbers that key them.

A Feistel network with cycle walking (Black and Rogaway, "Ciphers with arbitrary finite domains",
CT-RSA 2002): any place of a permutation of any length, without storing the others. Numbers come
from SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA
2014), read at any place of its stream.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Unsigned = npt.NDArray[np.uint64]

ROUNDS = 6
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
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
    out = _encrypt(places, bits, keys)
    at = np.flatnonzero(out >= sizes)
    while at.size:  # those that fell beyond their size walk on until they are within
        if len(sizes) > 1:
            walked = _encrypt(out[at], bits[:, at], keys[:, at])
            beyond = walked >= sizes[at]
        else:
            walked = _encrypt(out[at], bits, keys)
            beyond = walked >= sizes
        out[at] = walked
        at = at[beyond]
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


def _encrypt(values: Unsigned, bits: Unsigned, keys: Unsigned) -> Unsigned:
    left_mask, right_mask = (_ONE << bits) - _ONE
    left, right = values >> bits[1], values & right_mask
    for even, odd in zip(keys[::2], keys[1::2], strict=True):
        left ^= scatter(right ^ even) & left_mask
        right ^= scatter(left ^ odd) & right_mask
    joined: Unsigned = (left << bits[1]) | right
    return joined
