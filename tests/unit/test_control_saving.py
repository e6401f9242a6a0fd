"""Checkpoints that are made when they are worth it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycloud import commands as c
from raycloud import events as e
from raycloud.control.saving import Saving, interval_s
from tests.control_events import part
from tests.control_job import of, only, report
from tests.control_three import lost, three, to


def lost_share(tau_s: float, cost_s: float, between_s: float) -> float:
    """Time spent in all over time of useful work, restarts for nothing: Daly's model."""
    return between_s / tau_s * (math.exp((tau_s + cost_s) / between_s) - 1)


@given(st.floats(1e-3, 1e3), st.floats(10.0, 1e6))
def test_no_other_interval_loses_noticeably_less(cost_s: float, between_s: float) -> None:
    """Against the exact model, where checkpoints are worth anything at all."""
    if cost_s >= between_s / 2:
        return
    tau_s = interval_s(cost_s, between_s)
    assert tau_s > 0
    best = min(lost_share(tau_s * f, cost_s, between_s) for f in (0.5, 0.7, 0.9, 1.1, 1.4, 2.0))
    assert lost_share(tau_s, cost_s, between_s) <= best * 1.002


def test_more_losses_and_cheaper_checkpoints_make_them_more_frequent() -> None:
    assert interval_s(1.0, 3600.0) < interval_s(1.0, 36_000.0)
    assert interval_s(0.1, 3600.0) < interval_s(1.0, 3600.0)
    assert interval_s(100.0, 40.0) == 40.0


def first_due(saving: Saving, from_s: float) -> float:
    now_s = from_s
    while not saving.due(now_s):
        now_s += 1.0
    return now_s - from_s


def test_what_one_cost_and_how_many_were_lost_is_learned() -> None:
    saving = Saving(began_s=0.0)
    unknown_s = first_due(saving, 0.0)
    assert unknown_s == pytest.approx(interval_s(1.0, 6 * 3600.0), rel=0.05)
    saving.wrote(0.01, 0.1)
    saving.wrote(0.01, 0.04)
    saving.published(300.0)
    cheap_s = first_due(saving, 300.0)
    assert cheap_s == pytest.approx(interval_s(0.11, 6 * 3600.0), rel=0.05)
    saving.published(600.0)
    saving.losses = 60
    assert first_due(saving, 600.0) == 30.0  # not more often than that
    saving.losses = 0
    saving.wrote(0.0, 4000.0)
    saving.published(900.0)
    assert first_due(saving, 900.0) == 3600.0  # once an hour whatever it costs


def saved(commands):
    return [x for x in of(c.Prepare, commands) if isinstance(x.change, c.Save)]


def test_it_is_asked_for_while_steps_are_computed():
    job = three(saves=True)
    to(job, 5)
    assert job.tick(100.0) == ()
    [save] = saved(job.tick(250.0))
    for member in (0, 1, 2):
        job.on(e.ChangeApplied(member=member, change=save.number, step=7), 251.0)
        job.on(report(job, member, 5, 7), 251.0)
    assert job.tick(600.0) == ()  # its parts are still on their way
    for member in (0, 1, 2):
        commands = job.on(part(member, 7), 601.0)
    assert only(c.Publish, commands).step == 7
    assert not saved(job.tick(900.0))
    job.on(e.CheckpointPublished(step=7, path="p", state_bytes=1, write_s=0.1), 901.0)
    assert not saved(job.tick(903.0))
    assert saved(job.tick(1500.0))


def test_after_losses_it_is_asked_for_sooner():
    def after(losses):
        job = three(saves=True, max_workers=3)
        to(job, 5)
        for member in range(losses):
            job.on(lost(member), 2.0)
        job._state.met = True
        for now_s in range(3, 400):
            if saved(job.tick(float(now_s))):
                return now_s
        return None

    assert after(1) < after(0)


def test_where_the_job_says_how_often_nothing_is_asked_for():
    job = three()
    to(job, 5)
    assert not saved(job.tick(100_000.0))


def test_a_word_of_one_member_leaves_it_to_the_tick_that_time_has_passed() -> None:
    job = three(saves=True)
    to(job, 5)
    assert job.on(report(job, 0, 5, 6), 4000.0) == ()  # others have not committed that step
    assert isinstance(only(c.Prepare, job.tick(4000.0)).change, c.Save)
