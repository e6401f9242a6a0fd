"""Direct exchange: each member owns a part of a message, sums it, and sends the sum to all.

Messages are cut into as many parts as there are members. All send each part to its owner, which
sums in the order of ranks and sends the sum to all: the bytes of a ring, in two latencies in place
of 2 (N - 1). What is small goes whole to all, in one latency. With a codec parts travel encoded,
and the owner encodes its sum once, so that all decode the same. Of two members each sends the other
all it has, which is no more bytes, takes one latency, and encodes once. What is broadcast goes from
member to member.

Here is the protocol alone, without sockets and threads: `net.direct` has those. Operations are
numbered, and all members start the same ones in the same order. A frame may come before its
operation is started here, and waits then. Of no frame more is read than is expected, or allowed.
"""

from __future__ import annotations

import struct
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

import torch

from raycloud.errors import TransportError
from raycloud.spec.sizes import PAIR

if TYPE_CHECKING:
    from raycloud.net.transport import Coding

FORMAT = 1
HEADER = struct.Struct(">2sBBIIII")  # name, format, phase, nonce, operation, bytes, CRC-32
_NAME = b"rf"
WHOLE_BYTES = 2**13  # a message of at most so many goes whole to all
_EARLY_BYTES = 2**32  # may wait here for operations that have not been started
_LARGEST_BYTES = 2**31  # of a frame: it counts them in 32 bits
PLAIN = "plain "  # before a type, the name of what does not encode
_THERE = torch.ones(1, dtype=torch.uint8)
ALIGNED = 256  # values: parts begin at multiples, so that no block of a codec is cut


class Phase(IntEnum):
    """What a frame carries."""

    PART = 0  # the sender's part of what the receiver owns; of two members, all it has
    SUM = 1  # the sum of what the sender owns; of a broadcast, that it has come to the last
    WHOLE = 2  # the sender's whole message
    OPEN = 3  # to a server: what the operation is of
    LEFT = 4  # from a server: what encoding the sum has lost


class Frame(NamedTuple):
    """A header.

    Attributes:
        phase: What the payload is.
        operation: Its number in this generation.
        length: Bytes of the payload.
        check: CRC-32 of the payload.
    """

    phase: Phase
    operation: int
    length: int
    check: int

    def pack(self, nonce: int) -> bytes:
        """Its bytes; `nonce` says of which generation it is."""
        return HEADER.pack(_NAME, FORMAT, self.phase, nonce, *self[1:])

    @classmethod
    def unpack(cls, header: bytes | memoryview, nonce: int) -> Frame:
        """The header that these bytes are.

        Raises:
            TransportError: They are none of this generation.
        """
        name, number, phase, told, operation, length, check = HEADER.unpack(header)
        if (name, number, told) != (_NAME, FORMAT, nonce):
            raise TransportError(f"a frame of another format or generation came: {bytes(header)!r}")
        if phase not in list(Phase):
            raise TransportError(f"a frame of phase {phase} came, which there is not")
        return cls(Phase(phase), operation, length, check)


class Plain:
    """Values of any type as they are."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.name = dtype, f"{PLAIN}{str(dtype).removeprefix('torch.')}"
        self.for_pair = self

    def bound(self, count: int) -> int:
        """See `Coding.bound`."""
        return count * self.dtype.itemsize

    def encode(self, values: torch.Tensor, codes: torch.Tensor) -> None:
        """See `Coding.encode`."""
        codes.view(self.dtype).copy_(values)

    def add(self, codes: torch.Tensor, to: torch.Tensor) -> None:
        """See `Coding.add`."""
        to.add_(codes.to(to.device).view(self.dtype))

    def subtract(self, codes: torch.Tensor, from_: torch.Tensor) -> None:
        """See `Coding.subtract`."""
        from_.sub_(codes.to(from_.device).view(self.dtype))


class Pool:
    """Memory that is used again: after the first steps nothing is allocated."""

    def __init__(self) -> None:
        self._free: defaultdict[int, list[torch.Tensor]] = defaultdict(list)

    def take(self, size: int) -> torch.Tensor:
        """So many bytes, of any content."""
        free = self._free[size]
        return free.pop() if free else torch.empty(size, dtype=torch.uint8)

    def give(self, some: torch.Tensor) -> None:
        """They are not needed any more."""
        self._free[some.numel()].append(some)


Send = Callable[[int, Phase, int, torch.Tensor], None]
"""Sends to a rank a frame of a phase and operation with this payload, which is `sent` later."""


class Operation:
    """One exchange on this member.

    Attributes:
        number: Among those of the generation.
        waits_for: Frames that have to come, by rank and phase, and their bytes.
        unsent: Frames that have not left.
        lent: Memory of the exchange's that it needs until it is over.
    """

    _values: torch.Tensor

    def __init__(self) -> None:
        self.number = 0
        self.lent: list[torch.Tensor] = []
        self.waits_for: dict[tuple[int, Phase], int] = {}
        self.unsent = 0

    @property
    def is_empty(self) -> bool:
        """There is nothing to exchange, on any member."""
        return self._values.numel() == 0

    @property
    def is_over(self) -> bool:
        """All has come and left."""
        return not (self.waits_for or self.unsent)

    def start(self, exchange: DirectExchange) -> None:
        """Send what can be sent, and say what is waited for."""
        raise NotImplementedError

    def receive(
        self, exchange: DirectExchange, rank: int, phase: Phase, payload: torch.Tensor
    ) -> None:
        """Take what has come, and send what can be sent now."""
        raise NotImplementedError


class Reduction(Operation):
    """A sum over members.

    Args:
        values: This member's, shape (count,), contiguous, on any device. With a codec what encoding
            has lost of them, and of the sum in the part that is owned, is left there: the residual.
        total: Becomes the sum, the same on all members; may be `values` where there is no codec.
        coding: How parts travel.
    """

    def __init__(self, values: torch.Tensor, total: torch.Tensor, coding: Coding) -> None:
        super().__init__()
        self._values, self._total, self._coding = values, total, coding
        self._lossless = isinstance(coding, Plain)
        self._came: dict[int, torch.Tensor] = {}
        self._next = 0  # the rank whose part is to be added

    def start(self, exchange: DirectExchange) -> None:
        """See `Operation.start`."""
        rank, size = exchange.rank, exchange.size
        self._parts = parts_of(self._values, size)
        self._sums = parts_of(self._total, size)
        own = self._parts[rank]
        self._sum = exchange.lend(self, own.nbytes).view(own.dtype).zero_()
        others = [peer for peer in range(size) if peer != rank]
        for peer in others:
            part = self._parts[peer]
            if part.numel():
                codes = exchange.lend(self, self._coding.bound(part.numel()))
                self._coding.encode(part, codes)
                if not self._lossless:
                    self._coding.subtract(codes, part)
                exchange.send(self, peer, Phase.PART, codes)
                self.waits_for[peer, Phase.SUM] = codes.numel()
            if own.numel():
                self.waits_for[peer, Phase.PART] = self._coding.bound(own.numel())
        self._add(exchange)

    def receive(
        self,
        exchange: DirectExchange,
        rank: int,
        phase: Phase,
        payload: torch.Tensor,
    ) -> None:
        """See `Operation.receive`."""
        if phase is Phase.PART:
            self._came[rank] = payload
            self._add(exchange)
            return
        self._sums[rank].zero_()
        self._coding.add(payload, self._sums[rank])
        exchange.pool.give(payload)

    def _add(self, exchange: DirectExchange) -> None:
        """Add the parts that have come, by rank; send the sum when it is whole."""
        own = self._parts[exchange.rank]
        while self._next < exchange.size and own.numel():
            if self._next == exchange.rank:
                self._sum.add_(own.cpu())
            elif self._next in self._came:
                payload = self._came.pop(self._next)
                self._coding.add(payload, self._sum)
                exchange.pool.give(payload)
            else:
                return
            self._next += 1
            if self._next == exchange.size:
                self._send_sum(exchange)

    def _send_sum(self, exchange: DirectExchange) -> None:
        into = self._sums[exchange.rank]
        codes = exchange.lend(self, self._coding.bound(into.numel()))
        self._coding.encode(self._sum, codes)
        if self._lossless:
            into.copy_(self._sum)
        else:
            own = self._parts[exchange.rank].copy_(self._sum)
            self._coding.subtract(codes, own)
            into.zero_()
            self._coding.add(codes, into)
        for peer in range(exchange.size):
            if peer != exchange.rank:
                exchange.send(self, peer, Phase.SUM, codes)


class PairReduction(Operation):
    """A sum over two members: each sends all it has, and adds both codes in the order of ranks.

    Args:
        values: As of `Reduction`; with a codec the residual of this member's is left there.
        total: Likewise.
        coding: How they travel; of it `Coding.for_pair`.
    """

    def __init__(self, values: torch.Tensor, total: torch.Tensor, coding: Coding) -> None:
        super().__init__()
        self._values, self._total, self._coding = values, total, coding.for_pair

    def start(self, exchange: DirectExchange) -> None:
        """See `Operation.start`."""
        peer = 1 - exchange.rank
        self._codes = exchange.lend(self, self._coding.bound(self._values.numel()))
        self._coding.encode(self._values, self._codes)
        if not isinstance(self._coding, Plain):
            self._coding.subtract(self._codes, self._values)
        exchange.send(self, peer, Phase.PART, self._codes)
        self.waits_for[peer, Phase.PART] = self._codes.numel()

    def receive(
        self,
        exchange: DirectExchange,
        rank: int,
        phase: Phase,  # noqa: ARG002 - all are of one
        payload: torch.Tensor,
    ) -> None:
        """See `Operation.receive`."""
        self._total.zero_()
        for codes in (self._codes, payload) if rank else (payload, self._codes):
            self._coding.add(codes, self._total)
        exchange.pool.give(payload)


def reduction(
    values: torch.Tensor, total: torch.Tensor, coding: Coding, size: int
) -> Reduction | PairReduction:
    """A sum over so many members."""
    of = PairReduction if _by_pair(values.numel(), coding, size) else Reduction
    return of(values, total, coding)


def _by_pair(count: int, coding: Coding, size: int) -> bool:
    """Of two members, and what a frame can carry."""
    return size == PAIR and coding.for_pair.bound(count) < _LARGEST_BYTES


class Gather(Operation):
    """A sum of what is small: all send all they have to all.

    Args:
        values: This member's; becomes the sum.
    """

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()
        self._values = values
        self._came: dict[int, torch.Tensor] = {}

    def start(self, exchange: DirectExchange) -> None:
        """See `Operation.start`."""
        own = self._values.view(torch.uint8)
        payload = exchange.lend(self, own.numel()).copy_(own)
        for peer in range(exchange.size):
            if peer != exchange.rank:
                exchange.send(self, peer, Phase.WHOLE, payload)
                self.waits_for[peer, Phase.WHOLE] = payload.numel()
        self._came[exchange.rank] = payload

    def receive(
        self,
        exchange: DirectExchange,
        rank: int,
        phase: Phase,  # noqa: ARG002 - all are of one
        payload: torch.Tensor,
    ) -> None:
        """See `Operation.receive`."""
        self._came[rank] = payload
        self.lent.append(payload)
        if len(self._came) == exchange.size:
            self._values.zero_()
            for one in range(exchange.size):  # the same order everywhere: the same sum
                came = self._came[one].to(self._values.device)
                self._values.add_(came.view(self._values.dtype))


class Broadcast(Operation):
    """One member's tensor for all, each passing it on to the next, so that each sends it once.

    The last one says to the source that it is there, which so is never far ahead of the others.
    What is small goes straight to all, in one latency.

    Args:
        values: Of the source; becomes that elsewhere.
        chain: All ranks as they pass it on; the first is the source's.
    """

    def __init__(self, values: torch.Tensor, chain: Sequence[int]) -> None:
        super().__init__()
        self._values, self._chain = values, chain
        self._straight = values.nbytes <= WHOLE_BYTES

    def start(self, exchange: DirectExchange) -> None:
        """See `Operation.start`."""
        payload, at = self._values.view(torch.uint8), self._chain.index(exchange.rank)
        self._next = self._chain[at + 1 : at + 2] if not self._straight else ()
        if at:
            before = self._chain[0 if self._straight else at - 1]
            self.waits_for[before, Phase.WHOLE] = payload.numel()
            return
        if self._next:
            self.waits_for[self._chain[-1], Phase.SUM] = _THERE.numel()
        if payload.device.type != "cpu":
            payload = exchange.lend(self, payload.numel()).copy_(payload)
        for peer in self._next or self._chain[1:]:
            exchange.send(self, peer, Phase.WHOLE, payload)

    def receive(
        self,
        exchange: DirectExchange,
        rank: int,  # noqa: ARG002 - one alone sends
        phase: Phase,
        payload: torch.Tensor,
    ) -> None:
        """See `Operation.receive`."""
        if phase is Phase.SUM:
            return
        self._values.view(torch.uint8).copy_(payload)
        if self._straight:
            exchange.pool.give(payload)
        elif self._next:  # what is large is not kept for another time
            exchange.send(self, self._next[0], Phase.WHOLE, payload)
        else:
            exchange.send(self, self._chain[0], Phase.SUM, _THERE)


class DirectExchange:
    """The operations of one member in one generation.

    The calls are one thread's. Order for a frame: `expect` says where its payload goes; once that
    is filled, `receive` takes it. Whatever `send` was given is `sent` later, once for each.

    Args:
        rank: This member's.
        size: Number of members.
        send: Sends a frame.
    """

    def __init__(self, rank: int, size: int, send: Send) -> None:
        self.rank, self.size, self.pool = rank, size, Pool()
        self._send = send
        self._started = 0
        self._open: dict[int, Operation] = {}
        self._early: dict[tuple[int, int, Phase], torch.Tensor] = {}
        self._early_bytes = 0

    def start(self, operation: Operation) -> list[Operation]:
        """Begin the next one; returns those that are over by it."""
        self._started += 1
        return self._begin(operation, self._started - 1)

    def _begin(self, operation: Operation, number: int) -> list[Operation]:
        operation.number = number
        self._open[number] = operation
        operation.start(self)
        for rank, phase in tuple(operation.waits_for):
            payload = self._early.pop((operation.number, rank, phase), None)
            if payload is not None:
                self._early_bytes -= payload.numel()
                self._take(operation, rank, phase, payload)
        return self._if_over(operation)

    def expect(self, rank: int, frame: Frame) -> torch.Tensor:
        """Memory for the payload of a frame whose header has come from `rank`.

        Raises:
            TransportError: No such frame is to come from there.
        """
        operation = self._open.get(frame.operation)
        if operation is not None:
            fits = operation.waits_for.get((rank, frame.phase)) == frame.length
        else:
            key = frame.operation, rank, frame.phase
            room = _EARLY_BYTES - self._early_bytes
            fits = frame.operation >= self._started and key not in self._early
            fits = fits and frame.length <= room
        if not fits:
            raise TransportError(f"a frame came from rank {rank} that is not expected: {frame}")
        return self.pool.take(frame.length)

    def receive(self, rank: int, frame: Frame, payload: torch.Tensor) -> list[Operation]:
        """Take a payload; returns the operations that are over by it.

        Raises:
            TransportError: It is not what was sent.
        """
        self._check(rank, frame, payload)
        operation = self._open.get(frame.operation)
        if operation is None:
            self._early[frame.operation, rank, frame.phase] = payload
            self._early_bytes += frame.length
            return []
        self._take(operation, rank, frame.phase, payload)
        return self._if_over(operation)

    def _check(self, rank: int, frame: Frame, payload: torch.Tensor) -> None:
        if zlib.crc32(octets_of(payload)) != frame.check:
            raise TransportError(f"a frame from rank {rank} was damaged on its way: {frame}")

    def awaits(self, rank: int) -> bool:
        """Whether a frame is to come from there."""
        return any(key[0] == rank for one in self._open.values() for key in one.waits_for)

    def lend(self, operation: Operation, size: int) -> torch.Tensor:
        """So many bytes, until the operation is over."""
        operation.lent.append(self.pool.take(size))
        return operation.lent[-1]

    def send(self, operation: Operation, rank: int, phase: Phase, payload: torch.Tensor) -> None:
        """Send a frame of an operation."""
        operation.unsent += 1
        self._send(rank, phase, operation.number, payload)

    def sent(self, number: int) -> list[Operation]:
        """A frame of the operation of this number has left; returns what is over by it."""
        operation = self._open[number]
        operation.unsent -= 1
        return self._if_over(operation)

    def _take(self, operation: Operation, rank: int, phase: Phase, payload: torch.Tensor) -> None:
        if operation.waits_for.pop((rank, phase), None) != payload.numel():
            raise TransportError(f"rank {rank} sent {payload.numel()} bytes of another exchange")
        operation.receive(self, rank, phase, payload)

    def _if_over(self, operation: Operation) -> list[Operation]:
        if not operation.is_over or self._open.pop(operation.number, None) is None:
            return []
        for some in operation.lent:
            self.pool.give(some)
        operation.lent.clear()
        return [operation]


def octets_of(payload: torch.Tensor) -> memoryview:
    """The memory of a payload."""
    return memoryview(payload.numpy().data)


def reduction_bytes(count: int, rank: int, size: int, coding: Coding) -> int:
    """Bytes of payload that a member sends in a `reduction` of so many values."""
    if _by_pair(count, coding, size):
        return coding.for_pair.bound(count)
    each = -(-count // (size * ALIGNED)) * ALIGNED
    codes = [coding.bound(max(0, min(each, count - r * each))) for r in range(size)]
    return sum(codes) - codes[rank] + (size - 1) * codes[rank]


def parts_of(values: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Cut `values` into `count` parts; the last ones may be shorter, or empty.

    >>> [len(part) for part in parts_of(torch.zeros(600), 3)]
    [256, 256, 88]
    """
    each = -(-values.numel() // (count * ALIGNED)) * ALIGNED
    parts = list(values.split(each)) if each else []
    return parts + [values[values.numel() :]] * (count - len(parts))
