"""One job's control: events in, commands out.

What may come when stands in `tables`, what must hold in `guards`; what changes, in the four states
of `state.JobState`. Here they meet. The same events at the same times give the same commands.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from raycloud import events
from raycloud.commands import Command, Finish, Release, Spawn
from raycloud.control import generations, guards, rollback, scaling
from raycloud.control.failure_detector import overdue
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
from raycloud.events import MemberEvent, Noticed

if TYPE_CHECKING:
    from raycloud.commands import Change
    from raycloud.control.heartbeats import Heard
    from raycloud.control.member import Member
    from raycloud.control.membership import Adoption
    from raycloud.control.settings import ControlSettings
    from raycloud.events import Event, WorkerKey
    from raycloud.order import Ledger, Position


# Each member says these, one after the other, and all but the first or the last change nothing for
# the others: the next tick is soon enough.
_OF_ALL: Final = frozenset({events.StepsCommitted, events.ChangeApplied, events.PartWritten})
_FOR_THE_LOG: Final = (
    events.RunStarted,
    events.RunFinished,
    events.DataPreparing,
    events.DataPrepared,
    events.EvaluationPart,
    events.Noticed,
    events.CollatorsStarted,
    events.Predicted,
    events.Recovered,
    events.SyncChanged,
    events.SyncMeasured,
)
_MAY_PUBLISH: Final = frozenset(
    {Phase.TRAINING, Phase.STOPPING, Phase.REGROUPING, Phase.WAITING, Phase.CLOSING}
)
_TOLD = 8  # events that an error tells of
_LONGEST = 200  # characters of each


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
        self._state = JobState(settings)
        self._last_events: deque[tuple[float, Event]] = deque(maxlen=_TOLD)

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
        return {number: m.state for number, m in self._state.membership.members.items()}

    @property
    def group(self) -> tuple[int, ...]:
        """Members of the present generation, in order of rank."""
        return self._state.membership.group

    @property
    def generation(self) -> int:
        """The generation that is forming or in force."""
        return self._state.membership.generation

    @property
    def sound_from(self) -> int:
        """Words of older generations do not count any more: they broke."""
        return self._state.membership.sound_from

    def keys_of(self, generation: int) -> Mapping[int, WorkerKey]:
        """Who divided the work as `generation`, in order of rank: replica and position."""
        return self._state.membership.keys_of(generation)

    @property
    def shares(self) -> tuple[float, ...]:
        """Micro-batches per step of each member of `group`."""
        return self._state.membership.shares

    @property
    def committed_step(self) -> int:
        """One past the last step that all members have reported as committed."""
        progress = self._state.data.progress
        return self._state.settings.step if progress is None else progress.committed_step

    @property
    def ledger(self) -> Ledger | None:
        """What is committed; None until the members have said how much data there is."""
        progress = self._state.data.progress
        return None if progress is None else progress.ledger

    @property
    def change_outstanding(self) -> Change | None:
        """The change that was sent ahead and is not yet in force everywhere."""
        sent = self._state.membership.outstanding
        return None if sent is None else sent.change

    @property
    def last_published(self) -> int | None:
        """Step of the newest checkpoint that may be restored from."""
        return self._state.checkpoints.last_published

    @property
    def workers(self) -> tuple[int, int]:
        """The elastic range last asked for: fewest and most members."""
        return self._state.membership.workers

    def position_at(self, step: int) -> Position:
        """Where the sequence stands before `step`; for a checkpoint's manifest."""
        return self._state.data.formed().position_at(step)

    def samples_at(self, step: int) -> int:
        """Samples of the epoch that `step` belongs to; for a checkpoint's manifest."""
        progress = self._state.data.formed()
        return progress.steps.samples_in(progress.position_at(step).epoch)

    def ledger_at(self, step: int) -> dict[str, Any]:
        """The ledger's state with exactly the steps before `step`; for a checkpoint's manifest."""
        return self._state.data.formed().ledger_at(step)

    def start(self, now_s: float, capacity: int | None = None) -> tuple[Command, ...]:
        """Ask for the members, no more than the machines hold.

        Args:
            now_s: The time.
            capacity: How many that is, as of now; None: as the settings say.

        Raises:
            InternalError: It was called before.
        """
        state, settings = self._at(now_s, "start()", begins=True), self._state.settings
        state.recovery.start(now_s)
        state.checkpoints.begin(now_s, settings.step or None)
        state.phase = Phase.PLACING
        if capacity is not None:
            settings = replace(settings, capacity=capacity)
            state.membership.set_capacity(capacity)
        spawn = Spawn(members=state.membership.spawn(settings.workers, now_s, joins=False))
        if settings.workers == settings.max_workers:
            return (spawn,)
        what = f"the machines hold {settings.workers} of at most {settings.max_workers} workers"
        return Noticed(what=what), spawn

    def take_over(self, adoption: Adoption, now_s: float) -> tuple[Command, ...]:
        """Begin with members that compute already, in place of `start`.

        Raises:
            InternalError: It was begun before.
        """
        return tuple(generations.take_over(self._at(now_s, "take_over()", begins=True), adoption))

    def on(self, event: Event, now_s: float) -> tuple[Command, ...]:
        """Take in what happened.

        Raises:
            InternalError: The event is illegal where things stand; nothing has changed. The message
                tells of the last events before it.
        """
        state, membership = self._state, self._state.membership
        if isinstance(event, events.MemberReady):
            event = scaling.checked(state, event)
        if isinstance(event, events.MemberFailed):
            event = self._tolerated(event, now_s)
        try:
            moves = guards.judge(state, event)
        except InternalError as error:
            told = "".join(f"\n  {at:.2f} s {one!s:.{_LONGEST}}" for at, one in self._last_events)
            why = f"{error.message}\n\nthe last events before it:{told or ' none'}"
            raise InternalError(why) from error
        if moves is None:
            if isinstance(event, events.MemberLost):
                generations.note_ended(state, event.member)
            return ()
        self._last_events.append((now_s, event))
        state.now_s, stood, kind = now_s, state.stands(), type(event)
        commands = list(_ABSORB[kind](state, event) or ())
        spare = False
        if isinstance(event, MemberEvent):
            member = membership.members[event.member]
            member.hear(now_s)
            spare = kind is not events.MemberFailed and membership.is_spare(event.member)
        for number, becomes in moves.items():
            if not membership.members[number].gone:  # or it has left: its last word
                membership.members[number].enter(becomes)
        if not spare:  # the phase is that of those that compute
            commands += self._enter(PHASE_ON_EVENT[state.phase][kind])
        elif isinstance(event, events.MemberReady):
            commands += scaling.look_at_newcomer(state, membership.members[event.member])
        if commands or kind not in _OF_ALL or state.stands() != stood:
            commands += self._settle()
        return tuple(commands)

    def _tolerated(
        self, event: events.MemberFailed, now_s: float
    ) -> events.MemberFailed | events.MemberLost:
        """A failure before the first step counts as the loss of the member: not the job's fault.

        Those that the job begins with fail it, whether or not the others have waited for them.
        """
        state, member = self._state, self._state.membership.members.get(event.member)
        if member is None or state.data.progress is None:
            return event
        if event.member in state.membership.late:
            return event
        if not rollback.tolerates(state, member, now_s):
            return event
        return events.MemberLost(member=event.member, reason=f"{event.error}: {event.message}")

    def hear(self, heard: Heard) -> None:
        """Take in which members have answered the driver's calls; about as often as `tick`.

        Where the driver itself stood still, or its clock has jumped, nobody was silent meanwhile.
        """
        still_s = self._state.heartbeats.hear(heard)
        for member in self._state.membership.present() if still_s else ():
            member.hear(min(heard.looked_s, member.heard_s + still_s))
        self._state.resharing.foresee(heard.behind)

    def overdue(self, now_s: float) -> events.MemberLost | None:
        """The member that is to be taken for lost now, as an event for `on`; None: nobody is.

        Raises:
            InternalError: `start` was not called.
        """
        return overdue(self._at(now_s, "overdue()"))

    def tick(self, now_s: float) -> tuple[Command, ...]:
        """Time has passed.

        Raises:
            InternalError: `start` was not called.
        """
        membership = self._at(now_s, "tick()").membership
        membership.take_vacancies(len(membership.vacant))
        return tuple(self._settle(ticks=True))

    def _at(self, now_s: float, call: str, *, begins: bool = False) -> JobState:
        state = self._state
        if (state.phase is Phase.NEW) is not begins:
            where = f"in phase {state.phase}" if begins else "before start()"
            raise InternalError(f"{call} is illegal {where}")
        state.now_s = now_s
        return state

    def _enter(self, phase: Phase) -> Iterator[Command]:
        """Go to `phase`, and do what is done on entering it."""
        state, membership = self._state, self._state.membership
        if phase is state.phase:
            return
        state.phase = phase
        match phase:
            case Phase.FORMING:
                yield from generations.form(state)
            case Phase.TRAINING:
                for member in membership.in_group():
                    member.hear(state.now_s)
                    if member.state is MemberState.READY:
                        member.enter(MemberState.ACTIVE)
            case Phase.WAITING:
                yield from generations.wait(state)
            case Phase.RESTORING:
                yield from rollback.begin(state)
            case Phase.ENDING:
                state.recovery.end(state.now_s)
            case Phase.CLOSING:
                membership.settle()  # the last step came before the change took effect
                yield from scaling.dismiss(state)
            case Phase.FINISHED | Phase.STOPPED | Phase.FAILED:
                yield from self._end(phase.lower())
            case _:
                pass

    def _end(self, status: str) -> Iterator[Command]:
        """Every member's process ends and its place is given back, also that of a lost one."""
        membership, recovery = self._state.membership, self._state.recovery
        for member in membership.present():
            member.enter(MemberState.RELEASED)
        membership.settle()
        yield Release(members=tuple(membership.members))
        yield Finish(status=status, error=recovery.error or None, blames=recovery.blames)

    def _settle(self, *, ticks: bool = False) -> Iterator[Command]:
        """Follow the conditions that hold, then send the next change ahead if one is due.

        Further losses while members meet are one incident: they meet anew with the next tick.
        """
        state = self._state
        while True:
            row = PHASE_ON_CONDITION.get(state.phase, {})
            later = Condition.BROKEN if state.phase is Phase.REGROUPING and not ticks else None
            held = (c for c in row if c is not later and guards.holds(state, c))
            condition = next(held, None)
            if condition is None:
                break
            if condition is Condition.GATHERED:
                yield from rollback.gather(state)
            elif row[condition] is Phase.REGROUPING:
                if condition is Condition.UNEVEN:
                    yield from generations.note_uneven(state)
                yield from generations.regroup(state)
            elif why := guards.explain(state, condition):
                unsaved = why == state.checkpoints.why_unsaved()
                state.recovery.fail(why, "CheckpointError" if unsaved else "JobError")
            yield from self._enter(row[condition])
        if state.phase in _MAY_PUBLISH:
            yield from state.checkpoints.publish_again(state.now_s)
        yield from generations.send_ahead(state)
        yield from scaling.give_up(state)
        yield from scaling.grow(state)


# ---- what an event changes besides phase and member states


def _progressed(state: JobState, event: events.StepsCommitted) -> Iterator[Command]:
    membership, progress = state.membership, state.data.formed()
    member = membership.members[event.member]
    if not member.joined:
        yield from generations.note_joined(state, event)
    if event.generation >= membership.formed_as and state.phase is not Phase.WAITING:
        membership.note_met()
        if event.last_step > event.first_step:
            state.recovery.progress()
            yield from state.recovery.recovered(event.generation, state.now_s)
    progress.change_generation(event.generation, event.first_step)
    member.report(event.last_step, event.generation)
    progress.time(event)
    if event.bytes_last:
        member.note_pace(event.exchange_s / event.bytes_last)
    state.resharing.observe(event)
    state.exchange.observe(event)
    if (much := state.exchange.notice(membership.group)) is not None:
        yield much
    if event.skips:
        state.data.note_skips(event.skips, event.member)
    yield from _counted(state)
    if membership.outstanding is None:
        group, generation = membership.group, membership.generation
        yield from state.sync.progress(
            event, group, generation, state.steps_left, membership.following
        )


def _counted(state: JobState) -> Iterator[Command]:
    """Steps count that all members have; also those that only a lost one had not told of."""
    membership, data = state.membership, state.data
    if membership.all_past(data.formed().committed_step):
        for number in membership.following:  # who follows has its part in each of these steps
            membership.members[number].hear(state.now_s)
        yield from data.commit(min(m.step for m in membership.holders()))
    if data.skips:
        yield from data.write_skips(membership.members)


def _done(state: JobState, event: events.MemberDone) -> Iterator[Command]:
    yield from generations.note_joined(state, event)
    state.membership.members[event.member].come_to(event.step, event.generation)
    yield from _counted(state)  # and nothing was left to compute:
    yield from state.recovery.recovered(event.generation, state.now_s)


def _ready(state: JobState, event: events.MemberReady) -> None:
    state.membership.introduce(event, state.now_s)
    state.resharing.know(event)
    state.sync.learn(event)
    state.heartbeats.begin([event.member])


def _formed(state: JobState, event: events.GenerationFormed) -> None:
    if event.generation >= state.membership.formed_as:
        state.membership.note_met()
        state.recovery.note_met(event.kept)
        state.data.formed().change_generation(event.generation, event.first_step)


def _part_written(state: JobState, event: events.PartWritten) -> Iterator[Command]:
    membership = state.membership
    membership.note_met()
    membership.members[event.member].write_part(event.step)
    return state.checkpoints.take_in(event, membership.keys_of(event.generation))


def _part_failed(state: JobState, event: events.PartFailed) -> Iterator[Command]:
    state.membership.note_met()
    return state.checkpoints.lack(event, state.now_s, ends=_ends(state))


def _ends(state: JobState) -> bool:
    """Nothing is left to do but to keep the last checkpoint."""
    return state.phase is Phase.CLOSING or state.membership.any_done()


def _failed(state: JobState, event: events.MemberFailed) -> None:
    hint = f"\n\nhint: {event.hint}" if event.hint else ""
    member = state.membership.members[event.member]
    state.recovery.fail(f"{member}: {event.error}: {event.message}{hint}")


def _lost(state: JobState, event: events.MemberLost) -> Iterator[Command]:
    membership, began = state.membership, state.data.progress is not None
    member = membership.members[event.member]
    yield from scaling.leave_out(state, event)
    if member.joined and not (event.silent or member.leaving):
        membership.vacate(member.number)
    if began and not member.joined:
        yield from scaling.missed(state, member, event.reason)
        if membership.is_spare(member.number):
            return
    if began and member.number not in membership.within():
        yield from _left_early(state, member)
        return
    resume = state.checkpoints.resume_hint()
    state.recovery.fail(f"{member} was lost: {event.reason}\n\nhint: {resume}")
    if began:
        if (left := state.exchange.lost(member.number)) is not None:
            yield left
        state.checkpoints.note_loss()
        state.recovery.note_lost(member.number, event.reason, state.now_s)
    elif len(membership.roster.present) > membership.workers[0]:
        yield Release(members=(member.number,))


def _left_early(state: JobState, member: Member) -> Iterator[Command]:
    """The others go on without it already: only a checkpoint may lack its part."""
    membership, sent = state.membership, state.membership.outstanding
    yield Release(members=(member.number,))
    state.checkpoints.drop_before(membership.formed_as)
    if membership.strike(member.number) and sent is not None:
        step = state.data.formed().committed_step if sent.step is None else sent.step
        yield from generations.complete(state, sent, step)


_Absorb = Callable[[JobState, Any], Iterable[Command] | None]
_ABSORB: Final[Mapping[type[Event], _Absorb]] = {
    **dict.fromkeys(_FOR_THE_LOG, lambda _state, _event: None),
    events.StepsCommitted: _progressed,
    events.ChangeApplied: generations.note_applied,
    events.PartWritten: _part_written,
    events.PartFailed: _part_failed,
    events.Evaluated: lambda s, e: s.data.note_measured(e.step),
    events.MemberSpawned: lambda s, e: s.membership.members[e.member].place(e.node),
    events.MemberReady: _ready,
    events.MemberCaughtUp: generations.note_joined,
    events.MemberDone: _done,
    events.MemberLost: _lost,
    events.MemberLeaving: scaling.prepare_for_leave,
    events.MemberReturned: scaling.come_back,
    events.MemberFailed: _failed,
    events.ExchangeBroken: lambda s, e: s.recovery.note_broken(e, s.now_s),
    events.StepNotFinite: rollback.note_not_finite,
    events.GenerationFormed: _formed,
    events.RolledBack: rollback.go_back,
    events.CheckpointPublished: lambda s, e: s.checkpoints.published(e.step, s.now_s),
    events.CheckpointFailed: lambda s, e: s.checkpoints.fail(e, s.now_s, ends=_ends(s)),
    events.StopRequested: JobState.stop,
    events.SyncAsked: lambda s, e: s.sync.ask(e),
    events.RoundsRefused: lambda s, e: s.sync.refuse_rounds(e),
    events.RangeChanged: lambda s, e: s.membership.set_range(e.min_workers, e.max_workers),
    events.CapacityChanged: scaling.hold,
    events.DataGrew: lambda s, e: s.data.announce(e),
}
