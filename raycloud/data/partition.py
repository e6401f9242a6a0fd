"""Partitions: how many, where they begin, which rows are dealt to which; and bytes of rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from raycloud.order.permutation import numbers
from raycloud.order.seeds import stream_seed

Ints = npt.NDArray[np.int64]
Width = int | Ints
"""Bytes of every row alike, or of each."""

_PER_LANE = 4  # partitions of a lane, at least: with fewer, epochs would hardly differ
_OF_FIXED_SIZE = (pa.types.is_primitive, pa.types.is_fixed_size_binary, pa.types.is_decimal)
_DEALING = 0x6465616C  # so that no other use of the same seed draws alike


def partition_count(rows: int, largest: int, lanes: int) -> int:
    """How many partitions of at most `largest` rows: at least 4 of each lane where there are rows.

    The least multiple of `lanes` that keeps partitions as small as asked; no more than leave a row
    to each, but always `lanes`.

    >>> partition_count(1000, 1000, 8), partition_count(1000, 10, 8), partition_count(20, 10, 8)
    (32, 104, 16)
    >>> partition_count(3, 10, 8)
    8
    """
    of_lane = max(_PER_LANE, -(-rows // (largest * lanes)))
    return lanes * max(1, min(of_lane, rows // lanes))


def rows_of_bytes(rows: int, total_bytes: int, partition_bytes: int) -> int:
    """Rows of usual size that a partition may have, at least 1.

    >>> rows_of_bytes(100, 1000, 55), rows_of_bytes(100, 1000, 3), rows_of_bytes(0, 0, 3)
    (5, 1, 1)
    """
    return max(1, min(rows, partition_bytes * rows // max(1, total_bytes)))


def equal_rows(rows: int, count: int) -> tuple[int, ...]:
    """The first row of each of `count` partitions, and one past the last; sizes differ by 1.

    >>> equal_rows(10, 4)
    (0, 2, 5, 7, 10)
    """
    return tuple(place * rows // count for place in range(count + 1))


def equal_bytes(row_bytes: npt.NDArray[Any], lanes: int, partition_bytes: int) -> tuple[int, ...]:
    """The same where partitions shall be equal in bytes: each begins within a row of its due place.

    A partition is larger than `partition_bytes` only where single rows are more than half of that.
    A row that is larger than what a partition is due leaves others empty. There are as many as
    `partition_count` says.
    """
    ends = np.concatenate([[0], np.cumsum(row_bytes, dtype=np.int64)])
    rows, total = len(row_bytes), int(ends[-1])
    room = max(1, partition_bytes - int(max(row_bytes, default=0)))  # a cut may be a row too late
    least = -(-total // room)
    count = partition_count(rows, max(1, rows // max(1, least)), lanes)
    due = np.array([place * total // count for place in range(count + 1)], dtype=np.int64)
    after = np.searchsorted(ends, due)
    before = np.maximum(after - 1, 0)
    cuts = np.where(due - ends[before] < ends[after] - due, before, after)
    cuts[0], cuts[-1] = 0, rows  # rows of no bytes at either end
    return tuple(cuts.tolist())


def deal(codes: npt.NDArray[Any], partitions: int, seed: int = 0) -> list[Ints]:
    """Deal rows to partitions like cards, sorted by class: for each partition its rows, rising.

    Within a class rows are dealt in a random order, drawn from `seed`. As the rows of a class stand
    in a row, each partition gets one in `partitions` of them, up or down to a whole row; and as
    classes follow each other without a gap, so it does of all rows.

    >>> [part.tolist() for part in deal(np.array([0, 0, 0, 1, 1, 2]), 2)]
    [[0, 1, 4], [2, 3, 5]]
    """
    cards = np.lexsort((numbers(stream_seed(_DEALING, seed), len(codes)), codes))
    return [np.sort(cards[first::partitions]).astype(np.int64) for first in range(partitions)]


def bytes_of_rows(table: pa.Table) -> Width:
    """Bytes of values in each row: one number where all rows are of one size, at least 1.

    >>> bytes_of_rows(pa.table({"x": pa.array([1, 2], pa.int32()), "s": ["a", "bcd"]}))
    array([5, 7])
    >>> bytes_of_rows(pa.table({"x": pa.array([1, 2], pa.int32())}))
    4
    """
    total = np.zeros(len(table), np.int64)
    start = 0
    for batch in table.to_batches():
        total[start : start + len(batch)] = sum(map(_width, batch.columns))
        start += len(batch)
    total = np.maximum(total, 1)
    return int(total[0]) if len(total) and (total == total[0]).all() else total


def _width(array: pa.Array) -> Width:
    while isinstance(array.type, pa.BaseExtensionType):
        array = array.storage
    if pa.types.is_dictionary(array.type):
        array = array.indices
    kind = array.type
    if pa.types.is_null(kind):
        return 0
    if any(of(kind) for of in _OF_FIXED_SIZE):
        return -(-int(kind.bit_width) // 8)
    if pa.types.is_struct(kind):
        return sum((_width(part) for part in array.flatten()), start=0)
    if not pa.types.is_nested(kind):
        return _lengths(pc.binary_length(array))
    values = array.flatten()
    width = _width(values)
    if isinstance(width, int) and pa.types.is_fixed_size_list(kind):
        return width * int(kind.list_size)
    # Of lists of texts or lists the mean, rounded up.
    each = width if isinstance(width, int) else -(-int(width.sum()) // max(1, len(values)))
    return _lengths(pc.list_value_length(array)) * each


def _lengths(lengths: pa.Array) -> Ints:
    """Of each text or list; of a missing one none."""
    return np.asarray(pc.fill_null(lengths, 0), dtype=np.int64)
