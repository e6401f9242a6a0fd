"""Control where a checkpoint is gone back to: members that fail, that come late, that take long."""

from __future__ import annotations

from raycloud import commands as c
from raycloud import events as e
from raycloud.control import MemberState, Phase
from tests.control_events import part
from tests.control_job import of, only, tick
from tests.control_three import formed, lost, three, to
from tests.unit.test_control_rollback import (
    all_lost,
    come,
    restoring,
    saved,
)


def test_what_one_wrote_and_measured_before_its_first_step_may_come_after_the_others_loss():
    job = three(min_workers=2)
    to(job, 5)
    back = saved(job, 5)
    for member in (0, 1):
        job.on(lost(member), 2.0)
    assert only(c.Form, come(job, (3,), 3.0)).members == (2, 3)
    job.on(lost(2), 4.0)
    assert (job.phase, job.members[3]) == (Phase.RESTORING, MemberState.READY)
    late = [part(3, 5, generation=1), e.EvaluationPart(member=3, step=5, states={}, generation=1)]
    assert [job.on(word, 4.1) for word in late] == [(), ()]
    job.on(back, 4.2)
    assert [job.on(word, 4.3) for word in late] == [(), ()]
    assert only(c.Form, come(job, (4, 5))).members == (3, 4, 5)


def test_the_checkpoint_that_all_went_back_to_is_whole():
    """One that did not know writes its part of it, and no other does."""
    job = three()
    to(job, 5)
    back = e.RolledBack(step=5, ledger=job.ledger_at(5))  # of another start
    to(job, 8, first=5)
    all_lost(job)
    job.on(back, 3.0)
    come(job, (3, 4, 5))
    job.on(formed(job, 5), 5.5)
    job.on(part(3, 5, generation=2), 5.6)
    to(job, 9, (3, 4, 5), first=5)
    done = [e.MemberDone(member=m, step=9, generation=2) for m in (3, 4, 5)]
    commands = [x for word in done for x in job.on(word, 9.0)]
    assert only(c.Finish, commands).status == "finished"


def test_where_data_grows_meanwhile_the_run_ends_and_says_why():
    job, back, _ = restoring()
    job.on(back, 3.0)
    finish = only(c.Finish, job.on(e.DataGrew(samples=200, version=1), 4.0))
    assert finish.status == "failed"
    assert "none can join, since the data has grown: its process died" in finish.error


def test_that_they_were_ready_before_the_loss_is_no_waiting():
    job = three(gather_s=2.0)
    to(job, 5)
    back = saved(job, 5)
    for member in (0, 1):
        job.on(lost(member), 2.0)
    come(job, (3,), 2.5)
    job.on(e.MemberSpawned(member=4, node="n"), 3.0)
    job.on(lost(2), 3.1)
    assert job.phase is Phase.RESTORING
    assert not of(c.Form, job.on(back, 12.0))
    assert not of(c.Form, tick(job, 13.9))
    assert only(c.Form, tick(job, 14.1)).members == (3,)


def test_machines_that_are_lost_are_no_errors_of_members():
    job, back, _ = restoring()
    job.on(e.CapacityChanged(workers=1), 2.5)
    commands, now_s = job.on(back, 3.0), 3.0
    for _ in range(7):
        while not (spawned := of(c.Spawn, commands)):
            now_s += 1.0
            commands = tick(job, now_s)
        (member,) = spawned[0].members
        commands = job.on(lost(member), now_s)
    (member,) = only(c.Spawn, tick(job, now_s + 60.0)).members
    failed = e.MemberFailed(member=member, error="TaskError", message="no such file")
    assert not of(c.Finish, job.on(failed, now_s + 61.0))
    (member,) = only(c.Spawn, tick(job, now_s + 200.0)).members
    assert only(c.Form, come(job, (member,), now_s + 205.0)).members == (member,)


def unreadable(member):
    return e.MemberFailed(member=member, error="CheckpointError", message="cannot be read")


def test_who_cannot_load_it_is_lost_and_the_others_go_on():
    job, back, _ = restoring()
    job.on(back, 3.0)
    come(job, (3, 4, 5))
    commands = [*job.on(unreadable(4), 6.0), *job.tick(6.1)]
    assert not of(c.Finish, commands)
    form = only(c.Form, commands)
    assert (form.members, form.back.step) == ((3, 5), 5)
    job.on(formed(job, 5), 6.5)
    finish = only(c.Finish, job.on(unreadable(5), 7.0))  # it has computed, or is about to
    assert "cannot be read" in finish.error


def test_where_nobody_can_load_it_the_run_ends_in_the_end():
    job, back, _ = restoring()
    job.on(e.CapacityChanged(workers=1), 2.5)
    now_s, times, commands = 3.0, 0, []
    while not of(c.Finish, commands):
        times += 1
        commands = job.on(back, now_s)
        while not (spawned := of(c.Spawn, commands)):
            now_s += 1.0
            commands = tick(job, now_s)
        (member,) = spawned[0].members
        assert of(c.Form, come(job, (member,), now_s))
        commands = job.on(unreadable(member), now_s)
    assert times == 7
    assert "cannot be read" in only(c.Finish, commands).error


def test_loading_it_may_take_as_long_as_building():
    job, back, _ = restoring(form_s=60.0, spawn_s=300.0)
    job.on(back, 3.0)
    assert of(c.Form, come(job, (3, 4, 5), 5.0))
    assert job.overdue(304.0) is None
    found = job.overdue(306.0)
    assert found.reason.startswith("generation 2 was not formed after 300 s")


def test_members_that_fail_to_build_again_and_again_end_the_run():
    job, back, _ = restoring()
    job.on(e.CapacityChanged(workers=1), 2.5)
    commands, now_s = job.on(back, 3.0), 3.0
    for times in range(1, 8):
        while not (spawned := of(c.Spawn, commands)):
            now_s += 1.0
            commands = tick(job, now_s)
        (member,) = spawned[0].members
        failed = e.MemberFailed(member=member, error="TaskError", message="no such file")
        commands = job.on(failed, now_s)
        assert bool(of(c.Finish, commands)) == (times == 7)
    assert "no such file" in only(c.Finish, commands).error
