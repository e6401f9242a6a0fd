"""Control begins with members that have outlived their driver."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raycloud import commands as c
from raycloud import events as e
from raycloud.control import Control, ControlSettings, MemberState, Phase
from raycloud.control.membership import Adoption
from raycloud.errors import InternalError
from raycloud.order import ERROR, NAN, Ledger, Position, Skip, skip_record
from tests.control_events import part, ready, stop
from tests.control_job import control, of, on_and_tick, only, report, training
from tests.control_three import formed, lost


def taken(steps, *, at=5, count=2, skips=None, **values):
    """A job whose ledger ends at step `at`, taken over with members 3, 4, ...

    Args:
        steps: What the log says that they have reported.
        at: Where the ledger's file ends.
        count: How many members are there.
        skips: What the log says that each has skipped.
        values: Further settings.
    """
    before = training()
    for member in (0, 1):
        before.on(report(before, member, 0, at), 1.0)
    settings = {"min_workers": 2, "max_workers": 2, "capacity": 2, "global_batch": 8}
    began = {"step": at, "position": before.position_at(at), "ledger": before.ledger.state()}
    known = {"first_generation": 8, "first_member": 9, "micro_batch": 1}
    job = Control(ControlSettings(**{**settings, **(began if at else {}), **known, **values}))
    readies = tuple(ready(number) for number in range(3, 3 + count))
    adoption = Adoption(readies=readies, steps=steps, skips=skips or {}, changes=4, began_s=-2.0)
    return job, job.take_over(adoption, 1.0)


def test_they_meet_as_the_next_generation_where_they_are():
    job, commands = taken({3: 5, 4: 6})
    form = only(c.Form, commands)
    assert (form.generation, form.members, form.step, form.settled) == (8, (3, 4), 5, 4)
    assert sum(form.shares) == 8
    assert not of(c.Record, commands)  # the file goes on where it ends
    assert not of(c.Spawn, commands)
    assert job.phase is Phase.REGROUPING
    assert job.members == {3: MemberState.ACTIVE, 4: MemberState.ACTIVE}


def test_what_they_committed_meanwhile_counts_once():
    job, _ = taken({3: 5, 4: 6})
    assert job.on(report(job, 4, 6, 20, generation=7), 1.5) == ()
    commands = job.on(report(job, 3, 5, 19, generation=7), 1.5)
    records = only(c.Record, commands).records  # one for each part of an epoch
    assert (records[0]["commit"]["first_step"], records[-1]["commit"]["last_step"]) == (5, 19)
    job.on(formed(job, 20), 2.0)
    assert job.phase is Phase.TRAINING
    commands = [*job.on(report(job, 3, 19, 21), 3.0), *job.on(report(job, 4, 20, 21), 3.0)]
    told = only(e.Recovered, commands)
    assert (told.lost, told.detected_s, told.resumed_s) == ((), 0.0, 5.0)
    assert told.lost_steps == 0
    assert job.committed_step == 21
    assert job.ledger.audit(through=job.position_at(21)).exact


def test_who_was_called_back_before_and_has_not_reported_since_has_the_others_steps():
    """The ledger has steps that it has never reported: it had left, and was away meanwhile."""
    job, _ = taken({3: 3, 4: 6})
    job.on(report(job, 3, 5, 6, generation=7), 1.5)
    job.on(formed(job, 6), 2.0)
    for member in (3, 4):
        job.on(report(job, member, 6, 7), 3.0)
    assert job.committed_step == 7
    assert job.ledger.audit().exact


def test_what_the_log_has_and_the_ledger_has_not_is_counted_with_the_next_word():
    job, _ = taken({3: 8, 4: 9})
    commands = job.on(report(job, 4, 9, 10, generation=7), 1.5)
    (record,) = only(c.Record, commands).records
    assert (record["commit"]["first_step"], record["commit"]["last_step"]) == (5, 8)


@pytest.mark.parametrize(("first", "last"), [(3, 4), (3, 5), (4, 7)])
def test_what_the_ledger_has_and_the_log_has_not_is_not_counted_again(first, last):
    """The driver died after it had counted a step, and before it had logged who told of it."""
    job, _ = taken({3: first, 4: 5})
    told = replace(report(job, 3, 5, max(last, 5), generation=7), first_step=first, last_step=last)
    assert not of(c.Record, job.on(told, 1.5))
    if last < 7:
        rest = replace(report(job, 3, 5, 7, generation=7), first_step=last)
        assert not of(c.Record, job.on(rest, 1.5))
    [record] = only(c.Record, job.on(report(job, 4, 5, 7, generation=7), 1.6)).records
    assert (record["commit"]["first_step"], record["commit"]["last_step"]) == (5, 7)
    job.on(formed(job, 7), 2.0)
    for member in (3, 4):
        job.on(report(job, member, 7, 8), 3.0)
    assert job.committed_step == 8
    assert job.ledger.audit(through=job.position_at(8)).exact


def test_what_was_skipped_is_known_though_the_ledger_does_not_have_it_yet():
    before = Skip(step=2, epoch=0, start=17, stop=18, why=ERROR)
    after = Skip(step=7, epoch=0, start=56, stop=64, why=NAN)
    told = {3: [before.to_record(), after.to_record()], 4: [before.to_record()]}
    job, commands = taken({3: 8, 4: 9}, skips=told)
    assert only(c.Record, commands).records == (skip_record(before),)
    commands = job.on(report(job, 4, 9, 10, generation=7), 1.5)
    assert [r for told in of(c.Record, commands) for r in told.records if "skip" in r] == [
        skip_record(after)
    ]
    assert job.ledger.audit().skips == (before, after)
    assert Ledger.from_state(job.ledger_at(6)).skips == (before,)


def test_before_the_first_commit():
    job, commands = taken({}, at=0)
    assert only(c.Form, commands).step == 0
    job.on(report(job, 3, 0, 2, generation=7), 1.5)
    job.on(report(job, 4, 0, 2, generation=7), 1.5)
    assert job.committed_step == 2
    assert job.ledger.audit(through=job.position_at(2)).exact


def test_one_that_had_just_come_counts_from_its_first_word():
    job, commands = taken({3: 5})
    assert only(c.Form, commands).members == (3, 4)
    job.on(report(job, 3, 5, 9, generation=7), 1.5)
    job.on(report(job, 4, 7, 9, generation=7), 1.5)  # it may not have had the state
    assert job.committed_step == 5
    job.on(formed(job, 9), 1.6)
    job.on(report(job, 3, 9, 10, generation=8), 1.7)
    job.on(report(job, 4, 9, 10, generation=8), 1.7)
    assert job.committed_step == 10
    assert job.ledger.audit(through=job.position_at(10)).exact


def test_where_only_one_that_is_gone_had_reported_nobody_is_taken_for_older_than_it_is():
    job, commands = taken({0: 7})
    assert only(c.Form, commands).members == (3, 4)
    for member in (3, 4):  # they took the state, and had not come to tell of a step
        assert job.on(report(job, member, 7, 9, generation=7), 1.5) == ()
    job.on(formed(job, 9), 1.6)
    commands = [x for m in (3, 4) for x in job.on(report(job, m, 9, 10), 1.7)]
    assert job.committed_step == 10
    assert job.ledger.audit(through=job.position_at(10)).exact
    assert only(c.Record, commands)


def test_an_echo_of_their_last_meeting_changes_nothing_while_they_wait_for_others():
    job, _ = taken({3: 5}, count=1)
    assert job.phase is Phase.WAITING
    assert only(c.Spawn, job.tick(1.2)).members == (9,)
    echo = e.GenerationFormed(generation=7, members=(3, 4), shares=(4, 4), first_step=0)
    assert job.on(echo, 1.5) == ()
    assert job.phase is Phase.WAITING
    assert job.members == {3: MemberState.ACTIVE, 9: MemberState.SPAWNING}


def test_words_of_what_the_driver_before_had_begun_change_nothing():
    job, _ = taken({3: 5, 4: 5})
    for word in (
        part(3, 5, generation=7),
        e.ChangeApplied(member=3, change=4, step=6),
        e.ExchangeBroken(member=4, generation=7, why="closed"),
        e.MemberDone(member=3, step=5, generation=7),
        e.GenerationFormed(generation=7, members=(3, 4), shares=(4, 4), first_step=0),
    ):
        assert job.on(word, 1.5) == ()
    assert job.phase is Phase.REGROUPING
    assert job.members == {3: MemberState.ACTIVE, 4: MemberState.ACTIVE}


def test_changes_are_numbered_on():
    job, _ = taken({3: 5, 4: 5})
    job.on(formed(job, 5), 2.0)
    for member in (3, 4):
        job.on(report(job, member, 5, 6), 2.0)
    assert only(c.Prepare, job.on(stop(), 3.0)).number == 5


def test_too_few_wait_for_others_who_get_new_numbers():
    job, commands = taken({3: 5}, count=1)
    assert not of(c.Form, commands)
    assert job.phase is Phase.WAITING
    spawn = only(c.Spawn, job.tick(2.0))
    assert (spawn.members, spawn.joins) == ((9,), True)
    job.on(e.MemberSpawned(member=9), 2.5)
    form = only(c.Form, job.on(ready(9), 3.0))
    assert (form.generation, form.members) == (8, (3, 9))


def test_lost_ones_are_told_of_and_replaced():
    job, _ = taken({3: 5, 4: 5}, count=1, min_workers=1)
    assert only(c.Spawn, job.on(formed(job, 5), 2.0)).members == (9,)


def test_one_that_dies_while_they_meet_is_a_loss():
    job, _ = taken({3: 5, 4: 5}, min_workers=1)
    form = only(c.Form, on_and_tick(job, lost(3), 2.0))
    assert (form.generation, form.members) == (9, (4,))


def test_it_is_begun_once():
    job = control()
    job.start(0.0)
    with pytest.raises(InternalError, match="illegal in phase PLACING"):
        job.take_over(Adoption(readies=(ready(0),), steps={}), 0.0)


def test_where_the_sequence_stands_is_where_the_ledger_ends():
    job, _ = taken({3: 5, 4: 5})
    assert job.position_at(5) == Position(epoch=0, offset=40)
