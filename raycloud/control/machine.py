"""One job's control: events in, commands out.

No clock, no I/O, no randomness: the same events at the same times give the same commands. What may
come when stands in `tables`, what must hold in `guards`; what changes, in the four states of
`state.JobState`. Here they meet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, assert_never

from raycloud import events
from raycloud.commands import Change, Command, Finish, Release, Spawn
from raycloud.control import (
    generations,
    guards,
    rollback,
    scaling,
)
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
    from raycloud.control.heartbeats import Heard
    from raycloud.control.member import Member
    from raycloud.control.settings import ControlSettings
    from raycloud.control.state import Adoption
    from raycloud.events import Event, JobEvent, WorkerKey
    from raycloud.order import Ledger, Position


# Each member says these, one after the other, and all but the first or the last change nothing for
# the others: the next tick is soon enough.
_OF_ALL: Final = frozenset({events.StepsCommitted, events.ChangeApplied, events.PartWritten})
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
    def shares(self) -> tuple[int, ...]:
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

    def start(self, now_s: float) -> tuple[Command, ...]:
        """Ask for the members.

        Raises:
            InternalError: It was called before.
        """
        state, settings = self._state, self._state.settings
        if state.phase is not Phase.NEW:
            raise InternalError(f"start() is illegal in phase {state.phase}")
        state.recovery.start(now_s)
        state.checkpoints.begin(now_s, settings.step or None, saves=settings.saves)
        state.phase = Phase.PLACING
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
        if self._state.phase is not Phase.NEW:
            raise InternalError(f"take_over() is illegal in phase {self._state.phase}")
        self._state.now_s = now_s
        return tuple(generations.take_over(self._state, adoption, now_s))

    def on(self, event: Event, now_s: float) -> tuple[Command, ...]:
        """Take in what happened.

        Raises:
            InternalError: The event is illegal where things stand; nothing has changed. The message
                tells of the last events before it.
        """
        if isinstance(event, events.MemberFailed):
            event = self._tolerated(event, now_s)
        if isinstance(event, MemberEvent):
            return self._on_member(event, now_s)
        return self._on_job(event, now_s)

    def _on_job(self, event: JobEvent, now_s: float) -> tuple[Command, ...]:
        state = self._state
        try:
            moves = guards.judge_of_job(state, event)
        except InternalError as error:
            raise self._with_story(error) from error
        if moves is None:
            return ()
        self._last_events.append((now_s, event))
        state.now_s = now_s
        absorbed = tuple(_absorb_of_job(state, event))
        for number, becomes in moves.items():
            state.membership.members[number].enter(becomes, now_s)
        phase = PHASE_ON_EVENT[state.phase][type(event)]
        return *absorbed, *self._enter(phase, now_s), *self._settle(now_s)

    def _on_member(self, event: MemberEvent, now_s: float) -> tuple[Command, ...]:
        state, membership = self._state, self._state.membership
        try:
            becomes = guards.judge_of_member(state, event)
        except InternalError as error:
            raise self._with_story(error) from error
        if becomes is None:
            if isinstance(event, events.MemberLost):
                generations.note_ended(state, event.member, now_s)
            return ()
        self._last_events.append((now_s, event))
        state.now_s, stood = now_s, state.stands()
        commands = list(_absorb_of_member(state, event, now_s))
        member, kind = membership.members[event.member], type(event)
        member.hear(now_s)
        if member.state is not becomes and not member.gone:  # or it has left: its last word
            member.enter(becomes, now_s)
        phase = PHASE_ON_EVENT[state.phase][kind]
        spare = not member.joined and membership.is_spare(event.member)
        if spare and kind is not events.MemberFailed:  # the phase is that of those that compute
            commands += self._of_spare(event, member, now_s)
        elif phase is not state.phase:
            commands += self._enter(phase, now_s)
        if commands or kind not in _OF_ALL or state.stands() != stood:
            commands += self._settle(now_s)
        return tuple(commands)

    def _with_story(self, error: InternalError) -> InternalError:
        told = "".join(
            f"\n  {now_s:.2f} s {event!s:.{_LONGEST}}" for now_s, event in self._last_events
        )
        return InternalError(f"{error.message}\n\nthe last events before it:{told or ' none'}")

    def _of_spare(self, event: MemberEvent, member: Member, now_s: float) -> Iterator[Command]:
        if isinstance(event, events.MemberReady) and (
            why := scaling.unfit_to_join(self._state, member)
        ):
            member.enter(MemberState.RELEASED, now_s)
            yield from scaling.missed(self._state, member, why, now_s)

    def _tolerated(
        self, event: events.MemberFailed, now_s: float
    ) -> events.MemberFailed | events.MemberLost:
        """A failure before the first step counts as the loss of the member: not the job's fault."""
        state, member = self._state, self._state.membership.members.get(event.member)
        if member is None or state.data.progress is None:
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
        if self._state.resharing is not None:
            self._state.resharing.foresee(heard.behind)

    def overdue(self, now_s: float) -> events.MemberLost | None:
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
        self._state.membership.close_vacancies()
        return tuple(self._settle(now_s, ticks=True))

    def _enter(self, phase: Phase, now_s: float) -> Iterator[Command]:
        """Go to `phase`, and do what is done on entering it."""
        state, membership = self._state, self._state.membership
        if phase is state.phase:
            return
        state.phase = phase
        match phase:
            case Phase.FORMING:
                yield from generations.form(state, now_s)
            case Phase.TRAINING:
                for member in membership.in_group():
                    member.hear(now_s)
                    if member.state is MemberState.READY:
                        member.enter(MemberState.ACTIVE, now_s)
            case Phase.WAITING:
                yield from generations.wait(state, now_s)
            case Phase.RESTORING:
                yield from rollback.begin(state, now_s)
            case Phase.ENDING:
                state.recovery.end(now_s)
            case Phase.CLOSING:
                membership.abandon_change()  # the last step came before it took effect
                yield from scaling.dismiss(state, now_s)
            case Phase.FINISHED | Phase.STOPPED | Phase.FAILED:
                yield from self._end(phase.lower(), now_s)
            case Phase.NEW | Phase.PLACING | Phase.STOPPING | Phase.REGROUPING:
                pass
            case _:
                assert_never(phase)

    def _end(self, status: str, now_s: float) -> Iterator[Command]:
        """Every member's process ends and its place is given back, also that of a lost one."""
        membership, recovery = self._state.membership, self._state.recovery
        for member in membership.present():
            member.enter(MemberState.RELEASED, now_s)
        membership.abandon_change()
        yield Release(members=tuple(membership.members))
        yield Finish(status=status, error=recovery.error or None, blames=recovery.blames)

    def _settle(self, now_s: float, *, ticks: bool = False) -> Iterator[Command]:
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
                yield from rollback.gather(state, now_s)
            elif row[condition] is Phase.REGROUPING:
                yield from generations.regroup(state, now_s)
            else:
                self._explain(condition)
            yield from self._enter(row[condition], now_s)
        if state.phase in _MAY_PUBLISH:
            again = state.checkpoints.publish_again(now_s)
            yield from (again,) if again is not None else ()
        yield from generations.send_ahead(state, now_s)
        yield from scaling.give_up(state, now_s)
        yield from scaling.grow(state, now_s)

    def _explain(self, condition: Condition) -> None:
        """Why the run fails, where this condition ends it."""
        state, recovery = self._state, self._state.recovery
        match condition:
            case Condition.UNFIT:
                recovery.fail(guards.unfit(state))
            case Condition.STRANDED:
                recovery.fail(recovery.error or guards.stranded(state))
            case Condition.HOPELESS:
                recovery.fail(guards.hopeless(state))
            case Condition.UNSAVED | Condition.PART_MISSING if state.checkpoints.failing.in_a_row:
                recovery.fail(state.checkpoints.why_unsaved(), "CheckpointError")
            case Condition.PART_MISSING:
                recovery.fail(guards.part_missing(state))
            case _:
                pass


# ---- what an event changes besides phase and member states


def _absorb_of_job(state: JobState, event: JobEvent) -> Iterator[Command]:
    match event:
        case events.CheckpointPublished():
            state.checkpoints.published(event.step, state.now_s)
        case events.CheckpointFailed():
            most, ends = state.settings.most_failed, _ends(state)
            told = state.checkpoints.fail(event, state.now_s, ends=ends, most=most)
            yield from (told,) if told is not None else ()
        case events.StopRequested():
            state.stop(event)
        case events.RangeChanged():
            state.membership.set_range(event.min_workers, event.max_workers)
        case events.CapacityChanged():
            scaling.hold(state, event)
        case events.DataGrew():
            state.data.announce(event)
        case events.GenerationFormed():
            if event.generation >= state.membership.formed_as:
                state.membership.note_met()
                progress = state.data.formed()
                progress.change_generation(event.generation, event.first_step)
        case events.RolledBack():
            yield from rollback.go_back(state, event)
        case events.RunStarted() | events.Evaluated() | events.Noticed():
            pass
        case events.Recovered() | events.RunFinished():
            pass
        case _:
            assert_never(event)


def _absorb_of_member(state: JobState, event: MemberEvent, now_s: float) -> Iterator[Command]:
    member = state.membership.members[event.member]
    match event:
        case events.StepsCommitted():
            yield from _progressed(state, event, now_s)
        case events.ChangeApplied():
            yield from generations.note_applied(state, event, now_s)
        case events.MemberSpawned():
            member.place(event.node)
        case events.MemberReady():
            member.introduce(event)
            state.know_speed(event, now_s)
            state.heartbeats.begin([member.number])
        case events.PartWritten() | events.PartFailed():
            yield from _written(state, event)
        case events.MemberCaughtUp():
            yield from generations.note_joined(state, event, now_s)
        case events.MemberDone():
            yield from generations.note_joined(state, event, now_s)
            member.come_to(event.step, event.generation)
            yield from _counted(state)
            yield from _recovered(state, event.generation, now_s)  # nothing was left to compute
        case events.EvaluationPart() | events.DataPreparing() | events.DataPrepared():
            pass
        case _:
            yield from _absorb_of_fault(state, event, now_s)


def _absorb_of_fault(
    state: JobState,
    event: events.MemberLost
    | events.MemberLeaving
    | events.MemberReturned
    | events.ExchangeBroken
    | events.StepNotFinite
    | events.MemberFailed,
    now_s: float,
) -> Iterator[Command]:
    match event:
        case events.MemberLost():
            yield from _lost(state, event, now_s)
        case events.MemberLeaving():
            yield from scaling.prepare_for_leave(state, event, now_s)
        case events.MemberReturned():
            yield from scaling.come_back(state, event, now_s)
        case events.ExchangeBroken():
            state.recovery.note_broken(event, now_s)
        case events.StepNotFinite():
            rollback.note_not_finite(state, event)
        case events.MemberFailed():
            member = state.membership.members[event.member]
            hint = f"\n\nhint: {event.hint}" if event.hint else ""
            state.recovery.fail(f"{member}: {event.error}: {event.message}{hint}")
        case _:
            assert_never(event)


def _progressed(state: JobState, event: events.StepsCommitted, now_s: float) -> Iterator[Command]:
    membership, progress = state.membership, state.data.formed()
    member = membership.members[event.member]
    if not member.joined:
        yield from generations.note_joined(state, event, now_s)
    if event.generation >= membership.formed_as and state.phase is not Phase.WAITING:
        membership.note_met()
        if event.last_step > event.first_step:
            state.recovery.progress()
            if state.recovery.incident is not None:
                yield from _recovered(state, event.generation, now_s)
    progress.change_generation(event.generation, event.first_step)
    member.report(event.last_step, event.generation)
    progress.took.note(event)
    if event.bytes_last:
        member.note_pace(event.exchange_s / event.bytes_last)
    if state.resharing is not None:
        state.resharing.observe(event)
    if event.skips:
        state.data.note_skips(event)
    if state.data.skips or membership.all_past(progress.committed_step):
        yield from _counted(state)


def _counted(state: JobState) -> Iterator[Command]:
    """Steps count that all members have; also those that only a lost one had not told of."""
    membership, data = state.membership, state.data
    if membership.all_past(data.formed().committed_step):
        for number in membership.following:  # who follows has its part in each of these steps
            membership.members[number].hear(state.now_s)
        yield from data.commit(min(m.step for m in membership.holders()))
    if data.skips:
        yield from data.write_skips(membership.members)


def _recovered(state: JobState, generation: int, now_s: float) -> Iterator[Command]:
    told = state.recovery.recovered(generation, now_s)
    yield from (told,) if told is not None else ()


def _ends(state: JobState) -> bool:
    """Nothing is left to do but to keep the last checkpoint."""
    return state.phase is Phase.CLOSING or state.membership.any_done()


def _written(state: JobState, event: events.PartWritten | events.PartFailed) -> Iterator[Command]:
    membership, checkpoints = state.membership, state.checkpoints
    if event.generation < membership.sound_from:
        return  # of a generation that broke
    membership.note_met()
    told: Command | None
    if isinstance(event, events.PartFailed):
        most, ends = state.settings.most_failed, _ends(state)
        told = checkpoints.lack(event, state.now_s, ends=ends, most=most)
    else:
        membership.members[event.member].write_part(event.step)
        told = checkpoints.take_in(event, membership.keys_of(event.generation))
    yield from (told,) if told is not None else ()


def _lost(state: JobState, event: events.MemberLost, now_s: float) -> Iterator[Command]:
    membership, began = state.membership, state.data.progress is not None
    member = membership.members[event.member]
    yield from scaling.leave_out(state, event, now_s)
    if member.joined and not (event.silent or member.leaving):
        membership.vacate(member.number)
    if began and not member.joined:
        yield from scaling.missed(state, member, event.reason, now_s)
        if membership.is_spare(member.number):
            return
    if began and member.number not in membership.within():
        yield from _left_early(state, member, now_s)
        return
    resume = state.checkpoints.resume_hint()
    state.recovery.fail(f"{member} was lost: {event.reason}\n\nhint: {resume}")
    if began:
        state.checkpoints.note_loss()
        state.recovery.note_lost(member.number, event.reason, now_s)
    elif len(membership.roster.present) > membership.workers[0]:
        yield Release(members=(member.number,))


def _left_early(state: JobState, member: Member, now_s: float) -> Iterator[Command]:
    """The others go on without it already: only a checkpoint may lack its part."""
    membership, sent = state.membership, state.membership.outstanding
    yield Release(members=(member.number,))
    state.checkpoints.drop_before(membership.formed_as)
    if membership.strike(member.number) and sent is not None:
        step = next(iter(sent.applied.values()), state.data.formed().committed_step)
        yield from generations.complete(state, sent, step, now_s)
