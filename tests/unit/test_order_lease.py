"""Leases: what comes back goes out first, and counts once."""

from __future__ import annotations

import pytest

from raycloud.errors import InternalError
from raycloud.order import LeaseBook, Ledger, Settled
from tests.unit.test_order_ledger import commit


def book(samples=10, **more):
    return LeaseBook(ledger=Ledger(samples=samples), lease_s=5.0, **more)


def taken(leases, worker=0, samples=4, now_s=0.0):
    lease = leases.take(worker, samples, now_s)
    assert lease is not None
    return lease


def place(lease):
    return (lease.epoch, lease.start, lease.stop)


def test_leases_follow_the_sequence_and_stop_at_the_end_of_an_epoch():
    leases = book()
    assert [place(taken(leases)) for _ in range(4)] == [(0, 0, 4), (0, 4, 8), (0, 8, 10), (1, 0, 4)]


def test_nothing_is_handed_out_after_the_last_epoch():
    leases = book(samples=4, epochs=1)
    lease = taken(leases, now_s=3.0)
    assert lease.deadline_s == 8.0
    assert leases.take(1, 4, 0.0) is None
    assert not leases.done
    assert leases.commit(lease.lease, step=0, generation=0) is Settled.COMMITTED
    assert leases.done


def test_a_second_commit_is_a_duplicate():
    leases = book()
    lease = taken(leases)
    leases.commit(lease.lease, step=0, generation=0)
    before = leases.ledger.state()
    assert leases.commit(lease.lease, step=1, generation=0) is Settled.DUPLICATE
    assert leases.ledger.state() == before


def test_what_a_lost_worker_held_goes_out_first_and_its_word_is_void():
    leases = book()
    first, second = taken(leases, worker=0), taken(leases, worker=1)
    assert leases.lose(0) == (first,)
    again = taken(leases, worker=1, samples=3)
    assert place(again) == (0, 0, 3)
    assert leases.commit(first.lease, step=0, generation=0) is Settled.VOID
    assert place(taken(leases, worker=1, samples=3)) == (0, 3, 4)
    assert place(taken(leases, worker=1, samples=3)) == (0, 8, 10)
    assert leases.commit(second.lease, step=0, generation=0) is Settled.COMMITTED


def test_a_lease_expires_at_its_deadline():
    leases = book()
    early, late = taken(leases, now_s=0.0), taken(leases, now_s=1.0)
    assert leases.expire(4.9) == ()
    assert leases.expire(5.0) == (early,)
    assert leases.live == (late,)


def test_a_lease_that_was_never_handed_out_is_our_fault():
    with pytest.raises(InternalError, match="lease 0 was never handed out"):
        book().commit(0, step=0, generation=0)


def test_a_book_goes_on_where_its_ledger_ends_with_the_holes_first():
    ledger = Ledger(samples=10)
    for start, stop in ((0, 2), (5, 7)):
        ledger.commit(commit(start, stop))
    leases = LeaseBook(ledger=ledger, lease_s=5.0)
    assert [place(taken(leases, samples=3)) for _ in range(2)] == [(0, 2, 5), (0, 7, 10)]


@pytest.mark.parametrize("samples", [0, -1])
def test_a_lease_needs_a_sample(samples):
    with pytest.raises(ValueError, match="at least one sample"):
        book().take(0, samples, 0.0)


def test_a_lease_needs_time():
    with pytest.raises(ValueError, match="lease_s must be positive"):
        LeaseBook(ledger=Ledger(samples=1), lease_s=0.0)
