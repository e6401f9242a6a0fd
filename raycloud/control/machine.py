"""One job's control: events in, commands out.

No clock, no I/O, no randomness: the same events at the same times give the same commands. What may
come when stands in `tables`, what must hold in `guards`, what changes in `effects`; here they meet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, assert_never

from raycloud.commands import Change, Command, Notice, Spawn
from raycloud.control import effects
from raycloud.control.guards import MemberEvent, holds, judge, unfit
from raycloud.control.silence import overdue
from raycloud.control.state import JobState, Member
from raycloud.control.tables import (
    FINAL,
    PHASE_ON_CONDITION,
    PHASE_ON_EVENT,
    Condition,
    MemberState,
    Phase,
)
from raycloud.errors import InternalError

if TYPE_CHECKING:
    from raycloud.control.settings import ControlSettings
    from raycloud.events import Event
    from raycloud.order import Ledger, Position


class Control:
    """Decides what happens next in one job.

    Call `start` once, then `on` for every event and `tick` about once a second. Each returns
    commands to carry out in order. Events of one member must come in the order in which it sent
    them; how the members' events interleave does not matter. Give `on` everything that has arrived
    before calling `tick`, so that nobody is taken for silent who is merely unread.

    After `Finish` every event is legal and ignored.
    """

    def __init__(self, settings: ControlSettings) -> None:
        """Nothing happens before `start`."""
        self._state = JobState(
            settings=settings,
            generation=settings.first_generation,
            workers=(settings.min_workers, settings.max_workers),
        )
        if settings.step:
            self._state.checkpoints.last_published = settings.step

    @property
    def phase(self) -> Phase:
        """Where the job stands."""
        return self._state.phase

    @property
    def finished(self) -> bool:
        """`Finish` was returned."""
        return self._state.phase in FINAL

    @property
    def members(self) -> Mapping[int, MemberState]:
        """Every member there ever was, and where it stands."""
        return {number: m.state for number, m in self._state.members.items()}

    @property
    def group(self) -> tuple[int, ...]:
        """Members of the present generation, in order of rank."""
        return self._state.group

    @property
    def generation(self) -> int:
        """The generation that is forming or in force."""
        return self._state.generation

    @property
    def formed_as(self) -> int:
        """The generation as which the members of `group` met; shares may have changed since."""
        return self._state.formed_as

    @property
    def shares(self) -> tuple[int, ...]:
        """Micro-batches per step of each member of `group`."""
        return self._state.shares

    @property
    def committed_step(self) -> int:
        """One past the last step that all members have reported as committed."""
        progress = self._state.progress
        return self._state.settings.step if progress is None else progress.committed_step

    @property
    def ledger(self) -> Ledger | None:
        """What is committed; None until the members have said how much data there is."""
        return None if self._state.progress is None else self._state.progress.ledger

    @property
    def change_outstanding(self) -> Change | None:
        """The change that was sent ahead and is not yet in force everywhere."""
        return None if self._state.outstanding is None else self._state.outstanding.change

    @property
    def last_published(self) -> int | None:
        """Step of the newest checkpoint that may be restored from."""
        return self._state.checkpoints.last_published

    @property
    def workers(self) -> tuple[int, int]:
        """The elastic range last asked for: fewest and most members."""
        return self._state.workers

    def position_at(self, step: int) -> Position:
        """Where the sequence stands before `step`; for a checkpoint's manifest."""
        return self._state.formed().position_at(step)

    def samples_at(self, step: int) -> int:
        """Samples of the epoch that `step` belongs to; for a checkpoint's manifest."""
        progress = self._state.formed()
        return progress.steps.samples_in(progress.position_at(step).epoch)

    def ledger_at(self, step: int) -> dict[str, Any]:
        """The ledger's state with exactly the steps before `step`; for a checkpoint's manifest."""
        return self._state.formed().ledger_at(step)

    def start(self, now_s: float) -> tuple[Command, ...]:
        """Ask for the members.

        Raises:
            InternalError: It was called before.
        """
        state, settings = self._state, self._state.settings
        if state.phase is not Phase.NEW:
            raise InternalError(f"start() is illegal in phase {state.phase}")
        state.started_s = now_s
        first = settings.first_member
        numbers = tuple(range(first, first + settings.workers))
        state.members = {
            n: Member(number=n, state=MemberState.SPAWNING, since_s=now_s, heard_s=now_s)
            for n in numbers
        }
        state.phase = Phase.PLACING
        commands: list[Command] = []
        if settings.workers < settings.max_workers:
            what = f"the machines hold {settings.workers} of at most {settings.max_workers} workers"
            commands.append(Notice(what=what))
        return (*commands, Spawn(members=numbers))

    def on(self, event: Event, now_s: float) -> tuple[Command, ...]:
        """Take in what happened.

        Raises:
            InternalError: The event is illegal where things stand; nothing has changed.
        """
        moves = judge(self._state, event)
        if moves is None:
            return ()
        if isinstance(event, MemberEvent):
            commands = list(effects.absorb_of_member(self._state, event, now_s))
            self._state.members[event.member].heard_s = now_s
        else:
            commands = list(effects.absorb_of_job(self._state, event))
        for number, state in moves.items():
            effects.move(self._state.members[number], state, now_s)
        commands += self._enter(PHASE_ON_EVENT[self._state.phase][type(event)], now_s)
        commands += self._settle(now_s)
        return tuple(commands)

    def tick(self, now_s: float) -> tuple[Command, ...]:
        """Time has passed: whoever has been silent for too long is lost.

        Raises:
            InternalError: `start` was not called.
        """
        if self._state.phase is Phase.NEW:
            raise InternalError("tick() is illegal before start()")
        lost = overdue(self._state, now_s)
        if lost is None:
            return tuple(self._settle(now_s))
        what = f"{self._state.members[lost.member]} is taken for lost: {lost.reason}"
        return (Notice(what=what, member=lost.member), *self.on(lost, now_s))

    def _enter(self, phase: Phase, now_s: float) -> Iterator[Command]:
        """Go to `phase`, and do what is done on entering it."""
        if phase is self._state.phase:
            return
        self._state.phase = phase
        match phase:
            case Phase.FORMING:
                yield from effects.form(self._state, now_s)
            case Phase.TRAINING:
                for member in self._state.in_group():
                    member.heard_s = now_s
                    if member.state is MemberState.READY:
                        effects.move(member, MemberState.ACTIVE, now_s)
            case Phase.CLOSING:
                self._state.outstanding = None  # the last step came before it took effect
            case Phase.FINISHED:
                yield from effects.end(self._state, "finished", now_s)
            case Phase.STOPPED:
                yield from effects.end(self._state, "stopped", now_s)
            case Phase.FAILED:
                yield from effects.end(self._state, "failed", now_s)
            case Phase.NEW | Phase.PLACING | Phase.STOPPING | Phase.REGROUPING:
                pass
            case _:
                assert_never(phase)

    def _settle(self, now_s: float) -> Iterator[Command]:
        """Follow the conditions that hold, then send the next change ahead if one is due."""
        state = self._state
        while True:
            row = PHASE_ON_CONDITION.get(state.phase, {})
            condition = next((c for c in row if holds(state, c)), None)
            if condition is None:
                break
            if condition is Condition.BROKEN:
                yield from effects.regroup(state, now_s)
            elif condition is Condition.UNFIT:
                state.error = unfit(state)
            elif condition is Condition.PART_MISSING:
                step = state.checkpoints.collecting[0]
                lacking = state.checkpoints.missing(step, state.group)
                state.error = f"the checkpoint of step {step} has no part of members {lacking}"
            yield from self._enter(row[condition], now_s)
        yield from effects.send_ahead(state, now_s)
