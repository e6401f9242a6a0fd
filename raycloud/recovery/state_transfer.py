"""Tensors as bytes: what is told of them, room for them, and any range of them in a row."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from raycloud.checkpoint import decode, encode
from raycloud.errors import TransportError
from raycloud.net.stream import SILENT_S, Arrivals, connect
from raycloud.net.transport import Abandoned

if TYPE_CHECKING:
    import threading

    from raycloud.net.stream import Place, Stream
    from raycloud.recovery.quorum import Talk
    from raycloud.recovery.rendezvous import Host
    from raycloud.step.stateful import ReplicaState

_LARGEST_BYTES = 2**40

Tensors = dict[str, torch.Tensor]


def described(tensors: Mapping[str, torch.Tensor]) -> list[list[Any]]:
    """Name, type and shape of each, for a header."""
    return [[n, str(t.dtype).removeprefix("torch."), list(t.shape)] for n, t in tensors.items()]


def room_for(told: Mapping[str, Any]) -> Tensors:
    """Room for the tensors of a header.

    Raises:
        TransportError: It does not describe any.
    """
    found: Tensors = {}
    room = _LARGEST_BYTES
    for one in told.get("tensors", ()):
        match one:
            case [str(name), str(kind), [*shape]] if all(type(n) is int and n >= 0 for n in shape):
                dtype = getattr(torch, kind, None)
            case _:
                dtype = None
        if not isinstance(dtype, torch.dtype):
            raise TransportError(f"a tensor is announced that can be none: {one!r}")
        room -= math.prod(shape) * dtype.itemsize
        if room < 0:
            raise TransportError(f"more than {_LARGEST_BYTES} bytes are announced, with {one!r}")
        found[name] = torch.empty(shape, dtype=dtype)
    return found


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Those of one that lies on the CPU, in one piece."""
    flat = tensor.reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


class Row:
    """Tensors, one after the other, as one row of bytes.

    Args:
        tensors: In their order. They are not held still, and where they lie in one piece on the CPU
            not copied.

    Attributes:
        size: Bytes of all.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        """Lay them out; those without elements take no place."""
        self._tensors = [t for t in tensors if t.numel()]
        self._ends = list(accumulate(t.numel() * t.element_size() for t in self._tensors))
        self.size = self._ends[-1] if self._ends else 0
        self._copy = -1, torch.empty(0)  # of the last one that does not lie in one piece

    def read(self, start: int, stop: int) -> memoryview:
        """The bytes of a range: where they are, or a copy if they lie in several places."""
        found = [self._bytes(*part) for part in self._parts(start, stop)]
        return found[0] if len(found) == 1 else memoryview(b"".join(found))

    def places(self, start: int, stop: int) -> list[memoryview]:
        """Where the bytes of a range are to be written, in tensors as `room_for` makes them."""
        return [self._bytes(*part) for part in self._parts(start, stop)]

    def _parts(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Which tensors a range goes through, and for each from which of its bytes to which."""
        at = bisect_right(self._ends, start)
        while start < stop:
            before = self._ends[at - 1] if at else 0
            end = min(stop, self._ends[at])
            yield at, start - before, end - before
            start, at = end, at + 1

    def _bytes(self, at: int, start: int, stop: int) -> memoryview:
        tensor = self._tensors[at]
        if not tensor.is_contiguous():
            copy = self._copy
            if copy[0] != at:
                copy = self._copy = at, tensor.contiguous()
            tensor = copy[1]
        piece = tensor.reshape(-1).view(torch.uint8)[start:stop]
        found: memoryview = piece.to("cpu").numpy().data
        return found


PIECE_BYTES = 2**18  # 2 ms at 1 Gbit/s
_AHEAD = 4  # pieces asked for of each at a time: nobody waits for the next word
_MOST_GIVERS = 8
_ASKED = struct.Struct(">QI")  # from which byte on, and how many; none: all is here
_LOOK_UP_S = 0.05


def hand_over(
    state: ReplicaState,
    *,
    givers: Sequence[int],
    takers: Sequence[int],
    address: str,
    talk: Talk,
    host: Host,
) -> None:
    """Give the state to those who take it; all members call this.

    Args:
        state: This member's; it must not change meanwhile.
        givers: Ranks that have it, all the same; what is no tensor is the first one's.
        takers: Ranks, in order, whose state becomes theirs.
        address: This node's, that the others can reach.
        talk: With them.
        host: Where threads and connections come from.

    Raises:
        TransportError: The meeting broke, or was abandoned; this member's state is as it was.
    """
    rank = talk.transport.rank
    if rank in takers:
        with closing(Taking(address, len(sources(givers, takers.index(rank))), host)) as taking:
            talk.places(taking.place)
            state.load(*taking.result(talk.abandoned))
        return
    places = [p for at, p in enumerate(talk.places(None)) if rank in sources(givers, at)]
    if places:
        with closing(Giving(state, rank, places, host, tells=rank == givers[0])) as giving:
            giving.finish(talk.abandoned)


def sources(givers: Sequence[int], taker: int) -> tuple[int, ...]:
    """From whom a taker has it: the first and, where there are many, some of the others in turn.

    >>> sources((0, 2, 5), 1), sources(range(10), 1)
    ((0, 2, 5), (0, 8, 9, 1, 2, 3, 4, 5))
    """
    if len(givers) <= _MOST_GIVERS:
        return tuple(givers)
    first, *others = givers
    begin, count = taker * (_MOST_GIVERS - 1), _MOST_GIVERS - 1
    return (first, *(others[(begin + k) % len(others)] for k in range(count)))


class Giving:
    """This member's part in giving its state, as it is, to each that asks for pieces of it.

    Args:
        state: Whose.
        rank: This member's.
        places: Where those listen that ask.
        host: Where threads and connections come from.
        tells: It says what the state consists of.
    """

    def __init__(
        self,
        state: ReplicaState,
        rank: int,
        places: Sequence[Place],
        host: Host,
        *,
        tells: bool,
    ) -> None:
        """Connect, and answer."""
        # An optimizer keeps its tensors in the order in which it got them: not all got them alike.
        tensors = dict(sorted(state.tensors().items()))
        listed = described(tensors)
        self._tensors, self._rank, self._sockets = tensors, rank, host.sockets
        self._told = {
            "layout": hashlib.sha256(json.dumps(listed).encode()).hexdigest(),
            "tensors": listed if tells else None,
            "values": encode(state.values()) if tells else None,
        }
        self._turn = host.threads.condition()
        self._left, self._over = len(places), False
        self._error: TransportError | None = None
        self._streams: list[Stream] = []
        for place in places:
            host.threads.thread(self._serve, place, name="give").start()

    def finish(self, abandoned: Callable[[], bool]) -> None:
        """Wait until all have all of it.

        Raises:
            TransportError: One broke off, or the generation was abandoned.
        """
        _wait(self._turn, lambda: self._error or self._left == 0, abandoned)
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Nothing more is sent."""
        with self._turn:
            self._over = True
            streams = list(self._streams)
        for stream in streams:
            stream.hang_up()

    def _serve(self, place: Place) -> None:
        error: TransportError | None = None
        try:
            with closing(connect(place, self._rank, self._sockets)) as stream:
                self._give(stream)
        except TransportError as broken:
            error = broken
        except Exception as broken:  # noqa: BLE001 - the last line before the thread's end
            error = TransportError(f"the state could not be given: {broken}")
        with self._turn:
            self._error = self._error or error
            self._left -= error is None
            self._turn.notify_all()

    def _give(self, stream: Stream) -> None:
        with self._turn:
            self._streams.append(stream)
            if self._over:
                return
        stream.send_at_once()
        stream.tell(self._told)
        row = Row(self._tensors.values())
        while True:
            while not stream.heard(SILENT_S):
                pass  # a slower one is still sending what is missing
            start, count = _ASKED.unpack(stream.take(_ASKED.size))
            if count == 0:
                return
            if count > self._sockets.chunk_bytes or start + count > row.size:
                raise TransportError(f"{count} bytes from {start} on of {row.size} are asked")
            stream.send(row.read(start, start + count))


class Taking:
    """A state that comes from several members, piece by piece.

    Args:
        address: This node's, that they can reach.
        givers: How many give it.
        host: Where threads and connections come from.

    Attributes:
        place: Where they are to connect.
    """

    def __init__(self, address: str, givers: int, host: Host) -> None:
        """Listen, and take what comes."""
        self._turn = host.threads.condition()
        self._tensors: Tensors = {}
        self._values: Any = None
        self._layout = ""
        self._row: Row | None = None  # known once one has told what there is
        self._next = self._missing = 0  # the next byte to be asked for, and how many are not here
        self._left, self._over = givers, False
        self._error: TransportError | None = None
        self._piece_bytes = min(PIECE_BYTES, host.sockets.chunk_bytes)
        self._arrivals = Arrivals(
            address, givers, self._take, self._fail, host.threads, host.sockets
        )
        self.place = self._arrivals.place

    def result(self, abandoned: Callable[[], bool]) -> tuple[Tensors, Mapping[str, Any]]:
        """The tensors, each with memory of its own, and the plain values, once all is here.

        Raises:
            TransportError: One broke off, or the generation was abandoned.
        """
        _wait(self._turn, lambda: self._error or self._left == 0, abandoned)
        if self._error is not None:
            raise self._error
        return self._tensors, decode(self._values)

    def close(self) -> None:
        """Nothing more is taken."""
        with self._turn:
            self._over = True
            self._turn.notify_all()
        self._arrivals.close()

    def _fail(self, error: TransportError) -> None:
        with self._turn:
            self._error, self._over = self._error or error, True
            self._turn.notify_all()

    def _take(self, _: int, stream: Stream) -> None:
        stream.send_at_once()
        row = self._learn(stream.hear())
        asked: deque[tuple[int, int]] = deque()
        while True:
            while len(asked) < _AHEAD and (piece := self._piece(row)) is not None:
                stream.give(_ASKED.pack(piece[0], piece[1] - piece[0]))
                asked.append(piece)
            if not asked:
                break
            self._fill(stream, row, *asked.popleft())
        with self._turn:
            self._turn.wait_for(lambda: self._over or self._missing == 0)
            if self._missing:
                return  # another one has failed
        stream.give(_ASKED.pack(0, 0))
        with self._turn:
            self._left -= 1
            self._turn.notify_all()

    def _learn(self, told: Mapping[str, Any]) -> Row:
        """What there is, once the one who tells has told it."""
        with self._turn:
            if self._row is None and told.get("tensors") is not None:
                self._tensors, self._values = room_for(told), told["values"]
                self._layout = told["layout"]
                self._row = Row(self._tensors.values())
                self._missing = self._row.size
                self._turn.notify_all()
            self._turn.wait_for(lambda: self._over or self._row is not None)
            if self._row is None:
                raise TransportError("nobody has told what the state consists of")
            if told.get("layout") != self._layout:
                raise TransportError("two members are to give the same state, and differ in it")
            return self._row

    def _piece(self, row: Row) -> tuple[int, int] | None:
        """The next that nobody was asked for."""
        with self._turn:
            start, self._next = self._next, min(self._next + self._piece_bytes, row.size)
            return (start, self._next) if start < self._next else None

    def _fill(self, stream: Stream, row: Row, start: int, stop: int) -> None:
        places = row.places(start, stop)
        if len(places) == 1:
            stream.receive(places[0])
        else:
            whole, at = memoryview(bytearray(stop - start)), 0
            stream.receive(whole)
            for place in places:
                place[:] = whole[at : at + len(place)]
                at += len(place)
        with self._turn:
            self._missing -= stop - start
            if self._missing == 0:
                self._turn.notify_all()


def _wait(
    turn: threading.Condition, holds: Callable[[], Any], abandoned: Callable[[], bool]
) -> None:
    """Until something holds that others tell of, without ever being stuck in it."""
    with turn:
        while not turn.wait_for(holds, _LOOK_UP_S):
            if abandoned():
                raise Abandoned("the generation was abandoned while a state was handed over")
