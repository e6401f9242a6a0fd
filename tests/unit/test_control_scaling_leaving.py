"""Control when members leave, as fewer may compute: their words come late, and they may die."""

from __future__ import annotations

import pytest

from raycloud import commands as c
from raycloud import events as e
from raycloud.control import MemberState, Phase
from tests.control_events import part, published, ready
from tests.control_job import of, only, report
from tests.control_three import lost, three, to


def test_a_leaver_may_be_heard_to_change_after_the_others_have_gone_on():
    job = three()
    to(job, 5)
    prepare = only(c.Prepare, job.on(e.RangeChanged(min_workers=1, max_workers=2), 2.0))
    assert prepare.change.members == (0, 1)
    for member in (0, 1):
        job.on(e.ChangeApplied(member=member, change=1, step=5), 3.0)
    to(job, 7, members=(0, 1), first=5)
    assert job.committed_step == 7
    leaving = job.on(e.ChangeApplied(member=2, change=1, step=5), 4.0)
    assert only(c.Release, leaving).members == (2,)


def test_one_that_joined_and_left_again_may_be_heard_after_the_others_have_gone_on():
    job = three(max_workers=4, capacity=3)
    to(job, 5)
    job.on(e.CapacityChanged(workers=4), 2.0)
    job.on(e.MemberSpawned(member=3), 2.5)
    assert only(c.Prepare, job.on(ready(3), 3.0)).change.members == (0, 1, 2, 3)
    job.on(e.RangeChanged(min_workers=1, max_workers=3), 3.5)
    told = [x for m in (0, 1, 2) for x in job.on(e.ChangeApplied(member=m, change=1, step=5), 4.0)]
    assert only(c.Prepare, told).change.members == (0, 1, 2)
    for member in (0, 1, 2):
        job.on(report(job, member, 5, 6, share=2), 6.0)
        job.on(e.ChangeApplied(member=member, change=2, step=6), 6.0)
    assert job.committed_step == 6
    job.on(report(job, 3, 5, 6, generation=1, share=2), 7.0)
    released = job.on(e.ChangeApplied(member=3, change=2, step=6), 7.0)
    assert only(c.Release, released).members == (3,)


def test_those_that_were_to_leave_go_on_where_the_others_are_lost():
    job = three()
    to(job, 5)
    job.on(e.RangeChanged(min_workers=1, max_workers=1), 2.0)
    job.on(e.ChangeApplied(member=2, change=1, step=5), 3.0)
    assert job.group == (0,)
    form = only(c.Form, commands := job.on(lost(0), 4.0))
    assert (form.members, form.shares, form.settled) == ((1,), (8,), 1)
    assert only(c.Release, commands).members == (0, 2)


def called_back(heard=5):
    """Member 1 has left at step 5, and is called back at step 6; its words of that are to come."""
    job = three()
    to(job, 5, members=(0, 2))
    job.on(report(job, 1, 0, heard, share=3), 1.0)
    job.on(e.RangeChanged(min_workers=1, max_workers=1), 2.0)
    for member in (0, 2):
        job.on(e.ChangeApplied(member=member, change=1, step=5), 3.0)
    job.on(report(job, 0, 5, 6, share=8), 3.5)
    job.on(e.RangeChanged(min_workers=1, max_workers=2), 3.6)
    job.on(e.ExchangeBroken(member=0, generation=1, why="reset"), 9.0)
    form = only(c.Form, job.tick(12.5))
    assert (form.members, form.step) == ((0, 1), 6)
    return job


@pytest.mark.parametrize("last_words", [True, False])
def test_who_has_left_and_is_called_back_has_the_steps_that_the_others_took_since(last_words):
    """What it says of the time before may come after it was called."""
    job = called_back(heard=4 if last_words else 5)
    if last_words:
        job.on(report(job, 1, 4, 5, generation=0, share=3), 9.5)
    job.on(report(job, 0, 6, 7), 10.0)
    job.on(report(job, 1, 6, 7), 10.0)  # its step before was 4
    assert job.committed_step == 7
    assert job.ledger.audit().exact


def test_who_is_called_back_where_nothing_is_left_is_done_at_the_step_of_the_others():
    job = called_back()
    job.on(e.MemberDone(member=1, step=6, generation=job.generation), 13.0)
    assert job.members[1] is MemberState.DONE
    job.on(e.MemberDone(member=0, step=6, generation=job.generation), 13.0)
    assert (job.committed_step, job.ledger.audit().exact) == (6, True)


def test_who_was_called_back_and_left_again_is_heard_after_the_others_have_gone_on():
    job = called_back()
    again = job.generation
    job.on(report(job, 0, 6, 8), 13.0)
    change = only(c.Prepare, job.on(e.RangeChanged(min_workers=1, max_workers=1), 13.5))
    assert change.change.members == (0,)
    job.on(e.ChangeApplied(member=0, change=change.number, step=8), 14.0)
    job.on(report(job, 0, 8, 9, share=8), 15.0)
    assert job.committed_step == 9
    job.on(report(job, 1, 6, 8, generation=again), 16.0)
    gone = job.on(e.ChangeApplied(member=1, change=change.number, step=8), 16.0)
    assert only(c.Release, gone).members == (1,)
    assert job.ledger.audit().exact


def test_one_that_was_to_leave_may_be_lost_first():
    job = three()
    to(job, 5)
    job.on(e.RangeChanged(min_workers=1, max_workers=2), 2.0)
    for member in (0, 1):
        job.on(e.ChangeApplied(member=member, change=1, step=5), 3.0)
    job.on(lost(2), 4.0)
    assert job.change_outstanding is None
    assert job.group == (0, 1)


@pytest.mark.parametrize("heard", range(4))
def test_who_was_to_leave_and_is_lost_may_leave_a_checkpoint_without_its_part(heard):
    """However many of the others' parts came before: the run ends with those that are whole."""
    job = three()
    to(job, 5)
    job.on(e.RangeChanged(min_workers=1, max_workers=2), 2.0)
    for member in (0, 1):
        job.on(e.ChangeApplied(member=member, change=1, step=5), 3.0)
    to(job, 7, members=(0, 1), first=5)
    words = [part(0, 5), part(1, 5), part(0, 7, generation=1)]
    words.insert(heard, lost(2))
    assert not any(of(c.Publish, job.on(word, 4.0)) for word in words)
    whole = only(c.Publish, job.on(part(1, 7, generation=1), 5.0))
    assert (whole.step, sorted(whole.parts)) == (7, [(0, 0), (1, 0)])
    job.on(published(7), 5.5)
    for member in (0, 1):
        job.on(e.MemberDone(member=member, step=7, generation=1), 6.0)
    assert job.phase is Phase.FINISHED


@pytest.mark.parametrize("wrote", [False, True])
def test_who_leaves_need_not_be_done_when_the_others_are(wrote):
    job = three()
    to(job, 5)
    job.on(e.RangeChanged(min_workers=1, max_workers=2), 2.0)
    for member in (0, 1):
        job.on(e.ChangeApplied(member=member, change=1, step=5), 3.0)
    to(job, 7, members=(0, 1), first=5)
    for member in (0, 1) if wrote else ():
        job.on(part(member, 5), 3.5)
    for member in (0, 1):
        job.on(part(member, 7, generation=1), 4.0)
    told = [x for m in (0, 1) for x in job.on(e.MemberDone(member=m, step=7, generation=1), 5.0)]
    assert job.phase is Phase.CLOSING
    assert only(c.Release, told).members == (2,)
    for word in (part(2, 5), e.ChangeApplied(member=2, change=1, step=5), lost(2)):
        assert job.on(word, 5.5) == ()  # too late
    job.on(published(7), 6.0)
    assert job.phase is Phase.FINISHED
