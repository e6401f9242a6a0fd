"""Control of one job from its first event to its last: failures, stops, and the end."""

from __future__ import annotations

import pytest

from raycloud import commands as c
from raycloud import events as e
from raycloud.control import MemberState, Phase
from raycloud.errors import CheckpointError, InternalError
from raycloud.order import Position, header_record, ledger_line, read_ledger
from tests.control_events import part, published, ready
from tests.control_job import (
    control,
    of,
    on_and_tick,
    only,
    report,
    tick,
    training,
    training_to,
    walk,
)
from tests.control_three import formed, lost, three, to

# ---- faults


def test_where_nobody_can_come_the_run_fails_and_says_what_to_do():
    job = training(min_workers=1)
    job.on(e.DataGrew(samples=200, version=1), 0.5)
    commands = job.on(e.MemberLost(member=0, reason="its node died"), 1.0)
    assert not of(c.Finish, commands)
    finish = only(c.Finish, job.on(e.MemberLost(member=1, reason="its node died, too"), 1.0))
    assert finish.status == "failed"
    assert "member 1 on node-1 was lost: its node died, too" in finish.error
    assert "no checkpoint yet" in finish.error
    assert job.members[1] is MemberState.LOST
    assert job.on(report(job, 1, 0, 3), 1.0) == ()  # late word of the dead: ignored
    assert job.committed_step == 0


def test_the_checkpoint_to_resume_from_is_named():
    job = training(min_workers=1)
    for member in (0, 1):
        job.on(part(member, 10), 1.0)
    job.on(published(10), 1.0)
    job.on(e.DataGrew(samples=200, version=1), 1.0)
    job.on(e.MemberLost(member=0, reason="x"), 1.0)
    error = only(c.Finish, job.on(e.MemberLost(member=1, reason="x"), 1.0)).error
    assert "--resume goes on from the last checkpoint, of step 10" in error


def test_a_failed_member_fails_the_run_with_its_own_words():
    job = training()
    failed = e.MemberFailed(member=0, error="TaskError", message="no loss", hint="return one")
    error = only(c.Finish, job.on(failed, 1.0)).error
    assert error == "member 0 on node-0: TaskError: no loss\n\nhint: return one"


def test_a_member_that_does_not_become_ready_is_lost():
    job = control(spawn_s=30.0)
    job.start(0.0)
    job.on(ready(0), 1.0)
    assert tick(job, 30.0) == ()
    assert job.overdue(31.0).member == 1
    _, finish = tick(job, 31.0)
    assert "member 1 was lost: not ready after 30 s" in finish.error


def test_a_member_that_prepares_its_data_is_given_time():
    job = control(spawn_s=30.0)
    job.start(0.0)
    for member in (0, 1):
        job.on(e.DataPreparing(member=member, seconds=25.0), 25.0)
    assert tick(job, 54.0) == ()
    assert "not ready after 30 s" in tick(job, 56.0)[-1].error


def test_a_member_that_is_ready_prepares_nothing():
    job = training()
    with pytest.raises(InternalError):
        job.on(e.DataPreparing(member=0, seconds=25.0), 25.0)


def test_where_a_generation_does_not_form_a_member_is_lost():
    job = control(form_s=5.0)
    job.start(0.0)
    for member in (0, 1):
        job.on(ready(member), 100.0)
    assert tick(job, 105.0) == ()
    reason = job.overdue(106.0).reason
    assert reason == "generation 0 was not formed after 5 s (silent are members 0, 1)"
    assert only(c.Spawn, tick(job, 106.0)).members == (2,)


def test_a_run_that_resumes_has_longer_since_members_load_the_checkpoint_where_they_meet():
    first = training_to(14)
    at = {"step": 12, "position": first.position_at(12), "ledger": first.ledger_at(12)}
    job = control(form_s=5.0, spawn_s=200.0, silence_s=50.0, **at)
    job.start(0.0)
    for member in (0, 1):
        job.on(ready(member), 100.0)
    assert job.overdue(299.0) is None
    assert job.overdue(301.0).reason.startswith("generation 0 was not formed after 200 s")
    job.on(
        e.MemberLost(member=0, reason="died"), 110.0
    )  # another meeting, and nobody has loaded it
    job.on(ready(2), 120.0)
    assert job.overdue(309.0) is None
    assert job.overdue(321.0) is not None


def test_the_member_heard_least_recently_is_taken_for_lost():
    job = training(silence_s=10.0)
    job.on(report(job, 1, 0, 2), 1.0)
    job.on(report(job, 0, 0, 2), 2.0)
    assert tick(job, 11.0) == ()
    assert job.overdue(11.5).member == 1
    assert "no progress for 10 s" in job.overdue(11.5).reason
    tick(job, 11.5)
    assert job.members[0] is MemberState.ACTIVE
    assert job.members[1] is MemberState.LOST


def test_an_empty_report_is_a_sign_of_life():
    job = training(silence_s=10.0)
    for member in (0, 1):
        assert job.on(report(job, member, 0, 0), 9.0) == ()
    assert tick(job, 18.0) == ()


def test_a_changed_range_is_in_force_at_once():
    job = training()
    assert job.on(e.RangeChanged(min_workers=1, max_workers=5), 1.0) == ()  # there is no room
    assert job.workers == (1, 5)
    with pytest.raises(InternalError, match="no range"):
        job.on(e.RangeChanged(min_workers=3, max_workers=2), 1.0)


# ---- resuming


def resumed(first, **more):
    """A job that goes on from `first`'s checkpoint of step 14 in epoch 1."""
    return control(
        step=14,
        position=first.position_at(14),
        ledger=first.ledger_at(14),
        first_generation=first.generation + 1,
        **more,
    )


def test_a_resumed_run_goes_on_exactly():
    first = training()
    lines = [ledger_line(header_record(100))]

    def keep(commands):
        lines.extend(ledger_line(r) for x in of(c.Record, commands) for r in x.records)

    for member in (0, 1):
        keep(first.on(report(first, member, 0, 20), 1.0))
    job = resumed(first)
    assert job.last_published == 14
    job.start(0.0)
    job.on(ready(0), 0.0)
    commands = job.on(ready(1), 0.0)
    keep(commands)
    form = only(c.Form, commands)
    assert (form.generation, form.step) == (1, 14)
    assert job.committed_step == 14
    for member in (0, 1):
        keep(job.on(report(job, member, 14, 40), 1.0))
    ledger = read_ledger(lines)
    assert ledger.state() == job.ledger.state() == training_to(40).ledger.state()
    assert ledger.audit().exact


def test_a_tail_that_the_resumed_cut_cannot_use_is_left_out():
    first = training_to(20)
    assert first.position_at(12) == Position(offset=96)
    job = training(
        step=12, position=first.position_at(12), ledger=first.ledger_at(12), drop_last=True
    )
    assert (job.position_at(12), job.ledger_at(12)) == (Position(offset=96), first.ledger_at(12))
    for member in (0, 1):
        job.on(report(job, member, 12, 14), 1.0)
    audit = job.ledger.audit()
    assert audit.exact
    assert [str(r) for r in audit.left_out] == ["epoch 0 [96, 100)"]


def test_resuming_with_less_data_fails_the_run():
    job = resumed(training_to(20))
    job.start(0.0)
    job.on(ready(0, samples=99), 0.0)
    error = only(c.Finish, job.on(ready(1, samples=99), 0.0)).error
    assert "100 samples per epoch, the members see 99" in error


def test_a_checkpoint_that_contradicts_itself_is_refused():
    first = training_to(20)
    with pytest.raises(CheckpointError, match="its ledger ends at"):
        control(step=14, position=first.position_at(13), ledger=first.ledger_at(14))


def test_resuming_needs_the_ledger():
    with pytest.raises(InternalError, match="needs the ledger"):
        control(step=14)


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


def done(member, step=5, generation=0):
    return e.MemberDone(member=member, step=step, generation=generation)


def test_who_was_done_and_has_ended_since_does_not_meet_the_others_again():
    job = three()
    to(job, 5)
    job.on(done(0), 2.0)
    assert job.on(lost(0), 2.1) == ()
    assert job.phase is Phase.TRAINING
    form = only(c.Form, commands := job.on(lost(2), 3.0))
    assert form.members == (1,)
    assert {m for x in of(c.Release, commands) for m in x.members} == {0, 2}


def test_who_was_done_and_has_ended_since_is_nobody_to_wait_with():
    job = three(min_workers=3)
    to(job, 5)
    for member in (0, 1):
        job.on(done(member), 2.0)
    job.on(lost(1), 2.5)
    job.on(lost(2), 3.0)
    assert job.phase is Phase.WAITING  # member 0 has the state
    commands = [*job.on(lost(0), 4.0), *tick(job, 5.0)]
    assert of(c.Restore, commands)
    assert job.members[0] is MemberState.LOST
    assert job.phase is Phase.RESTORING


def test_many_that_are_lost_at_once_are_one_incident():
    job = control(min_workers=1, max_workers=24, capacity=24, global_batch=48)
    job.start(0.0)
    for member in range(24):
        job.on(ready(member), 0.0)
    job.on(formed(job, 0), 0.0)
    to(job, 5, job.group)
    for member in range(20):
        on_and_tick(job, lost(member, "its node is gone"), 2.0 + member / 10)
    assert (job.phase, job.group) == (Phase.REGROUPING, (20, 21, 22, 23))


def test_who_has_the_state_and_does_not_meet_anybody_is_lost_in_the_end():
    job = three(min_workers=2, silence_s=60.0)
    to(job, 5)
    job.on(lost(1), 2.0)
    commands, now_s, newest = job.on(lost(2), 2.0), 2.0, 2
    met_with = []
    while not of(c.Restore, commands) and now_s < 5_000:
        for member in (m for x in of(c.Spawn, commands) for m in x.members):
            newest = member
        now_s += 1.0
        if job.phase is Phase.WAITING and job.members[newest] is MemberState.SPAWNING:
            commands = job.on(ready(newest), now_s)
            met_with += [x.members for x in of(c.Form, commands)]
        else:
            commands = tick(job, now_s)
    assert job.phase is Phase.RESTORING
    assert 3 <= len(met_with) <= 6
    assert all(members[0] == 0 for members in met_with)


def test_who_is_done_and_has_ended_is_replaced_where_the_others_wait():
    job = three(min_workers=3)
    to(job, 5)
    job.on(done(0), 2.0)
    job.on(lost(0), 2.5)
    commands = job.on(lost(2), 3.0)
    assert only(c.Spawn, commands).members == (3, 4)
