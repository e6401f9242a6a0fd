"""Epochs of random sizes, searched against a walk that takes one sample after the other."""

from __future__ import annotations

import json
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from raycloud.order import (
    Ledger,
    Position,
    Steps,
    commit_record,
    growth_record,
    header_record,
    ledger_line,
    lockstep_commits,
    read_ledger,
    restore_record,
)
from tests.tiers import examples


@st.composite
def cuts(draw):
    """Steps of data that grows a few times; with `drop_last` early epochs may be too small."""
    global_batch = draw(st.integers(1, 8))
    samples = draw(st.integers(1, 25))
    later, epoch, size = [], 0, samples
    for _ in range(draw(st.integers(0, 3))):
        epoch, size = epoch + draw(st.integers(1, 3)), size + draw(st.integers(1, 12))
        later.append((epoch, size))
    return Steps(
        samples=samples,
        global_batch=global_batch,
        micro_batch=draw(st.integers(1, 4)),
        drop_last=draw(st.booleans()) and size >= global_batch,
        later=tuple(later),
    )


def plain_spans(steps, at, count):
    """`count` spans from `at` on as (epoch, start, stop), by the definition."""
    spans, epoch, offset = [], at.epoch, at.offset
    sizes = dict(steps.later)
    while len(spans) < count:
        size = max([steps.samples, *(n for e, n in sizes.items() if e <= epoch)])
        stop = min(offset + steps.global_batch, size)
        whole = stop - offset == steps.global_batch
        if stop <= offset or (steps.drop_last and not whole):
            epoch, offset = epoch + 1, 0
            continue
        spans.append((epoch, offset, stop))
        offset = stop
    return spans


@st.composite
def places(draw, steps):
    epoch = draw(st.integers(0, 6))
    return Position(epoch=epoch, offset=draw(st.integers(0, steps.samples_in(epoch))))


@examples(100)
@given(cuts(), st.integers(1, 40), st.data())
def test_walking_jumping_and_counting_agree_with_the_definition(steps, count, data):
    at = data.draw(places(steps))
    expected = plain_spans(steps, at, count + 1)
    walked = [(s.epoch, s.start, s.stop) for s, _ in zip(steps.walk(0, at), expected, strict=False)]
    assert walked == expected
    epoch, start, _ = expected[count]
    assert steps.position_after(count, at) == Position(epoch=epoch, offset=start)
    cut = steps.micro_batch
    many = sum(-(-(stop - start) // cut) for _, start, stop in expected[:count])
    assert steps.micro_batches(count, at) == many
    for last in range(at.epoch, epoch + 1):
        assert steps.until_epoch(last, at) == sum(e < last for e, _, _ in expected)
    for whole in range(at.epoch + 1, epoch):
        assert steps.per_epoch(whole) == sum(e == whole for e, _, _ in expected)


@examples(100)
@given(cuts(), st.lists(st.integers(0, 30), max_size=5))
def test_every_epoch_holds_each_of_its_samples_once(steps, reports):
    ledger, step = Ledger(samples=steps.samples), 0
    for epoch, samples in steps.later:
        ledger.grow(epoch, samples)
    for count in reports:
        commits = lockstep_commits(
            steps,
            at=steps.position_after(step, Position()) if step else Position(),
            first_step=step,
            last_step=step + count,
            generation=0,
        )
        assert sum(c.last_step - c.first_step for c in commits) == count
        for commit in commits:
            ledger.commit(commit)
        step += count
    assert ledger.audit().exact
    held = Counter()
    for epoch, start, stop in plain_spans(steps, Position(), step):
        held.update((epoch, i) for i in range(start, stop))
    assert set(held.values()) <= {1}
    assert ledger.committed_samples == held.total()
    if step:
        assert ledger.newest == steps.position_after(step, Position())
        assert ledger.audit(through=ledger.newest).exact
    for epoch in range(ledger.newest.epoch):
        whole = {i for e, i in held if e == epoch}
        tail = steps.samples_in(epoch) - len(whole)
        assert tail == 0 or (steps.drop_last and tail < steps.global_batch)
    assert Ledger.from_state(json.loads(json.dumps(ledger.state()))).state() == ledger.state()


@examples(75)
@given(
    st.integers(1, 25),
    st.lists(st.sampled_from(["go", "grow", "keep", "back"]), max_size=14),
    st.data(),
)
def test_a_ledger_that_grows_and_goes_back_reads_back_from_its_file(samples, acts, data):
    steps = Steps(samples=samples, global_batch=4, micro_batch=2)
    ledger, step, records = Ledger(samples=steps.samples), 0, [header_record(steps.samples)]
    kept = (0, steps, ledger.state())
    for act in acts:
        at = steps.position_after(step, Position())
        if act == "go":
            last = step + data.draw(st.integers(0, 12))
            for commit in lockstep_commits(
                steps, at=at, first_step=step, last_step=last, generation=0
            ):
                ledger.commit(commit)
                records.append(commit_record(commit))
            step = last
        elif act == "grow" and step:
            epoch, more = at.next_epoch, steps.sizes.most + data.draw(st.integers(0, 5))
            steps = steps.grown(epoch, more)
            ledger.grow(epoch, more)
            records.append(growth_record(epoch, more))
        elif act == "keep":
            kept = (step, steps, json.loads(json.dumps(ledger.state())))
        elif act == "back":
            step, steps, state = kept
            ledger.restore(state)
            records += [header_record(steps.samples), restore_record(state)]
    read = read_ledger(map(ledger_line, records))
    assert read.state() == ledger.state()
    assert read.sizes == steps.sizes
    assert read.audit().exact
    assert read.committed_samples == sum(
        stop - start for _, start, stop in plain_spans(steps, Position(), step)
    )
