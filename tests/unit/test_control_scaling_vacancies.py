"""Whose place another may take, and how fast it is there: control names who died just now."""

from __future__ import annotations

import pytest

from raycloud import commands as c
from raycloud import events as e
from raycloud.control import Phase
from tests.control_events import ready
from tests.control_job import of, only, report, tick
from tests.control_three import formed, lost, three, to


def named(commands):
    """The lost whose places are to be taken, of all that is asked for."""
    return [v.member for spawn in of(c.Spawn, commands) for v in spawn.vacancies]


def test_who_died_is_replaced_in_its_place_and_is_known_to_be_as_fast():
    job = three()
    for member in (0, 1, 2):
        job.on(report(job, member, 0, 5, share=3, compute_s=15 * 0.3), 1.0)
    spawn = only(c.Spawn, job.on(lost(1), 2.0))
    [vacancy] = spawn.vacancies
    assert (spawn.members, vacancy.member) == ((3,), 1)
    told_s = vacancy.fixed_s + 3 * vacancy.micro_batch_s
    assert told_s > 0.5  # as it was when it died, and not as it had measured itself


def test_where_shares_are_fixed_it_is_as_fast_as_it_said():
    job = three(shares="equal")
    to(job, 5)
    spawn = only(c.Spawn, job.on(lost(1), 2.0))
    assert spawn.vacancies == (c.Vacancy(member=1, fixed_s=0.0, micro_batch_s=0.1),)


def test_the_place_of_who_is_silent_is_not_had():
    job = three(return_s=0.0)
    to(job, 5)
    commands = job.on(e.MemberLost(member=1, reason="cut off", silent=True), 20.0)
    assert only(c.Spawn, commands).members == (3,)
    assert named(commands) == []


@pytest.mark.parametrize("node", ["", "node-1"])
def test_nor_is_that_of_who_was_to_leave(node):
    job = three()
    to(job, 5)
    job.on(e.MemberLeaving(member=1, reason="notice", node=node), 2.0)
    commands = [*job.on(lost(1), 3.0), *tick(job, 3.2)]
    assert named(commands) == []


def test_no_more_are_named_than_are_wanted():
    job = three()
    to(job, 5)
    job.on(e.RangeChanged(min_workers=1, max_workers=2), 1.5)
    assert named(job.on(lost(1), 2.0)) == []  # there was one too many
    assert named(job.on(lost(2), 2.0)) == [1]


def test_each_is_named_once():
    job = three()
    to(job, 5)
    assert named(job.on(lost(1), 2.0)) == [1]
    job.on(formed(job, 5), 2.5)
    assert named(job.on(lost(0), 2.6)) == [0]


def test_who_was_to_join_and_died_leaves_no_place():
    job = three()
    to(job, 5)
    job.on(lost(1), 2.0)
    job.on(formed(job, 5), 2.5)
    job.on(lost(3, "no memory"), 3.0)
    spawn = only(c.Spawn, tick(job, 4.0))
    assert (spawn.members, spawn.vacancies) == ((4,), ())


def test_a_place_is_kept_for_no_longer_than_a_turn():
    job = three()
    to(job, 5)
    job.on(lost(1), 2.0)
    job.on(formed(job, 5), 2.5)
    job.on(lost(3, "no memory"), 3.0)  # so none is asked for until 4 s
    assert not of(c.Spawn, job.on(lost(2), 3.1))
    assert not of(c.Spawn, tick(job, 3.2))
    spawn = only(c.Spawn, tick(job, 4.0))
    assert (spawn.members, spawn.vacancies) == ((4, 5), ())


def test_where_all_have_died_others_load_the_checkpoint_in_their_places():
    job = three()
    to(job, 5)
    for member in (0, 1, 2):
        commands = job.on(lost(member), 2.0)
    assert job.phase is Phase.RESTORING
    assert not of(c.Spawn, commands)
    back = e.RolledBack(step=0, ledger={})
    assert named(job.on(back, 2.0)) == [2]  # the other two were asked for as it came


def test_who_takes_a_place_is_ready_with_the_speed_that_was_known():
    job = three()
    to(job, 5)
    spawn = only(c.Spawn, job.on(lost(1), 2.0))
    job.on(formed(job, 5), 2.5)
    [vacancy] = spawn.vacancies
    prepare = only(c.Prepare, job.on(ready(3, micro_batch_s=vacancy.micro_batch_s), 8.0))
    assert prepare.change.members == (0, 2, 3)
