"""What steps took and did not count: into the ledger, once those steps are committed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from raycloud.commands import Command, Record
from raycloud.control.tables import MemberState
from raycloud.order import Skip, skip_of, skip_record

if TYPE_CHECKING:
    from raycloud.control.state import JobState
    from raycloud.events import StepsCommitted
    from raycloud.order import Ledger


def why_wrong(event: StepsCommitted) -> str:
    """Why these cannot be skips of these steps; empty if they can."""
    try:
        skips = [skip_of(record) for record in event.skips]
    except ValueError as error:
        return str(error)
    other = next((s for s in skips if not event.first_step <= s.step < event.last_step), None)
    return "" if other is None else f"{other} is of another step"


def hear_of_skips(state: JobState, event: StepsCommitted) -> None:
    """A member has committed steps without these samples; so have, or will, all others."""
    for record in event.skips:
        state.skips.setdefault(skip_of(record), set()).add(event.member)


def write_skips(state: JobState) -> Iterator[Command]:
    """Those of committed steps; but not on the word of lost members alone.

    A step that only they had committed was computed anew, and may have gone well then.
    """
    if not state.skips:
        return
    ledger, committed = state.formed().ledger, state.formed().committed_step
    due: list[Skip] = sorted(skip for skip in state.skips if skip.step < committed)
    yield from _write(ledger, [skip for skip in due if _sound(state, state.skips.pop(skip))])


def take_over_skips(
    state: JobState, ledger: Ledger, told: Mapping[int, Sequence[Mapping[str, Any]]], step: int
) -> Iterator[Command]:
    """What members had told the driver before, by member: the ledger may not have it.

    Those of steps before `step`, which are committed, are written at once.
    """
    for member, records in told.items():
        for record in records:
            state.skips.setdefault(skip_of(record), set()).add(member)
    due = sorted(skip for skip in state.skips if skip.step < step)
    for skip in due:
        del state.skips[skip]
    yield from _write(ledger, due)


def _write(ledger: Ledger, skips: Sequence[Skip]) -> Iterator[Command]:
    new = [skip for skip in skips if skip not in ledger.skips]
    for skip in new:
        ledger.skip(skip)
    if new:
        yield Record(records=tuple(skip_record(skip) for skip in new))


def _sound(state: JobState, members: set[int]) -> bool:
    return any(state.members[number].state is not MemberState.LOST for number in members)
