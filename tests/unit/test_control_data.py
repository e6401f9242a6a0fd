"""Control of the data: it grows, samples are skipped, and steps take their time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raycloud import commands as c
from raycloud import events as e
from raycloud.control import Phase
from raycloud.errors import InternalError
from raycloud.events import StepsCommitted
from raycloud.order import ERROR, NAN, Ledger, Position, Skip, ledger_line, read_ledger
from tests.control_events import committed, ready, stop
from tests.control_job import control, of, only, report, tick, training, training_to
from tests.control_three import formed, lost, three, to


def grew(samples, version=1, **more):
    return e.DataGrew(samples=samples, version=version, **more)


def applied(member, step, change=1):
    return e.ChangeApplied(member=member, change=change, step=step)


def noticed(commands):
    return [n.what for n in of(e.Noticed, commands)]


def grown_at(step, *, samples=120):
    """A job of 100 samples, 8 a step, whose members take up more at `step`."""
    job = training_to(step - 4)
    job.on(grew(samples), 1.0)
    for member in (0, 1):
        job.on(applied(member, step), 2.0)
    return job


def test_growth_is_sent_ahead():
    job = training()
    prepare = only(c.Prepare, job.on(grew(120, partitions=(0, 60, 120)), 1.0))
    extend = c.Extend(version=1, samples=120, partitions=(0, 60, 120))
    assert prepare == c.Prepare(number=1, members=(0, 1), change=extend)
    assert job.change_outstanding == extend


@pytest.mark.parametrize(
    ("step", "epoch"),
    [
        (9, 1),  # in the middle of epoch 0, which has 13 steps
        (12, 1),  # its last step
        (13, 1),  # the first step of epoch 1, of which no feed has asked for anything
        (14, 2),
    ],
)
def test_the_first_epoch_that_begins_then_has_the_new_samples(step, epoch):
    job = training_to(4)
    job.on(grew(120), 1.0)
    commands = job.on(applied(0, step), 2.0)
    assert only(c.Record, commands).records == ({"grow": {"epoch": epoch, "samples": 120}},)
    assert noticed(commands) == [
        f"the data has grown from 100 to 120 samples, from epoch {epoch} on"
    ]
    assert job.on(applied(1, step), 2.0) == ()
    assert job.change_outstanding is None
    assert job.position_at(13 * epoch + 14) == Position(epoch=epoch, offset=14 * 8)
    assert job.position_at(13 * epoch + 15) == Position(epoch=epoch + 1)
    assert [job.samples_at(s) for s in (13 * epoch - 1, 13 * epoch)] == [100, 120]
    for member in (0, 1):
        job.on(report(job, member, 4, 13 * epoch + 20), 3.0)
    assert job.ledger.audit(through=Position(epoch=epoch + 1, offset=8)).exact


def test_a_checkpoint_knows_of_growth_that_is_in_force_before_it():
    job = grown_at(8)
    assert [job.ledger_at(step).get("later") for step in (7, 8)] == [None, [[1, 120]]]


def test_more_growth_waits_its_turn_and_only_the_newest_is_sent():
    job = training_to(4)
    job.on(grew(110, 1), 1.0)
    assert not of(c.Prepare, job.on(grew(120, 2), 1.0))
    assert not of(c.Prepare, job.on(grew(130, 5), 1.0))
    assert not of(c.Prepare, job.on(applied(0, 9), 2.0))
    prepare = only(c.Prepare, job.on(applied(1, 9), 2.0))
    assert prepare.change == c.Extend(version=5, samples=130)
    commands = job.on(applied(1, 12, change=2), 3.0)
    assert only(c.Record, commands).records == ({"grow": {"epoch": 1, "samples": 130}},)
    assert job.samples_at(13) == 130


@pytest.mark.parametrize("odd", [grew(120, 2), grew(119, 2), grew(130, 1), grew(130, 0)])
def test_data_that_does_not_grow_is_refused(odd):
    job = training()
    job.on(grew(120), 1.0)
    with pytest.raises(InternalError, match="120 samples of version 1 are known, and data only"):
        job.on(odd, 1.0)
    job.on(grew(121, 2), 1.0)


def test_fewer_samples_than_the_members_see_are_refused():
    with pytest.raises(InternalError, match="100 samples of version 0 are known"):
        training().on(grew(100), 1.0)


def test_growth_before_the_members_meet_is_sent_once_they_train():
    job = control()
    job.start(0.0)
    assert job.on(grew(120), 0.0) == ()
    for member in (0, 1):
        commands = job.on(ready(member), 0.0)
    assert not of(c.Prepare, commands)
    form = only(c.Form, commands)
    formed = e.GenerationFormed(
        generation=form.generation, members=form.members, shares=form.shares, first_step=form.step
    )
    assert only(c.Prepare, job.on(formed, 0.0)).change == c.Extend(version=1, samples=120)


def test_growth_that_the_members_have_read_at_their_start_is_no_news():
    job = control()
    job.start(0.0)
    job.on(grew(120), 0.0)
    for member in (0, 1):
        job.on(ready(member, samples=120), 0.0)
    assert not of(c.Prepare, job.on(report(job, 0, 0, 1), 0.0))
    assert job.ledger.sizes.later == ()
    assert job.samples_at(0) == 120


def test_a_stop_comes_first():
    job = training()
    job.on(grew(120), 1.0)
    job.on(stop(), 1.0)
    job.on(grew(130, 2), 1.0)
    job.on(applied(0, 5), 2.0)
    assert isinstance(only(c.Prepare, job.on(applied(1, 5), 2.0)).change, c.Halt)


def test_growth_that_comes_too_late_to_be_in_force_changes_nothing():
    job = training_to(4)
    job.on(grew(120), 1.0)
    for member in (0, 1):
        job.on(e.MemberDone(member=member, step=4), 2.0)
    assert job.phase is Phase.FINISHED
    assert job.ledger.sizes.later == ()
    assert job.on(grew(130, 2), 3.0) == ()


def test_growth_in_the_past_is_refused_and_changes_nothing():
    job = training_to(14)
    job.on(grew(120), 1.0)
    with pytest.raises(InternalError, match="steps up to 14 are committed"):
        job.on(applied(0, 13), 2.0)
    assert job.ledger.sizes.later == ()


# ---- resuming


def resumed(first, step, *, samples, **more):
    """A job that goes on from `first`'s checkpoint of `step`; and what it does first."""
    job = control(step=step, position=first.position_at(step), ledger=first.ledger_at(step), **more)
    job.start(0.0)
    job.on(ready(0, samples=samples), 0.0)
    return job, job.on(ready(1, samples=samples), 0.0)


@pytest.mark.parametrize(("step", "epoch"), [(14, 2), (13, 1), (25, 2), (26, 2)])
def test_a_resumed_run_takes_up_what_is_new(step, epoch):
    first = training_to(26)
    job, commands = resumed(first, step, samples=130)
    header, restore, grow = only(c.Record, commands).records
    assert header["samples"] == restore["restore"]["samples"] == 100
    assert grow == {"grow": {"epoch": epoch, "samples": 130}}
    assert noticed(commands) == [
        f"the data has grown from 100 to 130 samples, from epoch {epoch} on"
    ]
    assert job.ledger_at(step)["later"] == [[epoch, 130]]
    for member in (0, 1):
        job.on(report(job, member, step, 60), 1.0)
    assert job.ledger.audit(through=job.position_at(60)).exact
    assert job.ledger.samples_in(epoch - 1) == 100
    with pytest.raises(InternalError, match="130 samples of version 0 are known"):
        job.on(grew(130), 2.0)


def test_a_resumed_run_knows_of_the_growth_before():
    first = grown_at(8)
    for member in (0, 1):
        first.on(report(first, member, 4, 20), 3.0)
    job, commands = resumed(first, 18, samples=120)
    assert len(only(c.Record, commands).records) == 2
    assert not noticed(commands)
    assert job.samples_at(18) == 120
    assert job.position_at(28) == Position(epoch=2)
    assert first.ledger_at(20)["later"] == job.ledger_at(20)["later"] == [[1, 120]]


def test_growth_that_had_not_begun_gives_way_to_more():
    job, commands = resumed(grown_at(8), 8, samples=140)
    assert only(c.Record, commands).records[-1] == {"grow": {"epoch": 1, "samples": 140}}
    lines = map(ledger_line, only(c.Record, commands).records)
    assert read_ledger(lines).sizes == job.ledger.sizes
    assert job.ledger.sizes.later == ((1, 140),)


def test_fewer_samples_than_it_had_grown_to_fail_the_run():
    _, commands = resumed(grown_at(8), 8, samples=119)
    error = only(c.Finish, commands).error
    assert "trained on 120 samples per epoch, the members see 119" in error


def test_a_checkpoint_at_the_end_of_a_grown_epoch_is_whole():
    first = grown_at(8)
    for member in (0, 1):
        first.on(report(first, member, 4, 28), 3.0)
    assert first.position_at(28) == Position(epoch=2)
    job, commands = resumed(first, 28, samples=120)
    assert not noticed(commands)
    assert job.ledger.newest == Position(epoch=2)


# ---- what members say of their data


def prepared(member, version=0):
    return e.DataPrepared(
        member=member,
        split="train",
        rows=1,
        bytes=1,
        blocks=1,
        cached_blocks=0,
        partitions=1,
        bad_rows=0,
        bad=(),
        inputs=(),
        seconds=0.0,
        read_s=0.0,
        version=version,
    )


def test_a_member_that_prepares_its_data_is_alive():
    job = control(spawn_s=10.0)
    job.start(0.0)
    for member in (0, 1):
        job.on(prepared(member), 9.0)
    assert tick(job, 18.0) == ()
    assert only(c.Finish, tick(job, 20.0)).status == "failed"


def test_members_may_say_so_at_any_time():
    job = training_to(4)
    assert job.on(prepared(0, 1), 1.0) == ()
    job.on(e.MemberDone(member=0, step=4), 1.0)
    assert job.on(prepared(0, 1), 1.0) == ()
    job.on(e.MemberDone(member=1, step=4), 1.0)
    assert job.on(prepared(0, 1), 1.0) == ()


SKIP = Skip(step=3, epoch=0, start=26, stop=27, why=ERROR)


def told(job, member, first, last, *skips, **more):
    made = report(job, member, first, last, share=3, **more)
    return replace(made, skips=tuple(skip.to_record() for skip in skips))


def written(commands):
    """Every record, in order."""
    return [record for command in of(c.Record, commands) for record in command.records]


def test_it_is_written_after_the_commit_of_its_step_and_once():
    job = three()
    for member in (0, 1):
        assert not written(job.on(told(job, member, 0, 4, SKIP), 1.0))
    records = written(job.on(told(job, 2, 0, 5, SKIP), 1.0))
    assert [next(iter(record)) for record in records] == ["commit", "skip"]
    assert records[1] == {"skip": SKIP.to_record()}
    audit = job.ledger.audit()
    assert audit.exact
    assert audit.skips == (SKIP,)
    assert audit.committed_samples == 4 * 8 - 1
    assert not [r for r in written(to(job, 9, first=4, members=(0, 1))) if "skip" in r]


def test_a_checkpoint_has_those_of_the_steps_before_it():
    job = three()
    later = Skip(step=6, epoch=0, start=48, stop=56, why=NAN)
    for member in (0, 1, 2):
        job.on(told(job, member, 0, 7, SKIP, later), 1.0)
    skips = {step: Ledger.from_state(job.ledger_at(step)).skips for step in (3, 4, 6, 7)}
    assert skips == {3: (), 4: (SKIP,), 6: (SKIP,), 7: (SKIP, later)}


def test_the_word_of_a_lost_member_alone_does_not_count():
    """It alone had committed the step; the others compute it anew, and then nothing fails."""
    job = three()
    to(job, 3)
    job.on(told(job, 1, 3, 4, SKIP), 1.0)
    job.on(lost(1), 2.0)
    job.on(formed(job, 3), 2.5)
    assert not [r for r in written(to(job, 5, (0, 2), first=3)) if "skip" in r]
    assert job.ledger.audit().skips == ()


def test_what_another_one_has_heard_of_counts():
    job = three()
    to(job, 3)
    job.on(told(job, 1, 3, 4, SKIP), 1.0)
    job.on(told(job, 2, 3, 4, SKIP), 1.0)
    job.on(lost(1), 2.0)
    job.on(formed(job, 4), 2.5)
    job.on(told(job, 0, 3, 5, SKIP), 3.0)  # it took the state, and says what it found in that
    to(job, 5, (2,), first=4)
    assert job.ledger.audit().skips == (SKIP,)
    assert job.ledger.audit().exact


@pytest.mark.parametrize(
    "record",
    [{}, {**SKIP.to_record(), "step": 7}, {**SKIP.to_record(), "why": "no"}],
    ids=["empty", "step", "why"],
)
def test_what_is_no_skip_of_these_steps_is_illegal(record):
    job = three()
    event = replace(report(job, 0, 0, 4, share=3), skips=(record,))
    with pytest.raises(InternalError, match="illegal"):
        job.on(event, 1.0)
    assert job.committed_step == 0


def timed(member: int, first: int, last: int, wall_s: float) -> StepsCommitted:
    report = committed(member, first, last, generation=0, at=Position(offset=last), computed=0)
    return replace(report, wall_s=wall_s)


def test_a_step_takes_as_long_as_most_of_the_last_five_say() -> None:
    took = training()._state.data.formed()
    assert took.step_s == 0.0
    for step, wall_s in enumerate([1.0, 1.0, 9.0, 1.0, 0.1, 1.0, 1.0]):
        took.time(timed(0, step, step + 1, wall_s))
        assert took.step_s == 1.0
    took.time(timed(0, 7, 11, 8.0))  # four steps
    took.time(timed(0, 11, 12, 2.0))
    took.time(timed(0, 12, 13, 2.0))
    assert took.step_s == pytest.approx(2.0)


def test_what_several_members_tell_of_a_step_counts_once() -> None:
    took = training()._state.data.formed()
    for step in range(3):
        took.time(timed(0, step, step + 1, 1.0))
    for member in range(5):
        took.time(timed(member, 3, 4, 60.0))
    took.time(timed(0, 4, 4, 5.0))  # no step
    assert took.step_s == 1.0


def test_steps_that_are_taken_back_are_computed_again() -> None:
    took = training()._state.data.formed()
    for step in range(10):
        took.time(timed(0, step, step + 1, 1.0))
    took.go_back(4, Ledger(samples=100), 1)
    assert took.step_s == 1.0
    for step in range(4, 7):
        took.time(timed(1, step, step + 1, 3.0))
    assert took.step_s == 3.0
