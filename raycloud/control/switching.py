"""A change takes effect: known from the first member that has switched, over with the last.

Each function changes the state that it is given and yields commands; nothing happens until it is
iterated.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, assert_never

from raycloud.commands import Command, Extend, Halt, Meet, Record, Release, Reshare, Save
from raycloud.control.forming import become, grown, take_in
from raycloud.control.tables import MemberState
from raycloud.errors import InternalError
from raycloud.order import growth_record

if TYPE_CHECKING:
    from raycloud.control.outstanding import Outstanding
    from raycloud.control.state import JobState
    from raycloud.events import ChangeApplied


def switched(state: JobState, event: ChangeApplied, now_s: float) -> Iterator[Command]:
    """A member has switched to the outstanding change; maybe the last one."""
    outstanding = state.outstanding
    if outstanding is None:
        raise InternalError(f"no change is outstanding: {event}")
    yield from in_force(state, outstanding, event.step, now_s)
    outstanding.applied[event.member] = event.step
    if outstanding.everywhere:
        yield from completed(state, outstanding, event.step, now_s)


def completed(
    state: JobState, outstanding: Outstanding, step: int, now_s: float
) -> Iterator[Command]:
    """All have switched."""
    match outstanding.change:
        case Reshare(generation=generation, shares=shares):
            state.generation, state.shares = generation, shares
            if state.resharing is not None:
                state.resharing.wait(step, now_s)
        case Meet():
            yield from _part_with(state, outstanding.members, now_s)
        case Extend() | Halt() | Save():
            pass
        case _:
            assert_never(outstanding.change)
    state.settled, state.outstanding = outstanding.number, None


def in_force(
    state: JobState, outstanding: Outstanding, step: int, now_s: float
) -> Iterator[Command]:
    """A member has applied it: from `step` on it holds for all. Known once, from the first word."""
    if outstanding.in_force:
        return
    outstanding.in_force, change = True, outstanding.change
    match change:
        case Reshare():
            take_in(state, change, step)
        case Meet():
            become(state, change, step, now_s)
        case Extend(samples=samples):
            before = state.formed().steps.sizes.most
            epoch = state.formed().grow(samples, step)
            yield Record(records=(growth_record(epoch, samples),))
            yield grown(epoch, samples, before=before)
        case Halt():
            state.halted = True
        case Save():
            pass
        case _:
            assert_never(change)


def _part_with(state: JobState, before: tuple[int, ...], now_s: float) -> Iterator[Command]:
    """Who left has written all that was its part."""
    stays = set(state.group)
    gone = tuple(number for number in before if number not in stays)
    for number in gone:
        state.members[number].enter(MemberState.RELEASED, now_s)
    if gone:
        yield Release(members=gone)
