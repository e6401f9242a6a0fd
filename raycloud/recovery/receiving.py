"""State transfer, the receiver's side: pieces of a state, each asked of whichever way is free.

It listens, and senders connect to it and say what they have (see `state_transfer`). Where the link
from a sender turns out to be thin, and another member's to be wide, pieces of that sender's part
are asked for through that member, too (see `relay`).
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from raycloud.checkpoint import decode
from raycloud.errors import TransportError
from raycloud.net.stream import Arrivals
from raycloud.planner.routes import Link, relayed
from raycloud.recovery.relay import ask_through

if TYPE_CHECKING:
    from raycloud.net.stream import Place, Stream
    from raycloud.recovery.rendezvous import Host

Tensors = dict[str, torch.Tensor]
Ask = tuple[int, int]  # from which byte on, and how many

PIECE_BYTES = 2**18  # 2 ms at 1 Gbit/s
_PIECE_S = 0.05  # a piece takes no longer: what was asked of a thin link nobody else may bring
_FIRST_BYTES = 2**15  # a piece, before it is known how long one takes
_AHEAD = 4  # pieces asked for of each sender at a time
_KNOWN_S = 0.25  # so long a link is measured before it counts as thin
_LONG_S = 1.0  # a part that takes no longer needs no relay
_TRIED = 4.0  # times the thin link's rate is thought of one that was not measured
_UNKNOWN_S = 3.0  # a part that takes longer is worth trying a member whose link was not measured
_LARGEST_BYTES = 2**40
ASK = struct.Struct(">QI")
DONE, HURRY = (0, 0), (1, 0)  # all is here; from now on all others wait


class _Part:
    """What one or several senders have: with memory for it, and what of it was asked for."""

    def __init__(self, told: Mapping[str, Any]) -> None:
        self.layout = told["layout"]
        self.tensors = room_for(told)
        self.row = Row(self.tensors.values())
        self.next, self.missing = 0, self.row.size
        self.again: deque[Ask] = deque()  # pieces that somebody was asked for, and did not bring


@dataclass(slots=True)
class _Pace:
    """How fast bytes come over one stream, from the first word on."""

    began_s: float
    got_bytes: int = 0
    asked_bytes: int = 0  # and not got

    def bytes_per_s(self, now_s: float) -> float:
        """At most: as if the next piece were here now; infinite before it is known."""
        took_s = now_s - self.began_s
        due = self.got_bytes or self.asked_bytes
        return due / took_s if took_s >= _KNOWN_S else math.inf


class Receiver:
    """Takes a state from so many `senders`, piece by piece, each of which connects to `place`."""

    def __init__(self, address: str, senders: int, host: Host) -> None:
        self._turn = host.threads.condition()
        self._host = host
        self._parts: dict[int, _Part] = {}
        self._values: Any = None
        self._left, self._over, self._hurried = senders, False, False
        self._error: TransportError | None = None
        self._piece_bytes = min(PIECE_BYTES, host.sockets.chunk_bytes)
        self._rank = -1
        self._doors: tuple[Place, ...] = ()
        self._paces: dict[int, _Pace] = {}  # by rank, of what it sends itself
        self._part_of: dict[int, _Part] = {}
        self._through: dict[int, int] = {}  # by sender, the member that was asked to relay
        self._relays: set[Stream] = set()
        self._taken = False
        self._notice: Callable[[str, Mapping[str, Any]], None] = lambda _what, _detail: None
        self._arrivals = Arrivals(
            address, senders, self._receive, self._fail, host.threads, host.sockets
        )
        self.place = self._arrivals.place

    def relay(
        self,
        rank: int,
        doors: Sequence[Place],
        notice: Callable[[str, Mapping[str, Any]], None],
    ) -> None:
        """From now on a member may pass on what another one sends: see `relay.Relay`.

        Args:
            rank: This member's.
            doors: Where members pass on what others send, by rank.
            notice: Told of each that is asked to.
        """
        with self._turn:
            self._rank, self._doors, self._notice = rank, tuple(doors), notice

    def wait(self, timeout_s: float = 0.0) -> bool:
        """Whether everything is here, within `timeout_s`; `TransportError`: it will not come."""
        with self._turn:
            self._turn.wait_for(lambda: self._error or self._left == 0, timeout_s)
            if self._error is not None and self._left:
                raise self._error
            return self._left == 0

    def take(self) -> tuple[Tensors, Mapping[str, Any]]:
        """The tensors, each with memory of its own, and the plain values, once all is whole."""
        with self._turn:
            parts = [self._parts[number] for number in sorted(self._parts)]
            self._parts, self._part_of, self._doors, self._taken = {}, {}, (), True
        return {n: t for part in parts for n, t in part.tensors.items()}, decode(self._values)

    def hurry(self) -> None:
        """From now on all others wait for it; a sender that connects later is told so, too."""
        with self._turn:
            self._hurried = True
            relays = tuple(self._relays)
        for stream in (*self._arrivals.streams, *relays):
            with suppress(TransportError):  # who has sent everything has hung up
                stream.give(ASK.pack(*HURRY))

    def close(self) -> None:
        """Nothing more is taken."""
        with self._turn:
            self._over = True
            relays = tuple(self._relays)
            self._turn.notify_all()
        self._arrivals.close()
        for stream in relays:
            stream.hang_up()

    def _fail(self, error: TransportError) -> None:
        with self._turn:
            self._error, self._over = self._error or error, True
            self._turn.notify_all()

    def _receive(self, rank: int, stream: Stream) -> None:
        part = self._part(stream.hear())
        pace = _Pace(self._host.clock.monotonic_s())
        with self._turn:
            self._paces[rank], self._part_of[rank] = pace, part
        if self._bring(stream, part, pace):
            with self._turn:
                self._left -= 1
                self._turn.notify_all()

    def _bring(self, stream: Stream, part: _Part, pace: _Pace) -> bool:
        """Ask for piece after piece of a part, until all are here; False: others have failed."""
        with self._turn:
            hurried = self._hurried
        if hurried:
            stream.give(ASK.pack(*HURRY))
        asked: deque[Ask] = deque()
        try:
            while True:
                while len(asked) < _AHEAD and (ask := self._next(part, pace)) is not None:
                    asked.append(ask)
                    stream.give(ASK.pack(*ask))
                if asked:
                    self._fill(stream, part, *asked[0])
                    pace.got_bytes += asked[0][1]
                    pace.asked_bytes -= asked.popleft()[1]
                    self._look()
                elif self._all_brought(part):
                    break
        finally:
            with self._turn:
                part.again.extend(asked)
                self._turn.notify_all()
        if part.missing:
            return False
        stream.give(ASK.pack(*DONE))
        return True

    def _all_brought(self, part: _Part) -> bool:
        """Wait for those pieces which others were asked for, or for one that they give back."""
        with self._turn:
            self._turn.wait_for(lambda: self._over or part.missing == 0 or part.again)
            return self._over or part.missing == 0

    def _part(self, told: Mapping[str, Any]) -> _Part:
        """What this sender has, once one of those that have the same has told what that is."""
        number = told.get("part", 0)
        with self._turn:
            if self._taken:  # a relay has come too late
                raise TransportError("the state is here")
            if told.get("tensors") is not None and number not in self._parts:
                self._parts[number] = _Part(told)
                if told.get("values") is not None:
                    self._values = told["values"]
                self._turn.notify_all()
            self._turn.wait_for(lambda: self._over or number in self._parts)
            if number not in self._parts:
                raise TransportError("nobody has told what the state consists of")
            part = self._parts[number]
            if told.get("layout") != part.layout:
                raise TransportError("two members are to give the same state, and differ in it")
            return part

    def _next(self, part: _Part, pace: _Pace) -> Ask | None:
        """The next piece of a part that nobody was asked for."""
        at_once = pace.bytes_per_s(self._host.clock.monotonic_s()) * _PIECE_S
        most = min(max(at_once, _FIRST_BYTES), self._piece_bytes)
        if not pace.got_bytes:
            most = min(_FIRST_BYTES, self._piece_bytes)
        with self._turn:
            if part.again:
                ask = part.again.popleft()
            else:
                start = part.next
                part.next = min(start + int(most), part.row.size)
                ask = start, part.next - start
            pace.asked_bytes += ask[1]
            return ask if ask[1] else None

    def _fill(self, stream: Stream, part: _Part, start: int, count: int) -> None:
        places = part.row.places(start, start + count)
        if len(places) == 1:
            stream.receive(places[0])
        else:
            whole, at = memoryview(bytearray(count)), 0
            stream.receive(whole)
            for place in places:
                place[:] = whole[at : at + len(place)]
                at += len(place)
        with self._turn:
            part.missing -= count
            if part.missing == 0:
                self._turn.notify_all()

    # ---- through others

    def _look(self) -> None:
        """Let a member relay what comes over a thin link, where that is worth it."""
        with self._turn:
            found = None if self._over or not self._doors else self._thin()
        if found is not None:
            source, third = found
            self._host.threads.thread(self._ask_through, source, third, name="through").start()

    def _thin(self) -> tuple[int, int] | None:
        """The sender whose part takes longest, and who is to relay it; None: none is."""
        now_s = self._host.clock.monotonic_s()
        rates = {rank: pace.bytes_per_s(now_s) for rank, pace in self._paces.items()}
        left_s = {
            rank: part.missing / rates[rank]
            for rank, part in self._part_of.items()
            if rank not in self._through
        }
        source = max(left_s, key=left_s.__getitem__, default=-1)
        if source < 0 or left_s[source] < _LONG_S:
            return None
        widest = max((rate for rate in rates.values() if rate < math.inf), default=0.0)
        links = {(source, self._rank): rates[source]}
        for third in range(len(self._doors)):
            if third in {source, self._rank}:
                continue
            # Who relays already has less of its link left.
            shares = 1 + sum(third == one for one in self._through.values())
            if third in rates:
                links[third, self._rank] = min(rates[third], widest) / shares
            elif left_s[source] >= _UNKNOWN_S:
                links[third, self._rank] = _TRIED * rates[source] / shares
            else:
                continue
            links[source, third] = max(widest, links[third, self._rank])
        by = relayed(
            {_named(pair): Link(bytes_per_s=rate) for pair, rate in links.items()},
            str(source),
            str(self._rank),
            self._part_of[source].missing,
            piece_bytes=self._piece_bytes,
        )
        if by is None:
            return None
        self._through[source] = int(by)
        return source, int(by)

    def _ask_through(self, source: int, third: int) -> None:
        """The same pieces, by another way; where it breaks they are asked for as before."""
        told = {"from": source, "bytes_per_s": round(self._rate(source))}
        try:
            with closing(ask_through(self._doors[third], self._rank, source, self._host)) as stream:
                with self._turn:
                    if self._over:
                        return
                    self._relays.add(stream)
                try:
                    part = self._part(stream.hear())
                    self._notice(f"the state comes through the member of rank {third}, too", told)
                    self._bring(stream, part, _Pace(self._host.clock.monotonic_s()))
                finally:
                    with self._turn:
                        self._relays.discard(stream)
        except TransportError as error:
            if not (self._over or self._taken):
                self._notice("a relay of the state ended", {**told, "why": str(error)})

    def _rate(self, rank: int) -> float:
        rate = self._paces[rank].bytes_per_s(self._host.clock.monotonic_s())
        return rate if rate < math.inf else 0.0


def _named(pair: tuple[int, int]) -> tuple[str, str]:
    return str(pair[0]), str(pair[1])


def described(tensors: Mapping[str, torch.Tensor]) -> list[list[Any]]:
    """Name, type and shape of each, for a header."""
    return [[n, str(t.dtype).removeprefix("torch."), list(t.shape)] for n, t in tensors.items()]


def room_for(told: Mapping[str, Any]) -> Tensors:
    """Memory for the tensors of a header; `TransportError`: it does not describe any."""
    found: Tensors = {}
    left_bytes = _LARGEST_BYTES
    for one in told.get("tensors", ()):
        match one:
            case [str(name), str(kind), [*shape]] if all(type(n) is int and n >= 0 for n in shape):
                dtype = getattr(torch, kind, None)
            case _:
                dtype = None
        if not isinstance(dtype, torch.dtype):
            raise TransportError(f"a tensor is announced that can be none: {one!r}")
        left_bytes -= math.prod(shape) * dtype.itemsize
        if left_bytes < 0:
            raise TransportError(f"more than {_LARGEST_BYTES} bytes are announced, with {one!r}")
        found[name] = torch.empty(shape, dtype=dtype)
    return found


class Row:
    """Tensors, one after the other, as one row of `size` bytes.

    They are not held still, and where they lie in one piece on the CPU not copied. Those without
    elements take no place.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = [t for t in tensors if t.numel()]
        self._ends = list(accumulate(t.numel() * t.element_size() for t in self._tensors))
        self.size = self._ends[-1] if self._ends else 0
        self._copy = -1, torch.empty(0)  # of the last one that does not lie in one piece

    def read(self, start: int, stop: int) -> memoryview:
        """The bytes of a range: where they are, or a copy if they lie in several places."""
        found = self.places(start, stop)
        return found[0] if len(found) == 1 else memoryview(b"".join(found))

    def places(self, start: int, stop: int) -> list[memoryview]:
        """Where the bytes of a range lie; to be written to in tensors as `room_for` makes them."""
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
