"""Transport over connections of each member with each other, looked after by one thread.

See `net.exchange` for what travels. The thread of a member, its courier, encodes, sends, receives
and sums, beside what the member computes; it waits in the kernel while nothing has come.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING

import torch

from raycloud.clock import SystemClock
from raycloud.errors import TransportError
from raycloud.net.exchange import (
    HEADER,
    WHOLE_BYTES,
    Broadcast,
    DirectExchange,
    Frame,
    Gather,
    Operation,
    Phase,
    Plain,
    octets_of,
    reduction,
    reduction_bytes,
)
from raycloud.net.stream import SOCKETS, Arrivals, Place, Sockets, connect
from raycloud.spec.sizes import ring_bytes
from raycloud.threads import THREADS, Threads

if TYPE_CHECKING:
    import queue

    from raycloud.net.stream import Stream
    from raycloud.net.transport import Coding, Work

_PARTS = 16  # given to the system at once
_TURN_BYTES = 2**20  # read from one peer before the next has its turn
_PIECE_BYTES = 2**20  # are passed on together
_AT_ONCE_BYTES = 2**18  # the courier is woken by a whole payload, or by so much of it


class DirectWork:
    """An operation under way."""

    def __init__(self, operation: Operation, threads: Threads) -> None:
        self.operation = operation
        self._over = threads.event()
        self._error: TransportError | None = None

    def wait(self, timeout_s: float) -> bool:
        """See `transport.Work.wait`."""
        if not self._over.wait(timeout_s):
            return False
        if self._error is not None:
            raise _of_exchange(self._error)
        return True

    def finish(self, error: TransportError | None = None) -> None:
        """It is complete, or will never be."""
        self._error = error
        self._over.set()


class _All:
    """Operations under way, as one; the last is over last."""

    def __init__(self, works: Sequence[DirectWork]) -> None:
        self._works = works

    def wait(self, timeout_s: float) -> bool:
        """See `transport.Work.wait`."""
        return self._works[-1].wait(timeout_s) and all(work.wait(0.0) for work in self._works)


class _Peer:
    """A connection, and what is on its way on it."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank, self.socket = rank, connection
        self.outgoing: deque[tuple[memoryview, int | None]] = deque()  # and whose last bytes it has
        self.header = memoryview(bytearray(HEADER.size))
        self.frame: Frame | None = None  # whose payload is coming
        self.payload = torch.empty(0, dtype=torch.uint8)
        self.place = self.header  # what is filled
        self.at = 0
        self.woken_by = 1  # bytes that have come
        self.ended = False  # it has closed its end

    def wait_for_more(self) -> None:
        """Be woken by what is missing in the place that is filled, not by each packet of it."""
        missing = min(len(self.place) - self.at, _AT_ONCE_BYTES)
        if missing != self.woken_by:
            self.woken_by = missing
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, missing)


class DirectTransport:
    """See `transport.Transport`; tensors are contiguous.

    Sums are made on the CPU, but for those of two members.

    Args:
        rank: This member's rank in the generation.
        connections: To each other member, by rank, as `meet` has made them.
        nonce: Of the generation, the same on all members; 32 bits.
        size: How many members there are; None: those that there are connections to, and this one.
        threads: Where the courier runs.

    Attributes:
        bytes_sent: Of frames, in this generation.
        courier_s: Processor seconds of the courier.
    """

    _look_s: float | None = None  # it waits for what comes, however long that takes

    def __init__(
        self,
        rank: int,
        connections: Mapping[int, socket.socket],
        *,
        nonce: int = 0,
        size: int | None = None,
        threads: Threads = THREADS,
    ) -> None:
        size = len(connections) + 1 if size is None else size
        self.rank, self.size, self._nonce, self._threads = rank, size, nonce, threads
        self.bytes_sent, self.courier_s = 0, 0.0
        self._exchange = self._made(rank, size)
        self._works: dict[Operation, DirectWork] = {}
        self._asked: deque[DirectWork] = deque()
        self._broken: TransportError | None = None
        self._bell, self._ear = socket.socketpair()
        for end in (self._bell, self._ear):
            end.setblocking(False)  # noqa: FBT003 - as the standard library has it
        self._peers = {r: _Peer(r, connection) for r, connection in connections.items()}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._ear, selectors.EVENT_READ)
        for peer in self._peers.values():
            peer.socket.setblocking(False)  # noqa: FBT003 - likewise
            self._selector.register(peer.socket, selectors.EVENT_READ, peer)
        self._courier = threads.thread(self._run, name="courier")
        self._courier.start()

    def _made(self, rank: int, size: int) -> DirectExchange:
        return DirectExchange(rank, size, self._send)

    def all_reduce(self, tensor: torch.Tensor) -> DirectWork:
        """Sum over members, in place."""
        flat = tensor.view(-1)
        if flat.nbytes <= WHOLE_BYTES:
            return self._begin(Gather(flat))
        return self._begin(reduction(flat, flat, Plain(flat.dtype), self.size))

    def all_reduce_bytes(self, size: int) -> int:
        """See `transport.Transport.all_reduce_bytes`."""
        if size <= WHOLE_BYTES:
            return (self.size - 1) * size
        return ring_bytes(size, self.size)

    def reduce(self, values: torch.Tensor, total: torch.Tensor, coding: Coding) -> DirectWork:
        """Sum over members, encoded; see `exchange.reduction`."""
        return self._begin(reduction(values, total, coding, self.size))

    def reduce_bytes(self, count: int, coding: Coding) -> int:
        """See `transport.CodedTransport.reduce_bytes`."""
        return reduction_bytes(count, self.rank, self.size, coding)

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        """Copy from the member of rank `source`, in place; see `exchange.Broadcast`."""
        flat, chain = tensor.view(-1), self._chain(source)
        pieces = flat.split(_PIECE_BYTES // flat.element_size())
        return _All([self._begin(Broadcast(piece, chain)) for piece in pieces])

    def _chain(self, source: int) -> Sequence[int]:
        """All ranks, from `source` on, as they pass on what is broadcast."""
        return [(source + k) % self.size for k in range(self.size)]

    def hang_up(self) -> None:
        """See `transport.Transport.hang_up`."""
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                peer.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of sockets."""
        self._broken = self._broken or TransportError("this member has closed it")
        self.hang_up()
        self._ring()
        self._courier.join()

    def _begin(self, operation: Operation) -> DirectWork:
        if self._broken is not None:
            raise _of_exchange(self._broken)
        work = DirectWork(operation, self._threads)
        if self.size == 1 or operation.is_empty:
            work.finish()
            return work
        self._asked.append(work)
        self._ring()
        self._give_up_if_broken(work)
        return work

    def _give_up_if_broken(self, work: DirectWork) -> None:
        """It may have broken just now, and then nobody may look at it any more."""
        if self._broken is not None:
            work.finish(self._broken)

    def _ring(self) -> None:
        with contextlib.suppress(OSError):  # it rings already, or nobody is there any more
            self._bell.send(b"!")

    def _run(self) -> None:
        """The courier."""
        try:
            self._carry()
        except TransportError as error:
            self._broken = self._broken or error
        except Exception as error:  # noqa: BLE001 - the last line before the thread's end
            self._broken = TransportError(f"the courier failed: {error!r}")
        for peer in self._peers.values():
            peer.socket.close()
        self._selector.close()
        self._bell.close()
        self._ear.close()
        while self._asked:
            self._asked.popleft().finish(self._broken)
        for work in self._works.values():
            work.finish(self._broken)

    def _carry(self) -> None:
        clock, thread = SystemClock(), threading.get_native_id()
        while self._broken is None:
            came = self._selector.select(self._look_s)
            if not came:
                self._look()
            for key, events in came:
                if key.data is None:
                    self._answer()
                    continue
                if events & selectors.EVENT_READ:
                    self._read(key.data)
                if events & selectors.EVENT_WRITE:
                    self._write(key.data)
            self.courier_s = clock.thread_cpu_s(thread)

    def _look(self) -> None:
        """Nothing has come for `_look_s`."""

    def _answer(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._ear.recv(64)
        while self._asked and self._broken is None:
            work = self._asked.popleft()
            self._works[work.operation] = work
            self._finish(self._exchange.start(work.operation))
            self._check_ended()

    def _check_ended(self) -> None:
        for peer in self._peers.values():
            if peer.ended and self._exchange.awaits(peer.rank):
                raise self._lost(peer.rank, "was closed")

    def _lost(self, rank: int, how: str) -> TransportError:
        return TransportError(f"the connection to rank {rank} {how}")

    def _finish(self, over: Iterable[Operation]) -> None:
        for operation in over:
            self._works.pop(operation).finish()

    def _send(self, rank: int, phase: Phase, number: int, payload: torch.Tensor) -> None:
        octets = octets_of(payload)
        frame = Frame(phase, number, len(octets), zlib.crc32(octets))
        peer = self._peers[rank]
        if peer.ended:
            raise self._lost(rank, "was closed")
        idle = not peer.outgoing
        peer.outgoing += [
            (memoryview(frame.pack(self._nonce)), None),
            (octets, number),
        ]
        self.bytes_sent += HEADER.size + len(octets)
        if idle:
            events = selectors.EVENT_READ | selectors.EVENT_WRITE
            self._selector.modify(peer.socket, events, peer)

    def _write(self, peer: _Peer) -> None:
        while peer.outgoing:
            some = [part for part, _ in islice(peer.outgoing, _PARTS)]
            try:
                left = peer.socket.sendmsg(some)
            except BlockingIOError:
                return
            except OSError as error:
                raise self._lost(peer.rank, f"broke: {error}") from error
            while peer.outgoing and left >= len(peer.outgoing[0][0]):
                part, number = peer.outgoing.popleft()
                left -= len(part)
                if number is not None:
                    self._finish(self._exchange.sent(number))
            if left:
                part, number = peer.outgoing[0]
                peer.outgoing[0] = part[left:], number
        self._selector.modify(peer.socket, selectors.EVENT_READ, peer)

    def _read(self, peer: _Peer) -> None:
        taken = 0
        while taken < _TURN_BYTES:
            try:
                got = peer.socket.recv_into(peer.place[peer.at :])
            except BlockingIOError:
                peer.wait_for_more()
                return
            except OSError as error:
                raise self._lost(peer.rank, f"broke: {error}") from error
            if not got:
                self._end(peer)
                return
            taken += got
            peer.at += got
            if peer.at == len(peer.place):
                self._filled(peer)
        peer.wait_for_more()  # of what its turn has ended in

    def _end(self, peer: _Peer) -> None:
        """A peer has closed its end: nothing is lost where nothing more is to come from it."""
        if peer.at or peer.frame is not None or peer.outgoing or self._exchange.awaits(peer.rank):
            raise self._lost(peer.rank, "was closed")
        peer.ended = True
        self._selector.unregister(peer.socket)

    def _filled(self, peer: _Peer) -> None:
        peer.at = 0
        if peer.frame is None:
            frame = peer.frame = Frame.unpack(peer.header, self._nonce)
            peer.payload = self._exchange.expect(peer.rank, frame)
            peer.place = octets_of(peer.payload)
        else:
            frame, peer.frame, peer.place = peer.frame, None, peer.header
            self._finish(self._exchange.receive(peer.rank, frame, peer.payload))


def _of_exchange(error: TransportError) -> TransportError:
    return type(error)(f"an exchange with the other members broke: {error}")


Make = Callable[..., DirectTransport]
"""Makes a transport of a rank, and connections by rank; it is told `nonce` and `threads`."""


def meet(  # noqa: PLR0913 - what identifies a member, and where it lives
    tell: Callable[[bytes], Sequence[bytes]],
    *,
    rank: int,
    size: int,
    address: str,
    nonce: int = 0,
    makes: Sequence[Make] = (DirectTransport,),
    threads: Threads = THREADS,
    sockets: Sockets = SOCKETS,
) -> list[DirectTransport]:
    """Meet the other members: transports, each of them over connections of its own.

    Args:
        tell: Gives the others some bytes; returns those of all, by rank, once all have told.
        rank: This member's rank in the generation.
        size: Number of members.
        address: The network address of this node that peers can reach.
        nonce: Of the generation, the same on all members; 32 bits.
        makes: What makes each of them of its connections.
        threads: Where couriers run.
        sockets: What connects.

    Raises:
        TransportError: A member does not come, or cannot be reached.
    """
    doors = [_Door(address, size - 1 - rank, threads, sockets) for _ in makes]
    try:
        own = [[door.place.address, door.place.port, door.place.key] for door in doors]
        told = [json.loads(one) for one in tell(json.dumps(own).encode())] if size > 1 else []
        for other in range(rank):
            for door, place in zip(doors, told[other], strict=True):
                door.found[other] = connect(Place(*place), rank, sockets).detach()
        for door in doors:
            door.wait()
    except BaseException as error:
        for door in doors:
            door.give_up()
        if isinstance(error, TransportError):
            raise TransportError(f"rank {rank} could not meet the others: {error}") from error
        raise
    return [
        make(rank, door.found, nonce=nonce, threads=threads)
        for make, door in zip(makes, doors, strict=True)
    ]


class _Door:
    """Where those of higher ranks connect; all connections of a transport that is to be.

    Attributes:
        place: Where it is.
        found: Connections by rank.
    """

    def __init__(self, address: str, awaited: int, threads: Threads, sockets: Sockets) -> None:
        self.found: dict[int, socket.socket] = {}
        self._awaited = awaited
        self._came: queue.Queue[tuple[int, socket.socket] | TransportError] = threads.queue()
        self._arrivals = Arrivals(address, awaited, self._hear, self._came.put, threads, sockets)
        self.place = self._arrivals.place

    def wait(self) -> None:
        """Until all have come; `TransportError`: one does not."""
        for _ in range(self._awaited):
            one = self._came.get()
            if isinstance(one, TransportError):
                raise one
            self.found[one[0]] = one[1]
        self._arrivals.close()

    def give_up(self) -> None:
        """Nobody is waited for any more."""
        self._arrivals.close()
        for connection in self.found.values():
            connection.close()

    def _hear(self, other: int, stream: Stream) -> None:
        self._came.put((other, stream.detach()))
