"""Events that cannot be: wherever the job stands, they raise and change nothing."""

from __future__ import annotations

import copy
from dataclasses import fields, is_dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raycloud import commands as c
from raycloud import events as e
from raycloud.control import Control, ControlSettings, Phase
from raycloud.errors import InternalError
from raycloud.order import Position


def ready(member, samples, micro_batch_s=0.1):
    return e.MemberReady(
        member=member,
        samples=samples,
        parameters=1,
        state_bytes=1,
        gradient_bytes=1,
        fixed_s=0.0,
        micro_batch_s=micro_batch_s,
    )


def stop():
    return e.StopRequested(reason="late")


def frozen(value):
    """Everything that a value holds, comparable."""
    if isinstance(value, dict):
        return tuple((k, frozen(v)) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(frozen(v) for v in value)
    if isinstance(value, set):
        return frozenset(value)
    if is_dataclass(value):
        return (type(value), tuple(frozen(getattr(value, f.name)) for f in fields(value)))
    if isinstance(value, Phase) or not hasattr(value, "__dict__"):
        return value
    return (type(value), frozen(vars(value)))


few = st.integers(0, 4)


@st.composite
def any_event(draw):
    """An event of any kind, with small numbers: mostly one that cannot be."""
    member, step = draw(few), draw(st.integers(0, 30))
    first = draw(st.integers(0, 30))
    return draw(
        st.sampled_from(
            [
                e.RunStarted(job="j", version="1"),
                e.MemberSpawned(member=member),
                ready(member, draw(st.sampled_from([20, 20, 20, 21, -1]))),
                ready(member, 20, float("nan")),
                e.MemberLost(member=member, reason="r"),
                e.MemberFailed(member=member, error="E", message="m"),
                e.MemberDone(member=member, step=step),
                e.GenerationFormed(
                    generation=draw(few), members=(0, 1), shares=(2, 2), first_step=0
                ),
                e.ChangeApplied(member=member, change=draw(few), step=step),
                committed(member, first, step, draw(few), Position(offset=draw(few))),
                e.PartWritten(member=member, step=step, part={}, blocked_s=0.0, write_s=0.0),
                e.CheckpointPublished(step=step, path="p", state_bytes=1, write_s=0.0),
                e.EvaluationPart(member=member, step=step, states={}),
                e.Evaluated(step=step, metrics={}),
                e.RangeChanged(min_workers=draw(few), max_workers=draw(few)),
                e.Noticed(what="w"),
                e.RunFinished(status="finished", steps=1),
                stop(),
            ]
        )
    )


def committed(member, first, last, generation, at):
    return e.StepsCommitted(
        member=member,
        generation=generation,
        first_step=first,
        last_step=last,
        epoch=at.epoch,
        offset=at.offset,
        loss=1.0,
        weight=1.0,
        samples=1,
        micro_batches=1,
        grad_norm=1.0,
        learning_rate=1.0,
        wall_s=1.0,
        compute_s=1.0,
        data_s=0.0,
        exchange_s=0.0,
        cpu_s=1.0,
        bytes_sent=0,
        bytes_dense=0,
    )


def changes_nothing_if_illegal(job, event, now_s):
    """Try an event on a copy: it raises and leaves the copy as it was, or it is legal."""
    twin = copy.deepcopy(job)
    before = frozen(twin)
    try:
        twin.on(event, now_s)
    except InternalError as error:
        why = str(error)
    else:
        return True
    assert type(event).__name__ in why or "there is no member" in why
    assert frozen(twin) == before
    return False


def life(*, stopped):
    """All events of a run of two members, in one legal order."""
    at = Position
    yield from (e.MemberSpawned(member=0), e.MemberSpawned(member=1), ready(0, 20), ready(1, 20))
    yield e.GenerationFormed(generation=0, members=(0, 1), shares=(2, 2), first_step=0)
    yield from (committed(0, 0, 3, 0, at(offset=12)), committed(1, 0, 2, 0, at(offset=8)))
    yield from (part(0, 2), committed(1, 2, 3, 0, at(offset=12)), part(1, 2))
    yield from (
        e.CheckpointPublished(step=2, path="p", state_bytes=1, write_s=0.0),
        e.Noticed(what="w"),
    )
    if stopped:
        yield stop()
        yield from (e.ChangeApplied(member=m, change=1, step=4) for m in (1, 0))
    for m in (0, 1):
        yield from (
            committed(m, 3, 4, 0, at(offset=16)),
            part(m, 4),
            e.MemberDone(member=m, step=4),
        )
    yield e.CheckpointPublished(step=4, path="p", state_bytes=1, write_s=0.0)
    yield e.RunFinished(status="finished", steps=4)


def part(member, step):
    return e.PartWritten(member=member, step=step, part={}, blocked_s=0.0, write_s=0.0)


def job_of_two():
    job = Control(
        ControlSettings(min_workers=2, max_workers=2, capacity=2, global_batch=4, micro_batch=1)
    )
    return job, list(job.start(0.0))


@settings(max_examples=60)
@given(st.booleans(), st.lists(any_event(), min_size=4, max_size=8))
def test_an_illegal_event_changes_nothing_wherever_the_job_stands(stopped, odd):
    job, commands = job_of_two()
    for event in life(stopped=stopped):
        for other in odd:
            changes_nothing_if_illegal(job, other, 1.0)
        commands += job.on(event, 1.0)
    status = "stopped" if stopped else "finished"
    assert commands[-1] == c.Finish(status=status)
    assert job.committed_step == 4


@settings(max_examples=150)
@given(st.lists(any_event(), max_size=40))
def test_a_soup_of_events_never_breaks_the_machine(events):
    job, commands = job_of_two()
    for now_s, event in enumerate(events):
        if changes_nothing_if_illegal(job, event, float(now_s)):
            commands += job.on(event, float(now_s))
        else:
            with pytest.raises(InternalError):
                job.on(event, float(now_s))
    assert sum(isinstance(x, c.Finish) for x in commands) == job.finished
    if job.ledger is not None:
        assert job.ledger.audit().exact
