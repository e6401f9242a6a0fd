"""Quorum: members of a new generation agree on the step from which all go on.

Each tells its status. A step that one of them has committed is final: whoever has not committed it
takes the state from those who have. The next step is computed from what members have kept of it;
what nobody has is dealt anew. Nobody asks the driver.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from raycloud.order import Position, deal
from raycloud.recovery.state_transfer import hand_over
from raycloud.step.forward import Fusing
from raycloud.step.state import digest

if TYPE_CHECKING:
    from raycloud.net.lane import Lane
    from raycloud.recovery.rendezvous import Host
    from raycloud.step.commit import Owed
    from raycloud.step.feed import Adopted
    from raycloud.step.replica import Replica

NOBODY = -1


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """Where one member stands. All values are numbers that float64 holds exactly, or a loss.

    Attributes:
        step: The step that it is to commit next.
        begun: 1 where it has been in a generation that computed; 0: what it holds is where it
            started, and counts only where nobody has begun.
        agreed: Number of the newest change that it knows all to hold.
        due_step: The step at which that takes effect; -1 where it has.
        knows_loss: 1 where it knows the mean loss of the step before, else 0.
        loss: That mean; or the sum of weight * loss over its own micro-batches, of this `weight`.
        epoch: Where the sequence stands before that step, with the sample at `offset`.
        follows: 1 where it would follow the others while it takes the state, if it may.
        processor: A number for the kind of its processor.
        fusing: What it knows of fused passes, see `forward.Fusing`.
    """

    step: int
    begun: int = 1
    agreed: int = 0
    due_step: int = -1
    knows_loss: int = 0
    loss: float = 0.0
    weight: float = 0.0
    epoch: int = 0
    offset: int = 0
    follows: int = 1
    processor: int = 0
    fusing: int = Fusing.UNKNOWN.value


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumePoint:
    """The `step` and `position` from which all go on, and by rank who has the state of that point.

    Attributes:
        holders: Ranks that have the state.
        takers: Ranks that take the state at once, while all wait.
        followers: Ranks that take the state while the others compute.
        loss: Mean loss of the step before; NaN where there is none.
        unlike: Not all members' processors are of one kind.
    """

    step: int
    position: Position
    holders: tuple[int, ...]
    takers: tuple[int, ...]
    followers: tuple[int, ...]
    loss: float
    unlike: bool


def gather_statuses(lane: Lane, own: MemberStatus) -> list[MemberStatus]:
    """The status of every member, by rank."""
    kinds = [type(value) for value in astuple(MemberStatus(0))]
    return [
        MemberStatus(*(kind(value) for kind, value in zip(kinds, row, strict=True)))
        for row in lane.gather(astuple(own))
    ]


def find_resume_point(
    everyone: Sequence[MemberStatus], may_follow: Sequence[int] = ()
) -> ResumePoint:
    """Where all go on: the furthest step that is committed by one who has computed.

    The ranks that `may_follow` need not have the state yet. They follow if nobody is behind but
    them, and all of them would; where one is to wait for it, all take it.
    """
    begun = [one for one in everyone if one.begun] or everyone
    step = max(one.step for one in begun)
    holders = [rank for rank, one in enumerate(everyone) if one in begun and one.step == step]
    behind = tuple(rank for rank in range(len(everyone)) if rank not in holders)
    follow = all(r in may_follow and not everyone[r].begun and everyone[r].follows for r in behind)
    first = everyone[holders[0]]
    return ResumePoint(
        step=step,
        position=Position(epoch=first.epoch, offset=first.offset),
        holders=tuple(holders),
        takers=() if follow else behind,
        followers=behind if follow else (),
        loss=mean_loss([everyone[rank] for rank in holders]),
        unlike=len({one.processor for one in everyone}) > 1,
    )


def take_state(replica: Replica, point: ResumePoint, lane: Lane, address: str, host: Host) -> bool:
    """Bring all that are behind to the resume point; all members call this.

    Returns:
        Whether this member was behind: it takes the state now, or follows.

    Raises:
        TransportError: The meeting broke, or was abandoned; this member's state is as it was.
    """
    rank = lane.transport.rank
    behind = rank in (*point.takers, *point.followers)
    if behind and replica.kept is not None:
        replica.discard()
    if point.takers:
        hand_over(
            replica.state,
            givers=point.holders,
            takers=point.takers,
            lane=lane,
            address=address,
            host=host,
        )
        if behind:
            replica.statistics.settle()
    return behind


def find_keepers(lane: Lane, kept: Sequence[int], count: int) -> list[int]:
    """For each of a step's `count` micro-batches the rank that has `kept` it, or `NOBODY`."""
    own, there = lane.transport.rank + 1, set(kept)
    return [int(r) - 1 for r in lane.sum([own if k in there else 0 for k in range(count)])]


def adopt(keepers: Sequence[int], shares: Sequence[float]) -> Adopted:
    """What each rank computes beside what it has kept: all that nobody has, dealt by shares.

    >>> adopt((0, 0, 0, -1, -1, 1), (3, 3))
    ((3,), (4,))
    """
    missing = [k for k, rank in enumerate(keepers) if rank == NOBODY]
    bounds = accumulate(deal(shares, len(missing)), initial=0)
    return tuple(tuple(missing[at:stop]) for at, stop in pairwise(bounds))


def align(replica: Replica, lane: Lane) -> bool:
    """Whether all members have the same parameters; where not, all take rank 0's, in place.

    Those arrive beside one's own, and are taken once all are there.
    """
    tensors = replica.common_tensors()
    if len(set(lane.gather_text(digest(tensors.items())))) == 1:
        return True
    if replica.kept is not None:
        replica.discard()
    arrived = []
    for _, tensor in sorted(tensors.items()):
        flat = tensor.detach().to("cpu", copy=True).contiguous().reshape(-1)
        lane.broadcast(flat)
        arrived.append((tensor, flat))
    for tensor, flat in arrived:
        tensor.copy_(flat.view(tensor.shape))
    replica.statistics.settle()
    return False


def known_loss(owed: Owed | None, mean: float) -> dict[str, Any]:
    """What a member can say of the loss of the step before: its own part of it, else the mean."""
    if owed is not None:
        return {"loss": owed.loss, "weight": owed.own_weight}
    return {} if math.isnan(mean) else {"knows_loss": 1, "loss": mean}


def mean_loss(known: Sequence[MemberStatus]) -> float:
    """The mean loss of the step before: as one knows it, else over what those here computed of it.

    >>> mean_loss([MemberStatus(3, loss=6.0, weight=2.0), MemberStatus(3, loss=2.0, weight=2.0)])
    2.0
    """
    for one in known:
        if one.knows_loss:
            return one.loss
    whole = sum(one.weight for one in known)
    return sum(one.loss for one in known) / whole if whole else float("nan")
