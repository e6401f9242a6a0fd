"""Control when an exchange breaks, and nobody is gone: the same members meet anew."""

from __future__ import annotations

from raycloud import commands as c
from raycloud import events as e
from raycloud.control.heartbeats import Heard
from raycloud.control.tables import Phase
from tests.control_events import part, ready
from tests.control_job import control, only, report, tick
from tests.control_three import formed, lost, three, to


def broke(member, generation, why="connection reset"):
    return e.ExchangeBroken(member=member, generation=generation, why=why)


def test_where_nobody_is_gone_the_same_members_meet_anew():
    job = three()
    to(job, 5)
    for member in (2, 0):
        assert job.on(broke(member, 0), 2.0 + member / 10) == ()
    assert tick(job, 5.1) == ()
    form = only(c.Form, tick(job, 5.3))
    assert (form.generation, form.members, form.shares) == (1, (0, 1, 2), (3, 3, 2))
    assert job.on(broke(1, 0), 5.4) == ()  # late: of the generation before
    assert tick(job, 9.0) == ()
    job.on(formed(job, 5), 9.0)
    told = only(e.Recovered, job.on(report(job, 1, 5, 6, share=3), 9.1))
    assert told == e.Recovered(
        generation=1, lost=(), cause="connection reset", detected_s=2.2, resumed_s=9.1
    )


def test_all_that_have_answered_since_need_not_wait():
    job = three()
    to(job, 5)
    job.on(broke(0, 0), 2.0)
    for now_s in (2.5, 3.0):  # answers of calls that were made before
        job.hear(Heard(looked_s=now_s, late_s={0: 0.0, 1: 0.0, 2: 0.0}))
        assert tick(job, now_s) == ()
    job.hear(Heard(looked_s=3.25, late_s={0: 0.0, 1: 0.0}))
    assert tick(job, 3.25) == ()
    job.hear(Heard(looked_s=3.5, late_s={2: 0.0}))
    assert only(c.Form, tick(job, 3.5)).members == (0, 1, 2)


def test_where_a_server_is_lost_nobody_is_waited_for():
    job = three()
    to(job, 5)
    job.on(broke(0, 0), 2.0)  # it has only seen another one go
    assert tick(job, 2.1) == ()
    lost_server = e.ExchangeBroken(member=1, generation=0, why="server (0, 0)", server=True)
    commands = (*job.on(lost_server, 2.2), *tick(job, 2.21))
    form = only(c.Form, commands)
    assert form.members == (0, 1, 2)
    assert form.generation == 1


def test_a_loss_behind_it_comes_first():
    job = three()
    to(job, 5)
    job.on(broke(0, 0), 2.0)
    form = only(c.Form, job.on(lost(1), 2.5))
    assert form.members == (0, 2)
    assert tick(job, 5.5) == ()
    told = only(e.Recovered, job.on(report(job, 2, 5, 6), 6.0))
    assert (told.lost, told.detected_s) == ((1,), 2.0)


def test_whose_exchange_breaks_at_every_meeting_is_lost():
    job, now_s = three(), 2.0
    to(job, 5)
    for generation in range(2):
        job.on(broke(2, generation), now_s)
        job.on(broke(0, generation), now_s)
        now_s += 3.0
        assert only(c.Form, tick(job, now_s)).members == (0, 1, 2)
        now_s += 1.0
    job.on(broke(2, 2), now_s)
    found = job.overdue(now_s + 3.0)
    assert found.reason == "its exchange broke 3 times in a row: connection reset"
    commands = tick(job, now_s + 3.0)
    assert only(c.Release, commands).members == (2,)
    assert only(c.Form, commands).members == (0, 1)


def test_a_step_between_begins_the_count_anew():
    job, now_s = three(), 2.0
    to(job, 5)
    for generation in range(4):
        job.on(broke(2, generation), now_s)
        now_s += 3.0
        assert only(c.Form, tick(job, now_s)).members == (0, 1, 2)
        step = 5 + generation
        job.on(report(job, 1, step, step + 1, share=3), now_s)


def test_it_may_break_where_they_first_meet():
    job = control(min_workers=1, max_workers=2)
    job.start(0.0)
    for member in (0, 1):
        job.on(ready(member), 0.0)
    job.on(broke(1, 0), 1.0)
    form = only(c.Form, tick(job, 4.0))
    assert (form.generation, form.members, form.step) == (1, (0, 1), 0)


def test_what_comes_before_the_next_tick_makes_no_further_meeting():
    job, now_s = three(), 2.0
    to(job, 5)
    for generation in range(2):
        job.on(broke(2, generation), now_s)
        now_s += 3.0
        assert only(c.Form, tick(job, now_s)).members == (0, 1, 2)
    job.on(broke(2, 2), now_s)
    assert job.on(e.Noticed(what="odd"), now_s + 3.1) == ()
    assert only(c.Form, tick(job, now_s + 3.2)).members == (0, 1)


def test_who_is_done_and_came_ahead_in_vain_breaks_nothing():
    """The others had done all, too, before they came to meet."""
    job = three()
    to(job, 5)
    job.on(part(1, 5), 1.5)
    job.on(e.MemberDone(member=1, step=5), 1.5)
    assert job.on(broke(1, 1, "it cannot be met"), 2.0) == ()
    assert job.phase is Phase.TRAINING
    assert job.overdue(9.0) is None
