"""Hierarchical exchange: as it is inside a zone, encoded between zones.

For its zone each member owns a part of a message. The others of the zone send it theirs of that
part as they are, and it adds them in the order of ranks. The owners of the same values in other
zones then do as all members do in `net.exchange`: of each piece one zone's owner is told the sums
of all zones in codes, adds them in the order of zones, encodes the sum once, and sends the code to
the others. Each owner passes the codes of its part on inside its zone. So what a link between zones
carries each way does not grow with the members that a zone has: 2 (Z - 1) / Z codes of the message
for each of Z zones, whatever the order of ranks; and it is crossed twice, one after the other.
Of two zones the owners tell each other their zones' sums, and both add the two codes: as many
bytes, in one latency, and nothing is encoded twice.

What encoding loses is kept by who encodes, the owners; nothing is lost inside a zone. If each
member is a zone of its own, all of this is direct exchange, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import torch

from raycloud.net.direct import DirectTransport, DirectWork
from raycloud.net.exchange import (
    HEADER,
    WHOLE_BYTES,
    Gather,
    Operation,
    Phase,
    Plain,
)
from raycloud.net.zones import Piece, Zones, routes_of, span
from raycloud.spec.sizes import PAIR
from raycloud.threads import THREADS, Threads

if TYPE_CHECKING:
    import socket

    from raycloud.net.exchange import DirectExchange
    from raycloud.net.transport import Coding


class TreeReduction(Operation):
    """A sum over members, by zones, three or more; of two: `PairTreeReduction`.

    From another zone's owner comes the code of its zone's sum (`Phase.PART`), and later that of all
    zones' (`Phase.SUM`); from one of the own zone its part as it is, and all sums of what it owns.

    Args:
        values: This member's, shape (count,), contiguous, on any device. With a codec what encoding
            has lost is left there, the residual: at who owns nothing, zeros.
        total: Becomes the sum, the same on all members; may be `values` where there is no codec.
        coding: How sums travel between zones, and the sum of all inside them.
        zones: Of the members.
    """

    _codes_each = 1  # of a sum of all zones

    def __init__(
        self, values: torch.Tensor, total: torch.Tensor, coding: Coding, zones: Zones
    ) -> None:
        super().__init__()
        self._values, self._total, self._coding, self._zones = values, total, coding, zones
        self._lossless = isinstance(coding, Plain)
        self._came: dict[int, torch.Tensor] = {}  # of the own zone, as they are
        self._told: dict[int, torch.Tensor] = {}  # of other zones, encoded
        self._next = 0  # in the own zone, whose part is to be added
        self._complete = False  # the zone's sum is

    def start(self, exchange: DirectExchange) -> None:
        """See `Operation.start`."""
        self._group = self._zones.groups[self._zones.numbers[exchange.rank]]
        routes = self._routes = routes_of(self._values.numel(), exchange.rank, self._zones)
        own = self._values[span(routes.own)]
        self._sum = exchange.lend(self, own.nbytes).view(own.dtype).zero_()
        size = self._codes_each * self._bound(routes.own)
        self._codes = exchange.lend(self, size)  # of the sums of what is owned
        self._known = dict(self._cut(self._codes, routes.own, self._codes_each))  # of each piece
        self._missing = len(routes.own)
        for peer, parts in routes.parts.items():
            payload = self._values[span(parts)].view(torch.uint8)
            if payload.device.type != "cpu":
                payload = exchange.lend(self, payload.numel()).copy_(payload)
            exchange.send(self, peer, Phase.PART, payload)  # not written to until it is summed
        for peer in routes.near if routes.own else ():
            self.waits_for[peer, Phase.PART] = own.nbytes
        for peer, pieces in chain(routes.parts.items(), routes.given.items()):
            self.waits_for[peer, Phase.SUM] = self._codes_each * self._bound(pieces)
        for peer, pieces in routes.taken.items():
            self.waits_for[peer, Phase.PART] = self._bound(pieces)
        self._add(exchange)

    def receive(
        self, exchange: DirectExchange, rank: int, phase: Phase, payload: torch.Tensor
    ) -> None:
        """See `Operation.receive`."""
        routes, is_near = self._routes, rank in self._group
        if phase is Phase.PART:
            (self._came if is_near else self._told)[rank] = payload
            self._add(exchange)
            return
        if is_near:
            pieces = routes.parts[rank]
            for piece, codes in self._cut(payload, pieces, self._codes_each):
                self._decode(piece, codes)
            if not self._lossless:
                self._values[span(pieces)].zero_()  # all of it was handed over
        else:
            for piece, code in self._cut(payload, routes.given[rank]):
                self._decode(piece, self._known[piece].copy_(code))
            self._pass_on(exchange, len(routes.given[rank]))
        exchange.pool.give(payload)

    def _add(self, exchange: DirectExchange) -> None:
        """Add the zone's parts that have come, by rank; then go on to the other zones."""
        own = self._routes.own
        while self._next < len(self._group) and own:
            rank = self._group[self._next]
            if rank == exchange.rank:
                self._sum.add_(self._values[span(own)].cpu())
            elif rank in self._came:
                payload = self._came.pop(rank)
                self._sum.add_(payload.view(self._sum.dtype))
                exchange.pool.give(payload)
            else:
                return
            self._next += 1
        if own and not self._complete:
            self._complete = True
            self._give(exchange)
        if self._complete and self._told.keys() == self._routes.taken.keys():
            self._collect(exchange)

    def _give(self, exchange: DirectExchange) -> None:
        """Tell the collectors in other zones the zone's sum."""
        for peer, pieces in self._routes.given.items():
            codes = exchange.lend(self, self._bound(pieces))
            for piece, code in self._cut(codes, pieces):
                self._encode(piece, self._of_zone(piece), code)
            exchange.send(self, peer, Phase.PART, codes)

    def _collect(self, exchange: DirectExchange) -> None:
        """All zones' sums of what is collected here are there: add them by zone, and tell all."""
        routes = self._routes
        told = {
            (rank, piece): code
            for rank, payload in self._told.items()
            for piece, code in self._cut(payload, routes.taken[rank])
        }
        for piece in routes.home:
            own = self._of_zone(piece)
            total = exchange.lend(self, own.nbytes).view(own.dtype).zero_()
            for owner in piece.owners:
                if owner == exchange.rank:
                    total.add_(own)
                else:
                    self._coding.add(told[owner, piece], total)
            self._encode(piece, total, self._known[piece])
            self._decode(piece, self._known[piece])
        for payload in self._told.values():
            exchange.pool.give(payload)
        self._told.clear()
        for peer, pieces in routes.taken.items():
            codes = exchange.lend(self, self._bound(pieces))
            for piece, code in self._cut(codes, pieces):
                code.copy_(self._known[piece])
            exchange.send(self, peer, Phase.SUM, codes)
        self._pass_on(exchange, len(routes.home))

    def _pass_on(self, exchange: DirectExchange, count: int) -> None:
        """So many more sums are known; once all are, tell the zone."""
        self._missing -= count
        if count and not self._missing:
            for peer in self._routes.near:
                exchange.send(self, peer, Phase.SUM, self._codes)

    def _of_zone(self, piece: Piece) -> torch.Tensor:
        """The zone's sum of a piece that is owned."""
        return piece.of(self._sum, self._routes.own[0].start)

    def _encode(self, piece: Piece, values: torch.Tensor, code: torch.Tensor) -> None:
        """Encode the sum of a piece, and keep what that loses."""
        self._coding.encode(values, code)
        if not self._lossless:
            self._coding.subtract(code, piece.of(self._values).copy_(values))

    def _decode(self, piece: Piece, codes: torch.Tensor) -> None:
        """What these codes stand for, one after the other, is the sum, here as everywhere."""
        total = piece.of(self._total).zero_()
        for code in codes.chunk(self._codes_each):
            self._coding.add(code, total)

    def _bound(self, pieces: Sequence[Piece]) -> int:
        return _bound(pieces, self._coding)

    def _cut(
        self, codes: torch.Tensor, pieces: Sequence[Piece], each: int = 1
    ) -> list[tuple[Piece, torch.Tensor]]:
        """So many codes of each piece."""
        sizes = [each * self._coding.bound(piece.stop - piece.start) for piece in pieces]
        return list(zip(pieces, codes.split(sizes), strict=True))


class PairTreeReduction(TreeReduction):
    """A sum over two zones: from the other zone's owners come codes of its sums, no sum of both.

    That is made of both codes, in the order of zones, by every member: an owner passes both on in
    its zone. Without a codec it passes on the sum.
    """

    def __init__(
        self, values: torch.Tensor, total: torch.Tensor, coding: Coding, zones: Zones
    ) -> None:
        super().__init__(values, total, coding.for_pair, zones)
        self._codes_each = _told_by_pair(coding)

    def _give(self, exchange: DirectExchange) -> None:
        """Tell the other zone's owners the zone's sum."""
        zone = self._routes.zone
        for peer, pieces in self._routes.taken.items():
            told = exchange.lend(self, self._bound(pieces))
            for piece, code in self._cut(told, pieces):
                self._encode(piece, self._of_zone(piece), code)
                if not self._lossless:
                    self._known[piece].chunk(PAIR)[zone].copy_(code)
            exchange.send(self, peer, Phase.PART, told)

    def _collect(self, exchange: DirectExchange) -> None:
        """The other zone's sums are there."""
        routes = self._routes
        for rank, payload in self._told.items():
            for piece, code in self._cut(payload, routes.taken[rank]):
                known = self._known[piece]
                if self._lossless:
                    self._coding.add(code, total := self._of_zone(piece))
                    self._coding.encode(total, known)
                else:
                    known.chunk(PAIR)[1 - routes.zone].copy_(code)
                self._decode(piece, known)
            exchange.pool.give(payload)
        self._told.clear()
        self._pass_on(exchange, len(routes.own))


def reduction_by_zones(
    values: torch.Tensor, total: torch.Tensor, coding: Coding, zones: Zones
) -> TreeReduction:
    """A sum over these zones."""
    of = PairTreeReduction if zones.is_pair else TreeReduction
    return of(values, total, coding, zones)


def _told_by_pair(coding: Coding) -> int:
    """Codes of a sum of two zones that are passed on inside them."""
    return 1 if isinstance(coding, Plain) else PAIR


def _bound(pieces: Sequence[Piece], coding: Coding) -> int:
    return sum(coding.bound(piece.stop - piece.start) for piece in pieces)


class TreeGather(Operation):
    """A sum of what is small, by way of the first member of each zone; links are crossed once.

    Args:
        values: This member's; becomes the sum.
        zones: Of the members.
    """

    def __init__(self, values: torch.Tensor, zones: Zones) -> None:
        super().__init__()
        self._values, self._zones = values, zones
        self._came: dict[tuple[int, Phase], torch.Tensor] = {}

    def start(self, exchange: DirectExchange) -> None:
        """See `Operation.start`."""
        own = self._values.view(torch.uint8)
        payload = exchange.lend(self, own.numel()).copy_(own)
        self._group = self._zones.groups[self._zones.numbers[exchange.rank]]
        self._firsts = [group[0] for group in self._zones.groups]
        first = self._group[0]
        if exchange.rank != first:
            exchange.send(self, first, Phase.WHOLE, payload)
            self.waits_for[first, Phase.SUM] = payload.numel()
            return
        self._came[first, Phase.WHOLE] = payload
        for peer in self._group[1:]:
            self.waits_for[peer, Phase.WHOLE] = payload.numel()
        for peer in self._firsts:
            if peer != first:
                self.waits_for[peer, Phase.PART] = payload.numel()
        self._sum_up(exchange)

    def receive(
        self, exchange: DirectExchange, rank: int, phase: Phase, payload: torch.Tensor
    ) -> None:
        """See `Operation.receive`."""
        self.lent.append(payload)
        if phase is Phase.SUM:
            self._values.copy_(payload.view(self._values.dtype))
            return
        self._came[rank, phase] = payload
        self._sum_up(exchange)

    def _sum_up(self, exchange: DirectExchange) -> None:
        """Add what has come: of the zone, and tell the other zones; of these, and tell the zone."""
        first = self._group[0]
        if (first, Phase.PART) not in self._came:
            zone = self._added(exchange, Phase.WHOLE, self._group)
            if zone is None:
                return
            self._came[first, Phase.PART] = zone
            for peer in self._firsts:
                if peer != first:
                    exchange.send(self, peer, Phase.PART, zone)
        total = self._added(exchange, Phase.PART, self._firsts)
        if total is not None:
            self._values.copy_(total.view(self._values.dtype))
            for peer in self._group[1:]:
                exchange.send(self, peer, Phase.SUM, total)

    def _added(
        self, exchange: DirectExchange, phase: Phase, ranks: Sequence[int]
    ) -> torch.Tensor | None:
        """The sum of what these have sent, in their order; None: some is missing."""
        if any((rank, phase) not in self._came for rank in ranks):
            return None
        summed = exchange.lend(self, self._values.nbytes)
        values = summed.view(self._values.dtype).zero_()
        for rank in ranks:
            values.add_(self._came[rank, phase].view(values.dtype))
        return summed


class TreeTransport(DirectTransport):
    """See `DirectTransport`; between zones bytes are few.

    Args:
        rank: This member's rank in the generation.
        connections: To each other member, by rank.
        zones: Of all members.
        small: Those by which small messages are summed; None: these.
        nonce: Of the generation.
        threads: Where the courier runs.

    Attributes:
        bytes_across: Of `bytes_sent` those to other zones.
    """

    def __init__(
        self,
        rank: int,
        connections: Mapping[int, socket.socket],
        *,
        zones: Zones,
        small: Zones | None = None,
        nonce: int = 0,
        threads: Threads = THREADS,
    ) -> None:
        self._zones, self._small, self.bytes_across = zones, small or zones, 0
        super().__init__(rank, connections, nonce=nonce, threads=threads)

    def all_reduce(self, tensor: torch.Tensor) -> DirectWork:
        """Sum over members, in place."""
        flat, small = tensor.view(-1), self._small
        if flat.nbytes > WHOLE_BYTES and len(self._zones.groups) > 1:
            return self._begin(reduction_by_zones(flat, flat, Plain(flat.dtype), self._zones))
        if flat.nbytes > WHOLE_BYTES:
            return super().all_reduce(tensor)
        return self._begin(Gather(flat) if small.gathers(flat.nbytes) else TreeGather(flat, small))

    def all_reduce_bytes(self, size: int) -> int:
        """See `transport.Transport.all_reduce_bytes`; of fp32."""
        if size > WHOLE_BYTES:
            if len(self._zones.groups) == 1:
                return super().all_reduce_bytes(size)
            return self.reduce_bytes(-(-size // 4), Plain(torch.float32))
        small = self._small
        if small.gathers(size):
            return (self.size - 1) * size
        group = small.groups[small.numbers[self.rank]]
        if self.rank != group[0]:
            return size
        return (len(small.groups) - 1 + len(group) - 1) * size

    def reduce(self, values: torch.Tensor, total: torch.Tensor, coding: Coding) -> DirectWork:
        """Sum over members, encoded between zones; see `TreeReduction`."""
        return self._begin(reduction_by_zones(values, total, coding, self._zones))

    def reduce_bytes(self, count: int, coding: Coding) -> int:
        """See `transport.CodedTransport.reduce_bytes`."""
        return sum(tree_reduction_bytes(count, self.rank, self._zones, coding))

    def _chain(self, source: int) -> tuple[int, ...]:
        return self._zones.chain(source)

    def _send(self, rank: int, phase: Phase, number: int, payload: torch.Tensor) -> None:
        super()._send(rank, phase, number, payload)
        if self._zones.numbers[rank] != self._zones.numbers[self.rank]:
            self.bytes_across += HEADER.size + payload.numel()


def tree_reduction_bytes(count: int, rank: int, zones: Zones, coding: Coding) -> tuple[int, int]:
    """Bytes of payload that a member sends in a reduction of fp32: in its zone, to others.

    >>> from raycloud.net.exchange import Plain
    >>> zones, full = Zones.of("aabb"), Plain(torch.float32)
    >>> [tree_reduction_bytes(1024, rank, zones, full) for rank in range(4)]
    [(4096, 2048), (4096, 2048), (4096, 2048), (4096, 2048)]
    """
    routes, each = routes_of(count, rank, zones), 1
    if zones.is_pair:
        coding, each = coding.for_pair, _told_by_pair(coding)
    parts = sum(4 * (piece.stop - piece.start) for own in routes.parts.values() for piece in own)
    far = (*routes.given.values(), *routes.taken.values())
    return (
        parts + each * len(routes.near) * _bound(routes.own, coding),
        sum(_bound(pieces, coding) for pieces in far),
    )
