"""Notes between two members, of which one backs up the other: small, of fixed length, at once.

A note says what it is, of which step and of which pass, by its first micro-batch. Nothing that
arrives is unpickled.
"""

from __future__ import annotations

import struct
import threading
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

from raycloud.errors import TransportError

if TYPE_CHECKING:
    from raycloud.sync.stream import Stream

_NOTE = struct.Struct(">BQIId")  # kind, step, index, count, seconds


class Kind(IntEnum):
    """What a note says. The first two, and the last two, come from the member that is backed up."""

    OFFERED = 1  # a pass of `count` micro-batches, `index` the first, may be computed there as well
    BEGUN = 2  # a pass is begun; before, each micro-batch took `seconds`
    STARTED = 3  # the backup computes this one, and is likely to take `seconds`
    DONE = 4  # it has the result
    TAKEN = 5  # the backup's result counts
    REFUSED = 6  # it does not: the member has begun, or had, it itself


@dataclass(frozen=True, slots=True)
class Note:
    """One of them."""

    kind: Kind
    step: int
    index: int
    count: int = 0
    seconds: float = 0.0


class Notes:
    """One end of a connection that carries them. Several threads may `say`, one may `hear`.

    Args:
        stream: It is this one's from now on.
    """

    def __init__(self, stream: Stream) -> None:
        """Nothing was said yet."""
        self._stream = stream
        self._stream.send_at_once()
        self._turn = threading.Lock()
        self._rest = b""

    def say(self, *notes: Note) -> None:
        """Send these, in this order.

        Raises:
            TransportError: The connection broke.
        """
        with self._turn:
            self._stream.give(
                b"".join(
                    _NOTE.pack(one.kind, one.step, one.index, one.count, one.seconds)
                    for one in notes
                )
            )

    def hear(self, timeout_s: float = 0.0) -> list[Note]:
        """What has come, in order; waits at most `timeout_s` for it.

        Raises:
            TransportError: The connection broke, or what came is no note.
        """
        come = self._rest + self._stream.some(timeout_s)
        whole = len(come) - len(come) % _NOTE.size
        self._rest = come[whole:]
        return [_note(*fields) for fields in _NOTE.iter_unpack(come[:whole])]

    def hang_up(self) -> None:
        """End the connection, which another thread hears and then closes."""
        self._stream.hang_up()

    def close(self) -> None:
        """End the connection; nobody hears it."""
        self._stream.close()


def _note(kind: int, step: int, index: int, count: int, seconds: float) -> Note:
    try:
        return Note(Kind(kind), step, index, count, seconds)
    except ValueError:
        raise TransportError(f"a note of kind {kind} came, which is none") from None
