"""Control where a step is not finite: all go back, in place, and leave it out the second time."""

from __future__ import annotations

import pytest

from raycloud import commands as c
from raycloud import events as e
from raycloud.control import MemberState, Phase
from raycloud.order import NAN, Ledger, Skip, read_ledger
from tests.control_events import part, published, ready, stop
from tests.control_job import of, only, report, tick
from tests.control_three import formed, kept_ledger, lost, three, to

ALL = (0, 1, 2)


def not_finite(job, member, step, *, left_out=-1, generation=None):
    """What a member says; as a rule the step itself is to be left out."""
    return e.StepNotFinite(
        member=member,
        generation=job.generation if generation is None else generation,
        step=step,
        why=f"the loss is nan at step {step}",
        left_out=step if left_out == -1 else left_out,
    )


def saved(job, step):
    """All write the checkpoint of this step, and it is published; what is found of it later."""
    for member in ALL:
        job.on(part(member, step, generation=job.generation), 1.0)
    job.on(published(step), 1.0)
    return e.RolledBack(step=step, ledger=job.ledger_at(step))


def went_wrong(**settings):
    """Three members come to step 8, which is not finite; their checkpoint is of step 5."""
    job = three(**settings)
    to(job, 5)
    back = saved(job, 5)
    to(job, 8, first=5)
    return job, back, [x for m in ALL for x in job.on(not_finite(job, m, 8, generation=0), 2.0)]


def skipped(job, member, first, last, step):
    """Its report, by which it has left out this step."""
    at, after = job.position_at(step), job.position_at(step + 1)
    skip = Skip(step=step, epoch=at.epoch, start=at.offset, stop=after.offset, why=NAN)
    word = report(job, member, first, last, share=3)
    fields = {name: getattr(word, name) for name in word.__dataclass_fields__}
    return e.StepsCommitted(**(fields | {"skips": (skip.to_record(),)}))


def test_all_go_back_in_place_and_leave_it_out():
    job, back, commands = went_wrong()
    assert job.phase is Phase.RESTORING
    assert of(c.Restore, commands) == [c.Restore(newest=8)]  # what others say of it is no news
    assert set(job.members.values()) == {MemberState.READY}
    commands = job.on(back, 2.1)
    form = only(c.Form, commands)
    assert (form.members, form.step, form.generation) == (ALL, 5, 1)
    assert form.back == c.Back(step=5, generation=1, without=(8,))
    assert not of(c.Spawn, commands)
    assert of(c.Release, commands) == []
    assert only(c.Record, commands).records == ({"restore": back.ledger},)
    assert only(e.Noticed, commands).detail == {"left_out": [8]}
    job.on(formed(job, 5), 2.2)
    assert job.phase is Phase.TRAINING
    told = only(e.Recovered, to(job, 8, first=5))
    assert (told.lost, told.lost_steps, told.cause) == ((), 3, "the loss is nan at step 8")


def test_the_ledger_names_the_step_and_lacks_nothing():
    job, (lines, keep) = three(), kept_ledger()
    keep(to(job, 5))
    back = saved(job, 5)
    keep(to(job, 8, first=5))
    keep(job.on(not_finite(job, 0, 8), 2.0))
    keep(job.on(back, 2.1))
    job.on(formed(job, 5), 2.2)
    for member in ALL:
        keep(job.on(skipped(job, member, 5, 10, 8), 3.0))
    ledger = read_ledger(lines)
    assert ledger.state() == job.ledger.state()
    assert ledger.audit().exact
    assert (ledger.next_step, [skip.step for skip in ledger.skips]) == (10, [8])


def test_words_of_what_was_taken_back_are_passed_over():
    job, back, _ = went_wrong()
    words = [
        report(job, 1, 8, 8, generation=0),
        part(1, 8, generation=0),
        e.EvaluationPart(member=1, step=8, states={}, generation=0),
        e.ExchangeBroken(member=1, generation=0, why="closed"),
        not_finite(job, 1, 8, generation=0),
    ]
    for word in words:
        assert job.on(word, 2.05) == ()
    assert job.phase is Phase.RESTORING
    job.on(back, 2.1)
    for word in words:
        assert job.on(word, 2.15) == ()
    assert job.phase is Phase.REGROUPING
    assert job.committed_step == 5


def test_what_was_measured_after_steps_that_were_taken_back_is_measured_again():
    job, back, _ = went_wrong()
    job.on(e.Evaluated(step=8, metrics={}), 2.05)
    job.on(back, 2.1)
    forms = of(c.Form, job.on(e.MemberLost(member=1, reason="died"), 2.2))
    assert [form.measured for form in [*forms, *of(c.Form, job.tick(3.2))]][-1:] == [5]


def test_without_a_checkpoint_they_begin_at_the_beginning():
    """With new processes: these are not as they began."""
    job = three()
    to(job, 3)
    assert of(c.Restore, job.on(not_finite(job, 1, 3), 2.0)) == [c.Restore(newest=3)]
    commands = job.on(e.RolledBack(step=0), 2.1)
    assert c.Release(members=ALL) in commands
    assert only(c.Spawn, commands).back == 0
    assert only(c.Record, commands).records == ({"restore": Ledger(samples=100).state()},)
    for member in (3, 4, 5):
        job.on(e.MemberSpawned(member=member, node="n"), 3.0)
    forms = [x for m in (3, 4, 5) for x in of(c.Form, job.on(ready(m), 3.0))]
    assert [form.back for form in forms] == [c.Back(step=0, generation=1, without=(3,))]


def test_it_may_be_the_first_step():
    job = three()
    word = e.StepNotFinite(member=0, generation=0, step=0, why="the loss is nan", left_out=0)
    assert of(c.Restore, job.on(word, 2.0))
    assert job.phase is Phase.RESTORING


def test_who_is_to_be_lost_meanwhile_is_replaced():
    job, back, _ = went_wrong()
    job.on(lost(1), 2.05)
    commands = job.on(back, 2.1)
    assert only(c.Form, commands).members == (0, 2)
    assert only(c.Spawn, [*commands, *tick(job, 4.0)]).members == (3,)


def test_a_step_that_broke_before_it_was_known_is_not_waited_for():
    """One is lost as the others say so: they meet, and find it out once more."""
    job = three()
    to(job, 8)
    job.on(lost(2), 2.0)
    assert job.on(not_finite(job, 0, 8, generation=0), 2.1) == ()
    assert job.phase is Phase.REGROUPING
    commands = job.on(not_finite(job, 0, 8), 2.2)
    assert of(c.Restore, commands) == [c.Restore(newest=8)]


def test_where_an_earlier_update_is_why_that_is_left_out_and_later_checkpoints_do_not_count():
    job = three()
    to(job, 5)
    back = saved(job, 5)
    to(job, 8, first=5)
    saved(job, 8)
    commands = job.on(not_finite(job, 0, 8, left_out=7), 2.0)
    assert of(c.Restore, commands) == [c.Restore(newest=7)]
    form = only(c.Form, job.on(back, 2.1))
    assert form.back == c.Back(step=5, generation=1, without=(7,))
    assert job.last_published == 5


def test_a_checkpoint_that_is_not_finite_is_passed_over():
    job, back, _ = went_wrong()
    job.on(back, 2.1)
    commands = job.on(not_finite(job, 1, 5, left_out=None), 2.3)
    assert of(c.Restore, commands) == [c.Restore(newest=4)]
    job.on(e.RolledBack(step=0), 2.4)
    assert job.committed_step == 0


def test_what_is_left_out_stays_so_where_all_are_lost():
    job, back, _ = went_wrong()
    job.on(back, 2.1)
    job.on(formed(job, 5), 2.2)
    to(job, 7, first=5)
    for member in ALL:
        job.on(lost(member), 3.0)
    job.on(back, 3.1)
    now_s, commands = 3.1, []
    while not (spawned := of(c.Spawn, commands)):
        now_s += 1.0
        commands = tick(job, now_s)
    for member in spawned[0].members:
        job.on(e.MemberSpawned(member=member, node="n"), now_s)
    forms = [x for m in spawned[0].members for x in of(c.Form, job.on(ready(m), now_s))]
    assert [form.back.without for form in forms] == [(8,)]


def returned(job, back, step, now_s):
    """They are back, and come to another step that is not finite; all commands."""
    job.on(back, now_s)
    job.on(formed(job, 5), now_s)
    to(job, step, first=5)
    return job.on(not_finite(job, 0, step), now_s)


def test_one_that_goes_back_again_and_again_without_coming_further_ends():
    job, back, commands = went_wrong(losing=3)
    times = 1
    while not of(c.Finish, commands):
        commands = returned(job, back, 8 + times, 2.0 + times)  # the very next step, each time
        times += 1
    assert times == 4
    finish = only(c.Finish, commands)
    assert finish.status == "failed"
    assert finish.error.startswith("it went back 3 times, and came no further than step 12: the ")
    assert "hint: lower the learning rate" in finish.error
    assert not of(c.Restore, commands)


def test_a_step_that_counts_beyond_it_is_further():
    job, back, commands = went_wrong(losing=3)
    for times in range(1, 9):
        commands = returned(job, back, 8 + 2 * times, 2.0 + times)
        assert not of(c.Finish, commands)


def test_a_stop_ends_it_with_the_steps_of_the_checkpoint():
    job, back, _ = went_wrong()
    job.on(stop(), 2.05)
    finish = only(c.Finish, job.on(back, 2.1))
    assert finish == c.Finish(status="stopped")
    assert job.committed_step == 5


def test_while_it_stops_it_goes_back_and_ends():
    job = three()
    to(job, 5)
    back = saved(job, 5)
    job.on(stop(), 1.5)
    assert of(c.Restore, job.on(not_finite(job, 0, 6), 2.0))
    assert only(c.Finish, job.on(back, 2.1)).status == "stopped"


def test_where_data_has_grown_the_run_ends():
    job = three()
    to(job, 5)
    job.on(e.DataGrew(samples=200, version=1), 1.0)
    finish = only(c.Finish, job.on(not_finite(job, 0, 6), 2.0))
    assert finish.status == "failed"
    assert "the loss is nan at step 6" in finish.error


def with_one_that_joins():
    """A job with a checkpoint of step 5, of which all have been told to meet another."""
    job = three(max_workers=4)
    to(job, 5)
    back = saved(job, 5)
    (new,) = only(c.Spawn, job.on(e.CapacityChanged(workers=4), 2.0)).members
    job.on(e.MemberSpawned(member=new, node="n"), 2.5)
    return job, back, new, only(c.Prepare, job.on(ready(new), 3.0))


def test_who_follows_goes_back_with_the_others():
    job, back, new, prepare = with_one_that_joins()
    assert prepare.change.following == (new,)
    for member in ALL:
        job.on(e.ChangeApplied(member=member, change=1, step=6), 3.1)
    job.on(formed(job, 6), 3.2)
    job.on(not_finite(job, 0, 6), 3.3)
    form = only(c.Form, job.on(back, 3.4))
    assert (sorted(form.members), form.following) == ([*ALL, new], ())


@pytest.mark.parametrize("applied", [(), (0,)])
def test_a_change_that_is_under_way_is_withdrawn(applied):
    job, back, new, _ = with_one_that_joins()
    for member in applied:
        job.on(e.ChangeApplied(member=member, change=1, step=6), 3.1)
    commands = job.on(not_finite(job, 0, 6, generation=1 if applied else 0), 3.3)
    form = only(c.Form, [*commands, *job.on(back, 3.4)])
    assert (form.generation, sorted(form.members), form.settled) == (2, [*ALL, new], 1)
