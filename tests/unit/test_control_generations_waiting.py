"""Control where fewer members are left than the job may run with: they wait, and others come."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from raycloud import commands as c
from raycloud import events as e
from raycloud.control import MemberState, Phase
from tests.control_events import ready, stop
from tests.control_job import control, of, only, report, tick
from tests.control_three import formed, lost, three, to


def waiting(**settings):
    """Member 1 of three is lost after step 5, and all three are needed; with its commands."""
    job = three(**{"min_workers": 3, **settings})
    to(job, 5)
    commands = job.on(lost(1), 2.0)
    assert job.phase is Phase.WAITING
    return job, commands


def test_who_is_left_waits_and_others_are_asked_for():
    job, commands = waiting()
    assert only(e.Noticed, commands).what == (
        "2 workers are left, at least 3 are needed: waiting for more"
    )
    assert only(c.Release, commands) == c.Release(members=(1,))
    spawn = only(c.Spawn, commands)
    assert (spawn.members, spawn.joins, spawn.back) == ((3,), True, None)
    assert not of(c.Form, commands)
    assert not of(c.Finish, commands)
    assert job.committed_step == 5


def test_they_go_on_as_soon_as_enough_are_there():
    job, _ = waiting()
    job.on(e.MemberSpawned(member=3, node="n"), 3.0)
    form = only(c.Form, job.on(ready(3), 9.0))
    assert (form.generation, form.members, form.step) == (1, (0, 2, 3), 5)
    assert job.phase is Phase.REGROUPING
    job.on(formed(job, 5), 9.5)
    for member in (0, 2, 3):
        job.on(report(job, member, 5, 7), 10.0)
    assert (job.phase, job.committed_step) == (Phase.TRAINING, 7)
    recovered = [x for x in to(job, 8, job.group, first=7) if isinstance(x, e.Recovered)]
    assert not recovered  # it was told with the first step
    assert job.ledger.audit().exact


def test_waiting_makes_nobody_overdue():
    job, _ = waiting(silence_s=60.0, capacity=3)
    job.on(e.CapacityChanged(workers=2), 3.0)
    for now_s in range(4, 400, 4):
        tick(job, float(now_s))
        assert job.overdue(float(now_s)) is None
    job.on(e.CapacityChanged(workers=3), 400.0)
    job.on(e.MemberSpawned(member=4, node="n"), 401.0)
    form = only(c.Form, job.on(ready(4), 405.0))
    assert form.members == (0, 2, 4)
    assert job.overdue(460.0) is None  # their time begins anew


def test_words_of_the_step_that_broke_may_still_come():
    job, _ = waiting()
    job.on(report(job, 0, 5, 6), 2.1)
    job.on(e.ExchangeBroken(member=0, generation=0, why="reset"), 2.2)
    job.on(e.ExchangeBroken(member=2, generation=0, why="reset"), 2.3)
    assert job.phase is Phase.WAITING
    assert tick(job, 60.0) == ()
    assert job.phase is Phase.WAITING


def test_others_are_asked_for_as_often_as_it_takes():
    job, commands = waiting()
    now_s, times = 3.0, []
    while len(times) < 12:
        if spawns := of(c.Spawn, commands):
            times.append(now_s)
            (member,) = spawns[0].members
            commands = job.on(lost(member, "no memory"), now_s + 0.1)
        else:
            now_s += 1.0
            commands = tick(job, now_s)
    gaps = [b - a for a, b in pairwise(times)]
    assert gaps == sorted(gaps)
    assert 55.0 <= gaps[-1] <= 65.0  # at most every minute
    assert job.phase is Phase.WAITING


def test_a_stop_is_carried_out_by_who_is_left():
    job, _ = waiting()
    form = only(c.Form, job.on(stop(), 3.0))
    assert form.members == (0, 2)
    commands = job.on(formed(job, 5), 4.0)
    assert isinstance(only(c.Prepare, commands).change, c.Halt)
    assert job.phase is Phase.STOPPING


def test_two_stops_end_it_at_once():
    job, _ = waiting()
    job.on(stop(), 3.0)
    assert only(c.Finish, job.on(stop(), 3.5)).status == "stopped"


def test_a_range_that_allows_it_lets_them_go_on():
    job, _ = waiting()
    form = only(c.Form, job.on(e.RangeChanged(min_workers=2, max_workers=3), 3.0))
    assert form.members == (0, 2)


def test_where_data_has_grown_nobody_can_join_so_there_is_nothing_to_wait_for():
    job = three(min_workers=3)
    to(job, 5)
    job.on(e.DataGrew(samples=200, version=1), 1.0)
    assert only(c.Finish, job.on(lost(1), 2.0)).status == "failed"


@pytest.mark.parametrize("kept", [[0, 0, 0, 0], [4, 4, 2, 4]])
def test_a_step_that_ends_whoever_computes_it_ends_the_run(kept):
    job = three(min_workers=2, losing=3)
    to(job, 5)
    newest, commands = 2, ()
    for times in range(1, 5):
        commands = job.on(lost(job.group[0], "segmentation fault"), 10.0 * times)
        if times == 4:
            break
        job.on(replace(formed(job, 5), kept=kept[times]), 10.0 * times + 1)
        newest += 1
        job.on(ready(newest), 10.0 * times + 2)
        if job.change_outstanding is not None:
            for member in job.group:
                job.on(
                    e.ChangeApplied(member=member, change=job._state.membership.changes, step=5),
                    10.0 * times + 3,
                )
            job.on(formed(job, 5), 10.0 * times + 4)
            job.on(report(job, newest, 5, 5), 10.0 * times + 4)
    finish = only(c.Finish, commands)
    assert finish.status == "failed"
    assert finish.error.startswith("4 times in step 5: member ")
    assert "segmentation fault" in finish.error


# ---- notices


def leaving(member, deadline_s=120.0):
    return e.MemberLeaving(member=member, reason="spot", deadline_s=deadline_s)


def test_who_is_going_to_leave_leaves_between_two_steps():
    job = three(min_workers=2)
    to(job, 5)
    commands = job.on(leaving(1), 2.0)
    prepare = only(c.Prepare, commands)
    assert isinstance(prepare.change, c.Meet)
    assert prepare.change.members == (0, 2)
    assert prepare.members == (0, 1, 2)
    assert not of(c.Release, commands)
    for member in (0, 1, 2):
        job.on(report(job, member, 5, 6, generation=0), 3.0)
        commands = job.on(e.ChangeApplied(member=member, change=1, step=6), 3.0)
    assert only(c.Release, commands) == c.Release(members=(1,))
    assert job.group == (0, 2)
    assert job.members[1] is MemberState.RELEASED
    job.on(lost(1, "its node is gone"), 9.0)  # as it was said
    job.on(formed(job, 6), 9.0)
    assert (job.phase, job.group) == (Phase.TRAINING, (0, 2))


def test_its_last_word_may_come_after_the_others_went_on():
    job = three(min_workers=2)
    to(job, 5)
    prepare = only(c.Prepare, job.on(leaving(1), 2.0))
    for member in (0, 2):
        job.on(report(job, member, 5, 6, generation=0), 3.0)
        job.on(e.ChangeApplied(member=member, change=prepare.number, step=6), 3.0)
        job.on(report(job, member, 6, 9, generation=1), 4.0)
    assert job.committed_step == 9
    job.on(report(job, 1, 5, 6, generation=0), 5.0)
    commands = job.on(e.ChangeApplied(member=1, change=prepare.number, step=6), 5.0)
    assert only(c.Release, commands) == c.Release(members=(1,))


def test_another_is_asked_for_in_its_place_at_once():
    job = three(min_workers=2)
    to(job, 5)
    assert only(c.Spawn, job.on(leaving(1), 2.0)).members == (3,)


def test_where_it_is_needed_it_stays_while_it_can_and_a_checkpoint_is_made():
    job = three(min_workers=3)
    to(job, 5)
    commands = job.on(leaving(1), 2.0)
    prepare = only(c.Prepare, commands)
    assert isinstance(prepare.change, c.Save)
    for member in (0, 1, 2):
        job.on(e.ChangeApplied(member=member, change=1, step=6), 3.0)
    assert only(c.Spawn, commands).members == (3,)
    prepare = only(c.Prepare, job.on(ready(3), 8.0))  # now it can be done without
    assert prepare.change.members == (0, 2, 3)


def test_of_all_that_leave_one_checkpoint_is_made():
    job = three(min_workers=1)
    to(job, 5)
    first = only(c.Prepare, job.on(leaving(0), 2.0))
    assert first.change.members == (1, 2)
    job.on(leaving(1), 2.1)
    job.on(leaving(2), 2.2)
    for member in (0, 1, 2):
        commands = job.on(e.ChangeApplied(member=member, change=1, step=5), 3.0)
    save = only(c.Prepare, commands)
    assert isinstance(save.change, c.Save)
    for member in (1, 2):
        commands = job.on(e.ChangeApplied(member=member, change=2, step=6), 4.0)
    assert not of(c.Prepare, commands)  # the last ones compute on


def test_who_was_to_join_and_is_going_to_leave_is_given_up():
    job = three(min_workers=2, max_workers=4)
    to(job, 5)
    (spawned,) = only(c.Spawn, job.on(e.CapacityChanged(workers=4), 2.0)).members
    commands = job.on(leaving(spawned), 3.0)
    assert only(c.Release, commands).members == (spawned,)
    assert only(c.Spawn, commands).members == (spawned + 1,)


@pytest.mark.parametrize("phase", ["placing", "forming", "closing"])
def test_a_notice_may_come_at_any_time(phase):
    job = three(min_workers=2)
    if phase == "closing":
        to(job, 5)
        for member in (0, 1, 2):
            job.on(e.MemberDone(member=member, step=5, generation=0), 2.0)
        assert job.on(leaving(1), 3.0) == ()
        return
    job = control(min_workers=1, max_workers=2, capacity=2)
    job.start(0.0)
    if phase == "forming":
        for member in (0, 1):
            job.on(ready(member), 0.0)
    assert job.on(leaving(1), 1.0) == ()
    if phase == "placing":
        for member in (0, 1):
            job.on(ready(member), 2.0)
    prepare = only(c.Prepare, job.on(formed(job, 0), 3.0))
    assert prepare.change.members == (0,)


def leaves_after_the_first_word():
    """Member 1 of three is to leave; member 0 has said that it changed."""
    job = three(min_workers=2)
    to(job, 5)
    prepare = only(c.Prepare, job.on(leaving(1), 2.0))
    job.on(e.ChangeApplied(member=0, change=prepare.number, step=5), 3.0)
    assert job.group == (0, 2)
    return job, prepare


def test_a_leaver_may_die_before_its_own_word():
    job, prepare = leaves_after_the_first_word()
    assert only(c.Release, job.on(lost(1, "gone"), 3.1)).members == (1,)
    job.on(e.ChangeApplied(member=2, change=prepare.number, step=5), 3.2)
    assert job.change_outstanding is None
    job.on(formed(job, 5), 3.3)
    for member in (0, 2):
        commands = job.on(report(job, member, 5, 8), 4.0)
    assert not of(e.Recovered, commands)
    assert isinstance(only(c.Prepare, job.on(stop(), 5.0)).change, c.Halt)
    assert job.phase is Phase.STOPPING


def test_a_leaver_stays_for_a_moment_where_another_is_lost_then():
    job, _ = leaves_after_the_first_word()
    commands = job.on(lost(2), 3.1)
    assert only(c.Form, commands).members == (0, 1)  # it is there, and has the state
    save = only(c.Prepare, job.on(formed(job, 5), 4.0))
    assert isinstance(save.change, c.Save)  # it is needed, and will not be there for long
    job.on(ready(3), 5.0)
    for member in (0, 1):
        commands = job.on(e.ChangeApplied(member=member, change=save.number, step=5), 6.0)
    assert only(c.Prepare, commands).change.members == (0, 3)


def test_where_all_are_to_leave_those_that_come_take_their_places():
    job = three(min_workers=1)
    to(job, 5)
    commands = [x for m in (0, 1, 2) for x in job.on(leaving(m), 2.0)]
    spawned = [m for x in of(c.Spawn, commands) for m in x.members]
    assert spawned == [3, 4, 5]
    meet = of(c.Prepare, commands)[0]
    for member in (0, 1, 2):
        commands = job.on(e.ChangeApplied(member=member, change=meet.number, step=5), 3.0)
    save = only(c.Prepare, commands)
    assert isinstance(save.change, c.Save)
    for member in job.group:
        job.on(e.ChangeApplied(member=member, change=save.number, step=5), 3.5)
    for member in (3, 4):
        job.on(ready(member), 8.0)
    commands = job.on(ready(5), 8.0)
    coming = job.change_outstanding
    assert isinstance(coming, c.Meet)
    assert any(member in coming.members for member in (1, 2))  # who has the state
    assert any(member in coming.members for member in spawned)
    assert len(coming.members) <= 4


def test_more_workers_may_be_asked_for_before_the_first_are_there():
    job = control(min_workers=1, max_workers=2, capacity=2)
    job.start(0.0)
    assert job.on(e.RangeChanged(min_workers=4, max_workers=4), 1.0) == ()
    for member in (0, 1):
        job.on(ready(member), 2.0)
    assert job.phase is Phase.FORMING


def test_a_recovery_is_told_when_it_is_one():
    job, _ = waiting()
    told = [*job.on(report(job, 0, 5, 6), 2.1), *job.on(report(job, 2, 5, 6), 2.1)]
    assert not of(e.Recovered, told)
    job.on(ready(3), 9.0)
    job.on(formed(job, 6), 9.5)
    told = only(e.Recovered, job.on(report(job, 0, 6, 7), 10.0))
    assert (told.detected_s, told.resumed_s) == (2.0, 10.0)
