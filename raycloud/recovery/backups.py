"""Connections between members that back each other up: one to each member, and one from it."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from typing import TYPE_CHECKING

from raycloud.errors import TransportError
from raycloud.net.stream import Arrivals, connect
from raycloud.step.speculation import Backing, Notes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from raycloud.clock import Clock
    from raycloud.net.lane import Lane
    from raycloud.net.stream import Place, Stream
    from raycloud.recovery.rendezvous import Meeting
    from raycloud.step.replica import Replica

_LOOK_UP_S = 0.25


def ring(nodes: Sequence[str], size: int) -> tuple[int, ...]:
    """For each rank the one that it backs up: on another node, unless one has more than half.

    A machine that is slow is slow for all that run on it. All know it by arithmetic: in the order
    of nodes, as many further as the largest node has members.

    Args:
        nodes: Where the members are, by rank; empty where that is not known.
        size: How many there are.

    >>> ring((), 3), ring(("a", "a", "b", "b"), 4), ring((), 1)
    ((1, 2, 0), (2, 3, 0, 1), (0,))
    """
    order = sorted(range(size), key=lambda rank: (nodes[rank] if nodes else "", rank))
    most = max(Counter(nodes).values(), default=1)
    further = 1 if most == size else most
    after = {rank: order[(at + further) % size] for at, rank in enumerate(order)}
    return tuple(after[rank] for rank in range(size))


class Links:
    """A member's two connections in a generation, opened and heard beside the training.

    Args:
        backing: What uses them.
        address: This node's, that other members can reach.
        notice: Told why one could not be opened.

    Attributes:
        place: Where its backup is to connect.
    """

    def __init__(self, backing: Backing, address: str, notice: Callable[[str], None]) -> None:
        """Wait for the backup; nobody knows the place yet."""
        self._backing, self._notice = backing, notice
        self._turn = threading.Lock()
        self._to_primary: Notes | None = None
        self._closed = False
        self._arrivals = Arrivals(address, 1, self._answer, self._no_backup)
        self.place = self._arrivals.place

    def open(self, primary: Place, rank: int) -> None:
        """Connect to whom this member of `rank` backs up; returns at once."""
        call = threading.Thread(target=self._call, args=(primary, rank), name="back-up")
        call.daemon = True
        call.start()

    def close(self) -> None:
        """Nothing is told or heard any more."""
        with self._turn:
            self._closed = True
        self._arrivals.close()
        if self._to_primary is not None:
            self._to_primary.close()

    def _call(self, primary: Place, rank: int) -> None:
        try:
            notes = Notes(connect(primary, rank))
        except TransportError as error:
            self._missing("the member that this one backs up", error)
            return
        with self._turn:
            if self._closed:
                notes.close()
            else:
                self._to_primary = self._backing.primary = notes

    def _answer(self, _: int, stream: Stream) -> None:
        notes = self._backing.backup = Notes(stream)
        try:
            with contextlib.suppress(TransportError):
                while not self._closed:
                    self._backing.answer(notes.hear(_LOOK_UP_S))
        finally:
            self._backing.backup = None
            self._backing.tail.forsaken()

    def _no_backup(self, error: TransportError) -> None:
        self._missing("the backup of this member", error)

    def _missing(self, who: str, error: TransportError) -> None:
        if not self._closed:
            self._notice(f"{who} is not connected: {error}")


class Backups:
    """A member's part in the backups of each generation that it is in.

    Args:
        replica: This member's.
        address: This node's, that other members can reach.
        most: Micro-batches that another member may compute as well; 0: none.
        clock: For the seconds.
    """

    def __init__(self, replica: Replica, address: str, *, most: int, clock: Clock) -> None:
        self._replica, self._address, self._most, self._clock = replica, address, most, clock
        self._links: Links | None = None

    def begin(self, meeting: Meeting, lane: Lane) -> None:
        """All members of the generation call this.

        Raises:
            TransportError: The generation broke, or was abandoned.
        """
        self.end()
        replica, size = self._replica, len(meeting.members)
        if not self._most or size == 1:
            return
        backing = Backing(most=self._most, clock=self._clock, abandoned=lane.abandoned)
        links = Links(backing, self._address, lambda what: replica.notice(what, {}))
        self._links, replica.backing = links, backing
        places = lane.gather_places(links.place)
        links.open(places[ring(meeting.nodes, size)[meeting.rank]], meeting.rank)

    def end(self) -> None:
        """The generation is over."""
        self._replica.backing = None
        if self._links is not None:
            self._links.close()
            self._links = None
