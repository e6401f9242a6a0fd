"""Events that cannot be: wherever the job stands, they raise and change nothing."""

from __future__ import annotations

import copy
from dataclasses import fields, is_dataclass
from enum import Enum

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from raycloud import commands as c
from raycloud import events as e
from raycloud.control import Control, ControlSettings
from raycloud.errors import InternalError
from raycloud.order import Position
from tests.control_events import committed, part, published, ready, stop
from tests.tiers import examples

# What was last computed from the rest: asking for it is no change.
MEMOS = {"_asked", "_past"}


def frozen(value):
    """Everything that a value holds, comparable."""
    if isinstance(value, dict):
        return tuple((k, frozen(v)) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(frozen(v) for v in value)
    if isinstance(value, set):
        return frozenset(value)
    if isinstance(value, np.ndarray):
        return tuple(value.tolist())
    if is_dataclass(value):
        names = [f.name for f in fields(value) if f.name not in MEMOS]
        return (type(value), tuple(frozen(getattr(value, name)) for name in names))
    if isinstance(value, Enum) or not hasattr(value, "__dict__"):
        return value
    return (type(value), frozen({k: v for k, v in vars(value).items() if k not in MEMOS}))


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
                ready(member, samples=draw(st.sampled_from([20, 20, 20, 21, -1]))),
                ready(member, samples=20, micro_batch_s=float("nan")),
                e.MemberLost(member=member, reason="r"),
                e.MemberFailed(member=member, error="E", message="m"),
                e.MemberDone(member=member, step=step),
                e.StepNotFinite(
                    member=member, generation=draw(few), step=step, why="nan", left_out=first
                ),
                e.RoundsRefused(member=member, why="counts"),
                e.GenerationFormed(
                    generation=draw(few), members=(0, 1), shares=(2, 2), first_step=0
                ),
                e.ChangeApplied(member=member, change=draw(few), step=step),
                committed(
                    member,
                    first,
                    step,
                    generation=draw(few),
                    at=Position(offset=draw(few)),
                    computed=draw(few),
                ),
                part(member, step),
                published(step),
                e.EvaluationPart(member=member, step=step, states={}),
                e.Evaluated(step=step, metrics={}),
                e.RangeChanged(min_workers=draw(few), max_workers=draw(few)),
                e.DataGrew(samples=draw(st.sampled_from([20, 23, 26])), version=draw(few)),
                e.Noticed(what="w"),
                e.RunFinished(status="finished", steps=1),
                stop(),
            ]
        )
    )


def answer(job, event, now_s):
    """The commands if the event is legal; None if it raises, which leaves the job as it was."""
    before = frozen(job)
    try:
        return job.on(event, now_s)
    except InternalError as error:
        why = str(error)
    assert type(event).__name__ in why or "there is no member" in why
    assert frozen(job) == before
    return None


def life(*, stopped, grown):
    """All events of a run of two members, in one legal order."""

    def did(member, first, last):
        at = Position(offset=4 * last)
        computed = 4 * (last - first)
        return committed(
            member, first, last, generation=0, at=at, computed=computed, compute_s=0.1
        )  # as fast as it was measured: no reason for other shares

    for m in (0, 1):
        yield e.MemberSpawned(member=m)
    for m in (0, 1):
        yield ready(m, samples=20)
    yield e.GenerationFormed(generation=0, members=(0, 1), shares=(2, 2), first_step=0)
    yield from (did(0, 0, 3), did(1, 0, 2))
    yield from (part(0, 2), did(1, 2, 3), part(1, 2))
    yield from (published(2), e.Noticed(what="w"))
    if grown:
        yield e.DataGrew(samples=23, version=1)
        yield from (e.ChangeApplied(member=m, change=1, step=4) for m in (1, 0))
    if stopped:
        yield stop()
        yield from (e.ChangeApplied(member=m, change=1 + grown, step=4) for m in (1, 0))
    for m in (0, 1):
        yield from (did(m, 3, 4), part(m, 4), e.MemberDone(member=m, step=4))
    yield published(4)
    yield e.RunFinished(status="finished", steps=4)


def job_of_two():
    job = Control(
        ControlSettings(min_workers=2, max_workers=2, capacity=2, global_batch=4, micro_batch=1)
    )
    return job, list(job.start(0.0))


@examples(30)
@given(st.booleans(), st.booleans(), st.lists(any_event(), min_size=2, max_size=5))
def test_an_illegal_event_changes_nothing_wherever_the_job_stands(stopped, grown, odd):
    job, commands = job_of_two()
    for event in life(stopped=stopped, grown=grown):
        twin = copy.deepcopy(job)
        for other in odd:
            if answer(twin, other, 1.0) is not None:
                twin = copy.deepcopy(job)
        commands += job.on(event, 1.0)
    status = "stopped" if stopped else "finished"
    assert commands[-1] == c.Finish(status=status)
    assert job.committed_step == 4


@examples(75)
@given(st.lists(any_event(), max_size=40))
def test_a_soup_of_events_never_breaks_the_machine(events):
    job, commands = job_of_two()
    for now_s, event in enumerate(events):
        commands += answer(job, event, float(now_s)) or ()
    assert sum(isinstance(x, c.Finish) for x in commands) == job.finished
    if job.ledger is not None:
        assert job.ledger.audit().exact
