"""Control while a newcomer follows the others without the state."""

from __future__ import annotations

from raycloud import commands as c
from raycloud import events as e
from raycloud.control import MemberState, Phase
from tests.control_events import ready, stop
from tests.control_job import of, on_and_tick, only, report
from tests.control_three import lost
from tests.unit.test_control_growing import applied, caught_up, formed, to, two


def following(**settings):
    """Members 0 and 1 compute, and member 2 follows them since step 6."""
    job = two(**settings)
    to(job, 5)
    job.on(e.CapacityChanged(workers=3), 2.0)
    prepare = only(c.Prepare, job.on(ready(2), 8.0))
    applied(job, prepare, 6)
    for member in (0, 1):
        job.on(report(job, member, 5, 8), 9.0)
    assert (job.group, job.shares, job.committed_step) == ((0, 1, 2), (4, 4, 0), 8)
    return job


def test_who_follows_goes_on_following_where_another_is_lost():
    job = following()
    form = only(c.Form, job.on(lost(0), 10.0))
    assert (form.members, form.shares, form.following) == ((1, 2), (8, 0), (2,))
    job.on(formed(job, 8), 10.5)
    job.on(report(job, 1, 8, 10), 11.0)
    assert (job.phase, job.committed_step) == (Phase.TRAINING, 10)
    change = only(c.Prepare, job.on(caught_up(2, 8, 10, job.generation), 12.0)).change
    assert (change.caught_up, min(change.shares) > 0) == ((2,), True)


def test_where_nobody_is_left_who_has_the_state_a_checkpoint_is_looked_for():
    job = following()
    job.on(lost(0), 10.0)
    assert only(c.Restore, job.on(lost(1), 10.1))


def test_who_has_caught_up_is_one_who_has_the_state():
    job = following()
    job.on(caught_up(2, 6, 8), 9.5)
    job.on(lost(0), 10.0)
    form = only(c.Form, on_and_tick(job, lost(1), 10.1))
    assert (form.members, form.shares, form.following) == ((2,), (8,), ())


def test_a_late_word_of_a_generation_that_broke_does_not_count():
    job = following()
    form = only(c.Form, job.on(lost(0), 10.0))
    assert not job.on(caught_up(2, 6, 8, generation=1), 10.1)
    assert not job.on(report(job, 2, 8, 9, generation=1), 10.2)
    job.on(formed(job, 8), 10.3)
    commands = job.on(caught_up(2, 8, 9, generation=form.generation), 10.4)
    assert only(c.Prepare, commands).change.caught_up == (2,)
    assert not job.on(caught_up(2, 8, 9, generation=form.generation), 10.5)


def test_who_follows_and_is_lost_is_missed_by_nobody():
    job = following()
    commands = job.on(lost(2), 10.0)
    assert only(c.Form, commands).members == (0, 1)
    assert "a member could not join" in only(c.Notice, commands).what


def test_who_leaves_is_not_kept_waiting():
    job = following()
    change = only(c.Prepare, job.on(e.MemberLeaving(member=0, reason="spot"), 10.0)).change
    assert (change.members, change.shares, change.following) == ((1, 2), (8, 0), (2,))


def test_what_comes_late_of_one_that_follows_and_has_been_let_go_does_not_count():
    job = following()
    prepare = only(c.Prepare, job.on(e.MemberLeaving(member=2, reason="spot"), 10.0))
    assert prepare.change.members == (0, 1)
    for member in (0, 1):
        job.on(report(job, member, 8, 9), 10.5)
        job.on(e.ChangeApplied(member=member, change=prepare.number, step=9), 11.0)
    assert not job.on(caught_up(2, 6, 8), 11.1)
    assert not job.on(report(job, 2, 8, 9, generation=1), 11.2)
    released = job.on(e.ChangeApplied(member=2, change=prepare.number, step=9), 11.3)
    assert only(c.Release, released).members == (2,)


def test_the_only_one_that_has_the_state_stays_until_another_has_it():
    job = following(max_workers=3)
    job.on(lost(0), 10.0)
    job.on(formed(job, 8), 10.5)
    assert not of(c.Prepare, job.on(e.MemberLeaving(member=1, reason="spot"), 11.0))[1:]
    while isinstance(job.change_outstanding, c.Save):
        number = job._state.membership.outstanding.number
        for member in job.group:
            job.on(e.ChangeApplied(member=member, change=number, step=9), 11.5)
    change = only(c.Prepare, job.on(caught_up(2, 8, 9, job.generation), 12.0)).change
    assert isinstance(change, c.Meet)
    assert (change.members, change.shares, change.following) == ((2,), (8,), ())


def test_a_run_may_end_with_one_that_follows():
    job = following()
    prepare = only(c.Prepare, job.on(stop(), 10.0))
    applied(job, prepare, 9)
    assert job.members[2] is MemberState.DRAINING
    for member in (0, 1):
        job.on(report(job, member, 8, 9), 10.5)
        job.on(e.MemberDone(member=member, step=9, generation=1), 11.0)
    commands = job.on(e.MemberDone(member=2, step=9, generation=1), 11.0)
    assert only(c.Finish, commands).status == "stopped"
    assert job.committed_step == 9


def test_the_first_word_of_the_meeting_may_be_that_one_has_caught_up():
    job = two()
    to(job, 5)
    job.on(e.CapacityChanged(workers=3), 2.0)
    prepare = only(c.Prepare, job.on(ready(2), 8.0))
    assert not job.on(caught_up(2, 6, 7), 8.5)
    assert (job.group, job.generation) == ((0, 1, 2), 1)
    change = only(c.Prepare, applied(job, prepare, 6)).change
    assert change.caught_up == (2,)


def test_shares_stay_as_they_are_while_one_follows():
    job = following()
    for at in range(8, 60, 4):
        for member in (0, 1):
            slow = report(job, member, at, at + 4, compute_s=1.0 + 30.0 * member)
            assert not of(c.Prepare, job.on(slow, 10.0 + at))


def test_who_follows_is_not_silent():
    job = following(silence_s=600.0)
    for at in range(8, 40, 4):
        for member in (0, 1):
            job.on(report(job, member, at, at + 4), 100.0 * at)
        assert job.overdue(100.0 * at + 1.0) is None


def test_one_that_follows_may_be_done_before_it_is_known_that_they_have_met():
    job = two()
    to(job, 5)
    job.on(e.CapacityChanged(workers=3), 2.0)
    prepare = only(c.Prepare, job.on(ready(2), 8.0))
    job.on(e.MemberDone(member=2, step=9, generation=1), 8.5)
    applied(job, prepare, 6)
    for member in (0, 1):
        job.on(report(job, member, 5, 9), 9.0)
        job.on(e.MemberDone(member=member, step=9, generation=1), 9.5)
    assert (job.phase, job.committed_step) == (Phase.FINISHED, 9)
