"""Members that have outlived their driver: control begins with them where they are.

They meet as the next generation, as after a loss: what a generation before has done stands, and
what its driver had sent ahead is withdrawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from raycloud.control import forming
from raycloud.control.member import Member
from raycloud.control.progress import Progress
from raycloud.control.recovery import Recovery
from raycloud.control.resharing import Resharing
from raycloud.control.saving import Saving
from raycloud.control.skipping import take_over_skips
from raycloud.control.tables import MemberState, Phase
from raycloud.order import Ledger

if TYPE_CHECKING:
    from raycloud.commands import Command
    from raycloud.control.state import JobState
    from raycloud.events import MemberReady

_CAUSE = "the driver was gone"


@dataclass(frozen=True, kw_only=True, slots=True)
class Adoption:
    """The members that are there, and what the run's files say of them.

    Attributes:
        readies: What they said when they could compute, by rank.
        steps: One past the last step that each has reported, by member, as far as the log has it;
            also of those that are gone.
        skips: What each has reported that did not count, as records, by member.
        lost: Members of their generation that are not there any more.
        changes: The highest number of a change that was sent to any of them.
        published: Step of the newest checkpoint; None where there is none.
        began_s: When what drives them now was started.
    """

    readies: tuple[MemberReady, ...]
    steps: dict[int, int]
    skips: Mapping[int, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    lost: tuple[int, ...] = ()
    changes: int = 0
    published: int | None = None
    began_s: float = 0.0


def adopt(state: JobState, adoption: Adoption, now_s: float) -> Iterator[Command]:
    """Let them meet; too few of them wait for others.

    The ledger goes on where its file ends. Steps that members have committed since, and those that
    they commit while they are told to meet, are counted once they have reported them.
    """
    settings, known = state.settings, adoption.steps
    state.first = adoption.readies[0]
    steps = settings.steps(state.first.samples)
    ledger = Ledger(samples=steps.samples)
    if settings.ledger is not None:
        ledger.restore(settings.ledger)
    yield from take_over_skips(state, ledger, adoption.skips, settings.step)
    state.started_s, state.generation = adoption.began_s, settings.first_generation - 1
    state.saving = Saving(began_s=now_s) if settings.saves else None
    state.checkpoints.last_published = adoption.published
    state.next_member = settings.first_member
    state.changes = state.settled = adoption.changes
    state.sound_from = state.generation + 1
    state.data_samples = steps.sizes.most
    state.progress = Progress(
        steps=steps,
        step=settings.step,
        position=settings.position,
        ledger=ledger,
        generation=state.generation,
    )
    for slot, ready in enumerate(adoption.readies):
        state.members[ready.member] = Member(
            number=ready.member,
            state=MemberState.ACTIVE,
            since_s=now_s,
            heard_s=now_s,
            node=ready.node,
            ready=ready,
            step=known.get(ready.member, settings.step),
            slot=slot,
            joined=ready.member in known or not known,  # else it may have come just then
            turns=state.turns,
        )
        if state.members[ready.member].step < settings.step:  # it was away, and is called back
            state.members[ready.member].recall(0, settings.step)
    state.turns.count += 1
    state.group = tuple(ready.member for ready in adoption.readies)
    state.hearing.begin(state.group)
    if settings.shares == "auto":
        readies = {ready.member: ready for ready in adoption.readies}
        state.resharing = Resharing(settings, readies, now_s)
    state.recovery = Recovery(detected_s=0.0, cause=_CAUSE, lost=list(adoption.lost))
    state.meetings = 0
    if len(state.group) < state.workers[0]:
        state.phase = Phase.WAITING
        yield from forming.wait(state, now_s)
    else:
        state.phase = Phase.REGROUPING
        yield from forming.regroup(state, now_s)
