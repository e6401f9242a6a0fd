"""How many partitions, and where they begin."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest

from raycloud.data.partition import bytes_of_rows, equal_bytes, partition_count
from raycloud.rows import Rows


@pytest.mark.parametrize(
    ("rows", "largest", "lanes", "count"),
    [
        (0, 1, 4, 4),  # always a whole number of lanes
        (3, 1, 4, 4),  # fewer rows than lanes: some are empty
        (4, 10, 4, 4),
        (15, 10, 4, 12),  # no partition is empty where there are rows
        (16, 10, 4, 16),  # four of each lane
        (10_000, 10_000, 4, 16),
        (10_000, 100, 4, 100),
        (10_000, 99, 4, 104),  # up to a whole number of lanes
        (10_000, 1, 4, 10_000),
        (10_001, 1, 4, 10_000),
        (60_000, 5461, 64, 256),  # 60,000 images of 3 kB
    ],
)
def test_partition_count(rows: int, largest: int, lanes: int, count: int) -> None:
    assert partition_count(rows, largest, lanes) == count


def test_equal_bytes_follow_the_rows_sizes() -> None:
    sizes = np.array([10] * 40 + [1000] * 40)
    starts = equal_bytes(sizes, lanes=1, partition_bytes=12_000)
    parts = [int(sizes[a:b].sum()) for a, b in pairwise(starts)]
    assert len(parts) == 4
    assert parts == [10_400, 10_000, 10_000, 10_000]


@pytest.mark.parametrize("sizes", [[], [0, 0, 0], [5], [1, 10**6, 1]])
def test_equal_bytes_of_odd_rows(sizes: list[int]) -> None:
    starts = equal_bytes(np.array(sizes, dtype=np.int64), lanes=2, partition_bytes=1024)
    assert (starts[0], starts[-1]) == (0, len(sizes))
    assert list(starts) == sorted(starts)
    assert (len(starts) - 1) % 2 == 0


def test_bytes_of_rows() -> None:
    rows = Rows({"image": np.zeros((3, 4, 5), np.uint8), "label": np.zeros(3, np.int32)})
    fixed = rows.to_table()
    assert bytes_of_rows(fixed) == 24
    texts = pa.array(["a", None, "bcde"])
    assert list(bytes_of_rows(fixed.append_column("s", texts))) == [25, 24, 28]  # type: ignore[arg-type]
    lists = pa.array([[1, 2], [], None], pa.list_(pa.int16()))
    assert list(bytes_of_rows(fixed.append_column("l", lists))) == [28, 24, 24]  # type: ignore[arg-type]
    assert bytes_of_rows(pa.table({"b": [True, False], "n": pa.nulls(2)})) == 1
    assert bytes_of_rows(pa.table({"d": pa.array([1, None], pa.decimal128(10, 2))})) == 16
    struct = pa.array([{"a": 1, "b": "xy"}, {"a": 2, "b": ""}])
    assert list(bytes_of_rows(pa.table({"s": struct}))) == [10, 8]  # type: ignore[arg-type]
    chunks = pa.concat_tables([pa.table({"s": ["a", "bb"]}), pa.table({"s": ["ccc"]})])
    assert list(bytes_of_rows(chunks)) == [1, 2, 3]  # type: ignore[arg-type]
    assert list(bytes_of_rows(chunks.slice(1))) == [2, 3]  # type: ignore[arg-type]
    coded = pa.table({"d": pa.array(["a", "b"]).dictionary_encode()})
    assert bytes_of_rows(coded) == 4
