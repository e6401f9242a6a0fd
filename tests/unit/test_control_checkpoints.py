"""Checkpoints that are made when they are worth it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycloud import commands as c
from raycloud import events as e
from raycloud.control import Phase
from raycloud.control.checkpoints import Checkpoints, interval_s
from tests.control_events import part, published
from tests.control_job import of, only, report
from tests.control_three import formed, lost, three, to


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


def first_due(kept: Checkpoints, from_s: float) -> float:
    now_s = from_s
    while not kept.is_due(now_s):
        now_s += 1.0
    return now_s - from_s


def keep(kept: Checkpoints, step: int, now_s: float, *costs_s: float) -> None:
    """A checkpoint whose parts cost so much is published."""
    for member, cost_s in enumerate(costs_s):
        word = replace(part(member, step), blocked_s=0.01, write_s=cost_s - 0.01)
        [*kept.take_in(word, {n: (n, 0) for n in range(len(costs_s))})]
    kept.published(step, now_s)


def test_what_one_cost_and_how_many_were_lost_is_learned() -> None:
    kept = Checkpoints()
    unknown_s = first_due(kept, 0.0)
    assert unknown_s == pytest.approx(interval_s(1.0, 6 * 3600.0), rel=0.05)
    keep(kept, 1, 300.0, 0.11, 0.05)
    cheap_s = first_due(kept, 300.0)
    assert cheap_s == pytest.approx(interval_s(0.11, 6 * 3600.0), rel=0.05)
    keep(kept, 2, 600.0, 0.05)
    kept.losses = 60
    assert first_due(kept, 600.0) == 30.0  # not more often than that
    kept.losses = 0
    keep(kept, 3, 900.0, 4000.0)
    assert first_due(kept, 900.0) == 3600.0  # once an hour whatever it costs


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
        job._state.membership.met = True
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


def failed(member, step, *, generation=0, why="no room"):
    hint = "free space there"
    return e.PartFailed(member=member, step=step, why=why, hint=hint, generation=generation)


def saves(job, now_s, step):
    """Members save, as they are asked to now, before `step`; the number of that change."""
    [save] = saved(job.tick(now_s))
    for member in (0, 1, 2):
        job.on(e.ChangeApplied(member=member, change=save.number, step=step), now_s)
        job.on(report(job, member, job._state.membership.members[member].step, step), now_s)
    return save.number


def test_a_part_that_fails_costs_that_checkpoint_and_another_is_asked_for_soon():
    job = three()
    to(job, 5)
    for member in (0, 2):
        assert not of(c.Publish, job.on(part(member, 5), 2.0))
    told = only(e.Noticed, job.on(failed(1, 5), 2.0))
    assert "step 5 could not be kept" in told.what
    assert told.detail == {"why": "no room", "in_a_row": 1, "again_s": 5.0}
    assert not of(e.Noticed, job.on(failed(2, 6), 3.0))  # of the same incident
    assert not saved(job.tick(6.0))
    saves(job, 7.0, 7)
    for member in (0, 1, 2):
        commands = job.on(part(member, 7), 8.0)
    assert only(c.Publish, commands).step == 7
    job.on(published(7), 8.0)
    assert not saved(job.tick(1000.0))
    assert only(e.Noticed, job.on(failed(1, 9), 1001.0)).detail["in_a_row"] == 1  # begun anew


def test_too_many_in_a_row_end_the_run_and_name_the_last_good_one():
    job = three(most_failed=3)
    to(job, 5)
    for member in (0, 1, 2):
        job.on(part(member, 5), 2.0)
    job.on(published(5), 2.0)
    assert only(e.Noticed, job.on(failed(1, 10), 10.0)).detail["again_s"] == 5.0
    saves(job, 15.0, 11)
    assert only(e.Noticed, job.on(failed(0, 11), 15.0)).detail["again_s"] == 10.0
    saves(job, 25.0, 12)
    finish = only(c.Finish, job.on(failed(0, 12, why="s3://b/c says 503"), 25.0))
    assert (finish.status, finish.blames) == ("failed", "CheckpointError")
    assert "step 12 could not be kept, 3 times in a row" in finish.error
    assert "the last good one is that of step 5: s3://b/c says 503" in finish.error
    assert "hint: free space there; --resume goes on from the last checkpoint" in finish.error


def test_pauses_double_up_to_five_minutes():
    kept, now_s, pauses = Checkpoints(most_failed=99), 0.0, []
    for _ in range(9):
        [told] = kept.lack(failed(0, 1), now_s, ends=False)
        pauses.append(told.detail["again_s"])
        assert not [*kept.lack(failed(0, 1), now_s + pauses[-1] / 2, ends=False)]
        now_s += pauses[-1]
    assert pauses == [5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0, 300.0]
    [told] = kept.lack(failed(0, 1), now_s, ends=True)
    assert told.detail["again_s"] == 30.0


def test_a_manifest_that_fails_is_published_again_with_the_parts_that_are_there():
    job = three()
    to(job, 5)
    for member in (0, 1, 2):
        commands = job.on(part(member, 5), 2.0)
    first = only(c.Publish, commands)
    only(e.Noticed, job.on(e.CheckpointFailed(step=5, why="503"), 3.0))
    assert not of(c.Publish, job.tick(7.0))
    commands = job.tick(8.0)
    assert only(c.Publish, commands) == first
    assert not saved(commands)
    job.on(published(5), 9.0)
    assert job.last_published == 5
    assert not of(c.Publish, job.tick(100.0))


def test_where_its_parts_are_not_sound_another_checkpoint_is_made():
    job = three()
    to(job, 5)
    for member in (0, 1, 2):
        job.on(part(member, 5), 2.0)
    job.on(e.CheckpointFailed(step=5, why="a part is missing", damaged=True), 3.0)
    saves(job, 8.0, 7)
    for member in (0, 1, 2):
        commands = job.on(part(member, 7), 9.0)
    assert only(c.Publish, commands).step == 7
    job.on(published(7), 10.0)
    assert job.phase is Phase.TRAINING


def done_at(job, step, now_s):
    """All members are done there; what they have written before was said."""
    commands = []
    for member in (0, 1, 2):
        job.on(report(job, member, job._state.membership.members[member].step, step), now_s)
    for member in (0, 1, 2):
        commands += job.on(e.MemberDone(member=member, step=step), now_s)
    return commands


def test_the_last_part_may_come_at_a_later_attempt():
    job = three()
    to(job, 5)
    for member in (0, 1):
        job.on(part(member, 6), 2.0)
    only(e.Noticed, job.on(failed(2, 6), 2.0))
    only(e.Noticed, job.on(failed(2, 6), 9.0))
    assert only(c.Publish, job.on(part(2, 6), 12.0)).step == 6
    assert not of(c.Finish, done_at(job, 6, 13.0))
    assert only(c.Finish, job.on(published(6), 14.0)).status == "finished"


@pytest.mark.parametrize("all_fail", [False, True])
def test_a_run_whose_last_checkpoint_has_no_part_does_not_end_well(all_fail):
    job = three()
    to(job, 5)
    for member in (0, 1):
        job.on(failed(member, 6) if all_fail else part(member, 6), 2.0)
    job.on(failed(2, 6), 2.0)
    finish = only(c.Finish, done_at(job, 6, 3.0))
    assert (finish.status, finish.blames) == ("failed", "CheckpointError")
    assert "step 6 could not be kept; there is none before it: no room" in finish.error


def test_the_last_manifest_is_published_again_until_there_were_too_many():
    job = three(most_failed=3)
    to(job, 5)
    for member in (0, 1, 2):
        job.on(part(member, 6), 2.0)
    done_at(job, 6, 3.0)
    assert job.phase is Phase.CLOSING
    now_s = 4.0
    for pause_s in (5.0, 10.0):
        job.on(e.CheckpointFailed(step=6, why="503"), now_s)
        now_s += pause_s
        assert only(c.Publish, job.tick(now_s)).step == 6
    finish = only(c.Finish, job.on(e.CheckpointFailed(step=6, why="503"), now_s))
    assert (finish.status, finish.blames) == ("failed", "CheckpointError")


def test_at_the_end_nothing_replaces_parts_that_are_not_sound():
    job = three()
    to(job, 5)
    for member in (0, 1, 2):
        job.on(part(member, 6), 2.0)
    done_at(job, 6, 3.0)
    gone = e.CheckpointFailed(step=6, why="part 1 is missing", damaged=True)
    assert "part 1 is missing" in only(c.Finish, job.on(gone, 4.0)).error


def test_after_members_meet_anew_what_failed_is_tried_again():
    job = three(max_workers=3)
    to(job, 5)
    job.on(failed(1, 5), 2.0)
    saves(job, 7.0, 7)
    job.on(part(0, 7), 7.5)
    job.on(lost(2), 8.0)
    job.tick(8.0)
    assert saved(job.on(formed(job, 7), 9.0))


def test_parts_of_two_generations_are_never_one_checkpoint() -> None:
    kept, keys = Checkpoints(), {0: (0, 0), 1: (1, 0)}
    assert not [*kept.take_in(part(0, 4, generation=1), keys)]
    [*kept.lack(failed(1, 4, generation=2), 1.0, ends=False)]
    assert not [*kept.take_in(part(1, 4, generation=1), keys)]  # divided anew by then
    assert not [*kept.take_in(part(1, 4, generation=2), keys)]
    [publish] = kept.take_in(part(0, 4, generation=2), keys)
    assert list(publish.parts) == [(0, 0), (1, 0)]
