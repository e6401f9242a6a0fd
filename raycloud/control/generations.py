"""Generations: which members meet as the next generation, and what they are told to change to.

Each function but those that ask changes the states that it is given, by their methods, and yields
commands; nothing happens until it is iterated.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, assert_never

from raycloud.commands import (
    Command,
    Extend,
    Form,
    Halt,
    Meet,
    Prepare,
    Release,
    Reshare,
    Save,
)
from raycloud.control.membership import one_worker_each
from raycloud.control.scaling import hand_over_at_once, who_may_stay
from raycloud.control.shares import asked_shares
from raycloud.control.tables import MemberState, Phase
from raycloud.errors import InternalError
from raycloud.events import MemberCaughtUp, MemberDone, Noticed

if TYPE_CHECKING:
    from raycloud.commands import Change
    from raycloud.control.membership import Outstanding
    from raycloud.control.state import Adoption, JobState
    from raycloud.events import ChangeApplied, StepsCommitted

_DRIVER_GONE = "the driver was gone"


def form(state: JobState, now_s: float) -> Iterator[Command]:
    """Members meet for the first time: the ledger is opened, and shares are fitted."""
    settings, membership = state.settings, state.membership
    ready = [m for m in membership.present() if m.ready is not None]
    first = ready[0].ready
    if first is None:
        raise InternalError("a member is ready that has said nothing of itself")
    yield from state.data.begin(settings, first)
    group = tuple(m.number for m in ready)
    state.recovery.get_over()  # whoever was lost before is not missed
    if state.resharing is not None and len(group) > 1:
        state.resharing.wait(settings.step, now_s)
        shares = state.resharing.first(group)
    else:
        shares = asked_shares(settings, [m.slot for m in ready])
    membership.form(group, shares)
    for member in ready:
        member.begin(settings.step, membership.generation, now_s)
    state.heartbeats.begin(group)
    yield Form(
        generation=membership.generation,
        members=group,
        shares=shares,
        step=settings.step,
        keys=membership.keys,
    )


def take_over(state: JobState, adoption: Adoption, now_s: float) -> Iterator[Command]:
    """Members that have outlived their driver meet as the next generation, as after a loss.

    What a generation before has done stands, and what its driver had sent ahead is withdrawn. The
    ledger goes on where its file ends. Steps that members have committed since, and those that they
    commit while they are told to meet, are counted once they have reported them.
    """
    settings, readies = state.settings, adoption.readies
    membership = state.membership
    yield from state.data.take_over(settings, readies[0], adoption.skips)
    state.recovery.take_over(adoption.began_s, _DRIVER_GONE, list(adoption.lost))
    state.checkpoints.begin(now_s, adoption.published, saves=settings.saves)
    membership.take_over(tuple(ready.member for ready in readies), adoption.changes)
    membership.adopt(readies, adoption.steps, now_s)
    for member in membership.in_group():
        step = adoption.steps.get(member.number, settings.step)
        member.come_to(step, membership.generation)
        if step < settings.step:  # it was away, and is called back
            member.recall(0, settings.step)
    state.heartbeats.begin(membership.group)
    for ready in readies:
        state.know_speed(ready, now_s)
    if len(membership.group) < membership.workers[0]:
        state.phase = Phase.WAITING
        yield from wait(state, now_s)
    else:
        state.phase = Phase.REGROUPING
        yield from regroup(state, now_s)


def regroup(state: JobState, now_s: float) -> Iterator[Command]:
    """Those that are left of the generation meet as the next one.

    Members that are to join come only where there would be too few: they may not be within reach.
    A change that is not in force everywhere is withdrawn, to be sent again if it is still wanted;
    growth of the data is not, since some may have taken it in.
    """
    membership, step = state.membership, state.data.formed().committed_step
    present, members = membership.roster.present, membership.members
    lost = tuple(number for number in membership.group if number not in present)
    left = _who_goes_on(state)
    new = membership.spares()[: max(0, membership.workers[0] - len(left))]
    before = membership.within()
    state.recovery.call(
        now_s,
        same=set(left) == before and not new,
        met=membership.met,
        lost=any(members[number].joined for number in lost),
        apart_s=state.settings.broken_s,
    )
    recalled = set(left).difference(before)
    group = (*left, *(member.number for member in new))
    # Where the others have to wait for the state anyway, all take it that have none.
    following = frozenset() if new else membership.who_follows(group)
    meet = frozenset(group)
    gone = tuple(n for n in present if n not in meet and members[n].joined)
    for number in gone:  # too many, or they were to leave and the others went on without them
        members[number].enter(MemberState.RELEASED, now_s)
    state.heartbeats.begin([member.number for member in new])
    for member in new:
        member.start_at(step)  # or a later one, as it will say
    state.wait_with_shares(step, now_s)
    membership.regroup(group, following, withdraw(state, group) + 1)
    for number in recalled:
        members[number].recall(membership.generation, step)
    membership.deal(fit(state, group, following))
    state.checkpoints.drop(now_s)
    if not membership.roster.leaving.isdisjoint(meet) and not who_may_stay(state):
        state.checkpoints.ask()
    state.recovery.get_over()
    for member in membership.in_group():
        member.meet_again(now_s)
    if ends := tuple(n for n in lost if n not in membership.absent_since_s) + gone:
        yield Release(members=ends)
    yield Form(
        generation=membership.generation,
        members=group,
        shares=membership.shares,
        step=step,
        settled=membership.settled,
        following=tuple(n for n in group if n in following),
        keys=membership.keys,
        back=state.recovery.back,
    )


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


def wait(state: JobState, now_s: float) -> Iterator[Command]:
    """Too few are left: they keep processes and state, and others are asked for."""
    membership = state.membership
    for number in membership.ended.intersection(membership.roster.present):
        membership.members[number].enter(MemberState.LOST, now_s)
    lost = [m.number for m in membership.in_group() if m.gone]
    left = len(membership.group) - len(lost)
    for member in membership.in_group():
        member.hear(now_s)
    what = f"{left} workers are left, at least {membership.workers[0]} are needed: waiting for more"
    yield Noticed(what=what, detail={"machines_hold": membership.capacity})
    yield Release(members=tuple(n for n in lost if n not in membership.absent_since_s))


def note_ended(state: JobState, number: int, now_s: float) -> None:
    """Whose process ends when it is done is not lost, but where it would have to meet again."""
    membership = state.membership
    membership.give_up([number])
    if number not in membership.roster.present:
        return
    membership.note_ended(number)
    if state.phase is Phase.WAITING:
        membership.members[number].enter(MemberState.LOST, now_s)


def note_joined(
    state: JobState, event: StepsCommitted | MemberCaughtUp | MemberDone, now_s: float
) -> Iterator[Command]:
    """A member that is new has the state, maybe before others say that they changed."""
    membership, member = state.membership, state.membership.members[event.member]
    if member.joined:
        return
    if isinstance(event, MemberDone) and membership.is_to_follow(event.member):
        member.start_at(event.step)  # it has followed to the end
        return
    first_step = event.step if isinstance(event, MemberDone) else event.first_step
    sent, coming = membership.outstanding, membership.coming
    if sent is not None and coming is not None and coming.generation == event.generation:
        yield from take_effect(state, sent, first_step, now_s)
    member.join(event.step if isinstance(event, MemberCaughtUp) else first_step)
    membership.forget_misses()


# ---- changes that are sent ahead


def send_ahead(state: JobState, now_s: float) -> Iterator[Command]:
    """One change at a time: a halt that was asked for, else data, a save, members, shares."""
    membership = state.membership
    if (
        state.phase not in {Phase.TRAINING, Phase.STOPPING}
        or membership.outstanding is not None
        or membership.halt_sent
        or membership.any_done()
    ):
        return
    change = _next_change(state, now_s)
    if change is not None:
        sent = membership.send(change)
        yield Prepare(number=sent.number, members=sent.members, change=change)


def _next_change(state: JobState, now_s: float) -> Change | None:
    if state.phase is Phase.STOPPING:
        return Halt(reason=state.stop_reason)
    if (grew := state.data.take_announced()) is not None:
        return Extend(version=grew.version, samples=grew.samples, partitions=grew.partitions)
    if state.checkpoints.is_due(now_s):
        state.checkpoints.save(now_s)
        return Save()
    return _next_meeting(state, now_s) or _next_shares(state, now_s)


def _next_meeting(state: JobState, now_s: float) -> Meet | None:
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
    none = state.data.version > 0 or bool(behind)
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
        member.hear(now_s)  # the others come to meet it
    return Meet(
        generation=membership.generation + 1,
        members=numbers,
        shares=fit(state, numbers, following),
        following=tuple(n for n in numbers if n in following),
        keys=one_worker_each(len(numbers)),
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


def _next_shares(state: JobState, now_s: float) -> Reshare | None:
    """Shares for those that have caught up, or better ones, where they are worth it."""
    membership = state.membership
    caught_up: tuple[int, ...] = ()
    group, generation = membership.group, membership.generation + 1
    if membership.following:
        behind = membership.who_follows(group)
        caught_up = tuple(n for n in group if n in membership.following and n not in behind)
        shares = fit(state, group, behind) if caught_up else None
    elif state.resharing is not None:
        step = state.data.formed().committed_step
        dealt = membership.shares
        shares = state.resharing.look(group=group, shares=dealt, step=step, now_s=now_s)
    else:
        shares = None
    if shares is None:
        return None
    return Reshare(generation=generation, shares=shares, caught_up=caught_up)


def note_applied(state: JobState, event: ChangeApplied, now_s: float) -> Iterator[Command]:
    """A member has switched to the outstanding change; maybe the last one."""
    outstanding = state.membership.outstanding
    if outstanding is None:
        raise InternalError(f"no change is outstanding: {event}")
    yield from take_effect(state, outstanding, event.step, now_s)
    outstanding.apply(event.member, event.step)
    if outstanding.everywhere:
        yield from complete(state, outstanding, event.step, now_s)


def take_effect(
    state: JobState, outstanding: Outstanding, step: int, now_s: float
) -> Iterator[Command]:
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
            membership.become(change, step, now_s)
            state.data.formed().change_generation(change.generation, step)
            state.wait_with_shares(step, now_s)
        case Extend() as change:
            yield from state.data.grow(change, step)
        case Halt():
            membership.halt()
        case Save():
            pass
        case _:
            assert_never(outstanding.change)


def complete(
    state: JobState, outstanding: Outstanding, step: int, now_s: float
) -> Iterator[Command]:
    """All have switched; who left has written all that was its part."""
    membership, change = state.membership, outstanding.change
    if isinstance(change, Reshare):
        membership.reshare(change)
        state.wait_with_shares(step, now_s)
    elif isinstance(change, Meet):
        stays = membership.within()
        gone = tuple(number for number in outstanding.members if number not in stays)
        for number in gone:
            membership.members[number].enter(MemberState.RELEASED, now_s)
        if gone:
            yield Release(members=gone)
    membership.settle()


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
        known = state.membership.members
        fitted = asked_shares(state.settings, [known[n].slot for n in computing])
    if not following:
        return fitted
    shares = dict(zip(computing, fitted, strict=True))
    return tuple(shares.get(number, 0) for number in members)
