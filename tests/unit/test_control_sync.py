"""How updates travel, changed while a job trains: on request, and through a tour of points."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from raycloud import commands as c
from raycloud import events as e
from raycloud.events import SyncPoint
from tests.control_events import ready
from tests.control_job import of, only, report, training

RING = SyncPoint()
INT4 = SyncPoint(topology="tree", codec="int4")
ROUNDS = SyncPoint(topology="tree", codec="int4", period=8)


def asked(point):
    return e.SyncAsked(point=asdict(point))


def applied(job, change, step, now_s=2.0):
    """Both members have switched before `step`; all commands."""
    word = e.GenerationFormed(
        generation=change.generation, members=job.group, shares=job.shares, first_step=step
    )
    commands = [*job.on(word, now_s)]
    number = job._state.membership.changes
    for member in (0, 1):
        told = e.ChangeApplied(member=member, change=number, step=step)
        commands += job.on(told, now_s)
    return commands


def reported(job, first, last, step_s, now_s=3.0):
    """Both members' words of some steps of the present generation; all commands."""
    commands = []
    for member in (0, 1):
        told = report(job, member, first, last, share=job.shares[member])
        wall_s = step_s * (last - first) + (0.25 if last - first < 5 else 0.0)
        commands += job.on(replace(told, typical_s=step_s, wall_s=wall_s), now_s)
    return commands


def test_what_is_asked_for_is_in_force_once_all_have_met_for_it():
    job = training(shares="equal")
    reported(job, 0, 4, 0.1)
    change = only(c.Prepare, job.on(asked(INT4), 1.0)).change
    assert change == c.Meet(
        generation=1, members=(0, 1), shares=(4, 4), keys=((0, 0), (1, 0)), sync=INT4
    )
    changed = only(e.SyncChanged, applied(job, change, 6))
    assert changed == e.SyncChanged(
        generation=1, step=6, point=asdict(INT4), given=asdict(RING), why="as asked"
    )
    assert job.on(changed, 3.0) == ()
    assert job.on(asked(INT4), 3.0) == ()  # it is in force
    assert only(c.Prepare, job.on(asked(RING), 3.0)).change.sync == RING


def test_who_is_left_goes_on_by_the_point_before_and_then_changes():
    job = training(shares="equal", min_workers=1)
    reported(job, 0, 4, 0.1)
    job.on(asked(INT4), 1.0)
    commands = [*job.on(e.MemberLost(member=1, reason="died"), 1.1), *job.tick(1.2)]
    form = only(c.Form, commands)
    assert (form.members, form.sync) == ((0,), RING)  # told outright: all are to know one
    word = e.GenerationFormed(
        generation=form.generation, members=(0,), shares=form.shares, first_step=4
    )
    assert only(c.Prepare, [*job.on(word, 1.3), *job.tick(1.4)]).change.sync == INT4


def test_a_change_that_breaks_each_time_is_given_up():
    job = training(shares="equal")
    sync = job._state.sync
    assert list(sync.ask(asked(INT4))) == []
    assert sync.send() == INT4
    assert [*sync.fail(), *sync.fail()] == []
    assert only(e.Noticed, sync.fail()).detail == {"point": "tree, codec int4", "times": 3}
    assert sync.wanted is None
    assert sync.now == RING


def test_rounds_are_refused_where_a_task_cannot_have_them():
    job = training()
    job._state.sync.learn(replace(ready(0), no_rounds="its gradients are sparse"))
    told = only(e.Noticed, job.on(asked(ROUNDS), 1.0))
    assert told.detail == {"why": "its gradients are sparse"}
    assert only(c.Prepare, job.on(asked(INT4), 1.0)).change.sync == INT4


SEEN = "Adam keeps 'seen', of type int"


def refused(job, now_s=2.1):
    """Both members have found that their steps cannot be made in rounds; all commands."""
    return [c for m in (0, 1) for c in job.on(e.RoundsRefused(member=m, why=SEEN), now_s)]


def test_rounds_that_members_refuse_are_not_taken_to_be_in_force():
    job = training(shares="equal")
    reported(job, 0, 4, 0.1)
    change = only(c.Prepare, job.on(asked(ROUNDS), 1.0)).change
    applied(job, change, 6)
    commands = refused(job)
    stepwise = replace(ROUNDS, period=1)
    assert only(e.Noticed, commands).detail == {"why": SEEN}
    changed = only(e.SyncChanged, commands)
    assert (SyncPoint(**changed.point), changed.generation, changed.step) == (stepwise, 1, 6)
    assert changed.why == f"as asked, but for rounds: {SEEN}"
    assert job._state.sync.now == stepwise
    assert only(e.Noticed, job.on(asked(ROUNDS), 3.0)).detail == {"why": SEEN}
    form = only(c.Form, _regrouped(job))
    assert form.sync == stepwise


def _regrouped(job):
    """An exchange broke, and both meet anew: all commands."""
    for member in (0, 1):
        job.on(e.ExchangeBroken(member=member, generation=1, why="reset"), 3.0)
    return [*job.tick(3.1), *job.tick(9.0)]


def test_rounds_that_are_refused_before_all_have_said_that_they_changed():
    job = training(shares="equal")
    reported(job, 0, 4, 0.1)
    change = only(c.Prepare, job.on(asked(ROUNDS), 1.0)).change
    told = only(e.Noticed, refused(job))
    assert told.detail == {"why": SEEN}
    changed = only(e.SyncChanged, applied(job, change, 6))
    assert SyncPoint(**changed.point) == replace(ROUNDS, period=1)
    assert job._state.sync.wanted is None


STEP_S = {RING: 0.1, INT4: 0.06, ROUNDS: 0.08}


def test_a_tour_does_not_take_rounds_that_were_refused_as_measured():
    job = training(shares="equal", tour=(ROUNDS, RING, INT4), job_steps=10_000)
    commands = list(reported(job, 0, 6, 0.1))
    commands += applied(job, only(c.Prepare, commands).change, 6)
    commands += refused(job)
    assert "points of the tour" in of(e.Noticed, commands)[-1].what
    assert of(e.Noticed, commands)[-1].detail == {"points": (str(ROUNDS),), "why": SEEN}
    more, _ = tour(job, at=6)
    measured = [SyncPoint(**x.point) for x in of(e.SyncMeasured, [*commands, *more])]
    assert measured == [RING, INT4]
    assert SyncPoint(**of(e.SyncChanged, more)[-1].point) == INT4


def test_a_tour_of_nothing_but_rounds_says_why_it_ends():
    job = training(shares="equal", tour=(ROUNDS,), job_steps=10_000)
    commands = list(reported(job, 0, 6, 0.1))
    commands += applied(job, only(c.Prepare, commands).change, 6)
    commands += refused(job)
    commands += reported(job, 6, 8, 0.1)
    given_up = of(e.Noticed, commands)[-1]
    assert given_up.what == "a tour of ways for updates was given up"
    assert SEEN in given_up.detail["why"]
    assert of(c.Prepare, commands)[-1].change.sync == RING


def tour(job, at=0):
    """Take a job through its tour: all commands after the first report, and the last step."""
    commands, step = list(reported(job, at, at + 6, 0.1)), at + 6
    while not [x for x in of(e.SyncChanged, commands) if x.toured]:
        sent = job.change_outstanding
        if sent is not None:
            commands += applied(job, sent, step)
        point = job._state.sync.now
        commands += reported(job, step, step + 1, STEP_S[point])
        commands += reported(job, step + 1, step + 17, STEP_S[point])
        commands += reported(job, step + 17, step + 41, STEP_S[point])
        step += 41
        assert step < 1000
    return commands, step


def test_a_tour_measures_each_point_and_goes_on_by_the_fastest():
    job = training(shares="equal", tour=(RING, INT4, ROUNDS), job_steps=10_000)
    commands, _ = tour(job)
    measured = [(SyncPoint(**x.point), x.step_s) for x in of(e.SyncMeasured, commands)]
    assert measured == list(STEP_S.items())
    last = of(e.SyncChanged, commands)[-1]
    assert SyncPoint(**last.point) == INT4
    assert last.why.startswith("after a tour: tree, codec int4 takes 0.06 s a step in place of")
    assert job._state.sync.now == INT4
    assert reported(job, job.committed_step, job.committed_step + 90, 0.06) is not None
    assert job.change_outstanding is None  # it is over


def exchanged(job, exchange_s, step_s=0.06, *, slow_s=0.0, looks=4, first=None):
    """Steps after a tour, of which an exchange takes so long where member 0 waits least for it."""
    commands, step = [], job.committed_step if first is None else first
    for _ in range(looks * 2):
        for member in (0, 1):
            told = report(job, member, step, step + 12, share=job.shares[member])
            seconds = exchange_s + (slow_s if member else 0.0)
            told = replace(told, typical_s=step_s, wall_s=12 * step_s, exchange_s=12 * seconds)
            commands += job.on(told, 3.0)
        step += 12
    return of(c.Prepare | e.SyncMeasured | e.SyncChanged | e.Noticed, commands)


def toured(**more):
    """A job after its tour, which goes on by int4, and has seen what an exchange takes."""
    values = {"shares": "equal", "exact": False, "tour": (RING, INT4), "job_steps": 10_000}
    values |= more
    job = training(**values)
    commands, step = tour(job)
    for change in of(c.Prepare, commands)[-1:]:
        if job.change_outstanding is not None:
            applied(job, change.change, step)
    assert job._state.sync.now == INT4
    assert exchanged(job, 0.01) == []
    return job


def test_where_links_change_the_points_are_measured_anew():
    job = toured()
    commands = exchanged(job, 0.03, 0.08)
    told = of(e.Noticed, commands)[0]
    assert told.what.startswith("ways for updates are measured anew")
    assert told.detail["exchange_s"] == pytest.approx(0.03)
    assert told.detail["then_s"] == pytest.approx(0.01)
    assert "steps left, for a change of" in told.detail["why"]
    assert of(c.Prepare, commands)[0].change.sync == RING


@pytest.mark.parametrize(
    "more",
    [
        {"slow_s": 0.5},  # member 0 is slow, and the other one waits for it
        {"looks": 1},  # an odd moment
        {"exchange_s": 0.012},
        {"exchange_s": 0.0005},  # it takes less, and there is nothing left to gain
    ],
)
def test_where_links_have_not_changed_or_nothing_is_to_be_gained_there_is_no_other_tour(more):
    job = toured()
    exchange_s = 0.03 if "looks" in more else 0.01
    assert exchanged(job, **{"exchange_s": exchange_s, "step_s": 0.08, **more}) == []


def test_where_few_steps_are_left_there_is_no_other_tour():
    job = toured(job_steps=toured().committed_step + 70)
    assert job._state.steps_left() == 70
    assert exchanged(job, 0.03, 0.08) == []


def test_what_someone_has_set_stays_though_links_change():
    job = toured()
    change = only(c.Prepare, job.on(asked(RING), 4.0)).change
    applied(job, change, job.committed_step)
    assert exchanged(job, 0.01) == []
    assert exchanged(job, 0.05, 0.1) == []


def test_a_resumed_run_that_has_toured_watches_links_and_no_more():
    points = {"tour": (RING, INT4), "toured": True, "in_force": INT4}
    job = training(shares="equal", exact=False, job_steps=10_000, **points)
    assert exchanged(job, 0.01, first=0) == []
    assert of(e.Noticed, exchanged(job, 0.03, 0.08))


def test_where_few_steps_are_left_the_point_stays():
    job = training(shares="equal", tour=(INT4, RING), job_steps=93)
    commands, _ = tour(job)
    last = of(e.SyncChanged, commands)[-1]
    assert SyncPoint(**last.point) == RING
    assert last.why.endswith("not worth it")


def test_a_tour_begins_anew_where_a_member_is_lost_in_it():
    job = training(shares="equal", min_workers=1, tour=(RING, INT4), job_steps=10_000)
    reported(job, 0, 6, 0.1)
    reported(job, 6, 26, 0.1)
    assert job._state.sync._tour.step_s == {RING: 0.1}
    form = only(c.Form, [*job.on(e.MemberLost(member=1, reason="died"), 4.0), *job.tick(4.1)])
    word = e.GenerationFormed(
        generation=form.generation, members=(0,), shares=form.shares, first_step=26
    )
    job.on(word, 4.2)
    told = report(job, 0, 26, 28, share=8)
    assert job.on(replace(told, typical_s=0.1, wall_s=0.2), 4.3) is not None
    assert job._state.sync._tour.step_s == {RING: 0.1}  # alone, nothing travels: it waits


@pytest.mark.parametrize("left", [None, 1000])
def test_a_resumed_run_goes_on_by_what_was_in_force(left):
    job = training(shares="equal", in_force=INT4, job_steps=left)
    assert job._state.sync.now == INT4
    assert job._state.steps_left() == left


@pytest.mark.parametrize(("left", "joins"), [(2, False), (400, True)])
def test_who_comes_too_late_to_be_worth_it_is_not_taken_in(left, joins):
    job = training(shares="equal", max_workers=3, job_steps=10 + left)
    reported(job, 0, 10, 0.05)
    commands = [*job.on(e.CapacityChanged(workers=3), 4.0), *job.tick(4.1)]
    [newcomer] = only(c.Spawn, commands).members
    commands = job.on(replace(ready(0), member=newcomer), 5.0)
    assert bool(of(c.Prepare, commands)) == joins
