"""Epochs of different sizes: what grows, what is refused, and where."""

from __future__ import annotations

from itertools import islice

import pytest

from raycloud.errors import InternalError
from raycloud.order import EpochSizes, LeaseBook, Ledger, Position, SampleRange, Steps
from tests.unit.test_order_ledger import commit

STEPS = Steps(samples=10, global_batch=4, micro_batch=2)
GROWN = STEPS.grown(2, 14)


def test_an_epoch_keeps_its_size_and_later_ones_are_larger():
    assert [GROWN.samples_in(epoch) for epoch in range(4)] == [10, 10, 14, 14]
    assert [GROWN.per_epoch(epoch) for epoch in range(4)] == [3, 3, 4, 4]
    spans = islice(GROWN.walk(5, Position(epoch=1, offset=8)), 6)
    assert [(s.step, s.epoch, s.start, s.stop) for s in spans] == [
        (5, 1, 8, 10),
        (6, 2, 0, 4),
        (7, 2, 4, 8),
        (8, 2, 8, 12),
        (9, 2, 12, 14),
        (10, 3, 0, 4),
    ]
    assert GROWN.until_epoch(4, Position(epoch=1, offset=8)) == 1 + 4 + 4
    assert GROWN.position_after(9, Position(epoch=1, offset=8)) == Position(epoch=4)


def test_growing_again_from_the_same_epoch_on_takes_the_place_of_the_first():
    assert GROWN.grown(2, 15).later == ((2, 15),)
    assert GROWN.grown(3, 15).later == ((2, 14), (3, 15))
    assert GROWN.grown(9, 14) == GROWN
    assert STEPS.grown(0, 10) == STEPS


@pytest.mark.parametrize(("epoch", "samples"), [(2, 13), (1, 15), (0, 15), (5, 1)])
def test_data_does_not_shrink_nor_grow_in_the_past(epoch, samples):
    with pytest.raises(ValueError, match="data can only grow"):
        GROWN.grown(epoch, samples)


def test_too_little_for_a_step_is_fine_once_it_has_grown():
    cut = {"samples": 3, "global_batch": 4, "micro_batch": 2, "drop_last": True}
    with pytest.raises(ValueError, match="drop_last leaves no step: 3 samples"):
        Steps(**cut)
    steps = Steps(**cut, later=((2, 9),))
    assert steps.position_after(0, Position()) == Position(epoch=2)
    assert steps.until_epoch(3, Position()) == 2


def test_sizes_come_back_from_a_ledger():
    ledger = Ledger(samples=10)
    ledger.grow(2, 14)
    assert EpochSizes.from_state(ledger.state()) == GROWN.sizes
    assert EpochSizes.from_state(Ledger(samples=10).state()) == EpochSizes(10)


def test_each_epoch_is_audited_by_its_own_size():
    ledger = Ledger(samples=10)
    ledger.grow(2, 14)
    ledger.commit(commit(0, 10, epoch=0, epochs=3))
    assert ledger.newest == Position(epoch=2, offset=10)
    assert ledger.audit().exact
    audit = ledger.audit(through=Position(epoch=4, offset=1))
    assert audit.missing == (
        SampleRange(epoch=2, start=10, stop=14),
        SampleRange(epoch=3, start=0, stop=14),
        SampleRange(epoch=4, start=0, stop=1),
    )
    ledger.commit(commit(10, 14, epoch=2))
    assert ledger.newest == Position(epoch=3)


def test_what_is_new_belongs_to_no_earlier_epoch():
    ledger = Ledger(samples=10)
    ledger.grow(2, 14)
    with pytest.raises(InternalError, match="not a range of an epoch of 10 samples"):
        ledger.commit(commit(8, 12, epoch=1))


@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_an_epoch_that_has_begun_does_not_grow(epoch):
    ledger = Ledger(samples=10)
    ledger.commit(commit(0, 10, epoch=0, epochs=2))
    ledger.commit(commit(0, 4, epoch=2))
    before = ledger.state()
    with pytest.raises(InternalError, match=f"cannot grow from epoch {epoch} on"):
        ledger.grow(epoch, 12)
    assert ledger.state() == before
    ledger.grow(3, 12)


def test_a_ledger_does_not_shrink():
    ledger = Ledger(samples=10)
    with pytest.raises(InternalError, match="data can only grow"):
        ledger.grow(1, 9)


def test_restoring_takes_growth_back():
    ledger = Ledger(samples=10)
    ledger.commit(commit(0, 10, epoch=0))
    state = ledger.state()
    ledger.grow(1, 14)
    grown = ledger.state()
    ledger.restore(state)
    assert ledger.state() == state
    ledger.grow(1, 13)
    ledger.restore(grown)
    assert ledger.samples_in(1) == 14


def test_leases_end_where_their_own_epoch_does():
    ledger = Ledger(samples=10)
    ledger.grow(1, 14)
    book = LeaseBook(ledger=ledger, lease_s=5.0, epochs=2)
    leases = [book.take(0, 8, 0.0) for _ in range(4)]
    assert [(at.epoch, at.start, at.stop) for at in leases] == [
        (0, 0, 8),
        (0, 8, 10),
        (1, 0, 8),
        (1, 8, 14),
    ]
    assert book.take(0, 8, 0.0) is None
