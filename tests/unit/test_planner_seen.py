"""A prediction by what a run has shown."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from raycloud.events import Noticed, StepsCommitted
from raycloud.planner.cost import Costs, Profile
from raycloud.planner.seen import STEPS, SeenSteps
from raycloud.planner.speed import Speed
from raycloud.spec import Job

TRIED = Profile(
    samples=100,
    parameters=1000,
    gradient_bytes=4000,
    state_bytes=4000,
    speeds=(Speed(fixed_s=0.1, micro_batch_s=0.1), Speed(fixed_s=0.0, micro_batch_s=0.3)),
)
MEMBERS = (4, 7)
SHARES = (3, 1)


def report(member: int, first: int, steps: int, **fields: Any) -> StepsCommitted:
    """Steps of a generation: 0.5 s of computing, 0.1 of waiting, 0.02 of what is left."""
    share = SHARES[MEMBERS.index(member)]
    each = {"wall_s": 0.62, "compute_s": 0.5, "exchange_s": 0.1, "overlap_s": 0.3} | fields
    generation = int(each.pop("generation", 0))
    return StepsCommitted(
        member=member,
        generation=generation,
        first_step=first,
        last_step=first + steps,
        epoch=0,
        offset=0,
        loss=1.0,
        weight=1.0,
        samples=steps,
        micro_batches=share * steps,
        grad_norm=1.0,
        learning_rate=0.1,
        data_s=0.0,
        cpu_s=0.0,
        bytes_sent=4000 * steps,
        bytes_dense=4000 * steps,
        **{name: value * steps for name, value in each.items()},
    )


def seen(**second: Any) -> SeenSteps:
    """Two members that have reported twenty steps after the first five."""
    made = SeenSteps()
    for first, steps in ((0, 5), (5, STEPS)):
        made.observe(report(4, first, steps))
        made.observe(report(7, first, steps, **second))
    return made


def test_the_mean_step_is_what_is_predicted_then() -> None:
    found = seen(compute_s=0.55, exchange_s=0.05).profile(MEMBERS, TRIED)
    assert found is not None
    first, second = found.speeds
    assert (first.seconds(3), second.seconds(1)) == pytest.approx((0.5, 0.55))
    assert first.fixed_s / first.micro_batch_s == pytest.approx(1.0)  # as it was tried
    assert found.link_bytes_per_s == pytest.approx(4000 / 0.35)  # of who waits least
    assert found.overhead_s == pytest.approx(0.02)
    job = Job(task="tasks.toy:Toy", steps=10, global_batch=16, fuse="auto")
    step = Costs(job, found, found.speeds, SHARES, (1, 1)).predict(job.sync_point).step_s
    assert step == pytest.approx(0.62, rel=1e-9)


def test_it_is_told_once_a_generation_and_kept_for_the_next() -> None:
    made = seen()
    assert made.profile(MEMBERS, TRIED) is not None
    assert made.profile(MEMBERS, TRIED) is None
    made.begin(1)
    assert made.profile(MEMBERS, TRIED) is None
    alone = replace(TRIED, speeds=TRIED.speeds[:1])
    known = made.of((4,), alone)
    assert known.speeds[0].seconds(3) == pytest.approx(0.5)
    assert known.overhead_s == pytest.approx(0.02)
    assert made.of((9,), alone).speeds == alone.speeds  # nobody has seen it
    for first, steps in ((30, 5), (35, STEPS)):
        for member in MEMBERS:
            made.observe(report(member, first, steps, generation=1, compute_s=1.0, wall_s=1.12))
    again = made.profile(MEMBERS, TRIED)
    assert again is not None
    assert again.speeds[0].seconds(3) == pytest.approx(1.0)


def test_too_few_steps_or_unlike_generations_tell_nothing() -> None:
    made = SeenSteps()
    assert made.profile(MEMBERS, TRIED) is None
    for member in MEMBERS:
        made.observe(report(member, 0, 5))
        made.observe(report(member, 5, STEPS - 1))
    assert made.profile(MEMBERS, TRIED) is None
    made.observe(report(4, 30, 1, generation=1))
    assert made.profile(MEMBERS, TRIED) is None


def test_other_work_in_some_steps_is_not_predicted_of_those_to_come() -> None:
    made = SeenSteps()
    for member in MEMBERS:
        made.observe(report(member, 0, 5))
        for first, slow in ((5, 1.0), (10, 5.0), (15, 1.0), (20, 1.0)):
            told = report(member, first, 5, wall_s=0.62 * slow, compute_s=0.5 * slow)
            made.observe(replace(told, typical_s=0.62 * slow))
    found = made.profile(MEMBERS, TRIED)
    assert found is not None
    job = Job(task="tasks.toy:Toy", steps=10, global_batch=16, fuse="auto")
    step = Costs(job, found, found.speeds, SHARES, (1, 1)).predict(job.sync_point).step_s
    assert step == pytest.approx(0.62, rel=0.01)


def test_where_steps_leave_the_interval_they_are_predicted_anew() -> None:
    made = seen()
    assert made.profile(MEMBERS, TRIED) is not None
    made.expect(0.55, 0.7)
    at = 5 + STEPS

    def more(steps: int, step_s: float) -> Profile | None:
        nonlocal at
        for member in MEMBERS:
            told = report(member, at, steps, wall_s=step_s, compute_s=step_s - 0.12)
            made.observe(replace(told, typical_s=step_s * steps / steps))
        at += steps
        return made.profile(MEMBERS, TRIED)

    assert more(STEPS, 0.6) is None  # as it was said
    assert more(STEPS, 1.0) is None  # twice as many are looked at
    anew = more(STEPS, 1.0)
    assert anew is not None
    assert anew.speeds[1].seconds(1) == pytest.approx(0.88)
    made.begin(1)
    assert made.profile(MEMBERS, TRIED) is None


def test_where_rounds_begin_it_is_predicted_anew_by_what_is_known() -> None:
    made = seen()
    job = Job(task="tasks.toy:Toy", steps=99, global_batch=16, sync={"period": "auto"})
    assert made.in_newest_rounds(job).sync_point.period == 1
    assert made.in_newest_rounds(job) == job.at(job.sync_point)
    stepwise = made.profile(MEMBERS, TRIED)
    assert stepwise is not None
    at = 5 + STEPS
    made.observe(replace(report(4, at, 16), period=16))
    found = made.profile(MEMBERS, TRIED)
    assert found is not None
    assert found == replace(stepwise, waited_s=None)
    made.observe(report(7, at - 3, 3))  # which is late
    assert made.profile(MEMBERS, TRIED) is None
    in_rounds = made.in_newest_rounds(job)
    assert in_rounds.sync_point.period == 16
    costs = Costs(in_rounds, found, found.speeds, SHARES, (1, 1))
    step = costs.predict(in_rounds.sync_point)
    assert step.exchange_s == pytest.approx(4000 / 16 / 10_000)
    assert step.step_s == pytest.approx(0.52 + 4000 / 16 / 10_000)
    streamed = job.model_copy(update={"sync": job.sync.model_copy(update={"stream": 4})})
    assert made.in_newest_rounds(streamed) is streamed
    made.travel()  # as somebody has asked
    assert made.in_newest_rounds(job) is job


@pytest.mark.parametrize("known", [True, False])
def test_where_members_choose_rounds_they_say_what_computing_takes(known: bool) -> None:
    made = seen() if known else SeenSteps()
    job = Job(task="tasks.toy:Toy", steps=99, global_batch=16, sync={"period": "auto"})
    at = 5 + STEPS
    if known:
        assert made.profile(MEMBERS, TRIED) is not None
    else:  # others have seen enough, the driver not yet
        made.observe(report(4, at - 1, 1))
    told = {"generation": 0, "period": 16, "step": at, "computing_s": 0.42}
    assert not made.take_choice(Noticed(what="something else", detail={"why": "x"}))
    assert not made.take_choice(Noticed(what="no rounds", detail={**told, "period": 1}))
    assert made.take_choice(Noticed(what="rounds", detail=told))
    assert not made.take_choice(Noticed(what="rounds", detail=told))
    tried = replace(TRIED, link_bytes_per_s=8000)
    found = made.profile(MEMBERS, tried, SHARES)
    assert found is not None
    in_rounds = made.in_newest_rounds(job)
    costs = Costs(in_rounds, found, found.speeds, SHARES, (1, 1))
    step = costs.predict(in_rounds.sync_point)
    link = 10_000 if known else 8000
    assert step.step_s == pytest.approx(0.42 + 4000 / 16 / link)
    assert step.high_s < 1.1 * step.step_s
    made.expect(0.4, 0.45)
    made.observe(report(4, at - 3, 8))  # in part of other rounds, or late
    assert made.profile(MEMBERS, TRIED, SHARES) is None
    assert made.in_newest_rounds(job).sync_point.period == 16
    for member in MEMBERS:
        for first, steps in ((at, 16), (at + 16, 32)):
            one = report(member, first, steps, wall_s=0.5, compute_s=0.4)
            made.observe(replace(one, period=16))
    anew = made.profile(MEMBERS, TRIED, SHARES)
    assert anew is not None
    assert max(map(Speed.seconds, anew.speeds, SHARES)) == pytest.approx(0.4)


def test_what_is_told_of_another_generation_is_not_taken() -> None:
    made = seen()
    assert made.profile(MEMBERS, TRIED) is not None
    told = {"generation": 0, "period": 16, "step": 25, "computing_s": 0.2}
    assert made.take_choice(Noticed(what="rounds", detail=told))
    made.begin(1)  # planned, while the one before goes on
    made.observe(report(4, 24, 4))  # in part of steps before the rounds
    made.observe(replace(report(4, 41, 16, generation=1), period=16))
    found = made.profile(MEMBERS, TRIED, SHARES)
    assert found is not None
    assert max(map(Speed.seconds, found.speeds, SHARES)) == pytest.approx(0.5)
    late = {**told, "step": 60}
    assert not made.take_choice(Noticed(what="rounds", detail=late))


def test_what_is_told_after_the_first_report_of_rounds_is_taken() -> None:
    made = seen()
    assert made.profile(MEMBERS, TRIED) is not None
    made.observe(replace(report(4, 25, 16), period=16))
    assert made.profile(MEMBERS, TRIED, SHARES) is not None
    told = {"generation": 0, "period": 16, "step": 25, "computing_s": 0.4}
    assert made.take_choice(Noticed(what="rounds", detail=told))
    found = made.profile(MEMBERS, TRIED, SHARES)
    assert found is not None
    assert max(map(Speed.seconds, found.speeds, SHARES)) == pytest.approx(0.4)


def test_rounds_that_a_run_goes_on_with_are_known_by_its_first_report() -> None:
    made, job = SeenSteps(), Job(task="tasks.toy:Toy", steps=99, sync={"period": "auto"})
    made.observe(replace(report(4, 64, 16), period=16))
    assert made.in_newest_rounds(job).sync_point.period == 16
    made.observe(report(4, 20, 1, generation=1))  # steps were taken back
    assert made.in_newest_rounds(job).sync_point.period == 1


def test_rounds_that_begin_before_enough_was_seen_are_no_news() -> None:
    made = SeenSteps()
    for member in MEMBERS:
        made.observe(report(member, 0, 5))
    made.observe(replace(report(4, 5, 8), period=8))
    assert made.profile(MEMBERS, TRIED) is None
    made.observe(replace(report(4, 13, STEPS), period=8))
    made.observe(replace(report(7, 5, 8 + STEPS), period=8))
    made.observe(replace(report(7, 13 + STEPS, STEPS), period=8))
    assert made.profile(MEMBERS, TRIED) is not None


def test_one_machines_memory_is_known_before_anything_travelled() -> None:
    assert SeenSteps().of(MEMBERS, replace(TRIED, link_bytes_per_s=9.0)).link_bytes_per_s == 9.0
