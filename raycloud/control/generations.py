"""Generations: which members meet as the next generation, and what they are told to change to.

Each function but those that ask changes the states that it is given, by their methods, and yields
commands; nothing happens until it is iterated.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from raycloud.commands import Command, Extend, Form, Halt, Meet, Prepare, Release, Reshare, Save
from raycloud.control.membership import one_worker_each
from raycloud.control.replanning import decide
from raycloud.control.scaling import hand_over_at_once, let_go, who_may_stay
from raycloud.control.tables import MemberState, Phase
from raycloud.errors import InternalError
from raycloud.events import MemberCaughtUp, MemberDone, Noticed

if TYPE_CHECKING:
    from raycloud.commands import Change
    from raycloud.control.member import Member
    from raycloud.control.membership import Adoption, Outstanding
    from raycloud.control.state import JobState
    from raycloud.events import ChangeApplied, StepsCommitted

_DRIVER_GONE = "the driver was gone"


def form(state: JobState) -> Iterator[Command]:
    """Members meet for the first time: the ledger is opened, and shares are fitted.

    Who is not ready yet is one that joins from now on.
    """
    settings, membership = state.settings, state.membership
    ready = [m for m in membership.present() if m.ready is not None]
    first = ready[0].ready
    if first is None:
        raise InternalError("a member is ready that has said nothing of itself")
    if late := [m for m in membership.present() if m.ready is None]:
        membership.begin_without(late)
        yield Noticed(
            what="the workers that are ready begin, and the others join as they come",
            detail={"ready": len(ready), "others": len(late)},
        )
        yield from let_go([m for m in late if m.leaving])
    yield from state.data.begin(settings, first)
    state.recovery.get_over()  # whoever was lost before is not missed
    yield from meet(state, ready, state.resharing.first(ready), settings.step)


def meet(
    state: JobState, members: Sequence[Member], shares: tuple[float, ...], step: int
) -> Iterator[Command]:
    """These meet where nobody has computed before: all have the same state, and begin at `step`."""
    membership, group = state.membership, tuple(m.number for m in members)
    membership.form(group, shares, membership.generation)
    state.resharing.wait(step, state.now_s)
    state.heartbeats.begin(group)
    for member in members:
        member.begin(step, membership.generation, state.now_s)
    yield Form(
        generation=membership.generation,
        members=group,
        shares=shares,
        step=step,
        settled=membership.settled,
        keys=membership.keys,
        back=state.recovery.back,
        sync=state.sync.point,
    )


def take_over(state: JobState, adoption: Adoption) -> Iterator[Command]:
    """Members that have outlived their driver meet as the next generation, as after a loss.

    What a generation before has done stands, and what its driver had sent ahead is withdrawn. The
    ledger goes on where its file ends. Steps that members have committed since, and those that they
    commit while they are told to meet, are counted once they have reported them.
    """
    settings, readies, membership = state.settings, adoption.readies, state.membership
    yield from state.data.take_over(settings, readies[0], adoption.skips)
    state.recovery.take_over(adoption.began_s, _DRIVER_GONE, list(adoption.lost))
    state.checkpoints.begin(state.now_s, adoption.published)
    membership.take_over(adoption, settings.step, state.now_s)
    state.heartbeats.begin(membership.group)
    for ready in readies:
        state.resharing.know(ready)
        state.sync.learn(ready)
    few = len(membership.group) < membership.workers[0]
    state.phase = Phase.WAITING if few else Phase.REGROUPING
    yield from wait(state) if few else regroup(state)


def regroup(state: JobState) -> Iterator[Command]:
    """Those that are left of the generation meet as the next one.

    Members that are to join come only where there would be too few: they may not be within reach.
    A change that is not in force everywhere is withdrawn, to be sent again if it is still wanted;
    growth of the data is not, since some may have taken it in.
    """
    membership, step = state.membership, state.data.formed().committed_step
    present, members = membership.roster.present, membership.members
    lost = [number for number in membership.group if number not in present]
    left = _who_goes_on(state)
    new = membership.spares()[: max(0, membership.workers[0] - len(left))]
    before = membership.within()
    state.recovery.call(
        state.now_s,
        same=set(left) == before and not new,
        met=membership.met,
        lost=any(members[number].joined for number in lost),
        apart_s=state.settings.broken_s,
    )
    recalled = set(left).difference(before)
    group = (*left, *(member.number for member in new))
    # Where the others have to wait for the state anyway, all take it that have none.
    following = frozenset() if new else membership.who_follows(group)
    stay = frozenset(group)
    gone = [n for n in present if n not in stay and members[n].joined]
    for number in gone:  # too many, or they were to leave and the others went on without them
        members[number].enter(MemberState.RELEASED)
    state.heartbeats.begin([member.number for member in new])
    for member in new:
        member.come_to(step)  # or to a later one, as it will say
    state.resharing.wait(step, state.now_s)
    shares = fit(state, group, following)
    sent = membership.coming
    if sent is not None and not membership.is_in_force and sent.sync != state.sync.point:
        yield from state.sync.fail()
    membership.form(group, shares, withdraw(state, group) + 1, following)
    for number in recalled:
        members[number].recall(membership.generation, step)
    state.checkpoints.drop(state.now_s)
    if not membership.roster.leaving.isdisjoint(stay) and not who_may_stay(state):
        state.checkpoints.ask()
    state.recovery.get_over()
    for member in membership.in_group():
        member.meet_again(state.now_s)
    if ends := [*(n for n in lost if n not in membership.absent_since_s), *gone]:
        yield Release(members=tuple(ends))
    yield Form(
        generation=membership.generation,
        members=group,
        shares=shares,
        step=step,
        settled=membership.settled,
        following=tuple(n for n in group if n in following),
        keys=membership.keys,
        back=state.recovery.back,
        sync=state.sync.point,
        measured=state.data.measured,
    )


def note_uneven(state: JobState) -> Iterator[Command]:
    """What is left of a round is about to be dealt anew, for the sake of one that is far behind."""
    membership = state.membership
    late = state.resharing.late_in_round(membership.group, membership.shares)
    if late is not None:
        what = "a member is far behind in a round: what is left of it is dealt anew"
        yield Noticed(what=what, member=late)


def _who_goes_on(state: JobState) -> list[int]:
    """Those that are left, by rank, and no more than may compute: who has the state and stays.

    The first rank is of one that has it.
    """
    membership, most = state.membership, state.membership.workers[1]
    left = membership.left()
    if behind := membership.who_follows(membership.group):
        left.sort(key=behind.__contains__)
    if len(left) <= most:
        return left

    def worth(number: int) -> tuple[bool, bool]:
        member = membership.members[number]
        return not member.joined, member.leaving

    kept = set(sorted(left, key=worth)[:most])
    return [number for number in left if number in kept]


def withdraw(state: JobState, group: tuple[int, ...]) -> int:
    """Take back the outstanding change; the newest generation that anybody may know of."""
    sent = state.membership.outstanding
    if sent is not None and isinstance(sent.change, Save):
        state.checkpoints.ask()
    return state.membership.withdraw(group)


def wait(state: JobState) -> Iterator[Command]:
    """Too few are left: they keep processes and state, and others are asked for."""
    membership = state.membership
    for number in membership.ended.intersection(membership.roster.present):
        membership.members[number].enter(MemberState.LOST)
    lost = [m.number for m in membership.in_group() if m.gone]
    left = len(membership.group) - len(lost)
    for member in membership.in_group():
        member.hear(state.now_s)
    what = f"{left} workers are left, at least {membership.workers[0]} are needed: waiting for more"
    yield Noticed(what=what, detail={"machines_hold": membership.capacity})
    yield Release(members=tuple(n for n in lost if n not in membership.absent_since_s))


def note_ended(state: JobState, number: int) -> None:
    """Whose process ends when it is done is not lost, but where it would have to meet again."""
    membership = state.membership
    membership.give_up([number])
    if number not in membership.roster.present:
        return
    membership.note_ended(number)
    if state.phase is Phase.WAITING:
        membership.members[number].enter(MemberState.LOST)


def note_joined(
    state: JobState, event: StepsCommitted | MemberCaughtUp | MemberDone
) -> Iterator[Command]:
    """A member that is new has the state, maybe before others say that they changed."""
    membership, member = state.membership, state.membership.members[event.member]
    if member.joined:
        return
    if isinstance(event, MemberDone) and membership.is_to_follow(event.member):
        member.come_to(event.step)  # it has followed to the end
        return
    first_step = event.step if isinstance(event, MemberDone) else event.first_step
    sent, coming = membership.outstanding, membership.coming
    if sent is not None and coming is not None and coming.generation == event.generation:
        yield from take_effect(state, sent, first_step)
    member.join(event.step if isinstance(event, MemberCaughtUp) else first_step)
    membership.forget_misses()


# ---- changes that are sent ahead


def send_ahead(state: JobState) -> Iterator[Command]:
    """One change at a time: a halt that was asked for, else data, a save, members, shares."""
    membership = state.membership
    if (
        state.phase not in {Phase.TRAINING, Phase.STOPPING}
        or membership.outstanding is not None
        or membership.halted
        or membership.any_done()
    ):
        return
    change = _next_change(state)
    if change is not None:
        if isinstance(change, Reshare):
            group, resharing = membership.group, state.resharing
            yield from filter(None, (resharing.forecasts(group), resharing.slow_feeds(group)))
        sent = membership.send(change)
        yield Prepare(number=sent.number, members=sent.members, change=change)


def _next_change(state: JobState) -> Change | None:
    if state.phase is Phase.STOPPING:
        return Halt(reason=state.stop_reason)
    if (grew := state.data.take_announced()) is not None:
        return Extend(version=grew.version, samples=grew.samples, partitions=grew.partitions)
    if state.checkpoints.is_due(state.now_s):
        state.checkpoints.save()
        return Save()
    return _next_meeting(state) or _next_sync(state) or _next_shares(state)


def _next_meeting(state: JobState) -> Meet | None:
    """The generation to change to, as members join, leave or may not compute; None: stay.

    Who is to leave does so if enough others are there. Who is new takes the state at once, where
    that is short, or follows the others, with a share of 0, until it has caught up; others wait
    that long before they come, too, and who follows begins anew where one leaves meanwhile.
    """
    membership, most = state.membership, state.membership.workers[1]
    ready, leaving = membership.spares(), membership.roster.leaving
    if not (ready or leaving or len(membership.group) > most):
        return None
    behind = membership.who_follows(membership.group)
    none = state.data.version > 0 or bool(behind) or not _worth_joining(state)
    new = [] if none else [m for m in ready if not m.leaving]
    left = who_may_stay(state) or _making_room(state, len(new))
    left = (sorted(left, key=behind.__contains__) if behind else left)[:most]
    new = new[: max(0, most - len(set(left) - leaving))]
    numbers = (*left, *(member.number for member in new))
    if numbers == membership.group:
        return None
    following = behind.intersection(numbers)
    if following or not hand_over_at_once(state, len(new)):
        following |= {member.number for member in new}
    for member in new:
        member.hear(state.now_s)  # the others come to meet it
    return Meet(
        generation=membership.generation + 1,
        members=numbers,
        shares=fit(state, numbers, following),
        following=tuple(n for n in numbers if n in following),
        keys=one_worker_each(len(numbers)),
        sync=state.sync.point,
    )


def _worth_joining(state: JobState) -> bool:
    """Whether newcomers could still win back what taking them in costs, if all else were free."""
    step_s, stay, join = state.data.formed().step_s, "stay", "join"
    if not step_s:
        return True
    best_s = {stay: step_s, join: 0.0}  # they cannot save more than all
    cost_s = state.settings.hand_over_s
    return decide(stay, best_s, left=state.steps_left(), cost_s=cost_s).changes


def _next_sync(state: JobState) -> Meet | None:
    """The same members, whose updates travel by another point; who follows is waited for."""
    membership = state.membership
    if state.sync.wanted is None or membership.following:
        return None
    return Meet(
        generation=membership.generation + 1,
        members=membership.group,
        shares=membership.shares,
        keys=membership.keys,
        sync=state.sync.send(),
    )


def _making_room(state: JobState, count: int) -> list[int]:
    """The group without those that are to leave and in whose place `count` others have come.

    One that has the state stays until another has it, even if it is one too many for that time.
    """
    membership = state.membership
    leavers = [m for m in membership.in_group() if m.leaving]
    goes = {m.number for m in leavers}
    room = max(0, membership.workers[1] - (len(membership.group) - len(goes)) - count)
    if not any(m.joined for m in membership.in_group() if m.number not in goes):
        room = max(room, 1)
    goes -= {m.number for m in sorted(leavers, key=lambda m: not m.joined)[:room]}
    return [number for number in membership.group if number not in goes]


def _next_shares(state: JobState) -> Reshare | None:
    """Shares for those that have caught up, or better ones, where they are worth it."""
    membership = state.membership
    caught_up: tuple[int, ...] = ()
    group, generation = membership.group, membership.generation + 1
    if membership.following:
        behind = membership.who_follows(group)
        caught_up = tuple(n for n in group if n in membership.following and n not in behind)
        shares = fit(state, group, behind) if caught_up else None
    else:
        step, dealt = state.data.formed().committed_step, membership.shares
        shares = state.resharing.look(group=group, shares=dealt, step=step, now_s=state.now_s)
    if shares is None:
        return None
    return Reshare(generation=generation, shares=shares, caught_up=caught_up)


def note_applied(state: JobState, event: ChangeApplied) -> Iterator[Command]:
    """A member has switched to the outstanding change; maybe the last one."""
    outstanding = state.membership.outstanding
    if outstanding is None:
        raise InternalError(f"no change is outstanding: {event}")
    yield from take_effect(state, outstanding, event.step)
    outstanding.apply(event.member, event.step)
    if not outstanding.waits_for:
        yield from complete(state, outstanding, event.step)


def take_effect(state: JobState, outstanding: Outstanding, step: int) -> Iterator[Command]:
    """A member has applied it: from `step` on it holds for all. Known once, from the first word."""
    if not outstanding.take_effect():
        return
    membership = state.membership
    match outstanding.change:
        case Reshare() as change:
            state.data.formed().change_generation(change.generation, step)
            membership.promote(change)
        case Meet() as change:
            before = membership.within()
            state.heartbeats.begin([n for n in change.members if n not in before])
            membership.become(change, step, state.now_s)
            state.data.formed().change_generation(change.generation, step)
            state.resharing.wait(step, state.now_s)
            if change.sync is not None:
                yield from state.sync.take_effect(change.sync, change.generation, step)
        case Extend() as change:
            yield from state.data.grow(change, step)
        case Halt():
            membership.halt()
        case Save():
            pass


def complete(state: JobState, outstanding: Outstanding, step: int) -> Iterator[Command]:
    """All have switched; who left has written all that was its part."""
    membership, change = state.membership, outstanding.change
    if isinstance(change, Reshare):
        membership.reshare(change)
        state.resharing.wait(step, state.now_s)
    elif isinstance(change, Meet):
        stays = membership.within()
        gone = [membership.members[n] for n in outstanding.members if n not in stays]
        yield from let_go(gone)
    membership.settle()


def fit(
    state: JobState, members: tuple[int, ...], following: Collection[int] = ()
) -> tuple[float, ...]:
    """Shares of these members, by rank; those that are `following` have none."""
    known = state.membership.members
    computing = [n for n in members if n not in following]
    fitted = state.resharing.fit([known[n] for n in computing])
    shares = dict(zip(computing, fitted, strict=True))
    return tuple(shares.get(number, 0) for number in members)
