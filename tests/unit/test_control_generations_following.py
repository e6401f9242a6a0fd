"""Control while newcomers take the state: at once where that is short, else as they follow."""

from __future__ import annotations

import pytest

from raycloud import commands as c
from raycloud import events as e
from raycloud.control import MemberState, Phase
from raycloud.control.scaling import hand_over_at_once
from tests.control_events import committed, ready, stop
from tests.control_job import of, on_and_tick, only, report
from tests.control_three import lost, three
from tests.control_three import to as three_to
from tests.unit.test_control_rollback import all_lost, come, saved
from tests.unit.test_control_scaling import (
    applied,
    caught_up,
    formed,
    to,
    two,
)


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
    assert "a member could not join" in only(e.Noticed, commands).what


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


def meeting(*paces, **settings):
    """What control has members 0 and 1 change to, whose last bytes took so long, for a third.

    A step takes a second.
    """
    job = two(**settings)
    to(job, 5)
    for member, (exchange_s, bytes_last) in enumerate(paces):
        word = committed(
            member,
            5,
            6,
            generation=0,
            at=job.position_at(6),
            computed=8,
            micro_batches=4,
            exchange_s=exchange_s,
            bytes_last=bytes_last,
        )
        job.on(word, 1.0)
    job.on(e.CapacityChanged(workers=3), 2.0)
    return job, only(c.Prepare, job.on(ready(2), 8.0))


@pytest.mark.parametrize(
    ("paces", "following"),
    [
        ([(0.16, 1), (0.5, 1)], ()),  # 3 bytes of state: the second one waited for the first
        ([(0.17, 1), (0.5, 1)], (2,)),
        ([(0.0, 0), (0.0, 0)], (2,)),  # nothing is known
    ],
)
def test_it_depends_on_how_long_all_would_wait(paces, following):
    _, prepare = meeting(*paces, hand_over_s=0.25)
    assert prepare.change.following == following
    assert prepare.change.shares == ((4, 4, 0) if following else (3, 3, 2))


def test_who_is_left_alone_goes_by_what_links_were_like_before():
    """It exchanges nothing; its newcomer would follow it for many of its steps."""
    job = two()
    to(job, 5)
    one = {"generation": 0, "at": job.position_at(6), "computed": 8, "micro_batches": 4}
    job.on(committed(0, 5, 6, **one), 1.0)
    job.on(committed(1, 5, 6, exchange_s=0.0, bytes_last=1, **one), 1.0)
    on_and_tick(job, e.MemberLost(member=1, reason="died"), 2.0)
    job.on(formed(job, 6), 3.0)
    job.on(report(job, 0, 6, 8), 4.0)
    assert only(c.Prepare, on_and_tick(job, ready(2), 8.0)).change.following == ()


def test_who_has_gone_back_goes_by_the_steps_of_before():
    """It has computed none yet since."""
    job = three(hand_over_s=0.7)
    three_to(job, 5)
    back = saved(job, 5)
    at = job.position_at(6)
    for member in job.group:
        one = {"at": at, "computed": 8, "micro_batches": 3, "exchange_s": 0.33, "bytes_last": 1}
        job.on(committed(member, 5, 6, generation=0, **one), 1.0)
    all_lost(job)
    job.on(back, 3.0)
    come(job, (3,))
    job.on(formed(job, 5), 5.5)
    assert only(c.Prepare, come(job, (4,), 6.0)).change.following == ()


@pytest.mark.parametrize(
    ("moment_s", "pace_s", "following"),
    [
        (0.7, 0.33, ()),  # 3 bytes, and in three steps it would compute for a second
        (0.7, 0.34, (2,)),
        (0.1, 0.06, ()),  # but twice a moment at most
        (0.1, 0.07, (2,)),
        (1.2, 0.39, ()),  # and a moment at least
        (1.2, 0.41, (2,)),
    ],
)
def test_all_wait_less_than_it_would_compute_in_three_steps(moment_s, pace_s, following):
    _, prepare = meeting((pace_s, 1), (0.5, 1), hand_over_s=moment_s)
    assert prepare.change.following == following


@pytest.mark.parametrize(("new", "short"), [(1, True), (2, True), (3, False)])
def test_it_goes_over_more_links_the_more_there_are_that_give_it(new, short):
    """Each newcomer has a link of its own; two that give three states are the bound."""
    job, _ = meeting((0.16, 1), (0.5, 1), hand_over_s=0.25)
    assert hand_over_at_once(job._state, new) is short


def test_who_takes_the_state_hand_over_at_once_computes_from_there_on():
    job, prepare = meeting((0.0, 1), (0.0, 1))
    applied(job, prepare, 7)
    job.on(formed(job, 7), 9.0)
    assert (job.group, job.shares) == ((0, 1, 2), (3, 3, 2))
    for member in job.group:
        first = 7 if member == 2 else 6
        job.on(report(job, member, first, 9, share=3), 10.0)
    assert job.committed_step == 9
    assert job.ledger.audit().exact
