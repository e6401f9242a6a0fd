"""Servers that sum: each member sends a part of its message to each of them, and gets the sum.

A message is cut into as many parts as there are servers. All members send each part to its server,
which adds them in the order of ranks, in the type of the values, and sends the sum to all. With a
codec parts travel encoded, and the server encodes the sum once. What that loses goes to one of the
members, encoded: there it is kept like what that member's own encoding loses. So a server keeps
nothing from one message to the next, and any other may take its place.

What is small goes from member to member, as in `net.exchange`, whose frames and operations these
are. To a server a member says first what its frames are of (`Phase.OPEN`).
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import astuple
from typing import TYPE_CHECKING, Any, Protocol

import torch

from raycloud.errors import TransportError
from raycloud.net.direct import DirectTransport, DirectWork
from raycloud.net.exchange import (
    PLAIN,
    WHOLE_BYTES,
    DirectExchange,
    Frame,
    Operation,
    Phase,
    Plain,
    parts_of,
)
from raycloud.net.messages import hear, tell
from raycloud.net.sockets import answers
from raycloud.net.stream import Place, connect
from raycloud.threads import THREADS, Threads

if TYPE_CHECKING:
    from raycloud.net.direct import _Peer
    from raycloud.net.stream import Stream
    from raycloud.net.transport import Coding

HUNG_S = 0.9  # a server whose machine acknowledges nothing for so long is lost
_UNREAD_S = 6.0  # ... and one that sums may leave what has come unread for so long
_LOOK_S = 0.25  # between two looks whether servers' machines answer, while nothing comes
_ANSWERS_S = 5.0  # and one that does not say that it knows of a generation
_OPEN_BYTES = 256  # of what a member says of an operation, at most
MOST_BYTES = 2**31  # of a sum


class LostServerError(TransportError):
    """A server does not answer any more, or answers again."""


class ServedReduction(Operation):
    """A sum over members that servers make, as a member takes part in it.

    Args:
        values: This member's, shape (count,), contiguous, on any device. With a codec what encoding
            has lost of them is left there, and of the sums of some servers, one in so many members.
        total: Becomes the sum, the same on all members; may be `values` where there is no codec.
        coding: How parts travel.
        servers: How many there are; their ranks follow those of members.
    """

    def __init__(
        self, values: torch.Tensor, total: torch.Tensor, coding: Coding, servers: int
    ) -> None:
        super().__init__()
        self._values, self._total, self._coding, self._servers = values, total, coding, servers
        self._lossless = isinstance(coding, Plain)

    def start(self, exchange: DirectExchange) -> None:
        """See `Operation.start`."""
        self._first = exchange.size  # of the servers' ranks
        self._parts = parts_of(self._values, self._servers)
        self._sums = parts_of(self._total, self._servers)
        for number, part in enumerate(self._parts):
            if not part.numel():
                continue
            server, keeper = self._first + number, number % exchange.size
            told = {"coding": self._coding.name, "count": part.numel(), "keeper": keeper}
            exchange.send(self, server, Phase.OPEN, _octets(told))
            codes = self._encoded(exchange, part)
            exchange.send(self, server, Phase.PART, codes)
            self.waits_for[server, Phase.SUM] = codes.numel()
            if keeper == exchange.rank and not self._lossless:
                self.waits_for[server, Phase.LEFT] = codes.numel()

    def _encoded(self, exchange: DirectExchange, part: torch.Tensor) -> torch.Tensor:
        if self._lossless and part.device.type == "cpu":
            return part.view(torch.uint8)  # not written to before it is summed
        codes = exchange.lend(self, self._coding.bound(part.numel()))
        self._coding.encode(part, codes)
        if not self._lossless:
            self._coding.subtract(codes, part)
        return codes

    def receive(
        self, exchange: DirectExchange, rank: int, phase: Phase, payload: torch.Tensor
    ) -> None:
        """See `Operation.receive`."""
        number = rank - self._first
        into = self._parts[number] if phase is Phase.LEFT else self._sums[number].zero_()
        self._coding.add(payload, into)
        exchange.pool.give(payload)


class Sum(Operation):
    """A sum over members that a server makes, as it does.

    Args:
        told: What the first member has said of it; the others have to say the same.
        codings: Gives what encodes by its name.
    """

    def __init__(self, told: torch.Tensor, codings: Callable[[str], Coding]) -> None:
        super().__init__()
        self._told = told
        asked = json.loads(bytes(told.numpy()))
        name, self._count = str(asked["coding"]), int(asked["count"])
        self._keeper = int(asked["keeper"])
        self._coding = _plain(name) if name.startswith(PLAIN) else codings(name)
        self._came: dict[int, torch.Tensor] = {}
        self._next = 0  # the rank whose part is to be added

    def start(self, exchange: DirectExchange) -> None:
        """See `Operation.start`."""
        dtype = self._coding.dtype if isinstance(self._coding, Plain) else torch.float32
        if not 0 < self._count * dtype.itemsize <= MOST_BYTES:
            raise TransportError(f"a sum of {self._count} values was asked for")
        summed = exchange.lend(self, self._count * dtype.itemsize)
        self._values = summed.view(dtype).zero_()
        for rank in range(exchange.size):
            self.waits_for[rank, Phase.OPEN] = self._told.numel()
            self.waits_for[rank, Phase.PART] = self._coding.bound(self._count)

    def receive(
        self, exchange: DirectExchange, rank: int, phase: Phase, payload: torch.Tensor
    ) -> None:
        """See `Operation.receive`."""
        if phase is Phase.OPEN:
            if not torch.equal(payload, self._told):
                raise TransportError(f"rank {rank} asks for another sum than those before it")
            return
        self._came[rank] = payload
        while (came := self._came.pop(self._next, None)) is not None:
            self._coding.add(came, self._values)
            exchange.pool.give(came)
            self._next += 1
        if self._next == exchange.size:
            self._send(exchange)

    def _send(self, exchange: DirectExchange) -> None:
        lossless = isinstance(self._coding, Plain)
        codes = self._values.view(torch.uint8) if lossless else self._encoded(exchange)
        for rank in range(exchange.size):
            exchange.send(self, rank, Phase.SUM, codes)
        if not lossless:
            self._coding.subtract(codes, self._values)
            exchange.send(self, self._keeper, Phase.LEFT, self._encoded(exchange))

    def _encoded(self, exchange: DirectExchange) -> torch.Tensor:
        codes = exchange.lend(self, self._coding.bound(self._count))
        self._coding.encode(self._values, codes)
        return codes


class SumExchange(DirectExchange):
    """The sums of one server in one generation: members say which there are.

    Args:
        size: How many members there are.
        send: Sends a frame.
        codings: Gives what encodes by its name.
    """

    def __init__(
        self,
        size: int,
        send: Callable[[int, Phase, int, torch.Tensor], None],
        codings: Callable[[str], Coding],
    ) -> None:
        super().__init__(size, size, send)
        self._codings = codings

    def expect(self, rank: int, frame: Frame) -> torch.Tensor:
        """See `DirectExchange.expect`."""
        opens = frame.phase is Phase.OPEN and frame.operation not in self._open
        if opens and frame.length <= _OPEN_BYTES:
            return self.pool.take(frame.length)
        return super().expect(rank, frame)

    def receive(self, rank: int, frame: Frame, payload: torch.Tensor) -> list[Operation]:
        """See `DirectExchange.receive`."""
        if frame.phase is Phase.OPEN and frame.operation not in self._open:
            self._check(rank, frame, payload)
            try:
                operation = Sum(payload, self._codings)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise TransportError(f"rank {rank} asks for a sum that is none: {error}") from error
            self._begin(operation, frame.operation)
        return super().receive(rank, frame, payload)


class ServedTransport(DirectTransport):
    """See `DirectTransport`; what is not small is summed by servers.

    Args:
        rank: This member's rank in the generation.
        connections: To each other member, by rank.
        servers: Connections to servers, in the same order on all members.
        nonce: Of the generation.
        threads: Where the courier runs.
    """

    _look_s = _LOOK_S

    def __init__(
        self,
        rank: int,
        connections: Mapping[int, socket.socket],
        *,
        servers: Sequence[socket.socket],
        nonce: int = 0,
        threads: Threads = THREADS,
    ) -> None:
        self._servers, size = len(servers), len(connections) + 1
        every = {**connections, **dict(enumerate(servers, size))}
        super().__init__(rank, every, nonce=nonce, size=size, threads=threads)

    def all_reduce(self, tensor: torch.Tensor) -> DirectWork:
        """Sum over members, in place."""
        flat = tensor.view(-1)
        if flat.nbytes <= WHOLE_BYTES:
            return super().all_reduce(tensor)
        return self._begin(ServedReduction(flat, flat, Plain(flat.dtype), self._servers))

    def all_reduce_bytes(self, size: int) -> int:
        """See `transport.Transport.all_reduce_bytes`."""
        return super().all_reduce_bytes(size) if size <= WHOLE_BYTES else size

    def reduce(self, values: torch.Tensor, total: torch.Tensor, coding: Coding) -> DirectWork:
        """Sum over members, encoded; see `ServedReduction`."""
        return self._begin(ServedReduction(values, total, coding, self._servers))

    def reduce_bytes(self, count: int, coding: Coding) -> int:
        """See `transport.CodedTransport.reduce_bytes`."""
        values = torch.empty(count, device="meta")
        return sum(coding.bound(part.numel()) for part in parts_of(values, self._servers))

    def _look(self) -> None:
        """A machine is lost that owes an answer; one that does not read what came is only busy."""
        for rank in range(self.size, self.size + self._servers):
            answered = None
            with contextlib.suppress(OSError, AttributeError):  # it has ended, or this is no Linux
                answered = answers(self._peers[rank].socket)
            if answered is not None and answered.is_silent and answered.heard_s >= HUNG_S:
                raise self._lost(rank, "is silent")

    def _lost(self, rank: int, how: str) -> TransportError:
        if rank >= self.size:
            # A server leaves those that lose a member: then it is that one who is lost.
            gone = [peer.rank for peer in self._peers.values() if peer.rank < self.size]
            gone = [r for r in gone if self._peers[r].ended or _has_ended(self._peers[r].socket)]
            if not gone:
                return LostServerError(f"the connection to server {rank - self.size} {how}")
            rank, how = gone[0], "was closed"
        return super()._lost(rank, how)


class SumTransport(DirectTransport):
    """A server's connections to all members of a generation; over once one breaks, or all end.

    Args:
        connections: To all members, by rank.
        codings: Gives what encodes by its name.
        nonce: Of the generation.
        threads: Where the courier runs.
    """

    def __init__(
        self,
        connections: Mapping[int, socket.socket],
        *,
        codings: Callable[[str], Coding],
        nonce: int,
        threads: Threads = THREADS,
    ) -> None:
        self._codings, size = codings, len(connections)
        super().__init__(size, connections, nonce=nonce, size=size, threads=threads)

    @property
    def over(self) -> bool:
        """All members have left."""
        return not self._courier.is_alive()

    def _made(self, rank: int, size: int) -> DirectExchange:  # noqa: ARG002 - it has none
        return SumExchange(size, self._send, self._codings)

    def _finish(self, over: Iterable[Operation]) -> None:
        """Nobody here waits for them."""

    def _filled(self, peer: _Peer) -> None:
        super()._filled(peer)
        self._check_ended()  # a sum may have begun that it does not take part in

    def _end(self, peer: _Peer) -> None:
        super()._end(peer)
        if all(one.ended for one in self._peers.values()):
            self._broken = TransportError("all members have left")


def _has_ended(connection: socket.socket) -> bool:
    """Whether the other end has closed it, and nothing more is to be read."""
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


class SumServers(Protocol):
    """The servers that a member knows."""

    def places(self) -> Sequence[Place]:
        """Where those listen that are there now; asked of rank 0."""

    def taken(self, which: Sequence[bool]) -> None:
        """Which of these places a generation goes by."""


def reach(
    tell_all: Callable[[bytes], Sequence[bytes]],
    servers: SumServers,
    *,
    rank: int,
    size: int,
    generation: int,
) -> list[socket.socket]:
    """Connections to the servers that all members of a generation reach, in the same order.

    Args:
        tell_all: Gives the others some bytes; returns those of all, by rank, once all have told.
        servers: Rank 0's say which there are.
        rank: This member's.
        size: Number of members.
        generation: Which.

    Raises:
        LostServerError: There is none.
        TransportError: A member has left.
    """
    own = [astuple(place) for place in servers.places()] if rank == 0 else []
    places = [Place(*one) for one in json.loads(tell_all(json.dumps(own).encode())[0])]
    asked = {"do": "sum", "generation": generation, "rank": rank, "size": size}
    with ExitStack() as held:
        found = [_asked(place, rank, asked, held) for place in places]
        joined = [stream is not None and _is_joined(stream) for stream in found]
        told = tell_all(json.dumps(joined).encode())
        common = [all(of) for of in zip(*map(json.loads, told), strict=True)]
        if rank == 0:
            servers.taken(common)
        if not any(common):
            raise LostServerError("there is no server that all members reach")
        pairs = zip(found, common, strict=True)
        return [one.detach() for one, goes in pairs if goes and one is not None]


def _asked(place: Place, rank: int, asked: Mapping[str, Any], held: ExitStack) -> Stream | None:
    with contextlib.suppress(TransportError):
        stream = connect(place, rank, silent_s=_ANSWERS_S, hung_s=_UNREAD_S, timeout_s=2.0 * HUNG_S)
        held.callback(stream.close)  # unless it is taken from there
        tell(stream, asked)
        return stream
    return None


def _is_joined(stream: Stream) -> bool:
    with contextlib.suppress(TransportError):
        return "error" not in hear(stream)[0]
    return False


def _octets(told: Mapping[str, Any]) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(told).encode()), dtype=torch.uint8)


def _plain(name: str) -> Plain:
    dtype = getattr(torch, name.removeprefix(PLAIN))
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} is no type of values")
    return Plain(dtype)
