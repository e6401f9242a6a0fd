"""Hierarchical exchange: as it is inside a zone, encoded between zones.

For its zone each member owns a part of a message. The others of the zone send it theirs of that
part as they are, and it adds them in the order of ranks. The owners of the same values in other
zones then do as all members do in `net.exchange`: of each piece one zone's owner is told the sums
of all zones in codes, adds them in the order of zones, encodes the sum once, and sends the code to
the others. Each owner passes the codes of its part on inside its zone. So what a link between zones
carries each way does not grow with the members that a zone has: 2 (Z - 1) / Z codes of the message
for each of Z zones, whatever the order of ranks; and it is crossed twice, one after the other.

What encoding loses is kept by who encodes, the owners; nothing is lost inside a zone. If each
member is a zone of its own, all of this is direct exchange, bit for bit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch

from raycloud.net.direct import DirectTransport, DirectWork
from raycloud.net.exchange import (
    ALIGNED,
    HEADER,
    WHOLE_BYTES,
    Gather,
    Operation,
    Phase,
    Plain,
)
from raycloud.threads import THREADS, Threads

if TYPE_CHECKING:
    import socket

    from raycloud.net.exchange import DirectExchange
    from raycloud.net.transport import Coding

# What is small goes whole from all to all, which is one latency, as long as that many bytes at most
# go from one zone to another: 13 ms at 20 Mbit/s. Else one member of each zone has it first.
_WHOLE_ACROSS_BYTES = 2**15


@dataclass(frozen=True)
class Zones:
    """Which members are near each other.

    Attributes:
        numbers: The zone of each rank; zones count from 0 in the order of their first ranks.
    """

    numbers: tuple[int, ...]

    @classmethod
    def of(cls, names: Sequence[str]) -> Zones:
        """Of names of zones, by rank.

        >>> Zones.of(["b", "a", "b"]).groups
        ((0, 2), (1,))
        """
        known = {name: number for number, name in enumerate(dict.fromkeys(names))}
        return cls(tuple(known[name] for name in names))

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each zone."""
        found: dict[int, list[int]] = {}
        for rank, number in enumerate(self.numbers):
            found.setdefault(number, []).append(rank)
        return tuple(tuple(found[number]) for number in sorted(found))

    @property
    def order(self) -> tuple[int, ...]:
        """All ranks, zone by zone: a ring in this order leaves each zone once.

        >>> Zones.of(["a", "b", "a", "b"]).order, Zones.of(["a", "a"]).order
        ((0, 2, 1, 3), (0, 1))
        """
        return tuple(rank for group in self.groups for rank in group)

    def gathers(self, size: int) -> bool:
        """Whether a message of so many bytes goes whole from all to all."""
        one, other, *_ = *sorted(map(len, self.groups), reverse=True), 0
        return one * other * size <= _WHOLE_ACROSS_BYTES

    def near(self, rank: int) -> tuple[int, ...]:
        """The others of a member's zone."""
        return tuple(other for other in self.groups[self.numbers[rank]] if other != rank)


class Piece(NamedTuple):
    """Values of a message that are exchanged among the same members of all zones.

    Attributes:
        start: The first of them.
        stop: One past the last.
        owners: The rank that owns them, by zone.
        home: The zone whose owner adds the sums of all zones.
    """

    start: int
    stop: int
    owners: tuple[int, ...]
    home: int

    @property
    def collector(self) -> int:
        """The rank that adds the sums of all zones."""
        return self.owners[self.home]

    def of(self, message: torch.Tensor, start: int = 0) -> torch.Tensor:
        """These values of a message; or of the part of it that begins with value `start`."""
        return message[self.start - start : self.stop - start]


@lru_cache(maxsize=1024)
def pieces_of(count: int, zones: Zones) -> tuple[tuple[Piece, ...], ...]:
    """The pieces of a message of `count` values that each rank owns for its zone, in their order.

    Each zone cuts the message into equal parts, one for each of its members; and what has the same
    owners everywhere is cut into pieces, one for each zone. As elsewhere no block of a codec is
    cut, so that the last ones may be shorter, or there are none.

    >>> ones = pieces_of(2048, Zones.of(["a", "a", "b"]))
    >>> [[(piece.start, piece.stop, piece.collector) for piece in own] for own in ones[:2]]
    [[(0, 512, 0), (512, 1024, 2)], [(1024, 1536, 1), (1536, 2048, 2)]]
    """
    found: list[list[Piece]] = [[] for _ in zones.numbers]
    each = [_share(count, len(group)) for group in zones.groups]
    edges = {0, count}
    for group, size in zip(zones.groups, each, strict=True):
        edges |= {min(k * size, count) for k in range(1, len(group))}
    for start, stop in pairwise(sorted(edges)):
        owners = tuple(group[start // size] for group, size in zip(zones.groups, each, strict=True))
        size = _share(stop - start, len(owners))
        for home, at in enumerate(range(start, stop, size)):
            piece = Piece(at, min(at + size, stop), owners, home)
            for owner in owners:
                found[owner].append(piece)
    return tuple(map(tuple, found))


def _share(count: int, among: int) -> int:
    return -(-count // (among * ALIGNED)) * ALIGNED


class _Routes:
    """What one member sends and gets in a reduction, as it is the same each time.

    Attributes:
        near: The others of its zone.
        own: The pieces that it owns for its zone.
        given: Those of them whose sum another member makes, by that one's rank.
        taken: Those whose sum it makes itself, by the ranks of other zones' owners.
        parts: The pieces that the others of its zone own, by rank.
    """

    def __init__(self, count: int, rank: int, zones: Zones) -> None:
        every, here = pieces_of(count, zones), zones.numbers[rank]
        self.near, self.own, self.zone = zones.near(rank), every[rank], here
        self.parts: Mapping[int, Sequence[Piece]] = {p: every[p] for p in self.near if every[p]}
        given: defaultdict[int, list[Piece]] = defaultdict(list)
        taken: defaultdict[int, list[Piece]] = defaultdict(list)
        for piece in self.own:
            if piece.home != here:
                given[piece.collector].append(piece)
                continue
            for owner in piece.owners:
                if owner != rank:
                    taken[owner].append(piece)
        self.given: Mapping[int, Sequence[Piece]] = given
        self.taken: Mapping[int, Sequence[Piece]] = taken
        self.home = tuple(piece for piece in self.own if piece.home == here)


@lru_cache(maxsize=1024)
def _routes(count: int, rank: int, zones: Zones) -> _Routes:
    return _Routes(count, rank, zones)


def _span(pieces: Sequence[Piece]) -> slice:
    """All of these pieces, which lie side by side."""
    return slice(pieces[0].start, pieces[-1].stop) if pieces else slice(0, 0)


class TreeReduction(Operation):
    """A sum over members, by zones.

    From another zone's owner comes the code of its zone's sum (`Phase.PART`), and later that of all
    zones' (`Phase.SUM`); from one of the own zone its part as it is, and all sums of what it owns.

    Args:
        values: This member's, shape (count,), contiguous, on any device. With a codec what encoding
            has lost is left there, the residual: at who owns nothing, zeros.
        total: Becomes the sum, the same on all members; may be `values` where there is no codec.
        coding: How sums travel between zones, and the sum of all inside them.
        zones: Of the members.
    """

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
        routes = self._routes = _routes(self._values.numel(), exchange.rank, self._zones)
        own = self._values[_span(routes.own)]
        self._sum = exchange.lend(self, own.nbytes).view(own.dtype).zero_()
        self._codes = exchange.lend(self, self._bound(routes.own))  # of the sums of what is owned
        self._missing = len(routes.own)  # of these
        for peer, parts in routes.parts.items():
            payload = self._values[_span(parts)].view(torch.uint8)
            if payload.device.type != "cpu":
                payload = exchange.lend(self, payload.numel()).copy_(payload)
            exchange.send(self, peer, Phase.PART, payload)  # not written to until it is summed
        for peer in routes.near if routes.own else ():
            self.waits_for[peer, Phase.PART] = own.nbytes
        for peer, pieces in chain(routes.parts.items(), routes.given.items()):
            self.waits_for[peer, Phase.SUM] = self._bound(pieces)
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
            for piece, code in self._cut(payload, pieces):
                self._decode(piece, code)
            if not self._lossless:
                self._values[_span(pieces)].zero_()  # all of it was handed over
        else:
            known = dict(self._cut(self._codes, routes.own))
            for piece, code in self._cut(payload, routes.given[rank]):
                self._decode(piece, known[piece].copy_(code))
            self._pass_on(exchange, len(routes.given[rank]))
        exchange.pool.give(payload)

    def _add(self, exchange: DirectExchange) -> None:
        """Add the zone's parts that have come, by rank; then go on to the other zones."""
        own = self._routes.own
        while self._next < len(self._group) and own:
            rank = self._group[self._next]
            if rank == exchange.rank:
                self._sum.add_(self._values[_span(own)].cpu())
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
        known = dict(self._cut(self._codes, routes.own))
        for piece in routes.home:
            own = self._of_zone(piece)
            total = exchange.lend(self, own.nbytes).view(own.dtype).zero_()
            for owner in piece.owners:
                if owner == exchange.rank:
                    total.add_(own)
                else:
                    self._coding.add(told[owner, piece], total)
            self._encode(piece, total, known[piece])
            self._decode(piece, known[piece])
        for payload in self._told.values():
            exchange.pool.give(payload)
        self._told.clear()
        for peer, pieces in routes.taken.items():
            codes = exchange.lend(self, self._bound(pieces))
            for piece, code in self._cut(codes, pieces):
                code.copy_(known[piece])
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

    def _decode(self, piece: Piece, code: torch.Tensor) -> None:
        """What a code stands for is the sum, here as everywhere."""
        self._coding.add(code, piece.of(self._total).zero_())

    def _bound(self, pieces: Sequence[Piece]) -> int:
        return _bound(pieces, self._coding)

    def _cut(
        self, codes: torch.Tensor, pieces: Sequence[Piece]
    ) -> list[tuple[Piece, torch.Tensor]]:
        """The code of each piece."""
        sizes = [self._coding.bound(piece.stop - piece.start) for piece in pieces]
        return list(zip(pieces, codes.split(sizes), strict=True))


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


class TreeBroadcast(Operation):
    """One member's tensor for all; each other zone gets it once.

    Args:
        values: Of the source; becomes that elsewhere.
        source: Its rank.
        zones: Of the members.
    """

    def __init__(self, values: torch.Tensor, source: int, zones: Zones) -> None:
        super().__init__()
        self._values, self._source, self._zones = values, source, zones

    def start(self, exchange: DirectExchange) -> None:
        """See `Operation.start`."""
        zones, payload = self._zones, self._values.view(torch.uint8)
        here = zones.numbers[exchange.rank]
        first, home = zones.groups[here][0], zones.numbers[self._source]
        if exchange.rank != self._source:
            told = here == home or exchange.rank == first
            self.waits_for[self._source if told else first, Phase.WHOLE] = payload.numel()
            return
        if payload.device.type != "cpu":
            payload = exchange.lend(self, payload.numel()).copy_(payload)
        for number, group in enumerate(zones.groups):
            if number != here:
                exchange.send(self, group[0], Phase.WHOLE, payload)
        self._pass_on(exchange, payload)

    def receive(
        self,
        exchange: DirectExchange,
        rank: int,
        phase: Phase,  # noqa: ARG002 - all are of one
        payload: torch.Tensor,
    ) -> None:
        """See `Operation.receive`."""
        self._values.view(torch.uint8).copy_(payload)
        self.lent.append(payload)
        if rank not in self._zones.groups[self._zones.numbers[exchange.rank]]:
            self._pass_on(exchange, payload)

    def _pass_on(self, exchange: DirectExchange, payload: torch.Tensor) -> None:
        for peer in self._zones.near(exchange.rank):
            exchange.send(self, peer, Phase.WHOLE, payload)


class TreeTransport(DirectTransport):
    """See `DirectTransport`; between zones bytes are few.

    Args:
        rank: This member's rank in the generation.
        connections: To each other member, by rank.
        zones: Of all members.
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
        nonce: int = 0,
        threads: Threads = THREADS,
    ) -> None:
        self._zones, self.bytes_across = zones, 0
        super().__init__(rank, connections, nonce=nonce, threads=threads)

    def all_reduce(self, tensor: torch.Tensor) -> DirectWork:
        """Sum over members, in place."""
        flat, zones = tensor.view(-1), self._zones
        if flat.nbytes > WHOLE_BYTES:
            return self._begin(TreeReduction(flat, flat, Plain(flat.dtype), zones))
        return self._begin(Gather(flat) if zones.gathers(flat.nbytes) else TreeGather(flat, zones))

    def all_reduce_bytes(self, size: int) -> int:
        """See `transport.Transport.all_reduce_bytes`; of fp32."""
        if size > WHOLE_BYTES:
            return self.reduce_bytes(-(-size // 4), Plain(torch.float32))
        if self._zones.gathers(size):
            return (self.size - 1) * size
        group = self._zones.groups[self._zones.numbers[self.rank]]
        if self.rank != group[0]:
            return size
        return (len(self._zones.groups) - 1 + len(group) - 1) * size

    def reduce(self, values: torch.Tensor, total: torch.Tensor, coding: Coding) -> DirectWork:
        """Sum over members, encoded between zones; see `TreeReduction`."""
        return self._begin(TreeReduction(values, total, coding, self._zones))

    def reduce_bytes(self, count: int, coding: Coding) -> int:
        """See `transport.CodedTransport.reduce_bytes`."""
        return sum(tree_reduction_bytes(count, self.rank, self._zones, coding))

    def broadcast(self, tensor: torch.Tensor, source: int) -> DirectWork:
        """Copy from the member of rank `source`, in place."""
        return self._begin(TreeBroadcast(tensor.view(-1), source, self._zones))

    def _send(self, rank: int, phase: Phase, number: int, payload: torch.Tensor) -> None:
        super()._send(rank, phase, number, payload)
        if self._zones.numbers[rank] != self._zones.numbers[self.rank]:
            self.bytes_across += HEADER.size + payload.numel()


def tree_reduction_bytes(count: int, rank: int, zones: Zones, coding: Coding) -> tuple[int, int]:
    """Bytes of payload that a member sends in a `TreeReduction` of fp32: in its zone, to others.

    >>> from raycloud.net.exchange import Plain
    >>> zones, full = Zones.of("aabb"), Plain(torch.float32)
    >>> [tree_reduction_bytes(1024, rank, zones, full) for rank in range(4)]
    [(4096, 2048), (4096, 2048), (4096, 2048), (4096, 2048)]
    """
    routes = _routes(count, rank, zones)
    parts = sum(4 * (piece.stop - piece.start) for own in routes.parts.values() for piece in own)
    far = (*routes.given.values(), *routes.taken.values())
    return (
        parts + len(routes.near) * _bound(routes.own, coding),
        sum(_bound(pieces, coding) for pieces in far),
    )
