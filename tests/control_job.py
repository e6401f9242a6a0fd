"""A job under control: of two members, new, in training, or well into it; and what it answered."""

from __future__ import annotations

from raycloud import events as e
from raycloud.control import Control, ControlSettings, Phase
from tests.control_events import committed, ready


def control(**settings):
    values = {"min_workers": 2, "max_workers": 2, "capacity": 2, "global_batch": 8}
    return Control(ControlSettings(**{**values, "micro_batch": 1, **settings}))


def of_all(job, first, last):
    """The micro-batches that all members together compute in steps from `first` to `last`."""
    return job._state.data.formed().micro_batches(first, last)


def report(job, member, first, last, *, generation=None, compute_s=None, share=4):
    """A member's word that it did `share` micro-batches in each step from `first` to `last`."""
    micro_batches = share * (last - first)
    return committed(
        member,
        first,
        last,
        generation=job.generation if generation is None else generation,
        at=job.position_at(last),
        computed=of_all(job, first, last),
        micro_batches=micro_batches,
        compute_s=micro_batches * 0.1 if compute_s is None else compute_s,
    )


def tick(job, now_s):
    """As the driver does: who is overdue is lost, then time passes. All commands."""
    lost = job.overdue(now_s)
    commands = () if lost is None else job.on(lost, now_s)
    return (*commands, *job.tick(now_s))


def on_and_tick(job, event, now_s):
    """All commands of an event, and of the tick after it, with which losses are added up."""
    return [*job.on(event, now_s), *job.tick(now_s)]


def formed(job):
    return e.GenerationFormed(
        generation=job.generation, members=job.group, shares=job.shares, first_step=0
    )


def training(**settings):
    """A job of members 0 and 1 in training, at 0 s."""
    job = control(**settings)
    job.start(0.0)
    for member in job.members:
        job.on(ready(member), 0.0)
    job.on(formed(job), 0.0)
    assert job.phase is Phase.TRAINING
    return job


def training_to(step):
    """A job in training whose members have both reported all steps before `step`."""
    job = training()
    for member in (0, 1):
        job.on(report(job, member, 0, step), 1.0)
    return job


def walk(job, *, until, slow_s, every_s=1.0, steps=10):
    """Both members report; member 1 needs `slow_s` per micro-batch. All commands."""
    commands, first, now_s = [], job.committed_step, 0.0
    while first < until:
        now_s += every_s
        for member in (0, 1):
            share = job.shares[member]
            compute_s = steps * share * (slow_s if member else 0.1)
            commands += job.on(
                report(job, member, first, first + steps, compute_s=compute_s, share=share), now_s
            )
        first += steps
    return commands


def of(kind, commands):
    """The commands of one kind."""
    return [command for command in commands if isinstance(command, kind)]


def only(kind, commands):
    """The one command of a kind."""
    [command] = of(kind, commands)
    return command
