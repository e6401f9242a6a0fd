"""What holds for all partitions: sizes, order, and the mix of stratified ones."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from raycloud.data.partition import deal, equal_bytes, equal_rows, partition_count
from raycloud.data.prepare import codes_of, labels_of

LANES = st.sampled_from([1, 2, 3, 8, 64])


@given(st.integers(0, 10_000), st.integers(1, 10_000), LANES)
def test_partitions_equal_in_rows(rows: int, largest: int, lanes: int) -> None:
    count = partition_count(rows, largest, lanes)
    starts = equal_rows(rows, count)
    sizes = [after - before for before, after in pairwise(starts)]
    assert count % lanes == 0
    assert (starts[0], starts[-1], len(sizes)) == (0, rows, count)
    assert max(sizes) - min(sizes) <= 1
    if rows >= lanes:
        assert min(sizes) >= 1
    if rows >= 4 * lanes:
        assert count >= 4 * lanes
    if rows >= lanes * -(-rows // (largest * lanes)):  # there is a row for each of so many
        assert max(sizes) <= largest


@given(st.lists(st.integers(0, 300), max_size=200), LANES, st.integers(600, 5000))
def test_partitions_equal_in_bytes(widths: list[int], lanes: int, partition_bytes: int) -> None:
    sizes = np.array(widths, dtype=np.int64)
    starts = equal_bytes(sizes, lanes, partition_bytes)
    count, total = len(starts) - 1, int(sizes.sum())
    assert count % lanes == 0
    assert list(starts) == sorted(starts)
    assert (starts[0], starts[-1]) == (0, len(widths))
    for place, start in enumerate(starts):
        due = place * total // count
        before = int(sizes[:start].sum())
        row = max([0, *widths[max(0, start - 1) : start + 1]])
        assert abs(before - due) <= row
    for first, last in pairwise(starts):
        assert int(sizes[first:last].sum()) <= partition_bytes


CLASSES = st.one_of(
    st.lists(st.sampled_from(["a", "b", "c", "rare", None]), max_size=120),
    st.lists(st.one_of(st.integers(-3, 3), st.none()), max_size=120),
    st.lists(st.one_of(st.booleans(), st.none()), max_size=120),
    st.lists(st.one_of(st.sampled_from([0.5, 1.5, -0.25]), st.none()), max_size=120),
    st.lists(st.binary(max_size=1), max_size=120),
)


@given(CLASSES, st.integers(1, 40), st.integers(0, 3), st.integers(0, 5))
def test_every_partition_has_the_mix(
    labels: list[object], partitions: int, cut: int, seed: int
) -> None:
    """Of each class, and of all rows, every partition has its part to within one row."""
    column = pa.array(labels)
    parts = [column.slice(0, cut), column.slice(cut)]
    codes = codes_of([labels_of(pa.table({"c": part}), "c") for part in parts])
    assert [labels[i] == labels[j] for i in range(len(labels)) for j in range(i)] == [
        codes[i] == codes[j] for i in range(len(labels)) for j in range(i)
    ]
    dealt = deal(codes, partitions, seed)
    assert sorted(np.concatenate(dealt).tolist()) == list(range(len(labels)))
    for part in dealt:
        assert part.tolist() == sorted(part.tolist())
        assert abs(len(part) - len(labels) / partitions) < 1
        for code in set(codes.tolist()):
            exact = int((codes == code).sum()) / partitions
            assert abs(int((codes[part] == code).sum()) - exact) < 1


@given(st.integers(1, 50), st.integers(1, 6))
def test_dealing_is_the_same_each_time_and_random(rows: int, partitions: int) -> None:
    codes = np.arange(rows) % 3
    first, again = deal(codes, partitions, 1), deal(codes, partitions, 1)
    assert [part.tolist() for part in first] == [part.tolist() for part in again]
    # A class larger than the number of partitions is not dealt in the order of its rows.
    if rows > 30 and partitions > 1:
        others = [deal(codes, partitions, seed) for seed in range(2, 8)]
        assert any(part[0].tolist() != first[0].tolist() for part in others)
