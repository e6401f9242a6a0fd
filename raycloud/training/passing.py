"""Where a generation has members that follow, the others pass the state on to them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from raycloud.events import MemberCaughtUp
from raycloud.step.memory import room_bytes
from raycloud.training.following import Following
from raycloud.training.snapshot import Incoming, Outgoing, Sharing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from raycloud.training.parts import Parts, Seat
    from raycloud.training.regroup import Talk

_TRIES = 3


class Passing:
    """What a member sends to those that follow, or how it follows itself.

    Args:
        parts: Whose replica it is, and who hears that it has caught up.
        address: This node's, that other members can reach.

    Attributes:
        lacking: This member has not been where others computed, or has no state of theirs yet.
    """

    def __init__(self, parts: Parts, address: str) -> None:
        """Nothing is on its way."""
        self._parts, self._address = parts, address
        self._outgoing: Outgoing | None = None
        self._tries = 0
        self.lacking = True

    @property
    def may_follow(self) -> bool:
        """False where that came to nothing again and again: the others have to wait then."""
        return self._tries < _TRIES

    def take_in_meeting(self) -> None:
        """Say that the others have to wait: this member does not follow them any more."""
        what = "a newcomer takes the state in a meeting, where all wait: it did not come before"
        self._parts.replica.notice(what, {"tries": self._tries})

    def begin(self, seat: Seat, following: Sequence[int], talk: Talk) -> None:
        """All members of the generation call this.

        Args:
            seat: This member's.
            following: The ranks that have no state; all others have.
            talk: With the others.

        Raises:
            TransportError: The generation broke, or was abandoned.
        """
        self.end()
        replica = self._parts.replica
        sources = [rank for rank in range(seat.size) if rank not in following]
        if seat.rank in following:
            self._tries += 1
            incoming = Incoming(self._address, len(sources), self._parts.host)
            replica.following = Following(
                replica,
                incoming,
                room_bytes=room_bytes(self._parts.job.resources.worker.memory_bytes),
                abandoned=talk.abandoned,
                caught_up=partial(self.done, seat),
                threads=self._parts.host.threads,
            )
            talk.places(incoming.place)
            return
        sharing = Sharing(
            rank=seat.rank,
            part=sources.index(seat.rank),
            parts=len(sources),
            places=talk.places(None),
            busy=lambda: replica.gradients.under_way,
            host=self._parts.host,
        )
        self._outgoing = Outgoing(replica.state, sharing)
        replica.settle = self._outgoing.settle

    def done(self, seat: Seat, step: int) -> None:
        """This member has the state before `step`, and may have a share."""
        self.lacking, self._tries = False, 0
        self._parts.report(
            MemberCaughtUp(
                member=seat.member,
                generation=seat.generation,
                first_step=seat.step,
                step=step,
            )
        )

    def end(self) -> None:
        """The generation is over: nothing more is sent or taken."""
        if self._outgoing is not None:
            self._outgoing.close()
            self._outgoing, self._parts.replica.settle = None, _at_once
        if self._parts.replica.following is not None:
            self._parts.replica.following.close()
            self._parts.replica.following = None


def _at_once() -> None:
    """Nothing is to be waited for."""
