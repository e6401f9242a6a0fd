"""Connections between members that back each other up: one to each member, and one from it."""

from __future__ import annotations

import contextlib
import threading
from functools import partial
from typing import TYPE_CHECKING

from raycloud.errors import TransportError
from raycloud.net.stream import Arrivals, connect
from raycloud.step.speculation import Backing, Notes, ring

if TYPE_CHECKING:
    from raycloud.clock import Clock
    from raycloud.net.lane import Lane
    from raycloud.net.stream import Place, Stream
    from raycloud.recovery.rendezvous import Meeting
    from raycloud.step.replica import Replica

_LOOK_UP_S = 0.25


class Backups:
    """A member's two connections in a generation, opened and heard beside the training.

    At most `most` micro-batches are computed by another member as well.
    """

    def __init__(
        self, replica: Replica, address: str, lane: Lane, *, most: int, clock: Clock
    ) -> None:
        """Wait for the backup; nobody knows the place yet."""
        self._replica, self._lane = replica, lane
        self._backing = Backing(most=most, clock=clock, abandoned=lane.abandoned)
        self._turn = threading.Lock()
        self._to_primary: Notes | None = None
        self._closed = False
        missing = partial(self._missing, "the backup of this member")
        self._arrivals = Arrivals(address, 1, self._answer, missing)
        replica.backing = self._backing

    def begin(self, meeting: Meeting) -> None:
        """Tell the place, and connect to whom this member backs up; all members call this.

        Raises:
            TransportError: The generation broke, or was abandoned.
        """
        places = self._lane.gather_places(self._arrivals.place)
        primary = places[ring(meeting.nodes, len(meeting.members))[meeting.rank]]
        args = primary, meeting.rank
        threading.Thread(target=self._call, args=args, name="back-up", daemon=True).start()

    def close(self) -> None:
        """The generation is over: nothing is told or heard any more."""
        self._replica.backing = None
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

    def _missing(self, who: str, error: TransportError) -> None:
        if not self._closed:
            self._replica.notice(f"{who} is not connected: {error}", {})
