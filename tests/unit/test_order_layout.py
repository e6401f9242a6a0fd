"""Layouts: what is refused, the sequence they fix, what is read when, growth, and the shuffle."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate

import numpy as np
import pytest

from raycloud.order import Layout, Order, lanes_of
from tests.shuffling import displacement, neighbours_together

SMALL = Layout(partitions=(0, 5, 10, 15, 20, 25, 30), lanes=2, run=3, window=2)
GOLDEN_LANES = [[1, 3, 4], [0, 2, 5]]
GOLDEN_EPOCH_0 = [
    *[22, 15, 17, 4, 0, 29, 24, 20, 16, 26, 3, 27, 23, 19, 21],
    *[28, 1, 2, 18, 8, 9, 25, 11, 13, 7, 6, 5, 14, 10, 12],
]
# Its lanes have 17, 7 and 9 rows: all take turns for 3 rounds, then two, then one.
UNEVEN = Layout(partitions=(0, 4, 14, 20, 23, 30, 33), lanes=3, run=2, window=2)
GOLDEN_UNEVEN = [
    *[10, 8, 20, 22, 32, 16, 6, 24, 1, 21, 31, 18, 5, 12, 0, 3, 19, 14],
    *[13, 26, 17, 15, 28, 9, 23, 29, 11, 4, 25, 27, 7, 2, 30],
]
GOLDEN_LARGE = [913533, 467447, 467512, 913487, 679917, 785594, 705320, 705314]


def even(rows, partitions, **others):
    starts = tuple(p * rows // partitions for p in range(partitions + 1))
    return Layout(**{"partitions": starts, "lanes": 8, "run": 16, "window": 4, **others})


def uneven(rows, partitions):
    """The largest partitions are almost nine times the smallest."""
    weights = [1 + 8 * (p * 7919 % partitions) / partitions for p in range(partitions)]
    starts = tuple(round(rows * at / sum(weights)) for at in accumulate(weights, initial=0))
    return Layout(partitions=starts, lanes=8, run=16, window=4)


def order_of(layout, seed=3):
    return Order(samples=layout.samples, seed=seed, layout=layout)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lanes": 0}, "lanes must be at least 1, got 0"),
        ({"run": -1}, "run must be at least 1, got -1"),
        ({"window": 0}, "window must be at least 1, got 0"),
        ({"partitions": (0,)}, "partitions must begin with 0 and end"),
        ({"partitions": (1, 2, 3)}, r"partitions must begin with 0 and end .* got \(1, 2, 3\)"),
        ({"partitions": (0, 4, 3)}, "partition 1 begins at row 4 and the next at 3"),
        (
            {"partitions": (0, 1, 2, 3)},
            "3 partitions cannot be dealt evenly to lanes=2: cut the data set into a multiple of 2",
        ),
    ],
)
def test_a_layout_that_cannot_be_dealt_is_refused(change, message):
    asked = {"partitions": (0, 4, 8), "lanes": 2, "run": 1, "window": 1, **change}
    with pytest.raises(ValueError, match=message):
        Layout(**asked)


def test_an_order_refuses_a_layout_of_other_data():
    with pytest.raises(ValueError, match="partitions hold 30 rows, but samples=31"):
        Order(samples=31, seed=0, layout=SMALL)


def test_lanes_share_the_micro_batches_of_a_step_equally():
    steps = [(8, 8), (16, 4), (640, 10), (650, 10), (1024, 8), (67, 1)]
    assert [lanes_of(*step) for step in steps] == [1, 4, 64, 13, 64, 1]
    for step in [(0, 1), (4, 0), (9, 4)]:
        with pytest.raises(ValueError, match="must be a positive multiple of micro_batch"):
            lanes_of(*step)


def test_the_sequence_of_a_layout_never_changes():
    order = order_of(SMALL, seed=7)
    assert [sorted(order.lane_partitions(0, lane).tolist()) for lane in (0, 1)] == GOLDEN_LANES
    assert order.ids(0, 0, 30).tolist() == GOLDEN_EPOCH_0
    assert order_of(UNEVEN, seed=7).ids(0, 0, 33).tolist() == GOLDEN_UNEVEN
    large = order_of(even(1_000_003, 1024), seed=1)
    assert large.ids(2, 500_000, 500_008).tolist() == GOLDEN_LARGE


def test_unshuffled_stands_in_its_own_order_with_a_layout_too():
    order = Order(samples=30, seed=7, shuffle=False, layout=SMALL)
    assert order.ids(2, 3, 9).tolist() == [3, 4, 5, 6, 7, 8]
    assert order.lanes_in(2) == 0
    assert order.partitions(2).tolist() == []


def test_without_a_layout_there_are_no_lanes_and_no_partitions():
    order = Order(samples=30, seed=7)
    assert order.lanes_in(0) == 0
    assert order.partitions(0).tolist() == []
    with pytest.raises(IndexError, match="lane 0 of epoch 0, which has 0 lanes"):
        order.lane_partitions(0, 0)
    with pytest.raises(IndexError, match="lane 2 of epoch 5, which has 2 lanes"):
        order_of(SMALL).lane_partitions(5, 2)


def test_an_epoch_without_end_costs_no_more_than_its_partitions():
    rows = 10**13
    order = order_of(even(rows, 1024))
    ids = order.ids(5, rows // 2, rows // 2 + 128)
    assert len(set(ids.tolist())) == 128
    assert ids.min() >= 0
    assert ids.max() < rows


def test_long_lanes_are_permuted_too():
    order = order_of(even(30_000, 16, lanes=2, run=50))
    whole = order.ids(1, 0, 30_000)
    assert (np.sort(whole) == np.arange(30_000)).all()
    for start in range(8_000, 8_300):  # around the 4,096th row of each lane
        assert order.ids(1, start, start + 130).tolist() == whole[start : start + 130].tolist()


def test_what_the_caller_does_with_ids_changes_nothing():
    order = order_of(SMALL)
    before = order.ids(0, 0, 3).tolist()
    order.ids(0, 0, 3)[:] = -1
    order.lane_partitions(0, 0)[:] = -1
    assert order.ids(0, 0, 3).tolist() == before


def test_epochs_and_seeds_differ():
    first, second = order_of(SMALL, seed=1), order_of(SMALL, seed=2)
    epochs = [first.ids(0, 0, 30), first.ids(1, 0, 30), first.ids(2, 0, 30), second.ids(0, 0, 30)]
    assert len({tuple(ids.tolist()) for ids in epochs}) == 4


def test_windows_of_one_epoch_are_mixed_differently():
    layout = Layout(partitions=tuple(range(0, 1001, 100)), lanes=2, run=100, window=1)
    ids = order_of(layout).ids(0, 0, 1000).reshape(-1, 100) % 100
    assert len({tuple(window) for window in ids.tolist()}) == 10
    assert not any((window == np.arange(100)).all() for window in ids)


def test_threads_read_one_order():
    layout = even(20_000, 64)
    alone = order_of(layout)
    expected = [alone.ids(epoch, 0, 20_000) for epoch in range(4)]
    order = order_of(layout)

    def read(thread):
        for epoch in [(thread + turn) % 4 for turn in range(4)]:
            parts = [order.ids(epoch, at, at + 100) for at in range(0, 20_000, 100)]
            assert (np.concatenate(parts) == expected[epoch]).all()
        return thread

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(read, range(4))) == [0, 1, 2, 3]


def test_an_order_travels_between_processes():
    order = order_of(SMALL).extended(2, 36, None)
    order.ids(0, 0, 5)
    copy = pickle.loads(pickle.dumps(order))
    for epoch, samples in [(0, 30), (2, 36)]:
        assert copy.ids(epoch, 0, samples).tolist() == order.ids(epoch, 0, samples).tolist()


def test_partitions_are_named_in_the_order_of_reading_and_empty_ones_are_not():
    order = order_of(even(3_200, 32, window=2))
    read = order.partitions(0)
    for window in range(2):
        heads = [order.lane_partitions(0, lane)[2 * window :][:2].tolist() for lane in range(8)]
        assert read[16 * window :][:16].reshape(8, 2).tolist() == heads
    layout = Layout(partitions=(0, 0, 6, 6, 6, 8, 8), lanes=2, run=1, window=2)
    assert set(order_of(layout).partitions(0).tolist()) == {1, 4}
    assert sorted(order_of(layout).ids(0, 0, 8).tolist()) == list(range(8))


def test_data_that_grew():
    grown = Layout(partitions=tuple(range(0, 41, 5)), lanes=2, run=3, window=2)
    before = order_of(SMALL)
    order = before.extended(3, 40, grown)
    assert [order.samples_in(epoch) for epoch in (0, 2, 3, 9)] == [30, 30, 40, 40]
    assert (order.samples, order.newest_from, before.newest_from) == (30, 3, 0)
    assert order.ids(2, 0, 30).tolist() == before.ids(2, 0, 30).tolist()
    assert sorted(order.ids(3, 0, 40).tolist()) == list(range(40))
    assert before.samples_in(3) == 30  # the old order is as it was
    for lane in range(2):  # and what a lane had, it keeps
        assert set(before.lane_partitions(0, lane)) < set(order.lane_partitions(3, lane))
    twice = order.extended(3, 41, None).extended(7, 50, None)
    assert [twice.samples_in(epoch) for epoch in (2, 3, 6, 7)] == [30, 41, 41, 50]
    assert twice.ids(6, 0, 41).tolist() == Order(samples=41, seed=3).ids(6, 0, 41).tolist()


def test_growth_that_is_none_is_refused():
    order = order_of(SMALL).extended(3, 40, None)
    with pytest.raises(ValueError, match="it has 40 samples, and from epoch 4 on would have 39"):
        order.extended(4, 39, None)
    with pytest.raises(ValueError, match="can grow from epoch 3 on, not from epoch 2"):
        order.extended(2, 50, None)
    with pytest.raises(ValueError, match="can grow from epoch 1 on, not from epoch 0"):
        order_of(SMALL).extended(0, 50, None)


@pytest.mark.parametrize(
    ("layout", "least", "most"),
    [
        # All partitions of a lane in one window: as a full shuffle, and a little more even.
        (even(50_000, 32), 0.90, 1.02),
        # 2, 4 and 8 windows a lane: neighbours meet that much more often.
        (even(50_000, 64), 1.75, 2.05),
        (even(50_000, 128), 3.4, 4.0),
        (even(50_000, 256), 6.8, 7.8),
        # A wider window takes it back.
        (even(50_000, 256, window=16), 1.7, 2.0),
        # Many lanes: a step draws 2 rows from each, more evenly than by chance.
        (even(50_000, 256, lanes=64, run=2), 0.4, 0.65),
        # Unequal lanes, a quarter of the rows after the shortest one's end: little worse.
        (uneven(50_000, 32), 1.0, 1.3),
        (uneven(50_000, 128), 3.4, 4.2),
    ],
)
def test_neighbours_meet_as_often_as_there_are_windows(layout, least, most):
    order, step = order_of(layout, seed=1), layout.lanes * layout.run
    assert least < neighbours_together(order, 0, step, near=10) < most
    assert 0.9 < displacement(order, 0) < 1.1


def test_the_measure_tells_a_full_shuffle_from_none():
    full, none = Order(samples=50_000, seed=1), Order(samples=50_000, seed=1, shuffle=False)
    for near in (10, 100, 1000):
        assert 0.95 < neighbours_together(full, 0, 128, near) < 1.05
        assert neighbours_together(none, 0, 128, near) > 20
    assert 0.98 < displacement(full, 0) < 1.02
    assert displacement(none, 0) == 0
    # Within 49,999 rows of each other are all pairs.
    assert neighbours_together(full, 0, 128, 49_999) == pytest.approx(1)
