"""One job's control: events in, commands out.

No clock, no I/O, no randomness: the same events at the same times give the same commands. What may
come when stands in `tables`, what must hold in `guards`, what changes in `effects`; here they meet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, assert_never

from raycloud.commands import Change, Command, Notice, Spawn
from raycloud.control import (
    rendezvous,
    rollback,
    scaling,
)
from raycloud.control.checkpoints import Saving
from raycloud.control.effects import (
    absorb_of_job,
    absorb_of_member,
    end,
    save_again,
    send_ahead,
    unsaved,
)
from raycloud.control.failure_detector import overdue
from raycloud.control.guards import (
    MemberEvent,
    holds,
    hopeless,
    judge_of_job,
    judge_of_member,
    unfit,
)
from raycloud.control.heartbeats import Hearing
from raycloud.control.membership import Member
from raycloud.control.rendezvous import adopt
from raycloud.control.state import JobState
from raycloud.control.tables import (
    FINAL,
    PHASE_ON_CONDITION,
    PHASE_ON_EVENT,
    Condition,
    MemberState,
    Phase,
)
from raycloud.errors import InternalError
from raycloud.events import (
    ChangeApplied,
    Event,
    MemberFailed,
    MemberLost,
    MemberReady,
    PartWritten,
    StepsCommitted,
)

if TYPE_CHECKING:
    from raycloud.control.heartbeats import Heard
    from raycloud.control.rendezvous import Adoption
    from raycloud.control.settings import ControlSettings
    from raycloud.order import Ledger, Position


# Each member says these, one after the other, and all but the first or the last change nothing for
# the others: the next tick is soon enough.
_OF_ALL: Final = frozenset({StepsCommitted, ChangeApplied, PartWritten})
_OF_STORE: Final = frozenset({Condition.UNSAVED, Condition.PART_MISSING})


class Control:
    """Decides what happens next in one job.

    Call `start` once, then `on` for every event and `tick` about once a second. Each returns
    commands to carry out in order. Events of one member must come in the order in which it sent
    them; how the members' events interleave does not matter. Give `on` everything that has arrived
    before asking `overdue`, so that nobody is taken for silent who is merely unread, and then what
    that says.

    After `Finish` every event is legal and ignored.
    """

    def __init__(self, settings: ControlSettings) -> None:
        """Nothing happens before `start`."""
        self._state = JobState(
            settings=settings,
            hearing=Hearing(settings.late_s),
            generation=settings.first_generation,
            workers=(settings.min_workers, settings.max_workers),
            capacity=settings.capacity,
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
    def sound_from(self) -> int:
        """Words of older generations do not count any more: they broke."""
        return self._state.sound_from

    def group_of(self, generation: int) -> tuple[int, ...]:
        """Who computed as `generation`, in order of rank."""
        return self._state.group_of(generation)

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
        state.saving = Saving(began_s=now_s) if settings.saves else None
        first = settings.first_member
        numbers = tuple(range(first, first + settings.workers))
        state.members = {
            n: Member(
                number=n,
                state=MemberState.SPAWNING,
                since_s=now_s,
                heard_s=now_s,
                slot=n - first,
                turns=state.turns,
            )
            for n in numbers
        }
        state.next_member = first + settings.workers
        state.phase = Phase.PLACING
        commands: list[Command] = []
        if settings.workers < settings.max_workers:
            what = f"the machines hold {settings.workers} of at most {settings.max_workers} workers"
            commands.append(Notice(what=what))
        return (*commands, Spawn(members=numbers))

    def take_over(self, adoption: Adoption, now_s: float) -> tuple[Command, ...]:
        """Begin with members that compute already, in place of `start`.

        Raises:
            InternalError: It was begun before.
        """
        if self._state.phase is not Phase.NEW:
            raise InternalError(f"take_over() is illegal in phase {self._state.phase}")
        self._state.now_s = now_s
        return tuple(adopt(self._state, adoption, now_s))

    def on(self, event: Event, now_s: float) -> tuple[Command, ...]:
        """Take in what happened.

        Raises:
            InternalError: The event is illegal where things stand; nothing has changed.
        """
        if isinstance(event, MemberEvent):
            return self._on_member(event, now_s)
        state, moves = self._state, judge_of_job(self._state, event)
        if moves is None:
            return ()
        state.now_s = now_s
        absorbed = tuple(absorb_of_job(state, event))
        for number, becomes in moves.items():
            state.members[number].enter(becomes, now_s)
        phase = PHASE_ON_EVENT[state.phase][type(event)]
        return *absorbed, *self._enter(phase, now_s), *self._settle(now_s)

    def _on_member(self, event: MemberEvent, now_s: float) -> tuple[Command, ...]:
        if isinstance(event, MemberFailed):
            event = self._tolerated(event, now_s)
        state, becomes = self._state, judge_of_member(self._state, event)
        if becomes is None:
            if isinstance(event, MemberLost):
                rendezvous.note_ended(state, event.member, now_s)
            return ()
        state.now_s, stood, error = now_s, state.stands(), state.error
        commands = list(absorb_of_member(state, event, now_s))
        if state.phase is Phase.ENDING:
            state.error = error  # of the first, whatever comes of it
        member, kind = state.members[event.member], type(event)
        member.heard_s = now_s
        if member.state is not becomes and not member.gone:  # or it has left: its last word
            member.enter(becomes, now_s)
        phase = PHASE_ON_EVENT[state.phase][kind]
        if kind is not MemberFailed and state.spare(event.member):  # or it is not tolerated
            commands += self._of_spare(event, now_s)  # the phase is that of those that compute
        elif phase is not state.phase:
            commands += self._enter(phase, now_s)
        if commands or kind not in _OF_ALL or state.stands() != stood:
            commands += self._settle(now_s)
        return tuple(commands)

    def _of_spare(self, event: MemberEvent, now_s: float) -> Iterator[Command]:
        member = self._state.members[event.member]
        if isinstance(event, MemberReady) and (why := scaling.unfit_to_join(self._state, member)):
            member.enter(MemberState.RELEASED, now_s)
            yield from scaling.missed(self._state, member, why, now_s)

    def _tolerated(self, event: MemberFailed, now_s: float) -> MemberFailed | MemberLost:
        """What befalls a member that has not computed yet is a loss, and not the job's fault."""
        state = self._state
        member = state.member(event.member)
        if state.progress is None or not rollback.tolerates(state, member, now_s):
            return event
        return MemberLost(member=event.member, reason=f"{event.error}: {event.message}")

    def hear(self, heard: Heard) -> None:
        """Take in which members have answered the driver's calls; about as often as `tick`.

        Where the driver itself stood still, or its clock has jumped, nobody was silent meanwhile.
        """
        still_s = self._state.hearing.hear(heard)
        for member in self._state.present() if still_s else ():
            member.heard_s = min(heard.looked_s, member.heard_s + still_s)
        if self._state.resharing is not None:
            self._state.resharing.foresee(heard.behind)

    def overdue(self, now_s: float) -> MemberLost | None:
        """The member that is to be taken for lost now, as an event for `on`; None: nobody is.

        Raises:
            InternalError: `start` was not called.
        """
        if self._state.phase is Phase.NEW:
            raise InternalError("overdue() is illegal before start()")
        self._state.now_s = now_s
        return overdue(self._state, now_s)

    def tick(self, now_s: float) -> tuple[Command, ...]:
        """Time has passed.

        Raises:
            InternalError: `start` was not called.
        """
        if self._state.phase is Phase.NEW:
            raise InternalError("tick() is illegal before start()")
        self._state.now_s = now_s
        self._state.away.vacant.clear()  # nobody was asked for in their place
        return tuple(self._settle(now_s, ticks=True))

    def _enter(self, phase: Phase, now_s: float) -> Iterator[Command]:
        """Go to `phase`, and do what is done on entering it."""
        if phase is self._state.phase:
            return
        self._state.phase = phase
        match phase:
            case Phase.FORMING:
                yield from rendezvous.form(self._state, now_s)
            case Phase.TRAINING:
                for member in self._state.in_group():
                    member.heard_s = now_s
                    if member.state is MemberState.READY:
                        member.enter(MemberState.ACTIVE, now_s)
            case Phase.WAITING:
                yield from rendezvous.wait(self._state, now_s)
            case Phase.RESTORING:
                yield from rollback.begin(self._state, now_s)
            case Phase.ENDING:
                self._state.failed_s = now_s
            case Phase.CLOSING:
                self._state.outstanding = None  # the last step came before it took effect
                yield from scaling.dismiss(self._state, now_s)
            case Phase.FINISHED | Phase.STOPPED | Phase.FAILED:
                yield from end(self._state, phase.lower(), now_s)
            case Phase.NEW | Phase.PLACING | Phase.STOPPING | Phase.REGROUPING:
                pass
            case _:
                assert_never(phase)

    def _settle(self, now_s: float, *, ticks: bool = False) -> Iterator[Command]:
        """Follow the conditions that hold, then send the next change ahead if one is due.

        Further losses while members meet are one incident: they meet anew with the next tick.
        """
        state = self._state
        while True:
            row = PHASE_ON_CONDITION.get(state.phase, {})
            later = Condition.BROKEN if state.phase is Phase.REGROUPING and not ticks else None
            condition = next((c for c in row if c is not later and holds(state, c)), None)
            if condition is None:
                break
            if condition is Condition.GATHERED:
                yield from rollback.gather(state, now_s)
            elif row[condition] is Phase.REGROUPING:
                yield from rendezvous.regroup(state, now_s)
            elif condition is Condition.UNFIT:
                state.error = unfit(state)
            elif condition is Condition.STRANDED:
                state.error = state.error or rollback.why_stranded(state)
            elif condition is Condition.HOPELESS:
                state.error = hopeless(state)
            elif condition in _OF_STORE and state.failing.in_a_row:
                state.error, state.blames = unsaved(state), "CheckpointError"
            elif condition is Condition.PART_MISSING:
                step = state.checkpoints.collecting(state.formed_as)[0]
                holders = tuple(m.number for m in state.holders())
                lacking = state.checkpoints.missing(step, holders)
                state.error = f"the checkpoint of step {step} has no part of members {lacking}"
            yield from self._enter(row[condition], now_s)
        yield from save_again(state, now_s)
        yield from send_ahead(state, now_s)
        yield from scaling.give_up(state, now_s)
        yield from scaling.grow(state, now_s)
