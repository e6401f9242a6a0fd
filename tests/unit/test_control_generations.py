"""Control before the first step: placing, forming, first shares, and what it refuses."""

from __future__ import annotations

import pytest

from raycloud import commands as c
from raycloud import events as e
from raycloud.control import MemberState, Phase
from raycloud.errors import InternalError
from tests.control_events import ready
from tests.control_job import control, formed, of, only, report


@pytest.mark.parametrize(
    ("low", "high", "capacity", "count"), [(1, 4, 2, 2), (1, 4, 9, 4), (3, 4, 1, 3)]
)
def test_start_spawns_what_fits_but_at_least_the_minimum(low, high, capacity, count):
    job = control(min_workers=low, max_workers=high, capacity=capacity, first_member=5)
    commands = job.start(0.0)
    assert only(c.Spawn, commands).members == tuple(range(5, 5 + count))
    assert len(of(e.Noticed, commands)) == (count < high)
    assert set(job.members.values()) == {MemberState.SPAWNING}


def test_all_ready_members_form_a_generation_and_open_the_ledger():
    job = control()
    job.start(0.0)
    assert job.on(e.MemberSpawned(member=0, node="a"), 0.0) == ()
    assert job.on(ready(1), 0.0) == ()
    assert job.ledger is None
    record, form = job.on(ready(0), 0.0)
    assert record == c.Record(records=({"format": 3, "kind": "ledger", "samples": 100},))
    assert form == c.Form(
        generation=0, members=(0, 1), shares=(4, 4), step=0, keys=((0, 0), (1, 0))
    )
    assert job.phase is Phase.FORMING
    job.on(formed(job), 0.0)
    assert set(job.members.values()) == {MemberState.ACTIVE}


def late_one(**settings):
    """Members 0 and 1 are ready 59 s and 60 s after the start, and 2 is not."""
    job = control(max_workers=3, capacity=3, **settings)
    job.start(0.0)
    job.on(ready(0), 59.0)
    job.on(ready(1), 60.0)
    return job


def test_those_that_are_ready_begin_where_another_takes_far_longer_and_it_joins():
    job = late_one()
    assert job.tick(71.9) == ()  # less than a fifth
    said, record, form = job.tick(72.0)
    assert "begin, and the others join" in said.what
    assert said.detail == {"ready": 2, "others": 1}
    assert isinstance(record, c.Record)
    assert form.members == (0, 1)
    job.on(e.DataPreparing(member=2, seconds=72.5), 72.5)
    job.on(formed(job), 73.0)
    for member in (0, 1):
        job.on(report(job, member, 0, 4), 78.0)
    assert only(c.Prepare, job.on(ready(2), 79.0)).change.members == (0, 1, 2)


def test_they_wait_some_seconds_where_all_that_took_was_a_moment():
    job = control(max_workers=3, capacity=3)
    job.start(0.0)
    for member in (0, 1):
        job.on(ready(member), 2.0)
    assert job.tick(4.9) == ()
    assert of(c.Form, job.tick(5.0))


def test_it_may_be_ready_or_gone_while_the_others_meet():
    job = late_one()
    job.tick(72.0)
    job.on(ready(2), 72.1)
    assert job.phase is Phase.FORMING
    assert job.members[2] is MemberState.READY
    job.on(e.MemberLost(member=2, reason="died"), 72.2)
    assert job.phase is Phase.FORMING
    job.on(formed(job), 73.0)
    assert job.phase is Phase.TRAINING


@pytest.mark.parametrize("settings", [{"min_workers": 3}, {"others_s": 13.0}])
def test_they_wait_where_they_are_too_few_or_it_is_early(settings):
    job = late_one(**settings)
    assert job.tick(72.0) == ()
    assert job.phase is Phase.PLACING


def test_what_makes_no_step_fails_the_run_of_those_that_begin_too():
    job = late_one(drop_last=True, global_batch=128)
    assert "drop_last leaves no step" in only(c.Finish, job.tick(72.0)).error


def test_a_late_ones_own_fault_fails_the_run_as_it_would_have_at_the_start():
    for fault, why in (
        (e.MemberFailed(member=2, error="TaskError", message="no such folder"), "no such folder"),
        (ready(2, samples=99), "it sees 99 samples, the others 100"),
    ):
        job = late_one()
        job.tick(72.0)
        finish = only(c.Finish, job.on(fault, 72.5))
        assert finish.status == "failed"
        assert why in finish.error


def test_a_range_that_was_raised_meanwhile_counts():
    job = late_one()
    job.on(e.RangeChanged(min_workers=3, max_workers=3), 61.0)
    assert job.tick(72.0) == ()
    assert job.phase is Phase.PLACING


def test_a_late_one_on_a_machine_that_is_going_is_let_go():
    job = late_one()
    job.on(e.MemberLeaving(member=2, reason="spot"), 61.0)
    assert only(c.Release, job.tick(72.0)).members == (2,)


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


# ---- settings, tables and the page


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
