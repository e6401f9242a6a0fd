"""Catch-up: a newcomer follows the others, and computes nothing, until it has their state.

It takes part in each exchange with nothing of its own, and keeps what the exchange brings. Once the
state is here, as it was when the newcomer came, it commits what it has kept, step by step, while
the others compute; each commit is bit for bit theirs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from raycloud.events import MemberCaughtUp
from raycloud.net.transport import Abandoned
from raycloud.recovery.receiving import Receiver
from raycloud.recovery.relay import Relay
from raycloud.recovery.state_transfer import Beside, Sender
from raycloud.step.device import room_bytes
from raycloud.step.stateful import Commit, Sums

if TYPE_CHECKING:
    import threading
    from collections.abc import Sequence

    import torch

    from raycloud.events import Event
    from raycloud.net.lane import Lane
    from raycloud.order import Skip
    from raycloud.recovery.rendezvous import Host, Meeting
    from raycloud.step.replica import Replica
    from raycloud.threads import Threads

_LEAST_STEPS = 2  # committed in each step of the others: one more than they do
_LOOK_UP_S = 0.05
_TRIES = 3
_THREE = 3  # a sender, a receiver, and one that may relay


class Follower:
    """What a replica without the state has kept, and how it catches up.

    What is kept is bounded: where there is no more room, the others wait in their exchange until
    the state is here and all that was kept is committed.

    Args:
        replica: Whose; it has the state once `caught_up` is called with the step to commit next.
        incoming: The state as it is before the first step that is kept.
        room_bytes: How much may be kept, and one step more.
        abandoned: Says that the generation is over.
        caught_up: See `replica`.
        threads: Where the state is read.
    """

    def __init__(
        self,
        replica: Replica,
        incoming: Receiver,
        *,
        room_bytes: int,
        abandoned: Callable[[], bool],
        caught_up: Callable[[int], None],
        threads: Threads,
    ) -> None:
        self._threads = threads
        self._replica, self._incoming = replica, incoming
        self._room_bytes = room_bytes
        self._abandoned, self._caught_up = abandoned, caught_up
        self._kept: deque[Sums] = deque()
        self._room: tuple[torch.Tensor, ...] = ()  # for the next sums
        self._loading: threading.Event | None = None  # set once that has come to its end
        self._failed: BaseException | None = None
        self._loaded = False

    def keep(self, step: Commit) -> None:
        """Keep a step instead of committing it; afterwards the replica may have caught up.

        Raises:
            TransportError: The state will not come, or the generation was abandoned.
        """
        room, self._room = self._room or self._replica.gradients.room(), ()
        self._keep(
            Sums(
                step=step,
                gradients=self._replica.gradients.sums(room),
                statistics=self._replica.statistics.sums,
                averaged=self._replica.statistics.averaged,
            )
        )

    def keep_nothing(self, step: int, skips: tuple[Skip, ...], steps: int = 1) -> None:
        """The same, of what changes nothing: only that it does not count."""
        self._keep(Sums(step=Commit(step=step, count=0, steps=steps, skips=skips)))

    def keep_measured(self, steps: int, value: float) -> None:
        """What was measured after so many steps: the schedule goes by it at its turn."""
        self._kept.append(Sums(step=Commit(step=steps - 1, count=0), measured=value))

    def _keep(self, sums: Sums) -> None:
        replica = self._replica
        replica.gradients.clear()
        self._kept.append(sums)
        if sum(one.bytes for one in self._kept) > self._room_bytes:
            self._wait()
        if self._loaded and len(self._kept) == 1:
            self._commit()
        if self._loaded and not self._kept:
            self.close()
            replica.following = None
            self._caught_up(sums.step.step + sums.step.steps)

    def catch_up(self, arrived: Callable[[], bool]) -> None:
        """Commit what is kept until the others' exchange has `arrived`; `keep` may follow.

        Room for what is kept next is made first: as long as that took, they would wait at the
        beginning of the next step. `TransportError`: the state will not come.
        """
        self._room = self._room or self._replica.gradients.room()
        if not self._load():
            return
        for done in range(len(self._kept)):
            if done >= _LEAST_STEPS and arrived():
                break
            self._commit()

    def close(self) -> None:
        """The state is not waited for any more; nobody writes to the replica from here."""
        self._incoming.close()
        if self._loading is not None:
            self._loading.wait()

    def _wait(self) -> None:
        what = "the others wait until a newcomer has the state: no more room to keep their steps"
        self._replica.notice(what, {"kept": len(self._kept), "room_bytes": self._room_bytes})
        self._incoming.hurry()
        while not self._load(_LOOK_UP_S):
            if self._abandoned():
                raise Abandoned("the generation was abandoned before the state had come")
        while self._kept:
            self._commit()

    def _load(self, timeout_s: float = 0.0) -> bool:
        """Whether the replica has the state; it is read into it beside the steps of the others."""
        if self._loaded:
            return True
        if self._loading is None:
            if self._incoming.wait(timeout_s):
                self._loading = self._threads.event()
                self._threads.thread(self._read, self._loading, name="load").start()
        elif self._loading.wait(timeout_s):
            if self._failed is not None:
                raise self._failed
            self._replica.statistics.settle()
            self._loaded = True
        return self._loaded

    def _read(self, over: threading.Event) -> None:
        try:
            self._replica.state.load(*self._incoming.take())
        except BaseException as error:  # noqa: BLE001 - raised to who waits
            self._failed = error
        finally:
            over.set()

    def _commit(self) -> None:
        """The oldest that is kept; an exchange under way is not disturbed."""
        replica, sums = self._replica, self._kept.popleft()
        if sums.measured is not None:
            replica.step_schedule(sums.step.step + 1, sums.measured)
            return
        if sums.gradients:
            replica.gradients.install_gradients(sums.gradients)
            replica.commit_parts(replace(sums.step, sums=sums))
        else:
            replica.history.skips += sums.step.skips


class Newcomers:
    """Streams a generation's state to its newcomers, or is one of them.

    `reserved_bytes` is memory that this process is to get along with (None: what there is);
    `report` is told that this member has caught up.

    Attributes:
        lacking: This member has not been where others computed, or has no state of theirs yet.
    """

    def __init__(
        self,
        replica: Replica,
        address: str,
        *,
        host: Host,
        reserved_bytes: int | None,
        report: Callable[[Event], None],
    ) -> None:
        self._replica, self._address, self._host = replica, address, host
        self._reserved_bytes, self._report = reserved_bytes, report
        self._sender: Sender | None = None
        self._relay: Relay | None = None
        self._tries = 0
        self.lacking = True

    @property
    def may_follow(self) -> bool:
        """False where that came to nothing again and again: the others have to wait then."""
        return self._tries < _TRIES

    def take_in_meeting(self) -> None:
        """Say that the others have to wait: this member does not follow them any more."""
        what = "a newcomer takes the state in a meeting, where all wait: it did not come before"
        self._replica.notice(what, {"tries": self._tries})

    def begin(self, meeting: Meeting, step: int, followers: Sequence[int], lane: Lane) -> None:
        """Begin to stream the state, as before `step`, to `followers`: the ranks that have none.

        All members of the generation call this. `TransportError`: it broke, or was abandoned.
        """
        self.end()
        replica, rank = self._replica, meeting.rank
        senders = [one for one in range(len(meeting.members)) if one not in followers]
        relay = None
        if len(meeting.members) >= _THREE:
            relay = self._relay = Relay(self._address, self._host)
        doors = [] if relay is None else lane.gather_places(relay.place)
        if rank in followers:
            self._tries += 1
            incoming = Receiver(self._address, len(senders), self._host)
            replica.following = Follower(
                replica,
                incoming,
                room_bytes=room_bytes(self._reserved_bytes),
                abandoned=lane.abandoned,
                caught_up=partial(self.done, meeting, step),
                threads=self._host.threads,
            )
            lane.gather_places(incoming.place)
            if relay is not None:
                relay.begin(rank, doors, None)
                incoming.relay(rank, doors, replica.notice)
            return
        beside = Beside(
            part=senders.index(rank),
            parts=len(senders),
            busy=lambda: replica.gradients.under_way,
        )
        places = lane.gather_places(None)
        self._sender = Sender(replica.state, rank, places, self._host, beside=beside)
        replica.settle = self._sender.settle
        if relay is not None:
            relay.begin(rank, doors, self._sender.serve)

    def done(self, meeting: Meeting, first_step: int, step: int) -> None:
        """This member has the state before `step`, and may have a share."""
        self.lacking, self._tries = False, 0
        self._report(
            MemberCaughtUp(
                member=meeting.members[meeting.rank],
                generation=meeting.generation,
                first_step=first_step,
                step=step,
            )
        )

    def end(self) -> None:
        """The generation is over: nothing more is sent, passed on or taken."""
        if self._relay is not None:
            self._relay.close()
            self._relay = None
        if self._sender is not None:
            self._sender.close()
            self._sender, self._replica.settle = None, lambda: None
        if self._replica.following is not None:
            self._replica.following.close()
            self._replica.following = None
