"""Who meets as a generation, and with which shares.

Each function changes the state that it is given and yields commands; nothing happens until it is
iterated.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, assert_never

from raycloud.commands import (
    Command,
    Extend,
    Form,
    Halt,
    Meet,
    Notice,
    Record,
    Release,
    Reshare,
    Save,
)
from raycloud.control.checkpoints import Saving
from raycloud.control.data import Progress, take_over_skips
from raycloud.control.membership import Member
from raycloud.control.recovery import Recovery
from raycloud.control.scaling import at_once, spares, who_may_stay
from raycloud.control.shares import Resharing, asked_shares
from raycloud.control.tables import MemberState, Phase
from raycloud.errors import InternalError
from raycloud.order import Ledger, growth_record, header_record, restore_record

if TYPE_CHECKING:
    from raycloud.control.membership import Outstanding
    from raycloud.control.state import JobState
    from raycloud.events import ChangeApplied, MemberReady

_ENDING: Final = frozenset({MemberState.DRAINING, MemberState.DONE})


def form(state: JobState, now_s: float) -> Iterator[Command]:
    """The members meet for the first time: fit shares, open the ledger."""
    settings = state.settings
    readies = {m.number: m.ready for m in state.present() if m.ready is not None}
    steps = settings.steps(next(iter(readies.values())).samples)
    ledger = Ledger(samples=steps.samples)
    records = [header_record(steps.samples)]
    if settings.ledger is not None:
        ledger.restore(settings.ledger)
        records.append(restore_record(settings.ledger))
    if steps.sizes != ledger.sizes:
        epoch, samples = steps.later[-1]
        yield grown(epoch, samples, before=ledger.sizes.most)
        ledger.grow(epoch, samples)
        records.append(growth_record(epoch, samples))
    state.first = next(iter(readies.values()))
    state.group, state.formed_as = tuple(readies), state.generation
    state.groups = {state.generation: state.group}
    state.error = ""  # whoever was lost before is not missed
    if state.resharing is not None and len(readies) > 1:
        state.resharing.wait(settings.step, now_s)
        state.shares = state.resharing.first(state.group)
    else:
        state.shares = asked_shares(settings, [member.slot for member in state.in_group()])
    state.progress = Progress(
        steps=steps,
        step=settings.step,
        position=settings.position,
        ledger=ledger,
        generation=state.generation,
    )
    _seen(state, steps.sizes.most)
    for member in state.in_group():
        member.heard_s, member.step, member.generation = now_s, settings.step, state.generation
    state.hearing.begin(state.group)
    yield Record(records=tuple(records))
    yield Form(
        generation=state.generation,
        members=state.group,
        shares=state.shares,
        step=settings.step,
    )


def know_speed(state: JobState, ready: MemberReady, now_s: float) -> None:
    """What a member has measured before it is ready, where shares follow speed."""
    if state.settings.shares == "auto":
        if state.resharing is None:
            state.resharing = Resharing(state.settings, {}, now_s)
        state.resharing.know({ready.member: ready})


def regroup(state: JobState, now_s: float) -> Iterator[Command]:
    """Those that are left of the generation meet as the next one.

    Members that are to join come only where there would be too few: they may not be within reach.
    A change that is not in force everywhere is withdrawn, to be sent again if it is still wanted;
    growth of the data is not, since some may have taken it in.
    """
    present = state.turns.present
    lost = tuple(number for number in state.group if number not in present)
    left = _who_goes_on(state)
    new = spares(state)[: max(0, state.workers[0] - len(left))]
    same = set(left) == state.within() and not new
    state.meetings = state.meetings + 1 if same else 1
    if state.met or now_s - state.called_s >= state.settings.broken_s:  # else it is one incident
        state.losing += any(state.members[number].joined for number in lost)
        state.unmet = 0 if state.met else state.unmet + 1
    state.called_s = now_s
    _note_break(state)
    had_left = set(left).difference(state.within())
    state.group = (*left, *(member.number for member in new))
    # Where the others have to wait for the state anyway, all take it that have none.
    state.following = frozenset() if new else _who_follows(state, state.group)
    meet, members = state.within(), state.members
    gone = tuple(n for n in present if n not in meet and members[n].joined)
    for number in gone:  # too many, or they were to leave and the others went on without them
        state.members[number].enter(MemberState.RELEASED, now_s)
    state.hearing.begin([member.number for member in new])
    for member in new:
        member.step = state.formed().committed_step  # or a later one, as it will say
    if state.resharing is not None:
        state.resharing.wait(state.formed().committed_step, now_s)
    newest = withdraw(state)
    state.halt_sent = state.halted = state.met = False
    state.generation = state.formed_as = state.sound_from = newest + 1
    for number in had_left:
        state.members[number].recall(state.generation, state.formed().committed_step)
    state.groups = {state.generation: state.holding()}
    state.shares = fit(state, state.group, state.following)
    state.drop_checkpoints()
    if not state.turns.leaving.isdisjoint(meet) and not who_may_stay(state):
        state.save_asked = True
    state.error = ""
    for member in state.in_group():
        member.heard_s, member.part_step = now_s, -1
        if member.state in _ENDING:
            member.enter(MemberState.ACTIVE, now_s)
    if ends := tuple(n for n in lost if n not in state.away) + gone:
        yield Release(members=ends)
    yield Form(
        generation=state.generation,
        members=state.group,
        shares=state.shares,
        step=state.formed().committed_step,
        settled=state.settled,
        following=tuple(n for n in state.group if n in state.following) if state.following else (),
        back=state.recovery.back if state.recovery is not None else None,
    )


def _note_break(state: JobState) -> None:
    if state.broken is not None and state.recovery is None:
        detected_s = state.broken_s - state.started_s
        state.recovery = Recovery(detected_s=detected_s, cause=state.broken.why)
    state.broken = None
    if state.met and state.recovery is not None:
        state.recovery.back = None  # whoever was there has gone back


def _who_follows(state: JobState, numbers: Iterable[int]) -> frozenset[int]:
    """Those of these members that followed, and are not known to have caught up."""
    follow = state.following.intersection(numbers) if state.following else ()
    return frozenset(number for number in follow if not state.members[number].joined)


def _who_goes_on(state: JobState) -> list[int]:
    """Those that are left, by rank, and no more than may compute: who has the state and stays.

    The first rank is of one that has it.
    """
    left = state.left()
    if behind := _who_follows(state, state.group):
        left.sort(key=behind.__contains__)
    if len(left) <= state.workers[1]:
        return left

    def worth(number: int) -> tuple[bool, bool]:
        member = state.members[number]
        return not member.joined, member.leaving

    kept = set(sorted(left, key=worth)[: state.workers[1]])
    return [number for number in left if number in kept]


def withdraw(state: JobState) -> int:
    """Take back the change that is outstanding; the newest generation that anybody may know of."""
    outstanding, newest = state.outstanding, state.generation
    if outstanding is None:
        return newest
    outstanding.members = state.group
    if isinstance(outstanding.change, Reshare | Meet):
        newest = max(newest, outstanding.change.generation)
    state.save_asked |= isinstance(outstanding.change, Save)
    if not isinstance(outstanding.change, Extend) or outstanding.everywhere:
        state.settled, state.outstanding = outstanding.number, None
    return newest


def wait(state: JobState, now_s: float) -> Iterator[Command]:
    """Too few are left: they keep processes and state, and others are asked for."""
    for number in filter(state.here, state.ended):
        state.members[number].enter(MemberState.LOST, now_s)
    lost = tuple(m.number for m in state.in_group() if m.gone)
    left = len(state.group) - len(lost)
    for member in state.in_group():
        member.heard_s = now_s
    what = f"{left} workers are left, at least {state.workers[0]} are needed: waiting for more"
    yield Notice(what=what, detail={"machines_hold": state.capacity})
    yield Release(members=tuple(n for n in lost if n not in state.away))


def note_ended(state: JobState, number: int, now_s: float) -> None:
    """Whose process ends when it is done is not lost, but where it would have to meet again."""
    state.away.since_s.pop(number, None)
    if not state.here(number):
        return
    state.ended.add(number)
    if state.phase is Phase.WAITING:
        state.members[number].enter(MemberState.LOST, now_s)


def next_meeting(state: JobState, now_s: float) -> Meet | None:
    """The generation to change to, as members join, leave or may not compute; None: stay.

    Who is to leave does so if enough others are there. Who is new takes the state at once, where
    that is short, or follows the others, with a share of 0, until it has caught up; others wait
    that long before they come, too, and who follows begins anew where one leaves meanwhile.
    """
    ready = spares(state)
    if not (ready or state.turns.leaving or len(state.group) > state.workers[1]):
        return None
    none = state.data_version > 0 or state.any_follows()
    new = [] if none else [m for m in ready if not m.leaving]
    most, behind = state.workers[1], _who_follows(state, state.group)
    left = who_may_stay(state) or _making_room(state, len(new))
    left = (sorted(left, key=behind.__contains__) if behind else left)[:most]
    new = new[: max(0, most - len(set(left) - state.turns.leaving))]
    numbers = (*left, *(member.number for member in new))
    if numbers == state.group:
        return None
    following = behind.intersection(numbers)
    if following or not at_once(state, len(new)):
        following |= {member.number for member in new}
    for member in new:
        member.heard_s = now_s  # the others come to meet it
    return Meet(
        generation=state.generation + 1,
        members=numbers,
        shares=fit(state, numbers, following),
        following=tuple(n for n in numbers if n in following) if following else (),
    )


def _making_room(state: JobState, count: int) -> list[int]:
    """The group without those that are to leave and in whose place `count` others have come.

    One that has the state stays until another has it, even if it is one too many for that time.
    """
    members, leavers = state.members, [m for m in state.in_group() if m.leaving]
    goes = {m.number for m in leavers}
    room = max(0, state.workers[1] - (len(state.group) - len(goes)) - count)
    if not any(members[number].joined for number in state.group if number not in goes):
        room = max(room, 1)
    goes -= {m.number for m in sorted(leavers, key=lambda m: not m.joined)[:room]}
    return [number for number in state.group if number not in goes]


def become(state: JobState, meeting: Meet, step: int, now_s: float) -> None:
    """One member has changed to this generation at `step`: so will all others."""
    before_it = state.within()
    state.hearing.begin([number for number in meeting.members if number not in before_it])
    for number in meeting.members:
        member = state.members[number]
        if number not in before_it:
            member.step = max(member.step, step)  # it may be done already
        if member.state is MemberState.READY:
            member.enter(MemberState.ACTIVE, now_s)
        member.heard_s = now_s
    state.group, state.shares = meeting.members, meeting.shares
    state.following = frozenset(meeting.following)
    state.groups[meeting.generation] = state.holding()
    state.generation = state.formed_as = meeting.generation
    state.formed().change_generation(meeting.generation, step)
    if state.resharing is not None:
        state.resharing.wait(step, now_s)


def grown(epoch: int, samples: int, *, before: int) -> Notice:
    """What a person should know of more data."""
    return Notice(
        what=f"the data has grown from {before} to {samples} samples, from epoch {epoch} on",
        detail={"epoch": epoch, "samples": samples},
    )


def next_shares(state: JobState, now_s: float) -> Reshare | None:
    """Shares for those that have caught up, or better ones, where they are worth it."""
    if state.following:
        return _share_out(state)
    if state.resharing is None:
        return None
    step = state.formed().committed_step
    shares = state.resharing.look(group=state.group, shares=state.shares, step=step, now_s=now_s)
    return None if shares is None else Reshare(generation=state.generation + 1, shares=shares)


def _share_out(state: JobState) -> Reshare | None:
    caught_up = tuple(n for n in state.group if n in state.following and state.members[n].joined)
    if not caught_up:
        return None
    following = _who_follows(state, state.group)
    return Reshare(
        generation=state.generation + 1,
        shares=fit(state, state.group, following),
        caught_up=caught_up,
    )


def take_in(state: JobState, change: Reshare, step: int) -> None:
    """One member has changed to these shares at `step`: who caught up is as all others there."""
    state.formed().change_generation(change.generation, step)
    if change.caught_up:
        state.following = state.following.difference(change.caught_up)
        state.groups[change.generation] = state.holding()


def fit(
    state: JobState, members: tuple[int, ...], following: Collection[int] = ()
) -> tuple[int, ...]:
    """Shares of these members, by rank: as asked, and `auto` by what is known of their speeds.

    Those that are `following` have none.
    """
    computing = tuple(n for n in members if n not in following) if following else members
    if state.resharing is not None and len(members) > 1:
        fitted = state.resharing.fit(computing)
    else:
        fitted = asked_shares(state.settings, [state.members[n].slot for n in computing])
    if not following:
        return fitted
    shares = dict(zip(computing, fitted, strict=True))
    return tuple(shares.get(number, 0) for number in members)


def _seen(state: JobState, samples: int) -> None:
    """The members that met have read `samples` samples: growth up to there is no news to them."""
    if state.data_ahead is not None and state.data_ahead.samples <= samples:
        state.data_ahead = None
    state.data_samples = max(state.data_samples, samples)


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
        yield from wait(state, now_s)
    else:
        state.phase = Phase.REGROUPING
        yield from regroup(state, now_s)
