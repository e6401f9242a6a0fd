"""Control where nobody is left who has the state: members go on from a checkpoint."""

from __future__ import annotations

import pytest

from raycloud import commands as c
from raycloud import events as e
from raycloud.control import MemberState, Phase
from raycloud.errors import InternalError
from raycloud.order import Ledger, read_ledger
from tests.control_events import part, published, ready, stop
from tests.control_job import of, only, report, tick
from tests.control_three import formed, kept_ledger, lost, three, to


def saved(job, step, members=(0, 1, 2)):
    """The members write the checkpoint of this step, and it is published."""
    for member in members:
        job.on(part(member, step, generation=job.generation), 1.0)
    job.on(published(step), 1.0)
    return e.RolledBack(step=step, ledger=job.ledger_at(step))


def all_lost(job, now_s=2.0, members=(0, 1, 2)):
    """All are lost, one right after the other, with their machines; all commands."""
    job.on(e.CapacityChanged(workers=0), now_s)
    commands = [x for m in members for x in job.on(lost(m), now_s)]
    return [*commands, *job.on(e.CapacityChanged(workers=3), now_s)]


def restoring(**settings):
    """Three members are lost at step 8, whose checkpoint is of step 5; with what is found."""
    job = three(**settings)
    to(job, 5)
    back = saved(job, 5)
    to(job, 8, first=5)
    return job, back, all_lost(job)


def come(job, members, now_s=5.0):
    """They find places and are ready; all commands."""
    commands = []
    for member in members:
        job.on(e.MemberSpawned(member=member, node="n"), now_s)
    for member in members:
        commands += job.on(ready(member), now_s)
    return commands


def test_the_newest_checkpoint_is_looked_for_and_others_are_asked_for():
    job, back, commands = restoring()
    assert job.phase is Phase.RESTORING
    assert of(c.Restore, commands) == [c.Restore()]
    assert not of(c.Finish, commands)
    assert not of(c.Spawn, tick(job, 2.5))  # what they are to load is not known yet
    commands = job.on(back, 3.0)
    assert only(c.Spawn, commands) == c.Spawn(members=(3, 4, 5), joins=True, back=5)
    assert "no worker is left, at least 1 are needed" in only(e.Noticed, commands).what
    assert only(c.Record, commands).records == ({"restore": back.ledger},)
    assert (job.committed_step, job.ledger.next_step) == (5, 5)


def test_they_load_it_and_meet_and_what_was_lost_is_told():
    job, back, _ = restoring()
    job.on(back, 3.0)
    form = only(c.Form, come(job, (3, 4, 5)))
    assert (form.members, form.step, form.generation) == ((3, 4, 5), 5, 2)
    assert form.back == c.Back(step=5, generation=2)
    assert job.phase is Phase.REGROUPING
    job.on(formed(job, 5), 5.5)
    told = only(e.Recovered, to(job, 9, (3, 4, 5), first=5))
    assert (told.lost, told.lost_steps, told.detected_s) == ((0, 1, 2), 3, 2.0)
    assert job.committed_step == 9
    assert job.ledger.audit().exact


def test_how_long_steps_take_is_still_known_and_learnt_of_those_that_are_computed_again():
    job, back, _ = restoring()
    progress = job._state.data.formed()
    assert progress.step_s == pytest.approx(1.0 / 3.0)  # a second for five steps, and for three
    job.on(back, 3.0)
    come(job, (3, 4, 5))
    job.on(formed(job, 5), 5.5)
    for first in range(5, 8):
        to(job, first + 1, (3, 4, 5), first=first)
    assert progress.step_s == 1.0


def test_the_file_of_the_ledger_proves_it():
    job, (lines, keep) = three(), kept_ledger()
    keep(to(job, 5))
    back = saved(job, 5)
    keep(to(job, 8, first=5))
    keep(all_lost(job))
    keep(job.on(back, 3.0))
    come(job, (3, 4, 5))
    job.on(formed(job, 5), 5.5)
    keep(to(job, 7, (3, 4, 5), first=5))
    ledger = read_ledger(lines)
    assert ledger.state() == job.ledger.state()
    assert ledger.audit().exact
    assert ledger.next_step == 7


def test_without_a_checkpoint_they_begin_at_the_beginning():
    job = three()
    to(job, 5)
    all_lost(job)
    commands = job.on(e.RolledBack(step=0), 3.0)
    assert only(c.Spawn, commands).back == 0
    assert only(c.Record, commands).records == ({"restore": Ledger(samples=100).state()},)
    form = only(c.Form, come(job, (3, 4, 5)))
    assert (form.step, form.back) == (0, c.Back(step=0, generation=2))
    job.on(formed(job, 0), 5.5)
    to(job, 2, (3, 4, 5))
    assert job.committed_step == 2


def test_the_first_ones_wait_for_others_that_have_a_place_but_not_for_long():
    job, back, _ = restoring(gather_s=2.0)
    job.on(back, 3.0)
    for member in (3, 4):  # there is no place for member 5 yet
        job.on(e.MemberSpawned(member=member, node="n"), 3.5)
    assert not of(c.Form, job.on(ready(3), 5.0))
    assert not of(c.Form, tick(job, 6.9))
    assert only(c.Form, tick(job, 7.1)).members == (3,)


def test_those_for_whom_there_is_no_place_are_not_waited_for():
    job, back, _ = restoring()
    job.on(back, 3.0)
    assert only(c.Form, come(job, (3, 4))).members == (3, 4)


def test_fewer_than_the_job_must_run_with_wait():
    job, back, _ = restoring(min_workers=2)
    job.on(back, 3.0)
    job.on(e.MemberSpawned(member=3, node="n"), 3.5)
    job.on(ready(3), 5.0)
    for now_s in range(6, 900, 3):
        assert job.overdue(float(now_s)) is None
        assert not of(c.Form, tick(job, float(now_s)))
    assert only(c.Form, come(job, (4,), 900.0)).members == (3, 4)


def test_without_machines_as_many_wait_for_a_place_as_are_needed():
    job, back, _ = restoring()
    job.on(e.CapacityChanged(workers=0), 2.5)
    assert only(c.Spawn, job.on(back, 3.0)).members == (3,)
    assert not of(c.Spawn, tick(job, 1000.0))
    commands = job.on(e.CapacityChanged(workers=2), 2000.0)
    assert only(c.Spawn, commands) == c.Spawn(members=(4,), joins=True, back=5)
    job.on(e.MemberSpawned(member=3, node="n"), 2001.0)
    assert only(c.Form, job.on(ready(3), 2004.0)).members == (3,)


def test_who_was_about_to_join_is_kept():
    job = three()
    to(job, 5)
    back = saved(job, 5)
    job.on(lost(1), 2.0)
    job.on(formed(job, 5), 2.1)
    to(job, 6, (0, 2), first=5)
    assert job.members[3] is MemberState.SPAWNING  # in member 1's place
    job.on(e.MemberSpawned(member=3, node="n"), 2.5)
    all_lost(job, 3.0, (0, 2))
    assert only(c.Spawn, job.on(back, 3.1)).members == (4, 5)
    assert only(c.Form, job.on(ready(3), 4.0)).members == (3,)


def following():
    """Member 3 follows members 0 and 2, without the state, when both are lost."""
    job = three()
    to(job, 5)
    back = saved(job, 5)
    job.on(lost(1), 2.0)
    job.on(formed(job, 5), 2.1)
    to(job, 6, (0, 2), first=5)
    job.on(e.MemberSpawned(member=3, node="n"), 2.5)
    meet = only(c.Prepare, job.on(ready(3), 3.0)).change
    assert meet.following == (3,)
    for member in (0, 2):
        job.on(e.ChangeApplied(member=member, change=1, step=6), 3.1)
    job.on(formed(job, 6), 3.2)
    all_lost(job, 4.0, (0, 2))
    assert job.phase is Phase.RESTORING
    return job, back


def test_who_has_followed_goes_back_with_the_others():
    job, back = following()
    commands = job.on(back, 4.1)
    assert only(c.Form, commands).members == (3,)  # it is ready
    word = e.MemberCaughtUp(member=3, generation=2, first_step=6, step=6)
    assert job.on(word, 4.2) == ()  # was on its way
    assert job.on(report(job, 3, 6, 6, generation=2), 4.2) == ()
    job.on(formed(job, 5), 4.3)
    job.on(report(job, 3, 5, 7, share=8), 5.0)
    assert job.committed_step == 7
    assert job.ledger.audit().exact


def test_who_has_followed_cannot_begin_at_the_beginning():
    job, _ = following()
    commands = job.on(e.RolledBack(step=0), 4.1)
    assert c.Release(members=(3,)) in of(c.Release, commands)
    assert job.members[3] is MemberState.RELEASED
    assert not of(c.Form, commands)


def test_who_meets_meanwhile_is_told_to_go_back_too():
    job, back, _ = restoring()
    job.on(back, 3.0)
    come(job, (3, 4, 5))
    form = only(c.Form, [*job.on(lost(4), 5.1), *job.tick(5.2)])
    assert (form.members, form.back) == ((3, 5), c.Back(step=5, generation=2))
    job.on(formed(job, 5), 5.5)
    to(job, 6, (3, 5), first=5)
    form = only(c.Form, [*job.on(lost(5), 6.0), *job.tick(6.1)])
    assert form.back is None


def test_all_may_be_lost_again_before_a_step():
    job, back, _ = restoring()
    job.on(back, 3.0)
    come(job, (3, 4, 5))
    commands = all_lost(job, 5.1, (3, 4, 5))
    assert of(c.Restore, commands)
    assert not of(c.Spawn, job.on(back, 5.2))  # not at once this time
    spawn = only(c.Spawn, tick(job, 6.3))
    form = only(c.Form, come(job, spawn.members, 9.0))
    assert form.back == c.Back(step=5, generation=form.generation)
    job.on(formed(job, 5), 9.5)
    told = only(e.Recovered, to(job, 9, spawn.members, first=5))
    assert (told.lost, told.lost_steps) == ((0, 1, 2, 3, 4, 5), 3)


def test_a_step_that_ends_all_that_compute_it_ends_the_run():
    """Steps before it are done again each time, and are no progress."""
    job, back, _ = restoring(losing=3)
    job.on(e.CapacityChanged(workers=1), 2.5)
    now_s, times, commands = 3.0, 0, []
    while not of(c.Finish, commands):
        times += 1
        commands = job.on(back, now_s)
        while not (spawned := of(c.Spawn, commands)):
            now_s += 1.0
            commands = tick(job, now_s)
        (member,) = spawned[0].members
        come(job, (member,), now_s)
        job.on(formed(job, 5), now_s)
        job.on(report(job, member, 5, 8, share=8), now_s)
        commands = job.on(lost(member, "segmentation fault"), now_s)
    assert times == 3
    finish = only(c.Finish, commands)
    assert finish.status == "failed"
    assert finish.error.startswith("4 times in step 8: member ")
    assert "segmentation fault" in finish.error


def test_a_stop_ends_it_with_the_steps_of_the_checkpoint():
    job, back, _ = restoring()
    assert not of(c.Finish, job.on(stop(), 2.5))
    finish = only(c.Finish, job.on(back, 3.0))
    assert finish == c.Finish(status="stopped")
    assert job.committed_step == 5


def test_where_data_has_grown_the_run_ends():
    job = three()
    to(job, 5)
    job.on(e.DataGrew(samples=200, version=1), 1.0)
    finish = [x for x in all_lost(job) if isinstance(x, c.Finish)]
    assert finish[0].status == "failed"


def test_those_that_wait_may_be_lost_too():
    job = three(min_workers=3)
    to(job, 5)
    back = saved(job, 5)
    job.on(lost(1), 2.0)
    job.on(ready(3), 3.0)
    assert job.phase is Phase.REGROUPING
    job.on(lost(0), 4.0)
    assert job.phase is Phase.WAITING
    job.on(lost(2), 5.0)
    assert (job.phase, job.members[3]) == (Phase.RESTORING, MemberState.READY)
    job.on(back, 5.1)
    assert only(c.Form, come(job, (4, 5))).members == (3, 4, 5)


def test_a_newer_checkpoint_that_is_damaged_is_written_again():
    job = three()
    to(job, 5)
    older = saved(job, 5)
    to(job, 8, first=5)
    saved(job, 8)
    all_lost(job)
    job.on(older, 3.0)
    assert job.last_published == 5
    come(job, (3, 4, 5))
    job.on(formed(job, 5), 5.5)
    to(job, 8, (3, 4, 5), first=5)
    commands = [x for m in (3, 4, 5) for x in job.on(part(m, 8, generation=2), 6.0)]
    assert only(c.Publish, commands).step == 8


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (e.RolledBack(step=0, ledger={"samples": 100}), "the beginning has no ledger"),
        (e.RolledBack(step=5, ledger={"samples": 100}), "its ledger cannot be used"),
        (e.RolledBack(step=4, ledger=Ledger(samples=100).state()), "its ledger has 0 steps"),
    ],
)
def test_what_cannot_be_gone_back_to_changes_nothing(event, why):
    job, back, _ = restoring()
    with pytest.raises(InternalError, match=why):
        job.on(event, 3.0)
    assert job.committed_step == 8
    job.on(back, 3.0)
    with pytest.raises(InternalError, match="no checkpoint is looked for"):
        job.on(back, 3.1)


def test_those_asked_for_while_some_were_left_load_it_where_they_meet():
    job = three()
    to(job, 5)
    back = saved(job, 5)
    spawned = [m for n in (0, 1, 2) for x in of(c.Spawn, job.on(lost(n), 2.0)) for m in x.members]
    assert spawned == [3, 4]
    assert only(c.Spawn, job.on(back, 3.0)).members == (5,)
    form = only(c.Form, come(job, (3, 4, 5)))
    assert (form.members, form.following, form.back.step) == ((3, 4, 5), (), 5)


def test_steps_that_were_taken_back_do_not_count_although_those_that_tell_them_compute_again():
    job, back = following()
    job.on(back, 4.1)
    job.on(formed(job, 5), 4.2)
    assert (job.on(report(job, 3, 5, 6, generation=2), 4.3), job.committed_step) == ((), 5)


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
