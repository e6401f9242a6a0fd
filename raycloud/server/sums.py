"""What a server sums for members in lockstep: a generation's connections, once all have come."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from raycloud.errors import TransportError
from raycloud.net.served import SumTransport
from raycloud.sync.codecs import CODECS

if TYPE_CHECKING:
    from raycloud.net.stream import Stream


class Sums:
    """The generations that a server sums for; one may come while another computes.

    Calls are made one after the other.

    Attributes:
        generation: The newest that it has heard of.
    """

    def __init__(self) -> None:
        self.generation = -1
        self._coming: dict[int, socket.socket] = {}  # by rank, of the newest
        self._going: list[SumTransport] = []

    @property
    def going(self) -> bool:
        """Whether members are there, or come."""
        for rank, one in [*self._coming.items()]:
            if _is_closed(one):  # to a generation that others did not come to
                one.close()
                del self._coming[rank]
        return bool(self._coming) or any(not one.over for one in self._going)

    def check(self, generation: int) -> None:
        """`TransportError`: another one has begun since."""
        if generation < self.generation:
            raise TransportError(f"generation {generation} is over")

    def join(self, generation: int, rank: int, size: int, stream: Stream) -> None:
        """A member of a generation of so many is there; it goes on once all are."""
        if generation > self.generation:
            self._leave_out()
            self.generation = generation
        if (before := self._coming.pop(rank, None)) is not None:
            before.close()
        self._coming[rank] = stream.detach()
        if len(self._coming) < size:
            return
        coming, self._coming = self._coming, {}
        made = SumTransport(coming, codings=CODECS.__getitem__, nonce=generation % 2**32)
        self._going = [*(one for one in self._going if not one.over), made]

    def close(self) -> None:
        """Sum nothing any more."""
        self._leave_out()
        for one in self._going:
            one.close()

    def _leave_out(self) -> None:
        """Who has come, of a generation that others did not come to."""
        for one in self._coming.values():
            one.close()
        self._coming = {}


def _is_closed(one: socket.socket) -> bool:
    """Whether who is on the other side has left."""
    try:
        return one.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
