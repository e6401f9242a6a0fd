"""Control when members fail, fall silent or die, and when a run is taken up again."""

from __future__ import annotations

import pytest

from raycloud import commands as c
from raycloud import events as e
from raycloud.control import MemberState
from raycloud.errors import CheckpointError, InternalError
from raycloud.order import Position, header_record, ledger_line, read_ledger
from tests.control_events import part, published, ready
from tests.control_job import control, of, only, report, tick, training, training_to

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
