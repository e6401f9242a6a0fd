"""Any exact ledger passes; one with a record dropped, doubled, moved or swapped is named."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from raycloud.errors import RunDirectoryError
from raycloud.order import (
    ERROR,
    Expected,
    Kind,
    Ledger,
    Position,
    Skip,
    Steps,
    audit_ledger,
    commit_record,
    growth_record,
    header_record,
    ledger_line,
    lockstep_commits,
    restore_record,
    skip_record,
)
from tests.tiers import examples


class Written:
    """A run's ledger as it is written: reports, growth, checkpoints and new starts."""

    def __init__(self, samples, global_batch, *, drop_last):
        self.steps = Steps(
            samples=samples, global_batch=global_batch, micro_batch=1, drop_last=drop_last
        )
        self.ledger, self.step = Ledger(samples=samples), 0
        self.records = [header_record(samples)]
        self.kept = (0, self.steps, self.ledger.state())
        self.counting = []  # places of the last start's commits in `records`

    def report(self, count):
        at = self.steps.position_after(self.step, Position()) if self.step else Position()
        for commit in lockstep_commits(
            self.steps, at=at, first_step=self.step, last_step=self.step + count, generation=0
        ):
            self.ledger.commit(commit)
            self.counting.append(len(self.records))
            self.records.append(commit_record(commit))
        self.step += count

    def grow(self, more):
        epoch = self.steps.position_after(self.step, Position()).next_epoch
        samples = self.steps.sizes.most + more
        if epoch and more:
            self.steps = self.steps.grown(epoch, samples)
            self.ledger.grow(epoch, samples)
            self.records.append(growth_record(epoch, samples))

    def skip(self, micro_batch):
        """Of the newest step, one micro-batch of one sample."""
        last = self.steps.position_after(self.step - 1, Position())
        span = self.steps.span(self.step - 1, last)
        start = span.start + micro_batch % span.samples
        skip = Skip(step=span.step, epoch=span.epoch, start=start, stop=start + 1, why=ERROR)
        if skip not in self.ledger.skips:
            self.ledger.skip(skip)
            self.records.append(skip_record(skip))

    def keep(self):
        self.kept = (self.step, self.steps, self.ledger.state())

    def go_back(self):
        self.step, self.steps, state = self.kept
        self.ledger.restore(state)
        self.records += [header_record(self.steps.samples), restore_record(state)]
        self.counting = []

    def expected(self):
        cut = self.steps
        return Expected(
            steps=self.step,
            global_batch=cut.global_batch,
            micro_batch=cut.micro_batch,
            drop_last=cut.drop_last,
        )


@st.composite
def ledgers(draw):
    global_batch = draw(st.integers(1, 8))
    drop_last = draw(st.booleans())
    samples = draw(st.integers(global_batch if drop_last else 1, 25))
    written = Written(samples, global_batch, drop_last=drop_last)
    acts = [*4 * ["report"], "skip", "grow", "keep", "back"]
    for act in draw(st.lists(st.sampled_from(acts), max_size=12)):
        if act == "report":
            written.report(draw(st.integers(1, 9)))
        elif act == "skip":
            if written.step:
                written.skip(draw(st.integers(0, 7)))
        elif act == "grow":
            written.grow(draw(st.integers(0, 5)))
        elif act == "keep":
            written.keep()
        else:
            written.go_back()
    return written


def audit_of(records, expected=None):
    return audit_ledger([ledger_line(record) for record in records], expected)


def places(epoch, epochs, start, stop):
    return {(e, i) for e in range(epoch, epoch + epochs) for i in range(start, stop)}


def held(record, *, left_out):
    c = record["commit"]
    stop = c["stop"] + (c.get("left_out", 0) if left_out else 0)
    return places(c["epoch"], c.get("epochs", 1), c["start"], stop)


def named(found, kind):
    return set().union(
        *(
            places(f.range.epoch, f.range.epochs, f.range.start, f.range.stop)
            for f in found.of(kind)
            if f.range is not None
        )
    )


@examples(100)
@given(ledgers())
def test_any_exact_ledger_passes(written):
    for expected in (None, written.expected()):
        found = audit_of(written.records, expected)
        assert found.exact, found.faults
        assert found.steps == written.step
        assert found.committed_samples == written.ledger.committed_samples
        assert found.skips == written.ledger.skips
        assert found.whole
    counted = Counter()
    for place in written.counting:
        counted.update(held(written.records[place], left_out=False))
    assert set(counted.values()) <= {1}


@examples(100)
@given(ledgers(), st.data())
def test_a_record_that_was_dropped_is_named(written, data):
    assume(written.counting)
    place = data.draw(st.sampled_from(written.counting))
    record = written.records[place]
    found = audit_of(written.records[:place] + written.records[place + 1 :], written.expected())
    missing = named(found, Kind.MISSING)
    assert held(record, left_out=False) <= missing <= held(record, left_out=True)
    assert not found.of(Kind.DOUBLED)
    first_step, last_step = record["commit"]["first_step"], record["commit"]["last_step"]
    for fault in found.of(Kind.MISSING):
        assert fault.first_step == first_step
        assert last_step <= fault.last_step <= max(last_step, first_step + 1)


@examples(100)
@given(ledgers(), st.data())
def test_a_record_that_is_there_twice_is_named(written, data):
    assume(written.counting)
    place = data.draw(st.sampled_from(written.counting))
    again = data.draw(st.sampled_from([p for p in written.counting if p >= place]))
    record = written.records[place]
    twice = [*written.records[: again + 1], record, *written.records[again + 1 :]]
    found = audit_of(twice, written.expected())
    assert named(found, Kind.DOUBLED) == held(record, left_out=True)
    assert not found.of(Kind.MISSING)
    lines = {fault.line for fault in found.of(Kind.DOUBLED)}
    assert lines == {again + 2}


@examples(125)
@given(ledgers(), st.data(), st.integers(-6, 6).filter(bool))
def test_a_record_whose_samples_were_moved_is_named(written, data, by):
    assume(written.counting)
    place = data.draw(st.sampled_from(written.counting))
    old = written.records[place]
    moved = {**old["commit"], "start": old["commit"]["start"] + by}
    moved["stop"] = old["commit"]["stop"] + by
    new = {"commit": moved}
    records = [*written.records[:place], new, *written.records[place + 1 :]]
    samples = written.ledger.samples_in(moved["epoch"])
    if moved["start"] < 0 or moved["stop"] + moved.get("left_out", 0) > samples:
        with pytest.raises(RunDirectoryError, match=f"line {place + 1} .* not a range of an epoch"):
            audit_of(records, written.expected())
        return
    found = audit_of(records, written.expected())
    assert not found.exact
    before, after = held(old, left_out=True), held(new, left_out=True)
    newest = written.ledger.newest
    there = {p for p in named(found, Kind.MISSING) if p < (newest.epoch, newest.offset)}
    assert there <= before - after
    assert named(found, Kind.DOUBLED) <= after - before
    if place != written.counting[-1]:
        assert there == before - after


@examples(100)
@given(ledgers(), st.data(), st.integers(-3, 3).filter(bool))
def test_a_record_whose_steps_were_moved_is_named(written, data, by):
    assume(written.counting)
    place = data.draw(st.sampled_from(written.counting))
    old = written.records[place]["commit"]
    moved = {**old, "first_step": old["first_step"] + by, "last_step": old["last_step"] + by}
    records = [*written.records[:place], {"commit": moved}, *written.records[place + 1 :]]
    found = audit_of(records, written.expected())
    lines = [fault.line for fault in found.of(Kind.MISPLACED)]
    assert place + 1 in lines


@examples(100)
@given(ledgers(), st.data())
def test_two_records_that_were_swapped_are_named(written, data):
    assume(len(written.counting) > 1)
    one, other = sorted(
        data.draw(st.lists(st.sampled_from(written.counting), min_size=2, max_size=2, unique=True))
    )
    records = list(written.records)
    assume(not any("grow" in record for record in records[one:other]))  # else they do not fit
    records[one], records[other] = records[other], records[one]
    found = audit_of(records, written.expected())
    lines = [fault.line for fault in found.of(Kind.MISPLACED)]
    assert other + 1 in lines


@examples(50)
@given(ledgers(), st.integers(1, 9), st.data())
def test_what_was_counted_twice_before_a_checkpoint_stays_named(written, more, data):
    """The model of a checkpoint has what its steps did, whatever comes after it."""
    assume(written.counting)
    place = data.draw(st.sampled_from(written.counting))
    record = written.records[place]
    assume(record["commit"]["first_step"] < record["commit"]["last_step"])
    written.records.insert(place + 1, record)
    written.keep()
    written.go_back()
    written.report(more)
    found = audit_of(written.records, written.expected())
    assert named(found, Kind.DOUBLED) == held(record, left_out=True)
    assert named(found, Kind.MISSING) == set()
