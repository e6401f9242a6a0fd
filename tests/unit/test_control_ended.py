"""Control where processes have ended, many at once, when they were done, or as good as."""

from __future__ import annotations

from raycloud import commands as c
from raycloud import events as e
from raycloud.control import MemberState, Phase
from tests.control_events import ready
from tests.control_job import control, of, on_and_tick, only, tick
from tests.control_three import formed, lost, three, to


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
