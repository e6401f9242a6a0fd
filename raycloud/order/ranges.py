"""Arithmetic on sets of integers that are written as disjoint, rising, half-open ranges."""

from __future__ import annotations

Ranges = tuple[tuple[int, int], ...]


def union(ranges: Ranges, start: int, stop: int) -> Ranges:
    """`ranges` with [start, stop) added; ranges that touch become one.

    >>> union(((0, 4), (8, 9)), 4, 8)
    ((0, 9),)
    """
    if start >= stop:
        return ranges
    low = tuple(r for r in ranges if r[1] < start)
    high = tuple(r for r in ranges if r[0] > stop)
    touching = ranges[len(low) : len(ranges) - len(high)]
    if touching:
        start, stop = min(start, touching[0][0]), max(stop, touching[-1][1])
    return (*low, (start, stop), *high)


def overlap(ranges: Ranges, start: int, stop: int) -> Ranges:
    """The part of `ranges` inside [start, stop).

    >>> overlap(((0, 4), (8, 12)), 2, 9)
    ((2, 4), (8, 9))
    """
    inside = ((max(start, low), min(stop, high)) for low, high in ranges)
    return tuple((low, high) for low, high in inside if low < high)


def gaps(ranges: Ranges, start: int, stop: int) -> Ranges:
    """The part of [start, stop) that `ranges` leaves open.

    >>> gaps(((0, 4), (8, 12)), 2, 20)
    ((4, 8), (12, 20))
    """
    found: list[tuple[int, int]] = []
    for low, high in overlap(ranges, start, stop):
        if start < low:
            found.append((start, low))
        start = high
    if start < stop:
        found.append((start, stop))
    return tuple(found)


def size(ranges: Ranges) -> int:
    """How many integers `ranges` holds.

    >>> size(((0, 4), (8, 9)))
    5
    """
    return sum(high - low for low, high in ranges)
