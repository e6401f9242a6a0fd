"""Words and commands in one line each, for the log."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from raycloud.commands import Form, Meet, Prepare, Publish, Release, Reshare, Spawn
from raycloud.events import ChangeApplied, GenerationFormed, PartWritten, StepsCommitted

if TYPE_CHECKING:
    from raycloud.commands import Command
    from raycloud.events import Event

_SHOWN = 64


def few(numbers: tuple[int, ...]) -> str:
    """Numbers, the first ones where they are many."""
    shown = ", ".join(map(str, numbers[:_SHOWN]))
    return f"({shown}, ...)" if len(numbers) > _SHOWN else f"({shown})"


def numbers(event: StepsCommitted | ChangeApplied) -> tuple[int, ...]:
    """What comes of each member, one after the other, where they are too many to tell in words."""
    match event:
        case StepsCommitted():
            steps = event.first_step, event.last_step
            return event.member, event.generation, *steps, event.micro_batches
        case ChangeApplied():
            return event.member, event.change, event.step
        case _:
            assert_never(event)


def short(record: Event | Command) -> str:
    """A record in one line, without what is long."""
    match record:
        case StepsCommitted() | ChangeApplied() | PartWritten():
            return _of_all(record)
        case Form():
            of = f"step={record.step}, settled={record.settled}"
            named = f"members={few(record.members)}, shares={few(record.shares)}"
            return f"Form(generation={record.generation}, {of}, {named})"
        case Prepare():
            to = f"members={few(record.members)}"
            return f"Prepare(number={record.number}, {to}, {_change(record)})"
        case Publish():
            replicas = tuple(replica for replica, _ in record.parts)
            return f"Publish(step={record.step}, parts={few(replicas)})"
        case Spawn():
            return f"Spawn(members={few(record.members)}, joins={record.joins})"
        case Release():
            return f"Release(members={few(record.members)})"
        case GenerationFormed():
            of = f"first_step={record.first_step}, members={few(record.members)}"
            return f"GenerationFormed(generation={record.generation}, {of})"
        case _:
            return repr(record)


def _of_all(record: StepsCommitted | ChangeApplied | PartWritten) -> str:
    """What each member says, one after the other."""
    match record:
        case StepsCommitted():
            steps = f"{record.first_step} to {record.last_step}, {record.micro_batches}"
            return f"{record.member} committed {steps} micro-batches as {record.generation}"
        case ChangeApplied():
            return f"{record.member} applied change {record.change} at step {record.step}"
        case PartWritten():
            part = f"{record.part} of step {record.step}"
            return f"{record.member} wrote {part} as {record.generation}"
        case _:
            assert_never(record)


def _change(prepare: Prepare) -> str:
    match prepare.change:
        case Reshare(generation=generation, shares=shares):
            return f"Reshare(generation={generation}, shares={few(shares)})"
        case Meet(generation=generation, members=members):
            return f"Meet(generation={generation}, members={few(members)})"
        case change:
            return repr(change)
