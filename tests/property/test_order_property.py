"""The sequence, the ledger and the leases for all sizes, searched."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from raycloud.errors import InternalError
from raycloud.order import (
    Commit,
    LeaseBook,
    Ledger,
    Order,
    Position,
    RoundEnds,
    Settled,
    Steps,
    assign,
    lockstep_commits,
)
from raycloud.order.assignment import deal
from raycloud.order.ledger import (
    gaps,
    overlap,
    size,
    union,
)
from tests.tiers import examples

small = st.integers(0, 30)


@st.composite
def cuts(draw):
    global_batch = draw(st.integers(1, 12))
    drop_last = draw(st.booleans())
    return Steps(
        samples=draw(st.integers(global_batch if drop_last else 1, 40)),
        global_batch=global_batch,
        micro_batch=draw(st.integers(1, 12)),
        drop_last=drop_last,
    )


@st.composite
def places(draw, steps):
    return Position(epoch=draw(st.integers(0, 3)), offset=draw(st.integers(0, steps.samples)))


@examples(75)
@given(st.integers(1, 3000), st.integers(0, 2**63 - 1), st.integers(0, 2**40), st.data())
def test_every_epoch_is_a_permutation(samples, seed, epoch, data):
    order = Order(samples=samples, seed=seed)
    ids = order.ids(epoch, 0, samples)
    assert sorted(ids.tolist()) == list(range(samples))
    start = data.draw(st.integers(0, samples))
    stop = data.draw(st.integers(start, samples))
    assert order.ids(epoch, start, stop).tolist() == ids[start:stop].tolist()


@examples(100)
@given(cuts(), st.data())
def test_micro_batches_tile_every_span(steps, data):
    at = data.draw(places(steps))
    for span, _ in zip(steps.walk(0, at), range(8), strict=False):
        batches = span.micro_batches
        assert [b.index for b in batches] == list(range(len(batches)))
        assert [b.start for b in batches] == [span.start, *(b.stop for b in batches[:-1])]
        assert batches[-1].stop == span.stop
        assert all(0 < b.samples <= steps.micro_batch for b in batches)
        assert all(b.samples == steps.micro_batch for b in batches[:-1])
        if steps.drop_last:
            assert span.samples == steps.global_batch


@examples(100)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=9).filter(any), st.integers(0, 300))
def test_deal_sums_exactly_and_is_proportional(shares, total):
    counts = deal(shares, total)
    assert sum(counts) == total
    for share, count in zip(shares, counts, strict=True):
        assert abs(count - share * total / sum(shares)) < 1
    assert deal(shares, sum(shares)) == tuple(shares)
    owners = assign(shares, total).owners
    assert list(owners) == sorted(owners)
    assert [owners.count(r) for r in range(len(shares))] == list(counts)


@examples(100)
@given(st.lists(st.tuples(small, small)), small, small)
def test_ranges_are_sets(pairs, start, stop):
    ranges, members = (), set()
    for low, high in pairs:
        ranges = union(ranges, low, high)
        members |= set(range(low, high))
    assert all(a[1] < b[0] for a, b in pairwise(ranges))
    assert {i for low, high in ranges for i in range(low, high)} == members
    inside = set(range(start, stop))
    assert {i for r in overlap(ranges, start, stop) for i in range(*r)} == members & inside
    assert {i for r in gaps(ranges, start, stop) for i in range(*r)} == inside - members
    assert size(ranges) == len(members)


@examples(100)
@given(cuts(), st.lists(st.integers(0, 40), max_size=5), st.data())
def test_lockstep_commits_are_what_walking_takes(steps, reports, data):
    start = data.draw(places(steps))
    ledger = Ledger(samples=steps.samples)
    for epoch in range(start.epoch):
        ledger.commit(
            Commit(
                first_step=0, last_step=0, epoch=epoch, start=0, stop=steps.samples, generation=0
            )
        )
    ledger.commit(
        Commit(
            first_step=0, last_step=0, epoch=start.epoch, start=0, stop=start.offset, generation=0
        )
    )
    before = ledger.committed_samples
    step, at, walked = 0, start, 0
    for count in reports:
        commits = lockstep_commits(
            steps, at=at, first_step=step, last_step=step + count, generation=1
        )
        assert len(commits) <= 4
        assert sum(c.last_step - c.first_step for c in commits) == count
        for c in commits:
            ledger.commit(c)
        walked += sum(
            span.samples for span, _ in zip(steps.walk(step, at), range(count), strict=False)
        )
        if count:
            at = steps.position_after(count, at)
        step += count
    audit = ledger.audit()
    assert audit.exact
    assert ledger.committed_samples - before == walked
    assert ledger.next_step == step
    if step:
        assert ledger.newest == at
    if not steps.drop_last:
        assert audit.left_out == ()
    assert Ledger.from_state(json.loads(json.dumps(ledger.state()))).state() == ledger.state()


@examples(75)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 4), st.integers(1, 3), st.integers(0, 10), small, st.integers(0, 3)
        ),
        max_size=12,
    )
)
def test_a_ledger_is_a_set_of_samples(entries):
    ledger, committed, left_out = Ledger(samples=10), set(), set()
    for epoch, epochs, start, length, most in entries:
        stop = min(10, start + length)
        left = min(most, 10 - stop)
        commit = Commit(
            first_step=0,
            last_step=1,
            epoch=epoch,
            start=start,
            stop=stop,
            generation=0,
            epochs=epochs,
            left_out=left,
        )
        which = range(epoch, epoch + epochs)
        new = {(e, i) for e in which for i in range(start, stop)}
        tail = {(e, i) for e in which for i in range(stop, stop + left)}
        if (new | tail) & (committed | left_out):
            before = ledger.state()
            with pytest.raises(InternalError, match="twice"):
                ledger.commit(commit)
            assert ledger.state() == before
        else:
            ledger.commit(commit)
            committed |= new
            left_out |= tail
    assert ledger.committed_samples == len(committed)
    known = committed | left_out
    newest = max(((e, i + 1) for e, i in known), default=(0, 0))
    expected = {
        (e, i)
        for e in range(newest[0] + 1)
        for i in range(10)
        if (e, i) < newest and (e, i) not in known
    }
    missing = {
        (r.epoch + k, i)
        for r in ledger.audit().missing
        for k in range(r.epochs)
        for i in range(r.start, r.stop)
    }
    assert missing == expected


class Leases(RuleBasedStateMachine):
    """Workers that die, come late and repeat themselves: each sample still counts exactly once."""

    out = Bundle("out")

    def __init__(self):
        super().__init__()
        self.now_s = 0.0
        self.ledger = Ledger(samples=17)
        self.book = LeaseBook(ledger=self.ledger, lease_s=10.0, epochs=3)
        self.held = {}
        self.counted = set()

    @rule(target=out, worker=st.integers(0, 3), samples=st.integers(1, 9))
    def take(self, worker, samples):
        lease = self.book.take(worker, samples, self.now_s)
        if lease is None:
            return None
        places = {(lease.epoch, i) for i in range(lease.start, lease.stop)}
        assert 1 <= lease.samples <= samples
        assert not places & self.counted
        for other in self.held.values():
            assert not places & {(other.epoch, i) for i in range(other.start, other.stop)}
        self.held[lease.lease] = lease
        return lease

    @rule(lease=out)
    def commit(self, lease):
        if lease is None:
            return
        places = {(lease.epoch, i) for i in range(lease.start, lease.stop)}
        settled = self.book.commit(lease.lease, step=0, generation=0)
        if lease.lease in self.held:
            assert settled is Settled.COMMITTED
            del self.held[lease.lease]
            self.counted |= places
        else:
            assert settled in {Settled.DUPLICATE, Settled.VOID}
            assert places <= self.counted or settled is Settled.VOID

    @rule(lease=consumes(out))
    def forget(self, lease):
        """The worker says nothing more about this lease: its time will be up."""

    @rule(worker=st.integers(0, 3))
    def lose(self, worker):
        for lease in self.book.lose(worker):
            assert self.held.pop(lease.lease).worker == worker

    @rule(seconds=st.floats(0, 8))
    def wait(self, seconds):
        self.now_s += seconds
        for lease in self.book.expire(self.now_s):
            assert self.held.pop(lease.lease).deadline_s <= self.now_s

    @invariant()
    def the_ledger_holds_what_was_committed(self):
        assert self.ledger.committed_samples == len(self.counted)
        assert {lease.lease for lease in self.book.live} == set(self.held)

    def teardown(self):
        for lease in list(self.held.values()):
            self.book.lose(lease.worker)
        while (lease := self.book.take(9, 5, self.now_s)) is not None:
            assert self.book.commit(lease.lease, step=1, generation=1) is Settled.COMMITTED
        assert self.book.done
        assert self.ledger.audit(through=Position(epoch=3)).exact
        assert self.ledger.committed_samples == 3 * 17


TestLeases = Leases.TestCase
TestLeases.settings = examples(60, stateful_step_count=40)


@given(
    st.sampled_from([2, 3, 8, 16, 32]),
    st.lists(st.integers(1, 60), max_size=3),
    st.sampled_from([0, 3, 28]),
)
def test_rounds_end_at_reads_are_no_longer_than_a_period_and_few(period, reads, warm_steps):
    ends = RoundEnds(period=period, reads=tuple(reads), warm_steps=warm_steps)
    step, last_step, cuts = warm_steps, 200, [warm_steps]
    while step < last_step:
        end = ends.after(step, last_step)
        assert step < end <= step + period
        assert all(ends.after(within, last_step) == end for within in range(step, end))
        step = end
        cuts.append(end)
    due = sorted({k for every in reads for k in range(0, last_step, every) if k > warm_steps})
    assert set(due) <= set(cuts)
    for first, stop in pairwise([warm_steps, *due]) if reads else ():
        assert sum(first < cut <= stop for cut in cuts) == -(-(stop - first) // period)
