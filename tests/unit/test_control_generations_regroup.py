"""Control when members are lost and enough are left: they meet, and go on where they are."""

from __future__ import annotations

import pytest

from raycloud import commands as c
from raycloud import events as e
from raycloud.control import MemberState, Phase
from raycloud.errors import InternalError
from tests.control_events import part, published, ready, stop
from tests.control_job import control, of, on_and_tick, only, report
from tests.control_three import formed, lost, three, to

# ---- one is lost


def test_those_that_are_left_meet_as_the_next_generation():
    job = three()
    to(job, 5)
    commands = job.on(lost(1), 2.0)
    assert only(c.Release, commands).members == (1,)
    form = only(c.Form, commands)
    assert (form.generation, form.members, form.shares) == (1, (0, 2), (4, 4))
    assert job.phase is Phase.REGROUPING
    assert job.members == {
        0: MemberState.ACTIVE,
        1: MemberState.LOST,
        2: MemberState.ACTIVE,
        3: MemberState.SPAWNING,  # in its place
    }
    job.on(formed(job, 5), 2.5)
    assert job.phase is Phase.TRAINING
    commands = to(job, 8, (0, 2), first=5)
    assert job.committed_step == 8
    assert [r["commit"]["generation"] for x in of(c.Record, commands) for r in x.records] == [1]
    assert job.ledger.audit().exact


def test_recovering_is_told_once_the_first_step_is_committed():
    job = three()
    to(job, 5)
    job.on(lost(1, "its node died"), 2.0)
    assert not of(e.Recovered, job.on(formed(job, 5), 2.5))
    told = only(e.Recovered, job.on(report(job, 0, 5, 6), 3.0))
    assert told == e.Recovered(
        generation=1, lost=(1,), cause="its node died", detected_s=2.0, resumed_s=3.0
    )
    assert not of(e.Recovered, job.on(report(job, 2, 5, 6), 3.0))


def test_a_word_of_the_new_generation_proves_that_it_has_met():
    job = three()
    to(job, 5)
    job.on(lost(0), 2.0)
    job.on(report(job, 1, 5, 6), 3.0)
    assert job.phase is Phase.TRAINING
    assert job.on(formed(job, 5), 3.0) == ()


def test_late_words_of_the_old_generation_count():
    """Some have committed a step of which others have not heard; the new generation takes it."""
    job = three()
    to(job, 5)
    job.on(lost(2), 2.0)
    job.on(report(job, 0, 5, 6, generation=0), 2.1)
    assert job.committed_step == 5
    assert job.phase is Phase.REGROUPING
    job.on(formed(job, 6), 2.5)
    job.on(report(job, 1, 5, 6, generation=0), 3.0)  # it has taken the step from member 0
    assert job.committed_step == 6
    for member in (0, 1):
        job.on(report(job, member, 6, 7), 3.0)
    assert job.committed_step == 7
    assert job.ledger.audit().exact


def test_no_step_is_left_out_of_a_report():
    job = three()
    to(job, 5)
    job.on(lost(2), 2.0)
    with pytest.raises(InternalError, match="next step is 5"):
        job.on(report(job, 1, 6, 7), 3.0)


def test_words_of_the_dead_are_ignored():
    job = three()
    to(job, 5)
    job.on(lost(1), 2.0)
    assert job.on(report(job, 1, 5, 9, generation=0), 2.0) == ()
    assert job.on(lost(1), 2.0) == ()
    assert job.committed_step == 5


def test_losses_while_they_meet_are_one_incident():
    job = control(min_workers=1, max_workers=5, capacity=5, global_batch=20)
    job.start(0.0)
    for member in range(5):
        job.on(ready(member), 0.0)
    job.on(formed(job, 0), 0.0)
    assert only(c.Form, job.on(lost(1), 2.0)).members == (0, 2, 3, 4)
    for member in (2, 3, 4):
        assert not of(c.Form, job.on(lost(member), 2.1))
    assert only(c.Form, job.tick(2.1)).members == (0,)
    assert not of(c.Form, job.tick(2.3))


def test_another_is_lost_while_they_meet():
    job = three()
    to(job, 5)
    job.on(lost(1), 2.0)
    form = only(c.Form, on_and_tick(job, lost(0, "it too"), 2.1))
    assert (form.generation, form.members, form.shares) == (2, (2,), (8,))
    told = only(e.Recovered, job.on(report(job, 2, 5, 6), 3.0))
    assert (told.lost, told.detected_s) == ((1, 0), 2.0)


def test_recovering_is_told_where_no_step_was_left():
    job = three()
    to(job, 5)
    for member in (0, 1):
        job.on(part(member, 5), 1.5)
    job.on(lost(2), 2.0)
    job.on(formed(job, 5), 2.2)
    for member in (0, 1):
        job.on(part(member, 5, generation=1), 2.4)
    told = only(e.Recovered, job.on(e.MemberDone(member=0, step=5, generation=1), 2.5))
    assert (told.lost, told.resumed_s) == ((2,), 2.5)


def test_nobody_is_left():
    job = three(min_workers=2)
    to(job, 5)
    job.on(lost(1), 2.0)
    assert not of(c.Restore, job.on(lost(0, "it too"), 2.1))
    assert of(c.Restore, job.on(lost(2, "and it"), 2.2))


def test_a_member_is_lost_before_it_is_ready():
    job = control(min_workers=1, max_workers=2)
    job.start(0.0)
    assert only(c.Release, job.on(lost(0), 1.0)).members == (0,)
    form = only(c.Form, job.on(ready(1), 2.0))
    assert (form.members, form.shares) == ((1,), (8,))
    job.on(formed(job, 0), 2.0)
    for step in (3, 6):
        job.on(report(job, 1, step - 3, step, share=8), 3.0)
    job.on(part(1, 6), 4.0)
    job.on(e.MemberDone(member=1, step=6), 4.0)
    assert only(c.Finish, job.on(published(6), 5.0)) == c.Finish(status="finished")


def test_a_member_is_lost_before_all_have_met():
    job = control(min_workers=1, max_workers=2)
    job.start(0.0)
    for member in (0, 1):
        job.on(ready(member), 0.0)
    form = only(c.Form, on_and_tick(job, lost(0), 1.0))
    assert (form.generation, form.members, form.step) == (1, (1,), 0)


def test_pinned_shares_keep_their_proportions():
    job = control(min_workers=1, max_workers=3, capacity=3, shares=(4, 3, 1))
    job.start(0.0)
    for member in (0, 1, 2):
        job.on(ready(member), 0.0)
    job.on(formed(job, 0), 0.0)
    assert only(c.Form, job.on(lost(1), 1.0)).shares == (6, 2)


# ---- what is under way when one is lost


def test_a_checkpoint_that_the_dead_did_not_write_is_forgotten():
    job = three()
    to(job, 5)
    for member in (0, 1):
        job.on(part(member, 5), 1.5)
    job.on(lost(2), 2.0)
    assert job.on(part(1, 5), 2.0) == ()  # late
    job.on(formed(job, 5), 2.5)
    assert not of(c.Publish, job.on(part(0, 5, generation=1), 2.6))
    publish = only(c.Publish, job.on(part(1, 5, generation=1), 2.6))
    assert tuple(publish.parts) == ((0, 0), (1, 0))


def test_a_checkpoint_is_published_once():
    job = three()
    to(job, 5)
    for member in (0, 1, 2):
        job.on(part(member, 5), 1.5)
    job.on(lost(2), 2.0)
    job.on(published(5), 2.1)
    job.on(formed(job, 5), 2.5)
    for member in (0, 1):
        assert not of(c.Publish, job.on(part(member, 5, generation=1), 2.6))
    assert job.last_published == 5


def test_new_shares_that_were_sent_ahead_are_withdrawn():
    job = three(reshare_every_s=1.0, reshare_steps=1)
    prepare = slow_down(job)
    assert isinstance(prepare.change, c.Reshare)
    step = job.committed_step
    form = only(c.Form, job.on(lost(0), 50.0))
    assert (form.generation, form.settled) == (2, 1)  # generation 1 was given away
    assert job.change_outstanding is None
    late = e.ChangeApplied(member=1, change=1, step=step + 3)
    assert job.on(late, 50.0) == ()
    assert form.shares[0] < form.shares[1]  # speeds are remembered


def slow_down(job):
    """Member 1 needs three times as long; the change that follows."""
    for turn in range(1, 40):
        step = job.committed_step
        for member, share in zip(job.group, job.shares, strict=True):
            seconds = 5 * share * (0.3 if member == 1 else 0.1)
            word = report(job, member, step, step + 5, share=share, compute_s=seconds)
            if found := of(c.Prepare, job.on(word, float(turn))):
                return found[0]
    raise AssertionError("no change of shares")


def test_grown_data_that_was_sent_ahead_is_not_withdrawn():
    job = three()
    to(job, 5)
    prepare = only(c.Prepare, job.on(e.DataGrew(samples=140, version=1), 1.0))
    form = only(c.Form, job.on(lost(0), 2.0))
    assert form.settled == 0
    job.on(formed(job, 5), 2.5)
    assert isinstance(job.change_outstanding, c.Extend)
    for member in (1, 2):
        job.on(report(job, member, 5, 9), 3.0)
        job.on(e.ChangeApplied(member=member, change=prepare.number, step=9), 3.0)
    assert job.change_outstanding is None
    assert job.ledger.sizes.most == 140


def test_a_stop_is_asked_for_while_they_meet():
    job = three()
    to(job, 5)
    job.on(lost(1), 2.0)
    assert job.on(stop(), 2.1) == ()
    prepare = only(c.Prepare, job.on(formed(job, 5), 2.5))
    assert isinstance(prepare.change, c.Halt)
    assert job.phase is Phase.STOPPING


def test_a_halt_is_sent_again():
    """One dies when others have halted: they go on with it a little, and halt again."""
    job = three()
    to(job, 5)
    first = only(c.Prepare, job.on(stop(), 1.0))
    job.on(e.ChangeApplied(member=0, change=first.number, step=5), 1.5)
    job.on(e.MemberDone(member=0, step=5), 1.6)
    assert job.members[0] is MemberState.DONE
    form = only(c.Form, job.on(lost(1), 2.0))
    assert form.settled == first.number
    again = only(c.Prepare, job.on(formed(job, 5), 2.5))
    assert (again.number, again.members) == (first.number + 1, (0, 2))
    for member in (0, 2):
        job.on(report(job, member, 5, 7), 3.0)
        job.on(e.ChangeApplied(member=member, change=again.number, step=7), 3.0)
        job.on(part(member, 7, generation=1), 3.1)
        job.on(e.MemberDone(member=member, step=7, generation=1), 3.2)
    assert only(c.Finish, job.on(published(7), 4.0)).status == "stopped"


def test_one_dies_when_all_others_are_done():
    """What it had to write of the last checkpoint is written by the others."""
    job = three()
    to(job, 5)
    for member in (0, 1):
        job.on(part(member, 5), 2.0)
        job.on(e.MemberDone(member=member, step=5), 2.0)
    form = only(c.Form, job.on(lost(2), 3.0))
    assert form.members == (0, 1)
    job.on(formed(job, 5), 3.5)
    for member in (0, 1):
        job.on(part(member, 5, generation=1), 4.0)
        job.on(e.MemberDone(member=member, step=5, generation=1), 4.0)
    assert only(c.Finish, job.on(published(5), 5.0)) == c.Finish(status="finished")


def test_steps_that_only_the_lost_one_had_not_told_of_count_where_no_other_is_left():
    """Cut off from the driver, it computed with the others to the end."""
    job = three()
    to(job, 2)
    to(job, 5, members=(0, 1), first=2)
    assert job.committed_step == 2
    job.on(lost(2), 3.0)
    job.on(formed(job, 5), 3.5)
    for member in (0, 1):
        job.on(part(member, 5, generation=1), 4.0)
    record = only(c.Record, job.on(e.MemberDone(member=0, step=5, generation=1), 4.0))
    assert [x["commit"]["last_step"] for x in record.records] == [5]
    job.on(e.MemberDone(member=1, step=5, generation=1), 4.0)
    assert only(c.Finish, job.on(published(5), 5.0)) == c.Finish(status="finished")
    assert job.committed_step == job.ledger.next_step == 5


def test_one_that_is_done_dies_and_nobody_minds():
    job = three()
    to(job, 5)
    for member in (0, 1, 2):
        job.on(part(member, 5), 2.0)
    job.on(e.MemberDone(member=0, step=5), 2.0)
    assert job.on(lost(0), 3.0) == ()
    assert job.phase is Phase.TRAINING


def test_a_late_word_of_being_done_is_no_longer_true():
    job = three()
    to(job, 5)
    job.on(part(0, 5), 2.0)
    job.on(lost(2), 3.0)
    assert job.on(e.MemberDone(member=0, step=5), 3.1) == ()
    assert job.members[0] is MemberState.ACTIVE
