"""The canonical sequence: seeds, permutation, steps and assignments, held by golden values."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import numpy as np
import pytest

from raycloud.order import PARTS, Order, Steps, assign, mix, stream_seed, whole_shares
from raycloud.order.assignment import deal

GOLDEN_MIX = [0, 6238072747940578789, 13029008266876403067]
GOLDEN_SEEDS = [2609960867503554896, 5559646655297520040]
GOLDEN_EPOCH_0 = [4, 7, 11, 15, 5, 1, 18, 9, 12, 13, 19, 10, 2, 14, 0, 17, 8, 6, 3, 16]
GOLDEN_EPOCH_1 = [3, 2, 13, 10, 4, 18, 17, 1, 8, 19, 15, 11, 14, 5, 0, 12, 9, 16, 7, 6]
GOLDEN_LARGE = [406235, 436284, 233242, 204253, 903575, 104200, 928748, 560944]


def test_seeds_never_change():
    assert [mix(v) for v in (0, 1, 2**64 - 1)] == GOLDEN_MIX
    assert [stream_seed(0), stream_seed(1, 2, 3)] == GOLDEN_SEEDS


def test_a_seed_depends_on_order_and_number_of_its_parts():
    seeds = [stream_seed(), stream_seed(0), stream_seed(0, 0), stream_seed(0, 1), stream_seed(1, 0)]
    assert len(set(seeds)) == len(seeds)


def test_the_sequence_never_changes():
    order = Order(samples=20, seed=7)
    assert order.ids(0, 0, 20).tolist() == GOLDEN_EPOCH_0
    assert order.ids(1, 0, 20).tolist() == GOLDEN_EPOCH_1
    large = Order(samples=1_000_003, seed=1)
    assert large.ids(2, 999_995, 1_000_003).tolist() == GOLDEN_LARGE


def test_a_shuffled_epoch_looks_shuffled():
    ids = Order(samples=10_000, seed=3).ids(0, 0, 10_000)
    assert abs(np.corrcoef(ids, np.arange(10_000))[0, 1]) < 0.05
    assert np.count_nonzero(np.diff(ids) == 1) < 10


def test_unshuffled_stands_in_its_own_order():
    assert Order(samples=5, seed=9, shuffle=False).ids(4, 1, 4).tolist() == [1, 2, 3]


def test_ids_refuses_places_outside_the_epoch():
    order = Order(samples=5, seed=0)
    assert order.ids(0, 5, 5).tolist() == []
    for start, stop in [(-1, 2), (3, 2), (0, 6)]:
        with pytest.raises(IndexError, match=r"outside an epoch of 5"):
            order.ids(0, start, stop)


def test_an_epoch_needs_a_sample():
    with pytest.raises(ValueError, match="samples=0"):
        Order(samples=0, seed=0)


def test_a_cut_that_makes_no_step_is_refused():
    with pytest.raises(ValueError, match="must be positive"):
        Steps(samples=3, global_batch=0, micro_batch=2)
    assert Steps(samples=3, global_batch=4, micro_batch=2).per_epoch() == 1


def drawn_parts(random, replicas, whole):
    """Shares in sixteenths that sum to so many micro-batches."""
    cuts = sorted(random.randint(0, whole * PARTS) for _ in range(replicas - 1))
    return [(b - a) / PARTS for a, b in pairwise((0, *cuts, whole * PARTS))]


@pytest.mark.parametrize("seed", range(40))
def test_shares_in_parts_are_dealt_whole_and_none_is_ever_off_by_more_than_one(seed):
    random = Random(seed)
    replicas, whole = random.randint(1, 9), random.choice((1, 3, 8, 64, 4096))
    shares, had = drawn_parts(random, replicas, whole), [0] * replicas
    for step in range(PARTS):
        counts = whole_shares(shares, 5 * PARTS + step)
        assert sum(counts) == whole
        assert min(counts) >= 0
        had = [before + count for before, count in zip(had, counts, strict=True)]
        for share, count in zip(shares, had, strict=True):
            assert abs(count - (step + 1) * share) < 1
    assert had == [PARTS * share for share in shares]


def test_whole_shares_are_dealt_as_they_are():
    assert {whole_shares((5, 2.0, 1), step) for step in range(40)} == {(5, 2, 1)}


def test_assignment_is_in_contiguous_runs():
    assignment = assign((5, 0, 2, 1), 8)
    assert assignment.owners == (0, 0, 0, 0, 0, 2, 2, 3)
    assert [assignment.of(r) for r in range(4)] == [(0, 1, 2, 3, 4), (), (5, 6), (7,)]


@pytest.mark.parametrize("shares", [(0, 0), (2, -1)])
def test_shares_that_share_nothing_are_refused(shares):
    with pytest.raises(ValueError, match="non-negative with a positive sum"):
        deal(shares, 3)


def test_micro_batches_go_to_those_who_hold_what_they_read():
    elsewhere = [(0, 8, 0), (0, 8, 0), (8, 0, 0), (8, 0, 0), (0, 0, 8), (8, 0, 0)]
    assert assign((3, 2, 1), 6, elsewhere).owners == (1, 1, 0, 0, 2, 0)
    # More is held by one than its share lets it take: the rest goes on as ever.
    assert assign((2, 2), 4, [(0, 8)] * 4).owners == (0, 0, 1, 1)
    # The two that only one of them holds go there, though both are held there.
    assert assign((2, 2), 4, [(8, 8), (8, 8), (8, 0), (8, 0)]).owners == (1, 1, 0, 0)


def test_lanes_stand_for_their_micro_batches():
    by_lane = [(0, 4), (4, 0)]
    assert assign((4, 4), 8, by_lane).owners == (1, 1, 1, 1, 0, 0, 0, 0)
    # A short last step: the first micro-batches of the same lanes; the odd one lies as ever.
    assert assign((4, 4), 6, by_lane).owners == (0, 1, 1, 1, 0, 0)
    assert assign((2, 2), 2, [(0, 4), (4, 0)]).owners == assign((2, 2), 2).owners  # of one lane
    assert assign((5, 3), 0, by_lane).owners == ()


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ([(1, 1)] * 3, "lanes that divides 4, got 3 rows"),
        ([], "got 0 rows"),
        ([(1,)] * 4, r"4 rows of 2 values for counts \(2, 2\), got 4 rows of \[1\]"),
        ([(1, 1), (1,)], r"got 4 rows of \[1, 2\]"),
        ([(1, -1)] * 4, "finite numbers that are not negative"),
        ([(1, float("nan"))] * 4, "finite numbers that are not negative"),
    ],
)
def test_held_that_does_not_fit_is_refused(held, message):
    with pytest.raises(ValueError, match=message):
        assign((2, 2), 4, held)
