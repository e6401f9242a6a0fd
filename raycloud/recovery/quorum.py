"""How members that survived a generation agree, at the meeting of the next, where they go on.

Each says where it stands. A step that one of them has committed stands: whoever has not takes the
state from those who have. The next step is computed by all from what they have kept of it: what
nobody has is dealt anew. Nobody asks the driver.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

import torch

from raycloud.net.stream import Place
from raycloud.net.transport import finish, same_everywhere, take_from
from raycloud.order import Position, deal
from raycloud.recovery.rendezvous import HOST
from raycloud.recovery.state_transfer import hand_over
from raycloud.step.forward import Fusing
from raycloud.step.state import digest

if TYPE_CHECKING:
    from raycloud.net.transport import Transport
    from raycloud.order import MicroBatch, StepSpan
    from raycloud.recovery.rendezvous import Host
    from raycloud.step.commit import Owed
    from raycloud.step.feed import Adopted
    from raycloud.step.replica import Replica

_NOBODY = -1
_ADDRESS_BYTES = 64


@dataclass(frozen=True, slots=True)
class Standing:
    """Where one member stands. All values are numbers that float64 holds exactly, or a loss.

    Attributes:
        step: The step that it is to commit next.
        begun: 1 where it has been in a generation that computed; 0: what it holds is where it
            started, and counts only where nobody has begun.
        agreed: Number of the newest change that it knows all to hold.
        due_step: The step at which that takes effect; -1 where it has.
        knows_loss: 1 where it knows the mean loss of the step before, else 0.
        loss: That mean; or the sum of weight * loss over its own micro-batches.
        weight: The weight of these micro-batches.
        epoch: Where the sequence stands before that step,
        offset: with its sample.
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
class Ground:
    """Where all go on.

    Attributes:
        step: The step to commit next.
        position: Where the sequence stands before it.
        taken: This member took its state from others.
        adopted: What each rank computes of that step, beside what it has kept; None: its share.
        suspects: Micro-batches of it that nobody is to compute.
        loss: Mean loss of the step before; NaN where there is none.
        following: Ranks that have no state yet, and take it while the others compute.
        unlike: Not all members' processors are of one kind.
    """

    step: int
    position: Position
    taken: bool
    adopted: Adopted | None
    loss: float
    suspects: tuple[MicroBatch, ...] = ()
    following: tuple[int, ...] = ()
    unlike: bool = False


@dataclass(frozen=True, slots=True)
class Talk:
    """How members talk to each other where they meet: all ask the same, in the same order.

    Attributes:
        transport: Any of the new generation, for tensors on the CPU.
        abandoned: Says that this generation, too, is over.
    """

    transport: Transport
    abandoned: Callable[[], bool]

    def standings(self, own: Standing) -> list[Standing]:
        """Where every member stands, by rank.

        Raises:
            TransportError: The meeting broke, or was abandoned.
        """
        rows = torch.zeros((self.transport.size, len(astuple(own))), dtype=torch.float64)
        rows[self.transport.rank] = torch.tensor(astuple(own), dtype=torch.float64)
        kinds = [type(value) for value in astuple(Standing(0))]
        return [
            Standing(*(kind(value) for kind, value in zip(kinds, at, strict=True)))
            for at in self._sum(rows).tolist()
        ]

    def places(self, own: Place | None) -> list[Place]:
        """Where those listen that do, by rank; `own` is this member's place, if it is one of them.

        Raises:
            TransportError: The meeting broke, or was abandoned.
        """
        rows = torch.zeros((self.transport.size, _ADDRESS_BYTES + 2), dtype=torch.float64)
        if own is not None:
            address = own.address.encode().ljust(_ADDRESS_BYTES, b"\0")
            told = [own.port, own.key, *address]
            rows[self.transport.rank] = torch.tensor(told, dtype=torch.float64)
        return [
            Place(bytes(map(int, address)).rstrip(b"\0").decode(), int(port), int(key))
            for port, key, *address in self._sum(rows).tolist()
            if port
        ]

    def keepers(self, kept: Sequence[int], count: int) -> tuple[int, ...]:
        """For each of a step's micro-batches the rank that has computed it; -1: nobody has.

        Args:
            kept: Indices of those that this member has computed.
            count: Micro-batches of the step.

        Raises:
            TransportError: The meeting broke, or was abandoned.
        """
        ranks = torch.zeros(count, dtype=torch.float64)
        ranks[list(kept)] = self.transport.rank + 1
        return tuple(int(rank) - 1 for rank in self._sum(ranks).tolist())

    def any_of(self, some: Sequence[int], count: int) -> tuple[int, ...]:
        """Which of `count` things a member names.

        Args:
            some: Indices of those that this one does.
            count: How many there are.

        Raises:
            TransportError: The meeting broke, or was abandoned.
        """
        named = torch.zeros(count, dtype=torch.float64)
        named[list(some)] = 1.0
        return tuple(k for k, many in enumerate(self._sum(named).tolist()) if many)

    def _sum(self, values: torch.Tensor) -> torch.Tensor:
        if self.transport.size > 1:
            finish(self.transport.all_reduce(values), self.abandoned)
        return values


@dataclass(frozen=True, kw_only=True, slots=True)
class Own:
    """What a member brings to a meeting.

    Attributes:
        replica: Its own.
        position: Where the sequence stands before its next step.
        span: The span of a step that stands somewhere; None past the last one.
        took: Told at once where it stands, with a state that it took from others or is to take.
        address: Its node's, that the others can reach.
        suspects: Which it suspects of a step's micro-batches, of which nobody has these.
        gone: It has lost somebody.
    """

    replica: Replica
    position: Position
    span: Callable[[int, Position], StepSpan | None]
    took: Callable[[int, Position], None]
    address: str
    suspects: Callable[[int, Sequence[int]], Sequence[int]] = lambda _step, _missing: ()
    gone: bool = False
    host: Host = HOST


def find_ground(
    everyone: Sequence[Standing],
    own: Own,
    *,
    shares: Sequence[int],
    talk: Talk,
    may_follow: Sequence[int] = (),
) -> Ground:
    """Where all go on, and what this member computes there; its state is then that of all.

    Args:
        everyone: Where every member stands, by rank.
        own: This member's.
        shares: The new generation's, by rank.
        talk: With the others.
        may_follow: Ranks that need not have the state yet. They follow if nobody is behind but
            them, and all of them would; where one is to wait for it, all take it.

    Raises:
        TransportError: The meeting broke, or was abandoned; another may follow.
    """
    begun = [one for one in everyone if one.begun] or everyone
    step = max(one.step for one in begun)
    there = [rank for rank, one in enumerate(everyone) if one in begun and one.step == step]
    behind = [rank for rank in range(len(everyone)) if rank not in there]
    new = [r for r in behind if r in may_follow and not everyone[r].begun and everyone[r].follows]
    following = tuple(new) if new == behind else ()
    rank, at = talk.transport.rank, everyone[there[0]]
    position = Position(epoch=at.epoch, offset=at.offset)
    taken = rank in behind and not following
    if rank in behind and own.replica.kept is not None:
        own.replica.discard()
    if behind and not following:
        hand_over(
            own.replica.state,
            givers=there,
            takers=behind,
            address=own.address,
            talk=talk,
            host=own.host,
        )
    if taken:
        own.replica.statistics.settle()
    if rank in behind:
        own.took(step, position)
    span = own.span(step, position)
    adopted: Adopted | None = None
    suspects: tuple[MicroBatch, ...] = ()
    if span is not None:
        adopted, suspects = _deal(own, span, shares, talk)
    loss = mean_loss([everyone[rank] for rank in there])
    return Ground(
        step=step,
        position=position,
        taken=taken,
        adopted=adopted,
        suspects=suspects,
        loss=loss,
        following=following,
        unlike=len({one.processor for one in everyone}) > 1,
    )


def _deal(
    own: Own, span: StepSpan, shares: Sequence[int], talk: Talk
) -> tuple[Adopted | None, tuple[MicroBatch, ...]]:
    """Who computes what of a step beside what is kept, None: as ever; and what nobody does."""
    every, kept = span.micro_batches, own.replica.kept
    have = list(talk.keepers(() if kept is None else kept.micro_batches, len(every)))
    missing = [k for k, rank in enumerate(have) if rank == _NOBODY]
    gone = (len(every),) if own.gone else ()
    named = talk.any_of((*own.suspects(span.step, missing), *gone), len(every) + 1)
    if len(missing) == len(every) and not named:
        return None, ()
    suspects = [k for k in named if k < len(every)]
    for k in suspects:
        have[k] = 0
    return adopt(have, shares), tuple(every[k] for k in suspects)


def alike(
    replica: Replica, gradients: Transport, lane: Transport, abandoned: Callable[[], bool]
) -> bool:
    """Whether all members have the same parameters; where not, all have rank 0's afterwards.

    Args:
        replica: This member's.
        gradients: What carries tensors that are not on the CPU.
        lane: What carries those that are.
        abandoned: Says that the generation is over.
    """
    tensors = replica.state.tensors()
    if same_everywhere(digest(tensors.items()), lane, abandoned):
        return True
    if replica.kept is not None:
        replica.discard()
    here = {name: t for name, t in tensors.items() if t.device.type == "cpu"}
    take_from(0, here, lane, abandoned)
    there = {name: t for name, t in tensors.items() if name not in here}
    take_from(0, there, gradients, abandoned)
    replica.statistics.settle()
    return False


def known_loss(owed: Owed | None, mean: float) -> dict[str, Any]:
    """What a member can say of the loss of the step before, as fields of its `Standing`.

    Args:
        owed: Its own part of it, where the mean is not known yet.
        mean: The mean where it is; NaN: there is none.
    """
    if owed is not None:
        return {"loss": owed.loss, "weight": owed.own_weight}
    return {} if math.isnan(mean) else {"knows_loss": 1, "loss": mean}


def mean_loss(known: Sequence[Standing]) -> float:
    """The mean loss of the step before: as one knows it, else over what those here computed of it.

    >>> mean_loss([Standing(3, loss=6.0, weight=2.0), Standing(3, loss=2.0, weight=2.0)])
    2.0
    """
    for one in known:
        if one.knows_loss:
            return one.loss
    whole = sum(one.weight for one in known)
    return sum(one.loss for one in known) / whole if whole else float("nan")


def adopt(keepers: Sequence[int], shares: Sequence[int]) -> Adopted:
    """What each rank computes beside what it has kept: all that nobody has, dealt by shares.

    >>> adopt((0, 0, 0, -1, -1, 1), (3, 3))
    ((3,), (4,))
    """
    missing = [k for k, rank in enumerate(keepers) if rank == _NOBODY]
    dealt, at = [], 0
    for count in deal(shares, len(missing)):
        dealt.append(tuple(missing[at : at + count]))
        at += count
    return tuple(dealt)
