"""Who does not answer, and the others cannot do without, or do not need yet."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raycloud import commands as c
from raycloud import events as e
from raycloud.control import MemberState, Phase
from tests.control_events import part, published, ready
from tests.control_job import control, of, on_and_tick, only, report
from tests.control_three import lost
from tests.unit.test_control_failure_detector import World
from tests.unit.test_control_scaling import formed, to, two


def alone(**settings):
    """Member 0 computes, and member 2 is ready to join it: at 10 s."""
    job = two(**{"max_workers": 2, "hand_over_s": 0.0, **settings})
    to(job, 5)
    on_and_tick(job, lost(1), 2.0)
    job.on(formed(job, 5), 3.0)
    to(job, 6, first=5)
    job.tick(4.0)
    assert (job.group, job.members[2]) == ((0,), MemberState.SPAWNING)
    job.on(e.MemberSpawned(member=2), 4.0)
    job.on(ready(2), 10.0)
    return job


def world_of(job, *members):
    world = World(job, now_s=10.0)
    world.members = members
    world.due_s = dict.fromkeys(members, 11.0)
    return world


def test_who_is_ready_to_join_and_does_not_answer_is_lost_before_the_others_wait_for_it():
    job = alone()
    world = world_of(job, 0, 2)
    assert not of(c.Release, world.go(20.0))
    commands = world.go(23.0, silent=(2,))
    assert only(c.Release, commands).members == (2,)
    assert only(e.Noticed, commands).member == 2
    assert job.phase is not Phase.RESTORING
    assert only(c.Spawn, world.go(25.0)).joins


@pytest.mark.parametrize(
    ("published_s", "step", "waits_s"),
    [
        (None, 10, 11.0 + 5.0),  # 10 steps, and one under way
        (None, 30, 31.0 + 5.0),
        (12.0, 10, 5.0 + 5.0),
        (12.0, 30, 25.0 + 5.0),
    ],
)
def test_the_last_that_has_the_state_is_waited_for_as_long_as_it_costs_to_go_back(
    published_s, step, waits_s
):
    """It began at 0 s, and is to answer at 21 s; a step takes 1 s, and to go back 5 s."""
    job = alone()
    world = world_of(job, 0, 2)
    world.go(12.0)
    if published_s is not None:
        only(c.Publish, job.on(part(0, 6, generation=job.generation), published_s))
        job.on(published(6), published_s)
    for first in range(6, step):
        to(job, first + 1, first=first)
    world.go(20.0)
    assert not of(c.Restore, world.go(21.0 + waits_s - 0.75, silent=(0,)))
    assert of(c.Restore, world.go(21.0 + waits_s + 0.75, silent=(0,)))
    assert job.phase is Phase.RESTORING


@pytest.mark.parametrize("odd_s", [0.01, 60.0])
def test_a_single_step_that_took_far_less_or_more_changes_nothing(odd_s):
    job = alone()
    world = world_of(job, 0, 2)
    for first in range(6, 9):
        to(job, first + 1, first=first)
    job.on(replace(report(job, 0, 9, 10), wall_s=odd_s), 12.0)
    world.go(20.0)
    assert not of(c.Restore, world.go(21.0 + 11.0 + 5.0 - 0.75, silent=(0,)))
    assert of(c.Restore, world.go(21.0 + 11.0 + 5.0 + 0.75, silent=(0,)))


def test_where_no_step_was_reported_what_was_measured_tells_how_long_one_takes():
    """Eight micro-batches, at half a second each."""
    job = control(min_workers=1, max_workers=2, capacity=2)
    job.start(0.0)
    for member in (0, 1):
        job.on(ready(member, micro_batch_s=0.5), 6.0)
    job.on(formed(job, 0), 6.0)
    on_and_tick(job, lost(1), 7.0)
    job.on(e.MemberSpawned(member=2), 8.0)
    job.on(ready(2), 10.0)
    world = world_of(job, 0, 2)
    world.go(20.0)
    assert job.shares == (8,)
    assert not of(c.Restore, world.go(21.0 + 4.0 + 5.0 - 0.75, silent=(0,)))
    assert of(c.Restore, world.go(21.0 + 4.0 + 5.0 + 0.75, silent=(0,)))


def test_it_is_waited_for_where_the_run_is_to_stop():
    job = alone()
    world = world_of(job, 0, 2)
    world.go(20.0)
    job.on(e.StopRequested(reason="asked"), 20.0)
    assert not of(c.Restore, world.go(59.0, silent=(0,)))


def test_others_that_are_ready_stand_in_for_who_does_not_answer():
    """Two are the fewest: one that has the state is left, and one that is new."""
    job = two(min_workers=2, max_workers=3)
    to(job, 5)
    job.on(e.CapacityChanged(workers=3), 2.0)
    job.on(e.MemberSpawned(member=2), 3.0)
    job.on(ready(2), 8.0)
    world = world_of(job, 0, 1, 2)
    assert not of(c.Form, world.go(20.0))
    assert only(c.Form, world.go(24.0, silent=(1,))).members == (0, 2)
