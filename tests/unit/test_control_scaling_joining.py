"""Control where members join: their words come as they come, and other samples are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raycloud import commands as c
from raycloud import events as e
from raycloud.control import MemberState, Phase
from raycloud.control.heartbeats import Heard
from tests.control_events import ready
from tests.control_job import control, of, on_and_tick, only, report, tick
from tests.control_three import lost, three
from tests.unit.test_control_scaling import (
    applied,
    caught_up,
    formed,
    to,
    two,
)


def test_who_was_heard_to_compute_has_joined_also_if_the_others_are_then_lost():
    """Their word that they changed may still be on its way, or never come."""
    job = two()
    to(job, 5)
    job.on(e.CapacityChanged(workers=3), 2.0)
    prepare = only(c.Prepare, job.on(ready(2), 8.0))
    job.on(report(job, 2, 5, 7, generation=1), 9.0)
    assert (job.generation, job.group, job.shares) == (1, (0, 1, 2), prepare.change.shares)
    job.on(e.MemberLost(member=0, reason="died"), 9.1)
    commands = on_and_tick(job, e.MemberLost(member=1, reason="died"), 9.2)
    assert only(c.Form, commands).members == (2,)
    job.on(formed(job, 7), 10.0)
    job.on(report(job, 2, 7, 41), 11.0)
    assert (job.phase, job.committed_step) == (Phase.TRAINING, 41)
    assert job.ledger.audit().exact


def test_who_joins_after_another_that_has_not_said_a_word_yet():
    job = two()
    to(job, 5)
    job.on(e.CapacityChanged(workers=4), 2.0)
    first = only(c.Prepare, job.on(ready(2), 8.0))
    job.on(ready(3), 8.1)
    assert not applied(job, first, 6)  # it comes once the one before has caught up
    second = only(c.Prepare, job.on(caught_up(2, 6, 7), 9.0))
    meet = second.change
    assert (meet.members, meet.following, meet.shares[3]) == ((0, 1, 2, 3), (3,), 0)
    assert min(meet.shares[:3]) > 0
    for member in (0, 1):
        job.on(report(job, member, 5, 6, generation=0), 9.0)
        job.on(report(job, member, 6, 8, generation=1), 9.0)
    assert job.committed_step == 8
    applied(job, second, 8, (0, 1))
    for member in (0, 1):
        job.on(report(job, member, 8, 9, generation=2), 9.0)
    assert job.committed_step == 8
    job.on(report(job, 2, 7, 9, generation=2), 9.0)
    assert job.committed_step == 9
    assert job.ledger.audit().exact


def test_who_is_to_join_waits_for_a_step_that_takes_minutes():
    """One is left of many: it computes whole batches, and a change waits for the step's end."""
    job = three(silence_s=600.0)
    to(job, 5)
    for member in (1, 2):
        on_and_tick(job, lost(member), 2.0)
    assert job.group == (0,)
    assert only(c.Release, job.on(e.CapacityChanged(workers=2), 2.5)).members == (4,)
    (newcomer,) = (m for m, state in job.members.items() if state is MemberState.SPAWNING)
    job.on(formed(job, 5), 3.0)
    job.on(e.MemberSpawned(member=newcomer), 4.0)
    meet = only(c.Prepare, job.on(ready(newcomer), 10.0)).change
    assert meet.members == (0, newcomer)
    given_up = []
    for now_s in map(float, range(11, 140)):
        late_s, due_s = dict.fromkeys(meet.members, 0.0), dict.fromkeys(meet.members, now_s + 1.0)
        job.hear(Heard(looked_s=now_s, late_s=late_s, due_s=due_s))
        given_up += of(c.Release, tick(job, now_s))
    assert not given_up


def test_one_that_is_ready_while_the_others_meet_joins_once_they_have_met():
    job = two(max_workers=2)
    to(job, 5)
    job.on(e.MemberLost(member=0, reason="died"), 2.0)
    assert job.on(ready(2), 2.1) == ()
    assert only(c.Prepare, job.on(formed(job, 5), 2.2)).change.members == (1, 2)


SEEN = {"train/63": "aa", "train/31": "bb", "held_out/7": "cc"}


def saw(member: int, held_out: int | None = 8, **other: str) -> e.MemberReady:
    seen = SEEN | {name.replace("_at_", "/"): digest for name, digest in other.items()}
    return replace(ready(member), fingerprint=seen, held_out=held_out)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (saw(1, train_at_31="other"), "different samples: train/31"),
        (saw(1, held_out_at_7="other"), "different samples: held_out/7"),
        (saw(1, held_out=9), "different samples: 8 and 9 are held out"),
    ],
    ids=["train", "held out", "how many"],
)
def test_two_that_do_not_see_the_same_do_not_begin(other: e.MemberReady, says: str) -> None:
    job = control()
    job.start(0.0)
    job.on(saw(0), 1.0)
    finish = only(c.Finish, job.on(other, 2.0))
    assert finish.status == "failed"
    assert f"Task.data gives member 0 and 1 {says}" in finish.error
    assert "\n\nhint: every worker calls Task.data" in finish.error


@pytest.mark.parametrize(
    "other",
    [saw(1), ready(1), saw(1, held_out=None), replace(saw(1), fingerprint={"train/5": "x"})],
    ids=["the same", "of an old version", "of an older one", "others were too slow"],
)
def test_two_that_may_see_the_same_begin(other: e.MemberReady) -> None:
    job = control()
    job.start(0.0)
    job.on(saw(0), 1.0)
    assert of(c.Form, job.on(other, 2.0))


def test_one_that_does_not_see_what_the_others_do_does_not_join() -> None:
    job = two()
    to(job, 5)
    job.on(e.CapacityChanged(workers=3), 2.0)
    first = job._state.data.first
    assert first is not None
    job._state.data.first = replace(first, fingerprint=SEEN)
    commands = job.on(saw(2, train_at_63="other"), 8.0)
    assert job.members[2] is MemberState.RELEASED
    assert only(c.Release, commands).members == (2,)
    assert (
        "gives it other samples than the others: train/63"
        in only(e.Noticed, commands).detail["why"]
    )
    assert not of(c.Finish, commands)
