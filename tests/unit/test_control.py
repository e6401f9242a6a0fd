"""Control, scene by scene: what it answers to each event, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from raycloud import commands as c
from raycloud import events as e
from raycloud.control import Control, ControlSettings, MemberState, Phase
from raycloud.control.diagram import render
from raycloud.control.resharing import Resharing
from raycloud.errors import CheckpointError, InternalError, SpecError
from raycloud.order import Position, ledger_line, read_ledger

PAGE = Path(__file__).parents[2] / "docs" / "state-machine.md"


def control(**settings):
    values = {"min_workers": 2, "max_workers": 2, "capacity": 2, "global_batch": 8}
    return Control(ControlSettings(**{**values, "micro_batch": 1, **settings}))


def ready(member, *, samples=100, micro_batch_s=0.1):
    return e.MemberReady(
        member=member,
        samples=samples,
        parameters=1,
        state_bytes=1,
        gradient_bytes=1,
        fixed_s=0.0,
        micro_batch_s=micro_batch_s,
        node=f"node-{member}",
    )


def report(job, member, first, last, *, generation=None, compute_s=None, share=4):
    at = job.position_at(last)
    return e.StepsCommitted(
        member=member,
        generation=job.generation if generation is None else generation,
        first_step=first,
        last_step=last,
        epoch=at.epoch,
        offset=at.offset,
        loss=1.0,
        weight=1.0,
        samples=share * (last - first),
        micro_batches=share * (last - first),
        grad_norm=1.0,
        learning_rate=1.0,
        wall_s=1.0,
        compute_s=(last - first) * share * 0.1 if compute_s is None else compute_s,
        data_s=0.0,
        exchange_s=0.0,
        cpu_s=1.0,
        bytes_sent=0,
        bytes_dense=0,
    )


def part(member, step):
    return e.PartWritten(
        member=member, step=step, part={"file": f"{member}-{step}"}, blocked_s=0.0, write_s=0.0
    )


def published(step):
    return e.CheckpointPublished(step=step, path="p", state_bytes=1, write_s=0.0)


def formed(job):
    return e.GenerationFormed(
        generation=job.generation, members=job.group, shares=job.shares, first_step=0
    )


def training(**settings):
    """A job of members 0 and 1 in training, at 0 s."""
    job = control(**settings)
    job.start(0.0)
    for member in job.members:
        job.on(ready(member), 0.0)
    job.on(formed(job), 0.0)
    assert job.phase is Phase.TRAINING
    return job


def of(kind, commands):
    return [command for command in commands if isinstance(command, kind)]


def only(kind, commands):
    [command] = of(kind, commands)
    return command


# ---- placing and forming


@pytest.mark.parametrize(
    ("low", "high", "capacity", "count"), [(1, 4, 2, 2), (1, 4, 9, 4), (3, 4, 1, 3)]
)
def test_start_spawns_what_fits_but_at_least_the_minimum(low, high, capacity, count):
    job = control(min_workers=low, max_workers=high, capacity=capacity, first_member=5)
    commands = job.start(0.0)
    assert only(c.Spawn, commands).members == tuple(range(5, 5 + count))
    assert len(of(c.Notice, commands)) == (count < high)
    assert set(job.members.values()) == {MemberState.SPAWNING}


def test_all_ready_members_form_a_generation_and_open_the_ledger():
    job = control()
    job.start(0.0)
    assert job.on(e.MemberSpawned(member=0, node="a"), 0.0) == ()
    assert job.on(ready(1), 0.0) == ()
    assert job.ledger is None
    record, form = job.on(ready(0), 0.0)
    assert record == c.Record(records=({"format": 1, "kind": "ledger", "samples": 100},))
    assert form == c.Form(generation=0, members=(0, 1), shares=(4, 4), step=0)
    assert job.phase is Phase.FORMING
    job.on(formed(job), 0.0)
    assert set(job.members.values()) == {MemberState.ACTIVE}


@pytest.mark.parametrize(
    ("shares", "slow_s", "expected"),
    [
        ("equal", 0.9, (4, 4)),
        ("auto", 0.3, (6, 2)),
        ("auto", 0.101, (4, 4)),
        ((1, 7), 0.9, (1, 7)),
    ],
)
def test_first_shares(shares, slow_s, expected):
    job = control(shares=shares)
    job.start(0.0)
    job.on(ready(0), 0.0)
    assert only(c.Form, job.on(ready(1, micro_batch_s=slow_s), 0.0)).shares == expected


def test_members_that_see_different_data_fail_the_run_by_name():
    job = control()
    job.start(0.0)
    job.on(ready(0), 0.0)
    release, finish = job.on(ready(1, samples=99), 0.0)
    assert release == c.Release(members=(0, 1))
    assert finish.status == "failed"
    assert "member 0 has 100 samples, member 1 has 99" in finish.error


def test_data_that_makes_no_step_fails_the_run():
    job = control(drop_last=True)
    job.start(0.0)
    job.on(ready(0, samples=7), 0.0)
    finish = only(c.Finish, job.on(ready(1, samples=7), 0.0))
    assert "drop_last leaves no step: 7 samples" in finish.error


def test_what_a_member_did_proves_that_the_generation_formed():
    job = control()
    job.start(0.0)
    for member in (0, 1):
        job.on(ready(member), 0.0)
    job.on(report(job, 1, 0, 3), 0.0)
    assert job.phase is Phase.TRAINING
    assert set(job.members.values()) == {MemberState.ACTIVE}
    assert job.on(formed(job), 0.0) == ()


# ---- progress


def test_a_step_counts_when_all_members_have_committed_it():
    job = training()
    assert job.on(report(job, 0, 0, 10), 1.0) == ()
    [record] = job.on(report(job, 1, 0, 7), 1.0)
    assert record.records == (
        {
            "commit": {
                "first_step": 0,
                "last_step": 7,
                "epoch": 0,
                "start": 0,
                "stop": 56,
                "generation": 0,
            }
        },
    )
    assert (job.committed_step, job.position_at(7)) == (7, Position(offset=56))
    assert job.ledger.committed_samples == 56


def test_the_ledger_at_a_step_is_exact_whatever_was_reported():
    job = training()
    for member in (0, 1):
        job.on(report(job, member, 0, 20), 1.0)
    assert job.ledger_at(20) == job.ledger.state()
    assert job.ledger_at(7)["ranges"] == [
        {"epoch": 0, "epochs": 1, "committed": [[0, 56]], "left_out": []}
    ]
    assert job.ledger_at(14)["next_step"] == 14


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"first_step": 4}, "next step is 3"),
        ({"first_step": 2}, "next step is 3"),
        ({"last_step": 2}, "next step is 3"),
        ({"generation": 1}, "generations 0 to 0 are possible"),
        ({"offset": 9}, "the sequence stands at"),
        ({"member": 7}, "no member 7"),
    ],
)
def test_a_report_that_cannot_be_is_refused(changes, problem):
    job = training()
    job.on(report(job, 0, 0, 3), 1.0)
    good = e.to_record(report(job, 0, 3, 6))
    with pytest.raises(InternalError, match=problem):
        job.on(e.from_record({**good, **changes}), 1.0)


# ---- shares


def walk(job, *, until, slow_s, every_s=1.0, steps=10):
    """Both members report; member 1 needs `slow_s` per micro-batch. All commands."""
    commands, first, now_s = [], job.committed_step, 0.0
    while first < until:
        now_s += every_s
        for member in (0, 1):
            share = job.shares[member]
            compute_s = steps * share * (slow_s if member else 0.1)
            commands += job.on(
                report(job, member, first, first + steps, compute_s=compute_s, share=share), now_s
            )
        first += steps
    return commands


def test_shares_follow_a_gain_that_lasts():
    job = training()
    prepare = only(c.Prepare, walk(job, until=120, slow_s=0.3))
    assert prepare == c.Prepare(
        number=1, members=(0, 1), change=c.Reshare(generation=1, shares=(6, 2))
    )
    assert job.change_outstanding == prepare.change
    at = job.committed_step + 3
    job.on(e.ChangeApplied(member=0, change=1, step=at), 20.0)
    assert (job.generation, job.shares) == (0, (4, 4))
    job.on(e.ChangeApplied(member=1, change=1, step=at), 20.0)
    assert (job.generation, job.shares, job.change_outstanding) == (1, (6, 2), None)
    first = job.committed_step
    commands = []
    for member in (0, 1):
        commands += job.on(report(job, member, first, at + 5, share=job.shares[member]), 21.0)
    [record] = commands
    ranges = [r["commit"] for r in record.records]
    assert {r["generation"] for r in ranges} == {0, 1}
    for r in ranges:
        assert r["last_step"] <= at if r["generation"] == 0 else r["first_step"] >= at
    assert job.ledger.audit().exact


@pytest.mark.parametrize("shares", ["equal", (4, 4)])
def test_shares_that_were_asked_for_stay(shares):
    assert not of(c.Prepare, walk(training(shares=shares), until=200, slow_s=0.3))


def test_a_small_gain_moves_no_work():
    assert not of(c.Prepare, walk(training(), until=200, slow_s=0.104))


def test_a_gain_must_be_seen_in_two_looks_in_a_row():
    settings = control(reshare_every_s=1.0, reshare_steps=1)._state.settings
    resharing = Resharing(settings, {0: ready(0), 1: ready(1, micro_batch_s=0.3)}, 0.0)

    def look(shares, now_s):
        return resharing.look(group=(0, 1), shares=shares, step=int(now_s), now_s=now_s)

    assert look((4, 4), 1.0) is None
    assert look((6, 2), 2.0) is None  # nothing to gain: what was seen before is forgotten
    assert look((4, 4), 3.0) is None
    assert look((4, 4), 3.5) is None  # too early to be a look
    assert look((4, 4), 4.0) == (6, 2)


def test_shares_are_not_looked_at_more_often_than_asked():
    job = training(reshare_every_s=1000.0)
    assert not of(c.Prepare, walk(job, until=200, slow_s=0.3))


@pytest.mark.parametrize(
    ("applied", "problem"),
    [
        (e.ChangeApplied(member=0, change=2, step=500), "change 2 is not outstanding"),
        (e.ChangeApplied(member=0, change=1, step=3), "are committed"),
        (e.ChangeApplied(member=1, change=1, step=500), "applied it already"),
        (e.ChangeApplied(member=0, change=1, step=501), "applied it at step 500"),
    ],
)
def test_a_change_that_cannot_have_been_applied_is_refused(applied, problem):
    job = training()
    walk(job, until=120, slow_s=0.3)
    if "already" in problem or "500" in problem:
        job.on(e.ChangeApplied(member=1, change=1, step=500), 20.0)
    with pytest.raises(InternalError, match=problem):
        job.on(applied, 20.0)


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
    assert publish == c.Publish(step=5, parts={0: {"file": "0-5"}, 1: {"file": "1-5"}})
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


# ---- faults


def test_a_lost_member_fails_the_run_and_says_what_to_do():
    job = training()
    finish = only(c.Finish, job.on(e.MemberLost(member=1, reason="its node died"), 1.0))
    assert finish.status == "failed"
    assert "member 1 on node-1 was lost: its node died" in finish.error
    assert "no checkpoint yet" in finish.error
    assert job.members[1] is MemberState.LOST
    assert job.on(report(job, 1, 0, 3), 1.0) == ()  # late word of the dead: ignored
    assert job.committed_step == 0


def test_a_lost_member_names_the_checkpoint_to_resume_from():
    job = training()
    for member in (0, 1):
        job.on(part(member, 10), 1.0)
    job.on(published(10), 1.0)
    error = only(c.Finish, job.on(e.MemberLost(member=0, reason="x"), 1.0)).error
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
    assert job.tick(30.0) == ()
    notice, _, finish = job.tick(31.0)
    assert notice.member == 1
    assert "member 1 was lost: not ready after 30 s" in finish.error


def test_a_generation_that_does_not_form_fails_the_run():
    job = control(form_s=5.0)
    job.start(0.0)
    for member in (0, 1):
        job.on(ready(member), 100.0)
    assert job.tick(105.0) == ()
    error = only(c.Finish, job.tick(106.0)).error
    assert "generation 0 was not formed after 5 s (silent are members 0, 1)" in error


def test_the_member_heard_least_recently_is_taken_for_lost():
    job = training(silence_s=10.0)
    job.on(report(job, 1, 0, 2), 1.0)
    job.on(report(job, 0, 0, 2), 2.0)
    assert job.tick(11.0) == ()
    notice, _, finish = job.tick(11.5)
    assert notice.member == 1
    assert "no progress for 10 s" in finish.error
    assert job.members == {0: MemberState.RELEASED, 1: MemberState.LOST}


def test_an_empty_report_is_a_sign_of_life():
    job = training(silence_s=10.0)
    for member in (0, 1):
        assert job.on(report(job, member, 0, 0), 9.0) == ()
    assert job.tick(18.0) == ()


def test_a_changed_range_is_remembered_and_said_to_wait():
    job = training()
    notice = only(c.Notice, job.on(e.RangeChanged(min_workers=1, max_workers=5), 1.0))
    assert notice.detail == {"min_workers": 1, "max_workers": 5}
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
    lines = [ledger_line({"format": 1, "kind": "ledger", "samples": 100})]

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


def training_to(step):
    job = training()
    for member in (0, 1):
        job.on(report(job, member, 0, step), 1.0)
    return job


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


def test_resuming_with_other_data_fails_the_run():
    job = resumed(training_to(20))
    job.start(0.0)
    job.on(ready(0, samples=101), 0.0)
    error = only(c.Finish, job.on(ready(1, samples=101), 0.0)).error
    assert "100 samples per epoch, the members see 101" in error


def test_a_checkpoint_that_contradicts_itself_is_refused():
    first = training_to(20)
    with pytest.raises(CheckpointError, match="its ledger ends at"):
        control(step=14, position=first.position_at(13), ledger=first.ledger_at(14))


def test_resuming_needs_the_ledger():
    with pytest.raises(InternalError, match="needs the ledger"):
        control(step=14)


# ---- settings, tables and the page


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"shares": (8,)}, "one share >= 0 for each of 2 workers"),
        ({"shares": (9, -1)}, "one share >= 0"),
        ({"shares": (3, 4)}, "sum to 7, a step has 8 micro-batches"),
    ],
)
def test_shares_that_do_not_fit_are_refused(settings, problem):
    with pytest.raises(SpecError, match=problem) as caught:
        control(**settings)
    assert caught.value.field == "elastic.shares"


def test_an_empty_range_is_our_fault():
    with pytest.raises(InternalError, match="not a range of workers"):
        control(min_workers=3)


def test_nothing_happens_before_start_and_start_happens_once():
    job = control()
    with pytest.raises(InternalError, match="there is no member 0"):
        job.on(ready(0), 0.0)
    with pytest.raises(InternalError, match="StopRequested is illegal: in phase NEW"):
        job.on(e.StopRequested(reason="x"), 0.0)
    with pytest.raises(InternalError, match="before start"):
        job.tick(0.0)
    with pytest.raises(InternalError, match="no generation was formed yet"):
        job.position_at(0)
    job.start(0.0)
    with pytest.raises(InternalError, match="illegal in phase PLACING"):
        job.start(0.0)


def test_an_illegal_event_names_event_member_and_state():
    job = control()
    job.start(0.0)
    with pytest.raises(InternalError, match="MemberDone is illegal: member 1 is SPAWNING"):
        job.on(e.MemberDone(member=1, step=0), 0.0)


def test_the_page_is_drawn_from_the_tables():
    assert PAGE.read_text() == render(), "run `python docs/generate.py`"
