"""Control where nobody is left who has the state, and some who are silent may come back."""

from __future__ import annotations

import pytest

from raycloud import commands as c
from raycloud import events as e
from raycloud.control import MemberState, Phase
from tests.control_job import of, only, report, tick
from tests.control_three import formed, three, to
from tests.unit.test_control_restoring import all_lost, come, saved


def silent(member):
    return e.MemberLost(member=member, reason="frozen, or cut off", silent=True)


def away(*, saves=True):
    """Member 1 is away when the others are lost at step 8; with what is found."""
    job = three()
    to(job, 5)
    back = saved(job, 5) if saves else e.RolledBack(step=0)
    to(job, 8, first=5)
    job.on(e.CapacityChanged(workers=0), 2.0)
    assert of(c.LeaveOut, job.on(silent(1), 2.0))
    commands = all_lost(job, 2.1, (0, 2))
    assert job.phase is Phase.RESTORING
    assert not any(1 in x.members for x in of(c.Release, commands))
    return job, back


def returns(job, now_s=3.5):
    """Member 1 is back; the commands."""
    return job.on(e.MemberReturned(member=1, late_s=1.0), now_s)


@pytest.mark.parametrize("early", [False, True])
def test_who_was_away_goes_back_to_the_checkpoint_like_all_others(early):
    job, back = away()
    commands = [] if early else list(job.on(back, 3.0))
    before = [m for x in of(c.Spawn, commands) for m in x.members]
    readmit = only(c.Readmit, returns(job))
    assert readmit == c.Readmit(member=3 + len(before), process=1)
    if early:
        job.on(back, 3.6)
    form = only(c.Form, come(job, (readmit.member,)))
    assert (form.members, form.following, form.back.step) == ((readmit.member,), (), 5)
    job.on(formed(job, 5), 5.5)
    job.on(report(job, readmit.member, 5, 7, share=8), 6.0)
    assert job.committed_step == 7
    assert job.ledger.audit().exact


def test_who_is_away_may_be_the_only_one_there_is_and_others_come_where_it_does_not_return():
    job, back = away()
    assert of(c.Spawn, job.on(back, 3.0))
    released = [m for now_s in (50, 93) for x in of(c.Release, tick(job, now_s)) for m in x.members]
    assert released == [1]
    assert not returns(job, 94.0)
    assert only(c.Form, come(job, (3, 4), 95.0)).members == (3, 4)


def test_who_was_away_cannot_begin_at_the_beginning():
    job, nothing = away(saves=False)
    commands = job.on(nothing, 3.0)
    assert any(1 in x.members for x in of(c.Release, commands))
    assert not returns(job)


def test_who_is_back_before_it_is_known_that_there_is_no_checkpoint_cannot_begin_either():
    job, nothing = away(saves=False)
    member = only(c.Readmit, returns(job, 2.5)).member
    commands = job.on(nothing, 3.0)
    assert c.Release(members=(member,)) in of(c.Release, commands)
    assert job.members[member] is MemberState.RELEASED
