"""Control while steps are done: what counts as committed, and shares that follow speed."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from math import exp
from random import Random
from types import SimpleNamespace

import pytest

from raycloud import commands as c
from raycloud import events as e
from raycloud.control.heartbeats import Behind, Heard
from raycloud.control.shares import Resharing
from raycloud.errors import InternalError
from raycloud.order import Position
from tests.control_events import ready
from tests.control_job import control, of, only, report, training, walk

# ---- progress


def test_a_step_counts_when_all_members_have_committed_it():
    job = training()
    assert job.on(report(job, 0, 0, 10), 1.0) == ()
    [record] = job.on(report(job, 1, 0, 7), 1.0)
    assert record.records == (
        {
            "commit": {
                "first_step": 0,
                "last_step": 7,
                "epoch": 0,
                "start": 0,
                "stop": 56,
                "generation": 0,
            }
        },
    )
    assert (job.committed_step, job.position_at(7)) == (7, Position(offset=56))
    assert job.ledger.committed_samples == 56


def test_the_ledger_at_a_step_is_exact_whatever_was_reported():
    job = training()
    for member in (0, 1):
        job.on(report(job, member, 0, 20), 1.0)
    assert job.ledger_at(20) == job.ledger.state()
    assert job.ledger_at(7)["ranges"] == [
        {"epoch": 0, "epochs": 1, "committed": [[0, 56]], "left_out": []}
    ]
    assert job.ledger_at(14)["next_step"] == 14


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"first_step": 4}, "next step is 3"),
        ({"first_step": 2}, "next step is 3"),
        ({"last_step": 2}, "next step is 3"),
        ({"generation": 1}, "generations 0 to 0 are possible"),
        ({"offset": 9}, "the sequence stands at"),
        ({"computed": 0}, "the steps have 24 micro-batches, members have computed 0"),
        ({"computed": 25}, "members have computed 25"),
        ({"member": 7}, "no member 7"),
    ],
)
def test_a_report_that_cannot_be_is_refused(changes, problem):
    job = training()
    job.on(report(job, 0, 0, 3), 1.0)
    with pytest.raises(InternalError, match=problem):
        job.on(replace(report(job, 0, 3, 6), **changes), 1.0)


# ---- shares


def test_shares_follow_a_gain_that_lasts():
    job = training()
    prepare = only(c.Prepare, walk(job, until=120, slow_s=0.3))
    assert prepare == c.Prepare(
        number=1, members=(0, 1), change=c.Reshare(generation=1, shares=(6, 2))
    )
    assert job.change_outstanding == prepare.change
    at = job.committed_step + 3
    job.on(e.ChangeApplied(member=0, change=1, step=at), 20.0)
    assert (job.generation, job.shares) == (0, (4, 4))
    job.on(e.ChangeApplied(member=1, change=1, step=at), 20.0)
    assert (job.generation, job.shares, job.change_outstanding) == (1, (6, 2), None)
    first = job.committed_step
    commands = []
    for member in (0, 1):
        share = job.shares[member]
        compute_s = (at + 5 - first) * share * (0.3 if member else 0.1)
        found = report(job, member, first, at + 5, share=share, compute_s=compute_s)
        commands += job.on(found, 21.0)
    [record] = commands
    ranges = [r["commit"] for r in record.records]
    assert {r["generation"] for r in ranges} == {0, 1}
    for r in ranges:
        assert r["last_step"] <= at if r["generation"] == 0 else r["first_step"] >= at
    assert job.ledger.audit().exact


def test_a_report_of_an_older_generation_than_the_last_one_is_refused():
    job = training()
    walk(job, until=120, slow_s=0.3)
    at = job.committed_step + 3
    for member in (0, 1):
        job.on(e.ChangeApplied(member=member, change=1, step=at), 20.0)
        compute_s = 3 * 4 * (0.3 if member else 0.1)
        found = report(job, member, job.committed_step, at, generation=0, compute_s=compute_s)
        job.on(found, 21.0)
    job.on(report(job, 0, at, at + 5, generation=1), 22.0)
    with pytest.raises(InternalError, match="generations 1 to 1 are possible"):
        job.on(report(job, 0, at + 5, at + 6, generation=0), 23.0)
    job.on(report(job, 1, at, at + 5, generation=1), 23.0)
    assert job.committed_step == at + 5


@pytest.mark.parametrize("shares", ["equal", (4, 4)])
def test_shares_that_were_asked_for_stay(shares):
    assert not of(c.Prepare, walk(training(shares=shares), until=200, slow_s=0.3))


def test_a_small_gain_moves_no_work():
    assert not of(c.Prepare, walk(training(), until=200, slow_s=0.104))


def fitted(settings, *readies):
    resharing = Resharing(settings)
    for one in readies:
        resharing.know(one)
    return resharing


def test_a_gain_must_be_seen_in_two_looks_in_a_row():
    settings = control(reshare_every_s=1.0, reshare_steps=1)._state.settings
    resharing = fitted(settings, ready(0), ready(1, micro_batch_s=0.3))

    def look(shares, now_s):
        return resharing.look(group=(0, 1), shares=shares, step=int(now_s), now_s=now_s)

    assert look((4, 4), 1.0) is None
    assert look((6, 2), 2.0) is None  # nothing to gain: what was seen before is forgotten
    assert look((4, 4), 3.0) is None
    assert look((4, 4), 3.5) is None  # too early to be a look
    assert look((4, 4), 4.0) == (6, 2)


def in_rounds(resharing, readies, shares, steps=16, *, by=1.0, wall_s=0.0):
    """Each member reports a round, in which it took that many times what it has measured."""
    for one, share in zip(readies, shares, strict=True):
        seconds = by * steps * (one.fixed_s + share * one.micro_batch_s)
        found = report(training(), one.member, 0, steps, compute_s=seconds)
        found = replace(found, micro_batches=round(steps * share), period=steps, wall_s=wall_s)
        resharing.observe(found)


def test_shares_have_parts_of_micro_batches_in_rounds_and_whole_ones_elsewhere():
    settings = control(reshare_every_s=1.0, reshare_steps=1)._state.settings
    readies = ready(0, micro_batch_s=0.1), ready(1, micro_batch_s=0.22)
    resharing = fitted(settings, *readies)

    def look(shares, now_s):
        return resharing.look(group=(0, 1), shares=shares, step=int(now_s), now_s=now_s)

    assert look((6, 2), 1.0) is None
    in_rounds(resharing, readies, (6, 2))
    fine = look((6, 2), 2.0)  # at the first look: so the gain is no odd moment's
    assert fine == (5.5, 2.5)
    in_rounds(resharing, readies, fine)
    assert look(fine, 3.0) is None
    assert resharing.fit([SimpleNamespace(number=n) for n in (0, 1)]) == fine
    for one, share in zip(readies, (5, 3), strict=True):  # each step is exchanged again
        seconds = share * one.micro_batch_s
        resharing.observe(report(training(), one.member, 16, 17, share=share, compute_s=seconds))
    found = look(fine, 4.0)
    assert found in {(5, 3), (6, 2)}
    assert all(isinstance(share, int) for share in found)


def test_a_first_round_tells_how_fast_a_member_is_in_rounds():
    """In lockstep what it computes has an exchange beside it, which takes a slow one far longer."""
    settings = control(reshare_every_s=1.0, reshare_steps=1)._state.settings
    readies = ready(0, micro_batch_s=0.1), ready(1, micro_batch_s=0.3)
    resharing = fitted(settings, *readies)
    for step in range(40):
        for one, share in zip(readies, (6, 2), strict=True):
            seconds = share * one.micro_batch_s
            found = report(training(), one.member, step, step + 1, share=share, compute_s=seconds)
            resharing.observe(found)
    in_rounds(resharing, readies[:1], (6,))
    in_rounds(resharing, readies[1:], (2,), by=0.7)
    assert resharing.look(group=(0, 1), shares=(6, 2), step=1, now_s=1.0) == (5.4375, 2.5625)


def test_what_is_not_urgent_is_decided_late_in_a_round():
    """A change keeps others from being made until the round is over."""
    settings = control(reshare_every_s=1.0, reshare_steps=1)._state.settings
    readies = ready(0, micro_batch_s=0.1), ready(1, micro_batch_s=0.22)

    def looks(*seconds):
        resharing = fitted(settings, *readies)
        in_rounds(resharing, readies, (6, 2), wall_s=10.0)
        return [
            resharing.look(group=(0, 1), shares=(6, 2), step=16, now_s=100.0 + at) for at in seconds
        ]

    assert looks(0.0, 5.9, 6.1) == [None, None, (5.5, 2.5)]
    resharing = fitted(settings, *readies)
    in_rounds(resharing, readies, (6, 2), wall_s=10.0)
    assert resharing.look(group=(0, 1), shares=(6, 2), step=16, now_s=100.0) is None
    resharing.foresee({0: Behind(6, 3.0, rest_s=30.0, usual_s=6.0)})
    assert resharing.look(group=(0, 1), shares=(6, 2), step=16, now_s=101.0) is not None


def test_a_round_is_as_long_as_one_of_those_in_a_report():
    settings = control(reshare_every_s=1.0, reshare_steps=1)._state.settings
    readies = ready(0, micro_batch_s=0.1), ready(1, micro_batch_s=0.22)
    resharing = fitted(settings, *readies)
    for one, share in zip(readies, (6, 2), strict=True):
        found = report(training(), one.member, 0, 32, compute_s=32 * share * one.micro_batch_s)
        resharing.observe(replace(found, micro_batches=32 * share, period=16, wall_s=20.0))
    looks = [
        resharing.look(group=(0, 1), shares=(6, 2), step=32, now_s=100.0 + at)
        for at in (0.0, 5.9, 6.1)
    ]
    assert looks == [None, None, (5.5, 2.5)]


def test_the_others_keep_their_parts_where_one_needs_less_than_a_micro_batch():
    settings = control(reshare_every_s=1.0, reshare_steps=1)._state.settings
    speeds = (0.1, 0.1, 0.5)
    readies = [ready(member, micro_batch_s=seconds) for member, seconds in enumerate(speeds)]
    resharing = fitted(settings, *readies)
    in_rounds(resharing, readies, (3.5, 3.5, 1))
    assert resharing.look(group=(0, 1, 2), shares=(3.5, 3.5, 1), step=1, now_s=1.0) is None
    in_rounds(resharing, readies, (3.5, 3.5, 1))
    assert resharing.fit([SimpleNamespace(number=n) for n in (0, 1, 2)]) == (3.5, 3.5, 1)


def test_first_steps_tell_nothing_of_speed_in_rounds():
    settings = control(reshare_every_s=1.0, reshare_steps=1)._state.settings
    readies = ready(0, micro_batch_s=0.1), ready(1, micro_batch_s=0.22)
    resharing = fitted(settings, *readies)
    for one, share, compute_s in zip(readies, (6, 2), (4.5, 3.0), strict=True):
        found = report(training(), one.member, 0, 2, share=share, compute_s=compute_s)
        resharing.observe(replace(found, period=16))
    shares = resharing.fit([SimpleNamespace(number=n) for n in (0, 1)])
    assert all(isinstance(share, int) for share in shares)


def test_whom_less_than_a_micro_batch_would_do_gets_a_whole_one():
    settings = control(reshare_every_s=1.0, reshare_steps=1)._state.settings
    readies = ready(0, micro_batch_s=0.1), ready(1, micro_batch_s=1.0)
    resharing = fitted(settings, *readies)
    in_rounds(resharing, readies, (6, 2))
    assert resharing.look(group=(0, 1), shares=(6, 2), step=1, now_s=1.0) == (7, 1)


@pytest.mark.parametrize(
    ("steps", "compute_s", "looks"), [(16, 40.0, 1), (16, 4.0, 2), (4, 40.0, 2)]
)
def test_one_look_is_enough_after_the_report_of_a_long_round(steps, compute_s, looks):
    settings = control(reshare_every_s=1.0, reshare_steps=1)._state.settings
    resharing = fitted(settings, ready(0), ready(1, micro_batch_s=0.3))
    share = max(1, round(compute_s / steps / 0.3))  # so that it tells nothing new
    resharing.observe(report(training(), 1, 0, steps, compute_s=compute_s, share=share))
    found = [resharing.look(group=(0, 1), shares=(4, 4), step=at, now_s=float(at)) for at in (1, 2)]
    assert [one is None for one in found].index(False) == looks - 1


@pytest.mark.parametrize(("scatter", "changes"), [(0.02, True), (0.12, False)])
def test_what_is_gained_must_be_more_than_the_slowest_errs(scatter, changes):
    """A gain of 7%: enough where seconds hardly scatter, and not where they do by more."""
    settings = control(
        reshare_every_s=1.0, reshare_steps=1, global_batch=80, micro_batch=1
    )._state.settings
    resharing, chance = fitted(settings, ready(0), ready(1, micro_batch_s=0.115)), Random(4)
    for step in range(60):
        for member, pace_s in ((0, 0.1), (1, 0.115)):
            seconds = 40 * pace_s * chance.lognormvariate(0.0, scatter)
            told = report(training(), member, step, step + 1, compute_s=seconds)
            resharing.observe(replace(told, micro_batches=40))
    resharing.changed = False
    looks = [
        resharing.look(group=(0, 1), shares=(40, 40), step=100 + at, now_s=100.0 + at)
        for at in range(3)
    ]
    assert any(looks) is changes


def test_the_log_says_which_forecast_shares_follow_once():
    settings, job = control()._state.settings, training()
    resharing, level, chance = fitted(settings, ready(0), ready(1)), 0.0, Random(4)
    assert resharing.forecasts((0, 1)) is None
    for step in range(200):  # member 1 wanders
        level += chance.gauss(0.0, 0.08) - 0.05 * level
        for member, compute_s in ((0, 0.4), (1, 0.4 * exp(level))):
            resharing.observe(report(job, member, step, step + 1, compute_s=compute_s))
    said = resharing.forecasts((0, 1))
    assert said.what == "shares follow the forecast of a member's speed that has erred least"
    [(member, how)] = said.detail.items()
    assert member == "member 1"
    assert re.fullmatch(r"(last value|EWMA\(0.6\)), \d+.\d% off, the fit \d+.\d%", how)
    assert resharing.forecasts((0, 1)) is None


def test_shares_are_not_looked_at_more_often_than_asked():
    job = training(reshare_every_s=1000.0)
    assert not of(c.Prepare, walk(job, until=200, slow_s=0.12))


def test_a_share_that_takes_far_too_long_is_foreseen_before_its_end():
    job = training(reshare_every_s=1000.0, reshare_steps=1000)
    for step in range(3):
        for member in (0, 1):
            job.on(report(job, member, step, step + 1), 1.0 + step)
    job.hear(Heard(looked_s=6.0, behind={1: Behind(4, 3.2)}))
    [prepare] = of(c.Prepare, job.tick(6.0))
    assert prepare.change == c.Reshare(generation=1, shares=(7, 1))


@pytest.mark.parametrize("seconds", [0.4, 0.7, 1.9])
def test_what_is_no_longer_than_a_hiccup_is_not_foreseen(seconds):
    job = training(reshare_every_s=1000.0, reshare_steps=1000)
    for member in (0, 1):
        job.on(report(job, member, 0, 3), 1.0)
    job.hear(Heard(looked_s=6.0, behind={1: Behind(4, seconds)}))
    assert not of(c.Prepare, job.tick(6.0))


def in_a_round(*behind: Behind, job=None) -> list[c.Command]:
    """What is done once member 1 has said that it is far behind, in the midst of a round of 8."""
    job = job or training(reshare_every_s=1000.0, reshare_steps=1000)
    for member in (0, 1):
        job.on(replace(report(job, member, 0, 8), period=8), 1.0)
    found = []
    for second, one in enumerate(behind, 6):
        job.hear(Heard(looked_s=float(second), behind={1: one}))
        found += job.tick(float(second))
    return found


def test_the_rest_of_a_round_is_dealt_anew_where_one_is_far_behind():
    far = Behind(4, 3.2, rest_s=20.0, usual_s=2.5)
    said, form = in_a_round(far, far)  # once in a round
    assert said == e.Noticed(
        what="a member is far behind in a round: what is left of it is dealt anew", member=1
    )
    assert (form.generation, form.members, form.shares) == (1, (0, 1), (7, 1))


@pytest.mark.parametrize(
    "behind",
    [
        Behind(4, 3.2, rest_s=4.5, usual_s=2.5),  # 3.2 s if all divide it: 1.3 s are not worth it
        Behind(4, 3.2),  # no round
    ],
)
def test_the_rest_of_a_round_stays_where_little_is_gained(behind):
    assert not of(c.Form, in_a_round(behind))


def test_the_rest_of_a_round_stays_where_all_are_slow_alike():
    job = training(reshare_every_s=1000.0, reshare_steps=1000)
    for member in (0, 1):
        job.on(replace(report(job, member, 0, 8), period=8), 1.0)
    far = Behind(4, 3.2, rest_s=20.0, usual_s=2.5)
    job.hear(Heard(looked_s=6.0, behind={0: far, 1: far}))
    assert not of(c.Form, job.tick(6.0))


def test_the_rest_of_a_round_stays_where_members_would_measure_once_more():
    job = training(reshare_every_s=1000.0, reshare_steps=1000, reads=(4,))
    assert not of(c.Form, in_a_round(Behind(4, 3.2, rest_s=20.0, usual_s=2.5), job=job))


@pytest.mark.parametrize(("told", "reads"), [((), (4,)), ((4,), (4,)), ((4, 8), (4, 8))])
def test_the_rest_of_a_round_stays_until_all_is_measured_and_nothing_is_written(told, reads):
    job = training(reshare_every_s=1000.0, reshare_steps=1000, reads=reads, measures=4)
    for step in told:
        job.on(e.Evaluated(step=step, metrics={}), 1.0)
    assert not of(c.Form, in_a_round(Behind(4, 3.2, rest_s=20.0, usual_s=2.5), job=job))


def test_the_rest_of_a_round_is_dealt_anew_where_all_is_measured():
    job = training(reshare_every_s=1000.0, reshare_steps=1000, reads=(4, 50), measures=4)
    job.on(e.Evaluated(step=8, metrics={}), 1.0)
    _, form = in_a_round(Behind(4, 3.2, rest_s=20.0, usual_s=2.5), job=job)
    assert form.measured == 8


def test_what_was_late_in_a_round_is_forgotten_with_it():
    job = training(reshare_every_s=1000.0, reshare_steps=1000)
    far = Behind(4, 3.2, rest_s=20.0, usual_s=2.5)
    assert of(c.Form, in_a_round(far, job=job))
    job.hear(Heard(looked_s=8.0, behind={0: Behind(7, 90.0, rest_s=700.0, usual_s=10.0)}))
    done = report(job, 1, 8, 16, generation=1, share=1)
    job.on(replace(done, period=8), 9.0)  # the other one has not told of it yet
    assert not of(c.Form, job.tick(9.0))


def test_the_rest_of_a_round_is_dealt_anew_in_the_next_round_too():
    job = training(reshare_every_s=1000.0, reshare_steps=1000)
    far = Behind(4, 3.2, rest_s=20.0, usual_s=2.5)
    assert of(c.Form, in_a_round(far, job=job))
    for member, share in ((0, 7), (1, 1)):
        done = report(job, member, 8, 16, generation=1, share=share)
        job.on(replace(done, period=8), 9.0)
    job.hear(Heard(looked_s=12.0, behind={0: Behind(7, 90.0, rest_s=700.0, usual_s=10.0)}))
    assert of(c.Form, job.tick(12.0))


def slow_since_the_last_step():
    """Members 0 and 1, of whom 1 needs 0.8 s a micro-batch since a step, as its report has said."""
    job = training(reshare_every_s=1000.0, reshare_steps=1000)
    for member in (0, 1):
        job.on(report(job, member, 0, 8), 1.0)
    job.on(report(job, 0, 8, 9), 2.0)
    [prepare] = of(c.Prepare, job.on(report(job, 1, 8, 9, compute_s=3.2), 2.0))
    return job, prepare.change


def test_the_rest_is_dealt_anew_too_where_new_shares_have_come_just_too_late_for_the_round():
    job, change = slow_since_the_last_step()
    assert change.shares == (7, 1)
    job.hear(Heard(looked_s=6.0, behind={1: Behind(4, 3.2, rest_s=20.0, usual_s=2.5)}))
    assert only(c.Form, job.tick(6.0)).shares == (7, 1)


def test_the_rest_of_a_round_stays_where_its_shares_are_as_good_as_they_get():
    job, change = slow_since_the_last_step()
    for member in (0, 1):
        job.on(e.ChangeApplied(member=member, change=1, step=9), 2.5)
    for member, share in ((0, 7), (1, 1)):
        compute_s = 8 * share * (0.8 if member else 0.1)
        job.on(report(job, member, 9, 17, share=share, compute_s=compute_s), 9.0)
    assert job.shares == change.shares
    job.hear(Heard(looked_s=12.0, behind={1: Behind(1, 0.8, rest_s=20.0, usual_s=2.5)}))
    assert not of(c.Form, job.tick(12.0))


def test_who_is_idle_is_measured_now_and_then_and_taken_back_once_it_has_recovered():
    settings = control(reshare_every_s=1.0, reshare_steps=1)._state.settings
    resharing = fitted(settings, ready(0), ready(1, micro_batch_s=2.0))
    job, tries = training(), []

    def look(shares, now_s):
        return resharing.look(group=(0, 1), shares=shares, step=int(now_s), now_s=now_s)

    def tried(seconds, now_s):
        told = replace(report(job, 1, 0, 2), micro_batches=2, compute_s=2 * seconds)
        resharing.observe(told)
        return look((7, 1), now_s)

    for now_s in range(1, 120):
        if (found := look((8, 0), float(now_s))) is not None:
            assert found == (7, 1)
            tries.append(now_s)
            assert tried(2.0, now_s + 0.5) == (8, 0)  # at once, as slow as ever
    between = [b - a for a, b in pairwise(tries)]
    assert between == [50]  # forty times the 1.2 s that a step takes more
    while look((8, 0), float(now_s)) is None:
        now_s += 1
    assert tried(0.1, now_s + 0.2) == (4, 4)  # at once, too


@pytest.mark.parametrize("slow_s", [0.3, 0.8])
def test_a_new_speed_is_looked_at_when_it_is_known(slow_s):
    """Whatever was looked at shortly before, and after how few steps."""
    job = training(reshare_every_s=1000.0, reshare_steps=1000)
    needed = 1 if slow_s > 0.75 else 2  # two seconds in place of far less are no hiccup
    for step in range(10):
        commands = job.on(report(job, 0, step, step + 1), 1.0 + step)
        compute_s = 4 * (0.1 if step < 2 else slow_s)
        commands += job.on(report(job, 1, step, step + 1, compute_s=compute_s), 1.0 + step)
        if prepared := of(c.Prepare, commands):
            break
    assert step == 2 + needed - 1
    [prepare] = prepared
    assert prepare.change.shares == ((6, 2) if slow_s == 0.3 else (7, 1))


@pytest.mark.parametrize(
    ("applied", "problem"),
    [
        (e.ChangeApplied(member=0, change=2, step=500), "change 2 is not outstanding"),
        (e.ChangeApplied(member=0, change=1, step=3), "are committed"),
        (e.ChangeApplied(member=1, change=1, step=500), "applied it already"),
        (e.ChangeApplied(member=0, change=1, step=501), "applied it at step 500"),
    ],
)
def test_a_change_that_cannot_have_been_applied_is_refused(applied, problem):
    job = training()
    walk(job, until=120, slow_s=0.3)
    if "already" in problem or "500" in problem:
        job.on(e.ChangeApplied(member=1, change=1, step=500), 20.0)
    with pytest.raises(InternalError, match=problem):
        job.on(applied, 20.0)
