"""Control towards the end: stops, checkpoints, members that are done."""

from __future__ import annotations

import pytest

from raycloud import commands as c
from raycloud import events as e
from raycloud.control import MemberState, Phase
from raycloud.errors import InternalError
from tests.control_events import part, published, ready
from tests.control_job import control, of, only, report, training, walk

# ---- stopping


def test_a_stop_halts_then_ends_as_stopped():
    job = training()
    prepare = only(c.Prepare, job.on(e.StopRequested(reason="Ctrl-C"), 1.0))
    assert prepare.change == c.Halt(reason="Ctrl-C")
    assert job.phase is Phase.STOPPING
    commands = []
    for member in (0, 1):
        commands += job.on(e.ChangeApplied(member=member, change=1, step=5), 1.0)
        assert job.members[member] is MemberState.DRAINING
        commands += job.on(report(job, member, 0, 5), 1.0)
        commands += job.on(part(member, 5), 1.0)
        commands += job.on(e.MemberDone(member=member, step=5), 1.0)
    publish = only(c.Publish, commands)
    assert publish == c.Publish(step=5, parts={(0, 0): {"file": "0-5"}, (1, 0): {"file": "1-5"}})
    assert not of(c.Finish, commands)
    assert job.phase is Phase.CLOSING
    assert job.on(published(5), 2.0) == (
        c.Release(members=(0, 1)),
        c.Finish(status="stopped"),
    )
    assert job.last_published == 5


def test_a_stop_waits_for_the_change_that_is_outstanding():
    job = training()
    walk(job, until=120, slow_s=0.3)
    assert job.on(e.StopRequested(reason="x"), 13.0) == ()
    assert job.on(e.ChangeApplied(member=0, change=1, step=200), 13.0) == ()
    prepare = only(c.Prepare, job.on(e.ChangeApplied(member=1, change=1, step=200), 13.0))
    assert (prepare.number, prepare.change) == (2, c.Halt(reason="x"))


def test_a_second_stop_ends_at_once():
    job = training()
    job.on(e.StopRequested(reason="x"), 1.0)
    assert job.on(e.StopRequested(reason="x"), 1.0) == (
        c.Release(members=(0, 1)),
        c.Finish(status="stopped"),
    )
    assert job.finished


def test_a_stop_before_training_ends_at_once():
    job = control()
    job.start(0.0)
    assert only(c.Finish, job.on(e.StopRequested(reason="x"), 0.0)).status == "stopped"
    job = control()
    job.start(0.0)
    for member in (0, 1):
        job.on(ready(member), 0.0)
    assert only(c.Finish, job.on(e.StopRequested(reason="x"), 0.0)).status == "stopped"


def test_members_that_are_done_are_not_told_to_halt():
    job = training()
    job.on(report(job, 0, 0, 5), 1.0)
    job.on(e.MemberDone(member=0, step=5), 1.0)
    assert job.on(e.StopRequested(reason="x"), 1.0) == ()
    job.on(report(job, 1, 0, 5), 1.0)
    commands = job.on(e.MemberDone(member=1, step=5), 1.0)
    assert only(c.Finish, commands).status == "finished"


def test_a_halt_that_comes_after_the_last_step_leaves_the_run_finished():
    job = training()
    job.on(e.StopRequested(reason="x"), 1.0)
    commands = []
    for member in (0, 1):
        commands += job.on(report(job, member, 0, 5), 1.0)
        commands += job.on(e.MemberDone(member=member, step=5), 1.0)
    assert only(c.Finish, commands) == c.Finish(status="finished")
    assert job.change_outstanding is None


# ---- checkpoints and the end


def test_checkpoints_in_flight_are_kept_apart():
    job = training()
    commands = []
    for member, step in [(0, 10), (0, 20), (1, 10)]:
        commands += job.on(part(member, step), 1.0)
    assert only(c.Publish, commands).step == 10
    assert only(c.Publish, job.on(part(1, 20), 1.0)).step == 20
    job.on(published(20), 1.0)
    job.on(published(10), 1.0)
    assert job.last_published == 20
    with pytest.raises(InternalError, match="not being published"):
        job.on(published(10), 1.0)
    with pytest.raises(InternalError, match="this or a later part"):
        job.on(part(0, 20), 1.0)


def test_the_run_is_finished_when_its_last_checkpoint_is_published():
    job = training()
    for member in (0, 1):
        job.on(report(job, member, 0, 30), 1.0)
        job.on(part(member, 30), 1.0)
        job.on(e.MemberDone(member=member, step=30), 1.0)
    assert job.phase is Phase.CLOSING
    assert job.on(e.MemberLost(member=0, reason="gone"), 1.0) == ()  # its work is kept
    assert job.on(published(30), 1.0)[-1] == c.Finish(status="finished")
    assert job.ledger.audit(through=job.position_at(30)).exact
    assert job.on(e.MemberLost(member=1, reason="gone"), 1.0) == ()  # late
    assert set(job.members.values()) == {MemberState.RELEASED}


def test_a_checkpoint_that_stays_incomplete_fails_the_run():
    job = training()
    job.on(part(0, 5), 1.0)
    commands = []
    for member in (0, 1):
        job.on(report(job, member, 0, 5), 1.0)
        commands += job.on(e.MemberDone(member=member, step=5), 1.0)
    assert "checkpoint of step 5 has no part of members (1,)" in only(c.Finish, commands).error


@pytest.mark.parametrize(("step", "problem"), [(4, "reported steps up to 5"), (6, "up to 5")])
def test_done_at_another_step_is_refused(step, problem):
    job = training()
    job.on(report(job, 0, 0, 5), 1.0)
    with pytest.raises(InternalError, match=problem):
        job.on(e.MemberDone(member=0, step=step), 1.0)


def test_members_must_be_done_at_the_same_step():
    job = training()
    for member, last in ((0, 5), (1, 6)):
        job.on(report(job, member, 0, last), 1.0)
    job.on(e.MemberDone(member=0, step=5), 1.0)
    with pytest.raises(InternalError, match="is done at step 5"):
        job.on(e.MemberDone(member=1, step=6), 1.0)


# ---- a member that fails

RAISED = {"error": "TaskError", "message": "ZeroDivisionError"}


def test_a_failure_waits_for_the_parts_that_others_write():
    job = training()
    job.on(part(0, 30), 1.0)
    assert job.on(e.MemberFailed(member=0, **RAISED), 1.0) == ()
    assert job.phase is Phase.ENDING
    assert only(c.Publish, job.on(part(1, 30), 2.0)).step == 30
    assert job.on(e.MemberFailed(member=1, error="TaskError", message="another"), 2.0) == ()
    commands = job.on(published(30), 3.0)
    assert job.last_published == 30
    assert only(c.Finish, commands).status == "failed"
    assert "ZeroDivisionError" in only(c.Finish, commands).error  # the first one's


def test_a_failure_after_all_parts_waits_until_they_are_published():
    job = training()
    for member in (0, 1):
        job.on(part(member, 30), 1.0)
    assert job.on(e.MemberFailed(member=1, **RAISED), 1.0) == ()
    assert only(c.Finish, job.on(published(30), 1.5)).status == "failed"


@pytest.mark.parametrize("writes", [True, False])
def test_a_failure_ends_the_run_at_once_where_nothing_can_become_whole(writes):
    job = training()
    if writes:  # and the part of the one that fails is missing
        job.on(part(1, 30), 1.0)
    assert only(c.Finish, job.on(e.MemberFailed(member=0, **RAISED), 1.0)).status == "failed"


def test_what_others_write_is_not_waited_for_where_they_are_gone_or_too_slow():
    job = training()
    job.on(part(0, 30), 1.0)
    job.on(e.MemberFailed(member=0, **RAISED), 1.0)
    lost = job.on(e.MemberLost(member=1, reason="gone"), 2.0)
    assert "ZeroDivisionError" in only(c.Finish, lost).error
    job = training()
    job.on(part(0, 30), 1.0)
    job.on(e.MemberFailed(member=0, **RAISED), 1.0)
    assert not of(c.Finish, job.tick(30.0))
    assert only(c.Finish, job.tick(31.0)).status == "failed"


def test_two_stops_do_not_wait_for_a_checkpoint_either():
    job = training()
    job.on(part(0, 30), 1.0)
    job.on(e.MemberFailed(member=0, **RAISED), 1.0)
    job.on(e.StopRequested(reason="x"), 1.0)
    assert only(c.Finish, job.on(e.StopRequested(reason="x"), 1.0)).status == "failed"
