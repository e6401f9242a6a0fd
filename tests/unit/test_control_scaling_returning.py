"""Control where a member is lost by silence alone, and its process comes back."""

from __future__ import annotations

import pytest

from raycloud import commands as c
from raycloud import events as e
from raycloud.control import MemberState, Phase
from tests.control_events import part, ready, stop
from tests.control_job import of, only, report, tick
from tests.control_three import formed, lost, three, to
from tests.unit.test_control_generations_following import following
from tests.unit.test_control_scaling import applied, caught_up, two


def silent(member):
    return e.MemberLost(member=member, reason="frozen, or cut off", silent=True)


def returned(member, late_s=20.04):
    return e.MemberReturned(member=member, late_s=late_s)


def away(**settings):
    """Member 1 of three is left out at step 5; the others go on, and another is asked for."""
    job = three(**settings)
    to(job, 5)
    commands = job.on(silent(1), 20.0)
    assert only(c.LeaveOut, commands) == c.LeaveOut(member=1)
    assert not of(c.Release, commands)
    assert only(c.Form, commands).members == (0, 2)
    assert only(c.Spawn, commands) == c.Spawn(members=(3,), joins=True)
    job.on(formed(job, 5), 20.5)
    return job


def released(commands):
    return [m for x in of(c.Release, commands) for m in x.members]


def test_it_joins_as_another_member_and_nobody_is_built_beside_it():
    job = away()
    commands = job.on(returned(1), 40.0)
    assert only(c.Readmit, commands) == c.Readmit(member=4, process=1)
    assert released(commands) == [3]  # it has found no place
    told = only(e.Noticed, commands)
    assert (told.member, told.detail) == (1, {"late_s": 20.0})
    assert "goes on as member 4" in told.what
    assert (job.members[1], job.members[4]) == (MemberState.LOST, MemberState.SPAWNING)
    job.on(e.MemberSpawned(member=4), 40.1)
    prepare = only(c.Prepare, job.on(ready(4), 40.5))
    assert (prepare.members, prepare.change.members) == ((0, 2), (0, 2, 4))
    assert prepare.change.following == (4,)
    applied(job, prepare, 6)
    change = only(c.Prepare, job.on(caught_up(4, 6, 8, job.generation), 41.0)).change
    assert min(change.shares) > 0


def test_nothing_counts_that_the_old_process_says():
    job = away()
    job.on(returned(1), 40.0)
    before = job.ledger.state(), job.phase, job.change_outstanding
    for word in (
        report(job, 1, 5, 9, generation=0),
        part(1, 5),
        e.ExchangeBroken(member=1, generation=0, why="reset"),
        e.EvaluationPart(member=1, step=5, states={}),
        e.ChangeApplied(member=1, change=1, step=5),
        e.MemberDone(member=1, step=9),
        e.MemberFailed(member=1, error="TaskError", message="no"),
        returned(1),
    ):
        assert not job.on(word, 40.1)
    assert (job.ledger.state(), job.phase, job.change_outstanding) == before


def test_what_was_known_of_its_speed_still_is():
    job = three(shares="auto")
    for first in range(0, 30, 5):
        for member, per_s in ((0, 0.1), (1, 0.4), (2, 0.1)):
            share = dict(zip(job.group, job.shares, strict=True))[member]
            took_s = 5 * share * per_s
            word = report(job, member, first, first + 5, share=share, compute_s=took_s)
            job.on(word, 1.0 + first)
    job.on(silent(1), 40.0)
    job.on(formed(job, 30), 40.5)
    job.on(returned(1), 60.0)
    prepare = only(c.Prepare, job.on(ready(4, micro_batch_s=0.1), 60.5))
    applied(job, prepare, 31)
    change = only(c.Prepare, job.on(caught_up(4, 31, 33, job.generation), 61.0)).change
    assert change.shares[2] < min(change.shares[:2])


def test_who_is_silent_for_too_long_is_replaced():
    job = away(return_s=60.0)
    assert not of(c.Release, tick(job, 79.0))
    assert released(tick(job, 80.5)) == [1]
    assert not job.on(returned(1), 81.0)


def test_who_has_died_meanwhile_does_not_return():
    job = away()
    assert not job.on(lost(1), 30.0)
    assert not job.on(returned(1), 31.0)
    assert 1 not in released(tick(job, 500.0))


def test_another_that_is_there_first_has_its_part():
    job = away(capacity=4)
    job.on(e.MemberSpawned(member=3, node="n"), 21.0)
    prepare = only(c.Prepare, job.on(ready(3), 35.0))
    assert released(applied(job, prepare, 6)) == [1]
    assert not job.on(returned(1), 40.0)


@pytest.mark.parametrize(("first", "second"), [(4, 3), (3, 4)])
def test_where_both_are_on_their_way_the_first_that_is_ready_is_taken(first, second):
    job = away(capacity=4)
    job.on(e.MemberSpawned(member=3, node="n"), 21.0)
    commands = job.on(returned(1), 30.0)
    assert only(c.Readmit, commands).member == 4
    assert not of(c.Release, commands)
    commands = job.on(ready(first), 31.0)
    assert (only(c.Prepare, commands).change.members, released(commands)) == ((0, 2, first), [])
    assert released(applied(job, only(c.Prepare, commands), 6)) == [second]
    assert not job.on(ready(second), 32.0)


def test_it_comes_back_a_few_times_and_then_another_is_built():
    job, process = two(max_workers=2), 1
    for turn in range(4):
        now_s = 100.0 * (turn + 1)
        commands = job.on(silent(process), now_s)
        if turn == 3:
            break
        assert only(c.LeaveOut, commands).member == process
        job.on(formed(job, job.committed_step), now_s + 1.0)
        process = only(c.Readmit, job.on(returned(process), now_s + 9.0)).member
        prepare = only(c.Prepare, job.on(ready(process), now_s + 10.0))
        applied(job, prepare, 3 * turn + 1)
        word = caught_up(process, 3 * turn + 1, 3 * turn + 2, job.generation)
        applied(job, only(c.Prepare, job.on(word, now_s + 11.0)), 3 * turn + 3)
    assert not of(c.LeaveOut, commands)
    assert released(commands) == [process]


def test_who_is_silent_while_others_wait_for_more_ends_the_wait():
    job = two(min_workers=2, max_workers=2)
    commands = job.on(silent(1), 10.0)
    assert job.phase is Phase.WAITING
    assert not any(released(commands))
    assert only(c.Readmit, job.on(returned(1), 30.0)) == c.Readmit(member=3, process=1)
    form = only(c.Form, job.on(ready(3), 31.0))
    assert (form.members, job.phase) == ((0, 3), Phase.REGROUPING)


def test_who_returns_before_the_others_have_met_joins_them_afterwards():
    job = three()
    to(job, 5)
    job.on(silent(1), 20.0)
    assert job.phase is Phase.REGROUPING
    commands = job.on(returned(1), 20.2)
    assert (only(c.Readmit, commands).member, released(commands)) == (4, [3])
    assert not job.on(ready(4), 20.4)
    commands = job.on(formed(job, 5), 20.5)
    assert only(c.Prepare, commands).change.members == (0, 2, 4)
    assert not of(c.Spawn, commands)


def test_who_freezes_while_it_follows_may_come_back():
    job = following(max_workers=3)
    commands = job.on(silent(2), 10.0)
    assert only(c.LeaveOut, commands).member == 2
    assert not of(c.Release, commands)
    assert only(c.Form, commands).members == (0, 1)
    job.on(formed(job, 8), 10.2)
    assert only(c.Readmit, job.on(returned(2), 10.5)) == c.Readmit(member=3, process=2)


def test_nobody_is_kept_for_a_run_that_ends():
    job = away()
    assert 1 in released(job.on(stop(), 30.0))
    assert not job.on(returned(1), 31.0)
    job = away()
    finish = [x for x in job.on(stop(), 30.0) + job.on(stop(), 30.1) if isinstance(x, c.Release)]
    assert {0, 1, 2, 3} <= set(finish[-1].members)


@pytest.mark.parametrize(
    "before",
    [
        stop(),
        e.MemberLeaving(member=1, reason="spot"),
        e.DataGrew(samples=200, version=1),
    ],
)
def test_who_would_not_be_taken_is_not_kept(before):
    job = three()
    to(job, 5)
    job.on(before, 19.0)
    commands = job.on(silent(1), 20.0)
    assert not of(c.LeaveOut, commands)
    assert 1 in released(commands)


def test_where_it_is_not_to_be_kept_it_is_not():
    job = three(return_s=0.0)
    to(job, 5)
    commands = job.on(silent(1), 20.0)
    assert released(commands) == [1]


def test_fewer_that_may_compute_need_nobody_back():
    job = away()
    assert 1 in released(job.on(e.RangeChanged(min_workers=1, max_workers=2), 30.0))


def test_it_has_the_share_that_it_was_asked_to_have():
    job = three(shares=(3, 3, 2))
    to(job, 5)
    job.on(silent(1), 20.0)
    job.on(formed(job, 5), 20.5)
    job.on(returned(1), 40.0)
    prepare = only(c.Prepare, job.on(ready(4), 40.5))
    applied(job, prepare, 6)
    change = only(c.Prepare, job.on(caught_up(4, 6, 8, job.generation), 41.0)).change
    assert dict(zip((0, 2, 4), change.shares, strict=True)) == {0: 3, 2: 2, 4: 3}
