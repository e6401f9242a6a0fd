"""Orders with a layout, for layouts of all shapes; and deals that prefer what is held."""

from __future__ import annotations

from itertools import accumulate, permutations
from unittest.mock import patch

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from raycloud.order import (
    Layout,
    Order,
    assign,
    prefer,
)
from raycloud.order.assignment import deal
from tests.tiers import examples


@st.composite
def layouts(draw, lane_count=None, behind=()):
    """Any layout with a row in it: unequal partitions, empty ones, empty lanes."""
    lane_count = lane_count or draw(st.integers(1, 5))
    count = lane_count * draw(st.integers(1, 6))
    most = draw(st.sampled_from([1, 3, 10, 60]))
    sizes = draw(st.lists(st.integers(0, most), min_size=count, max_size=count))
    if not sum(sizes):
        sizes[draw(st.integers(0, count - 1))] = 1
    return Layout(
        partitions=tuple(accumulate([*behind, *sizes], initial=0)),
        lanes=lane_count,
        run=draw(st.integers(1, 7)),
        window=draw(st.integers(1, 4)),
    )


seeds = st.integers(0, 2**63 - 1)
epochs = st.integers(0, 2**40)


def partition_of(layout, ids):
    return np.searchsorted(layout.partitions, ids, side="right") - 1


@examples(150)
@given(layouts(), seeds, epochs, st.sampled_from([1, 4, 4096]), st.data())
def test_every_epoch_is_a_permutation_and_its_slices_agree(layout, seed, epoch, chunk, data):
    rows = layout.samples
    order = Order(samples=rows, seed=seed, layout=layout)
    start = data.draw(st.integers(0, rows))
    stop = data.draw(st.integers(start, rows))
    with patch("raycloud.order.layout._CHUNK", chunk):
        part = order.ids(epoch, start, stop)
        whole = order.ids(epoch, 0, rows)
    assert part.dtype == np.int64
    assert sorted(whole.tolist()) == list(range(rows))
    assert part.tolist() == whole[start:stop].tolist()
    other = Order(samples=rows, seed=seed, layout=layout)
    assert other.ids(epoch, 0, rows).tolist() == whole.tolist()


@examples(100)
@given(layouts(), seeds, epochs)
def test_rounds_read_whichever_lanes_have_a_run_left(layout, seed, epoch):
    order = Order(samples=layout.samples, seed=seed, layout=layout)
    sizes = np.diff(layout.partitions)
    dealt = [order.lane_partitions(0, lane) for lane in range(layout.lanes)]
    assert order.lanes_in(epoch) == layout.lanes
    assert sorted(np.concatenate(dealt).tolist()) == list(range(layout.count))
    for lane, mine in enumerate(dealt):
        assert set(order.lane_partitions(epoch, lane)) == set(mine)
        # One of each `lanes` that follow each other.
        assert sorted((mine // layout.lanes).tolist()) == list(range(len(mine)))
    lane_of = {p: lane for lane, mine in enumerate(dealt) for p in mine.tolist()}
    read = [lane_of[p] for p in partition_of(layout, order.ids(epoch, 0, layout.samples)).tolist()]
    rows = [int(sizes[mine].sum()) for mine in dealt]
    expected = []
    while max(rows) >= layout.run:
        for lane in range(layout.lanes):
            if rows[lane] >= layout.run:
                rows[lane] -= layout.run
                expected += [lane] * layout.run
    for lane in range(layout.lanes):
        expected += [lane] * rows[lane]
    assert read == expected


@examples(100)
@given(layouts(), seeds, epochs, st.data())
def test_a_lane_reads_window_after_window(layout, seed, epoch, data):
    order = Order(samples=layout.samples, seed=seed, layout=layout)
    lane = data.draw(st.integers(0, layout.lanes - 1))
    mine = order.lane_partitions(epoch, lane).tolist()
    ids = order.ids(epoch, 0, layout.samples)
    found = [p for p in partition_of(layout, ids).tolist() if p in set(mine)]
    at = 0
    for first in range(0, len(mine), layout.window):
        window = mine[first : first + layout.window]
        rows = sum(layout.partitions[p + 1] - layout.partitions[p] for p in window)
        assert set(found[at : at + rows]) <= set(window)
        at += rows
    assert at == len(found)


@examples(100)
@given(layouts(), seeds, epochs)
def test_partitions_are_named_as_their_windows_are_reached(layout, seed, epoch):
    order = Order(samples=layout.samples, seed=seed, layout=layout)
    sizes, reached = np.diff(layout.partitions), []
    for lane in range(layout.lanes):
        mine, at = order.lane_partitions(epoch, lane).tolist(), 0
        for first in range(0, len(mine), layout.window):
            window = [p for p in mine[first : first + layout.window] if sizes[p]]
            reached += [(at, lane, p) for p in window]
            at += sum(sizes[window])
    reached.sort(key=lambda one: one[:2])
    assert order.partitions(epoch).tolist() == [p for _, _, p in reached]


@examples(50)
@given(layouts(), seeds, st.integers(1, 5), st.data())
def test_growth_changes_nothing_before_it(layout, seed, epoch, data):
    sizes = np.diff(layout.partitions).tolist()
    grown = data.draw(layouts(lane_count=layout.lanes, behind=sizes))
    before = Order(samples=layout.samples, seed=seed, layout=layout)
    order = before.extended(epoch, grown.samples, grown)
    alone = Order(samples=grown.samples, seed=seed, layout=grown)
    for e in range(epoch + 2):
        source, rows = (before, layout.samples) if e < epoch else (alone, grown.samples)
        assert order.samples_in(e) == rows
        assert order.ids(e, 0, rows).tolist() == source.ids(e, 0, rows).tolist()
        assert order.lane_partitions(e, 0).tolist() == source.lane_partitions(e, 0).tolist()
    for lane in range(layout.lanes):
        assert set(before.lane_partitions(0, lane)) < set(order.lane_partitions(epoch, lane))


@st.composite
def held_by_replicas(draw):
    replicas = draw(st.integers(1, 3))
    counts = draw(st.lists(st.integers(0, 3), min_size=replicas, max_size=replicas))
    amounts = draw(st.sampled_from([st.integers(0, 2), st.integers(0, 2**40)]))
    row = st.lists(amounts, min_size=replicas, max_size=replicas)
    return counts, draw(st.lists(row, min_size=sum(counts), max_size=sum(counts)))


@examples(100)
@given(held_by_replicas())
def test_no_other_deal_holds_more(case):
    counts, held = case
    contiguous = [r for r, count in enumerate(counts) for _ in range(count)]

    def worth(owners):
        local = sum(held[k][owner] for k, owner in enumerate(owners))
        return local, sum(a == b for a, b in zip(owners, contiguous, strict=True))

    owners = prefer(counts, held).owners
    assert [owners.count(r) for r in range(len(counts))] == counts
    if len(contiguous) <= 7:
        assert worth(owners) == max(map(worth, set(permutations(contiguous))))


@examples(100)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any),
    st.integers(0, 12),
    st.floats(0, 1e15),
)
def test_where_all_hold_the_same_the_deal_is_contiguous(shares, micro_batches, held):
    whole = max(sum(shares), micro_batches)
    lane_count = next(n for n in (4, 3, 2, 1) if whole % n == 0)
    owners = assign(shares, micro_batches, [[held] * len(shares)] * lane_count).owners
    assert owners == assign(shares, micro_batches).owners
    assert [owners.count(r) for r in range(len(shares))] == list(deal(shares, micro_batches))
