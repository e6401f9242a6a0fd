"""What steps took and did not count: told by every member, into the ledger once, with its step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raycloud import commands as c
from raycloud.errors import InternalError
from raycloud.order import ERROR, NAN, Ledger, Skip
from tests.control_job import of, report
from tests.control_three import formed, lost, three, to

SKIP = Skip(step=3, epoch=0, start=26, stop=27, why=ERROR)


def told(job, member, first, last, *skips, **more):
    made = report(job, member, first, last, share=3, **more)
    return replace(made, skips=tuple(skip.to_record() for skip in skips))


def written(commands):
    """Every record, in order."""
    return [record for command in of(c.Record, commands) for record in command.records]


def test_it_is_written_after_the_commit_of_its_step_and_once():
    job = three()
    for member in (0, 1):
        assert not written(job.on(told(job, member, 0, 4, SKIP), 1.0))
    records = written(job.on(told(job, 2, 0, 5, SKIP), 1.0))
    assert [next(iter(record)) for record in records] == ["commit", "skip"]
    assert records[1] == {"skip": SKIP.to_record()}
    audit = job.ledger.audit()
    assert audit.exact
    assert audit.skips == (SKIP,)
    assert audit.committed_samples == 4 * 8 - 1
    assert not [r for r in written(to(job, 9, first=4, members=(0, 1))) if "skip" in r]


def test_a_checkpoint_has_those_of_the_steps_before_it():
    job = three()
    later = Skip(step=6, epoch=0, start=48, stop=56, why=NAN)
    for member in (0, 1, 2):
        job.on(told(job, member, 0, 7, SKIP, later), 1.0)
    skips = {step: Ledger.from_state(job.ledger_at(step)).skips for step in (3, 4, 6, 7)}
    assert skips == {3: (), 4: (SKIP,), 6: (SKIP,), 7: (SKIP, later)}


def test_the_word_of_a_lost_member_alone_does_not_count():
    """It alone had committed the step; the others compute it anew, and then nothing fails."""
    job = three()
    to(job, 3)
    job.on(told(job, 1, 3, 4, SKIP), 1.0)
    job.on(lost(1), 2.0)
    job.on(formed(job, 3), 2.5)
    assert not [r for r in written(to(job, 5, (0, 2), first=3)) if "skip" in r]
    assert job.ledger.audit().skips == ()


def test_what_another_one_has_heard_of_counts():
    job = three()
    to(job, 3)
    job.on(told(job, 1, 3, 4, SKIP), 1.0)
    job.on(told(job, 2, 3, 4, SKIP), 1.0)
    job.on(lost(1), 2.0)
    job.on(formed(job, 4), 2.5)
    job.on(told(job, 0, 3, 5, SKIP), 3.0)  # it took the state, and says what it found in that
    to(job, 5, (2,), first=4)
    assert job.ledger.audit().skips == (SKIP,)
    assert job.ledger.audit().exact


@pytest.mark.parametrize(
    "record",
    [{}, {**SKIP.to_record(), "step": 7}, {**SKIP.to_record(), "why": "no"}],
    ids=["empty", "step", "why"],
)
def test_what_is_no_skip_of_these_steps_is_illegal(record):
    job = three()
    event = replace(report(job, 0, 0, 4, share=3), skips=(record,))
    with pytest.raises(InternalError, match="illegal"):
        job.on(event, 1.0)
    assert job.committed_step == 0
