"""Control when members join: the lost are replaced, and machines that are added are used."""

from __future__ import annotations

from raycloud import commands as c
from raycloud import events as e
from raycloud.control import MemberState, Phase
from raycloud.control.scaling import MOST_MISSES
from tests.control_events import part, ready, stop
from tests.control_job import control, of, only, report, tick


def two(**settings):
    """A job of members 0 and 1 in training, which may have one to four."""
    values = {"min_workers": 1, "max_workers": 4, "capacity": 2, **settings}
    job = control(**values)
    job.start(0.0)
    for member in (0, 1):
        job.on(ready(member), 0.0)
    job.on(formed(job, 0), 0.0)
    assert (job.phase, job.group) == (Phase.TRAINING, (0, 1))
    return job


def formed(job, step):
    return e.GenerationFormed(
        generation=job.generation, members=job.group, shares=job.shares, first_step=step
    )


def to(job, step, first=0):
    for member in job.group:
        job.on(report(job, member, first, step), 1.0)


def caught_up(member, first, step, generation=1):
    return e.MemberCaughtUp(member=member, generation=generation, first_step=first, step=step)


def asked_for(commands):
    return [x.members for x in of(c.Spawn, commands)]


def applied(job, prepare, step, members=None):
    """Those that compute, or some of them, change at `step`; all commands."""
    words = [
        e.ChangeApplied(member=m, change=prepare.number, step=step)
        for m in members or prepare.members
    ]
    return [x for word in words for x in job.on(word, 9.0)]


def test_machines_that_are_added_are_used():
    job = two()
    to(job, 5)
    commands = job.on(e.CapacityChanged(workers=3), 2.0)
    assert of(c.Spawn, commands) == [c.Spawn(members=(2,), joins=True)]
    job.on(e.MemberSpawned(member=2, node="n"), 3.0)
    prepare = only(c.Prepare, job.on(ready(2), 8.0))
    assert prepare.members == (0, 1)
    meet = prepare.change
    assert meet == c.Meet(
        generation=1,
        members=(0, 1, 2),
        shares=(4, 4, 0),
        following=(2,),
        keys=((0, 0), (1, 0), (2, 0)),
    )
    assert (job.phase, job.group) == (Phase.TRAINING, (0, 1))
    assert applied(job, prepare, 6, (0,)) == []
    assert (job.generation, job.group, job.shares) == (1, (0, 1, 2), meet.shares)
    assert job.members[2] is MemberState.ACTIVE
    job.on(formed(job, 6), 9.0)
    for member in (0, 1):
        job.on(report(job, member, 5, 6, generation=0), 9.0)
        if member == 1:
            applied(job, prepare, 6, (1,))
        job.on(report(job, member, 6, 8), 9.0)
    assert job.change_outstanding is None
    assert job.committed_step == 8  # who follows commits nothing yet
    prepare = only(c.Prepare, job.on(caught_up(2, 6, 9), 9.5))
    assert prepare.members == (0, 1, 2)
    assert prepare.change.caught_up == (2,)
    assert (prepare.change.generation, min(prepare.change.shares) > 0) == (2, True)
    applied(job, prepare, 12)
    assert job.shares == prepare.change.shares
    for member, first in ((0, 8), (1, 8), (2, 9)):
        assert job.committed_step < 14
        job.on(report(job, member, first, 14, generation=2), 10.0)
    assert job.committed_step == 14
    assert job.ledger.audit().exact


def test_the_first_word_of_who_joined_may_come_before_any_other():
    job = two()
    to(job, 5)
    job.on(e.CapacityChanged(workers=3), 2.0)
    prepare = only(c.Prepare, job.on(ready(2), 8.0))
    job.on(report(job, 2, 5, 7, generation=1), 9.0)
    assert job.committed_step == 5
    applied(job, prepare, 5)
    job.on(formed(job, 5), 9.0)
    for member in (0, 1):
        job.on(report(job, member, 5, 7), 9.0)
    assert job.committed_step == 7


def test_a_part_of_the_generation_before_still_counts():
    job = two()
    to(job, 5)
    job.on(e.CapacityChanged(workers=3), 2.0)
    job.on(part(0, 5), 2.0)
    prepare = only(c.Prepare, job.on(ready(2), 8.0))
    applied(job, prepare, 6)
    assert tuple(only(c.Publish, job.on(part(1, 5), 9.0)).parts) == ((0, 0), (1, 0))
    assert not of(c.Publish, job.on(part(0, 10, generation=1), 9.5))
    assert tuple(only(c.Publish, job.on(part(1, 10, generation=1), 9.5)).parts) == ((0, 0), (1, 0))
    prepare = only(c.Prepare, job.on(caught_up(2, 6, 11), 9.6))
    assert not of(c.Publish, job.on(part(0, 12, generation=1), 9.7))
    applied(job, prepare, 13)
    assert tuple(only(c.Publish, job.on(part(1, 12, generation=1), 9.8)).parts) == ((0, 0), (1, 0))
    for member in (0, 1):
        assert not of(c.Publish, job.on(part(member, 15, generation=2), 9.9))
    assert tuple(only(c.Publish, job.on(part(2, 15, generation=2), 9.9)).parts) == (
        (0, 0),
        (1, 0),
        (2, 0),
    )


def test_who_is_lost_before_all_have_changed_is_done_without():
    job = two()
    to(job, 5)
    job.on(e.CapacityChanged(workers=3), 2.0)
    prepare = only(c.Prepare, job.on(ready(2), 8.0))
    form = only(c.Form, job.on(e.MemberLost(member=2, reason="died"), 8.5))
    assert (form.generation, form.members, form.settled) == (2, (0, 1), prepare.number)
    assert job.on(e.ChangeApplied(member=0, change=prepare.number, step=6), 8.6) == ()
    job.on(formed(job, 5), 9.0)
    to(job, 7, first=5)
    assert job.committed_step == 7


def test_who_computes_may_be_lost_while_another_comes():
    job = two()
    to(job, 5)
    job.on(e.CapacityChanged(workers=3), 2.0)
    job.on(ready(2), 8.0)
    form = only(c.Form, job.on(e.MemberLost(member=0, reason="died"), 8.5))
    assert (form.generation, form.members) == (2, (1,))  # at once, and then with the other
    prepare = only(c.Prepare, job.on(formed(job, 5), 9.0))
    assert (prepare.members, prepare.change.members) == ((1,), (1, 2))


def test_who_is_ready_is_met_at_once_where_there_would_be_too_few():
    job = two(min_workers=2, max_workers=3)
    to(job, 5)
    job.on(e.CapacityChanged(workers=3), 2.0)
    job.on(ready(2), 8.0)
    form = only(c.Form, job.on(e.MemberLost(member=0, reason="died"), 8.5))
    assert form.members == (1, 2)
    job.on(report(job, 2, 6, 7), 9.0)  # member 1 had come to step 6
    assert job.committed_step == 5
    job.on(report(job, 1, 5, 6, generation=0), 9.0)
    assert job.committed_step == 6
    job.on(report(job, 1, 6, 7), 9.0)
    assert job.committed_step == 7


def test_who_fails_before_it_has_computed_is_done_without():
    job = two()
    to(job, 5)
    job.on(e.CapacityChanged(workers=3), 2.0)
    prepare = only(c.Prepare, job.on(ready(2), 8.0))
    applied(job, prepare, 6)
    failed = e.MemberFailed(member=2, error="TaskError", message="out of memory")
    commands = job.on(failed, 9.0)
    assert only(c.Form, commands).members == (0, 1)
    assert "a member could not join" in only(e.Noticed, commands).what
    assert asked_for(tick(job, 9.5)) == []


def test_whom_the_others_cannot_meet_is_given_up_at_once():
    job = two()
    to(job, 5)
    job.on(e.CapacityChanged(workers=3), 2.0)
    meet = only(c.Prepare, job.on(ready(2), 8.0)).change
    job.on(e.ExchangeBroken(member=0, generation=meet.generation, why="no route"), 8.5)
    found = job.overdue(8.6)
    assert (found.member, found.reason) == (2, "the others could not meet it: no route")
    assert only(c.Form, job.on(found, 8.6)).members == (0, 1)


def test_one_incident_counts_once_and_another_machine_begins_anew():
    job = two(max_workers=12)
    to(job, 5)
    job.on(e.CapacityChanged(workers=10), 2.0)
    for member in range(2, 10):
        job.on(e.MemberLost(member=member, reason="its node died"), 3.0)
    assert asked_for(tick(job, 3.5)) == []
    assert len(only(c.Spawn, tick(job, 4.0)).members) == 8


def test_who_does_not_come_to_the_meeting_is_lost():
    job = two(form_s=5.0, silence_s=20.0)
    to(job, 5)
    job.on(e.CapacityChanged(workers=3), 2.0)
    job.on(ready(2), 8.0)
    to(job, 6, first=5)
    assert job.overdue(21.0) is None  # a step may take long
    assert job.overdue(28.5).member == 2


def test_no_more_than_may_compute_are_asked_for():
    job = two()
    to(job, 5)
    assert asked_for(job.on(e.CapacityChanged(workers=9), 2.0)) == [(2, 3)]
    assert asked_for(tick(job, 3.0)) == []
    assert asked_for(job.on(e.RangeChanged(min_workers=1, max_workers=5), 4.0)) == [(4,)]


def test_who_is_lost_is_replaced():
    job = two(max_workers=2)
    to(job, 5)
    commands = job.on(e.MemberLost(member=0, reason="died"), 2.0)
    assert only(c.Form, commands).members == (1,)
    assert asked_for(commands) == [(2,)]  # it builds while they meet
    assert asked_for(job.on(formed(job, 5), 2.2)) == []
    assert only(c.Prepare, job.on(ready(2), 9.0)).change.members == (1, 2)


def test_who_was_to_join_and_died_is_tried_again_later_and_later():
    job, now_s = two(), 2.0
    to(job, 5)
    job.on(e.CapacityChanged(workers=3), now_s)
    waits = []
    for number in range(2, 1 + MOST_MISSES):
        commands = job.on(e.MemberLost(member=number, reason="no memory"), now_s)
        assert only(c.Release, commands).members == (number,)
        assert "a member could not join" in only(e.Noticed, commands).what
        assert job.phase is Phase.TRAINING
        began_s = now_s
        while not asked_for(tick(job, now_s)):
            now_s += 0.5
        waits.append(now_s - began_s)
        now_s += 1.0
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0]
    job.on(e.MemberLost(member=number + 1, reason="no memory"), now_s)
    for _ in range(90):
        now_s += 1.0
        for member in (0, 1):  # a sign of life
            job.on(report(job, member, 5, 5), now_s)
        assert not asked_for(tick(job, now_s))
    assert job.phase is Phase.TRAINING


def test_an_error_of_who_was_to_join_does_not_end_the_run():
    job = two()
    to(job, 5)
    job.on(e.CapacityChanged(workers=3), 2.0)
    failed = e.MemberFailed(member=2, error="SpecError", message="another place")
    commands = job.on(failed, 3.0)
    assert only(e.Noticed, commands).detail == {"why": "SpecError: another place"}
    assert job.phase is Phase.TRAINING
    failed = e.MemberFailed(member=1, error="TaskError", message="no")
    assert only(c.Finish, job.on(failed, 4.0)).status == "failed"


def test_who_sees_other_data_does_not_join():
    job = two()
    to(job, 5)
    job.on(e.CapacityChanged(workers=3), 2.0)
    commands = job.on(ready(2, samples=7), 3.0)
    assert only(c.Release, commands).members == (2,)
    assert job.members[2] is MemberState.RELEASED
    assert not of(c.Prepare, commands)


def test_where_data_has_grown_nobody_joins():
    job = two()
    to(job, 5)
    job.on(e.CapacityChanged(workers=3), 2.0)
    commands = job.on(e.DataGrew(version=1, samples=10_000), 3.0)
    assert (2,) in [x.members for x in of(c.Release, commands)]
    assert "no worker joins" in only(e.Noticed, commands).what
    assert asked_for(job.on(e.CapacityChanged(workers=4), 4.0)) == []


def test_what_has_found_no_place_is_given_up_where_there_is_less_room():
    job = two()
    to(job, 5)
    job.on(e.CapacityChanged(workers=4), 2.0)
    job.on(e.MemberSpawned(member=3, node="n"), 3.0)
    assert tick(job, 900.0 - 850.0) == ()  # it may take hours until there is a place
    commands = job.on(e.CapacityChanged(workers=3), 51.0)
    assert only(c.Release, commands).members == (2,)
    assert job.on(e.CapacityChanged(workers=1), 52.0) == ()  # the others have theirs


def test_where_fewer_may_compute_the_last_ones_go():
    job = two(capacity=4, max_workers=2)
    to(job, 5)
    prepare = only(c.Prepare, job.on(e.RangeChanged(min_workers=1, max_workers=1), 2.0))
    assert (prepare.members, prepare.change.members) == ((0, 1), (0,))
    assert applied(job, prepare, 6, (0,)) == []
    job.on(part(1, 5), 9.0)
    assert only(c.Publish, job.on(part(0, 5), 9.0)).step == 5
    assert only(c.Release, applied(job, prepare, 6, (1,))).members == (1,)
    assert job.members[1] is MemberState.RELEASED
    job.on(report(job, 0, 5, 6, generation=0), 9.0)
    job.on(report(job, 0, 6, 9, share=8), 9.5)
    assert job.committed_step == 9


def test_a_change_on_its_way_comes_first():
    job = two(capacity=2)
    to(job, 5)
    job.on(e.CapacityChanged(workers=3), 2.0)
    job.on(stop(), 3.0)
    assert job.on(ready(2), 4.0) == ()
    assert job.phase is Phase.STOPPING


def test_at_the_end_nobody_joins_any_more():
    job = two(capacity=2)
    to(job, 5)
    job.on(e.CapacityChanged(workers=3), 2.0)
    for member in (0, 1):
        job.on(part(member, 5), 3.0)
    job.on(e.MemberDone(member=0, step=5), 3.0)
    assert job.on(ready(2), 3.5) == ()
    commands = job.on(e.MemberDone(member=1, step=5), 4.0)
    assert job.phase is Phase.CLOSING
    assert (2,) in [x.members for x in of(c.Release, commands)]


def test_places_of_pinned_shares_are_taken_over():
    job = two(shares=(7, 1), max_workers=2)
    to(job, 5)
    job.on(e.MemberLost(member=0, reason="died"), 2.0)
    assert job.shares == (8,)
    job.on(formed(job, 5), 2.2)
    prepare = only(c.Prepare, job.on(ready(2), 9.0))
    assert (prepare.change.members, prepare.change.shares) == ((1, 2), (8, 0))
    applied(job, prepare, 6)
    prepare = only(c.Prepare, job.on(caught_up(2, 6, 9, generation=2), 9.5))
    assert (prepare.change.shares, prepare.change.caught_up) == ((1, 7), (2,))


def test_too_few_counts_those_that_are_ready():
    job = two(min_workers=2, max_workers=3)
    to(job, 5)
    job.on(e.CapacityChanged(workers=3), 2.0)
    job.on(e.MemberSpawned(member=2, node="n"), 2.0)
    assert not of(c.Form, job.on(e.MemberLost(member=0, reason="died"), 3.0))
    assert job.phase is Phase.WAITING  # member 2 is not ready yet
    assert only(c.Form, job.on(ready(2), 4.0)).members == (1, 2)
