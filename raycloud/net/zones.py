"""Zones: which members are near each other, and what each owns and sends in a sum by zones."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, pairwise
from typing import TYPE_CHECKING, NamedTuple

from raycloud.net.exchange import ALIGNED
from raycloud.spec.sizes import PAIR

if TYPE_CHECKING:
    import torch

# What is small goes whole from all to all, which is one latency, as long as that many bytes at most
# go from one zone to another, 13 ms at 20 Mbit/s, and as there are few members, since each has a
# message of each other one to read. Else one member of each zone, or of a part of it, has it first.
_WHOLE_ACROSS_BYTES = 2**15
WHOLE_MEMBERS = 16


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
    def is_pair(self) -> bool:
        """Whether there are two."""
        return len(self.groups) == PAIR

    @property
    def order(self) -> tuple[int, ...]:
        """All ranks, zone by zone: a ring in this order leaves each zone once.

        >>> Zones.of(["a", "b", "a", "b"]).order, Zones.of(["a", "a"]).order
        ((0, 2, 1, 3), (0, 1))
        """
        return tuple(rank for group in self.groups for rank in group)

    def chain(self, source: int) -> tuple[int, ...]:
        """All ranks from `source` on, zone by zone: each zone is entered once.

        >>> Zones.of(["a", "b", "a", "b"]).chain(3)
        (3, 1, 0, 2)
        """
        home = self.numbers[source]
        others = (group for number, group in enumerate(self.groups) if number != home)
        return (source, *self.near(source), *chain.from_iterable(others))

    @property
    def in_parts(self) -> Zones:
        """Each zone in parts of as many members as there are parts, about, if all are many.

        >>> Zones.of("aabaa").in_parts.groups, len(Zones.of("ab" * 50).in_parts.groups)
        (((0, 1, 3, 4), (2,)), 10)
        """
        count = len(self.numbers)
        if count <= WHOLE_MEMBERS:
            return self
        most = math.ceil(math.sqrt(count))
        places = {rank: at // most for group in self.groups for at, rank in enumerate(group)}
        return Zones.of([f"{zone}/{places[rank]}" for rank, zone in enumerate(self.numbers)])

    def gathers(self, size: int) -> bool:
        """Whether a message of so many bytes goes whole from all to all."""
        if len(self.numbers) > WHOLE_MEMBERS:
            return False
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
        home: The zone whose owner adds the sums of all zones; of two both owners do, and it is 0.
    """

    start: int
    stop: int
    owners: tuple[int, ...]
    home: int

    @property
    def collector(self) -> int:
        """The rank that adds the sums of all zones, of three or more."""
        return self.owners[self.home]

    def of(self, message: torch.Tensor, start: int = 0) -> torch.Tensor:
        """These values of a message; or of the part of it that begins with value `start`."""
        return message[self.start - start : self.stop - start]


@lru_cache(maxsize=1024)
def pieces_of(count: int, zones: Zones) -> tuple[tuple[Piece, ...], ...]:
    """The pieces of a message of `count` values that each rank owns for its zone, in their order.

    Each zone cuts the message into equal parts, one for each of its members; and what has the same
    owners everywhere is cut into pieces, one for each zone, unless there are two. As elsewhere no
    block of a codec is cut, so that the last ones may be shorter, or there are none.

    >>> ones = pieces_of(1536, Zones.of(["a", "b", "c"]))
    >>> [(piece.start, piece.stop, piece.collector) for piece in ones[0]]
    [(0, 512, 0), (512, 1024, 1), (1024, 1536, 2)]
    >>> ones = pieces_of(2048, Zones.of(["a", "a", "b"]))
    >>> [[(piece.start, piece.stop, piece.owners) for piece in own] for own in ones[:2]]
    [[(0, 1024, (0, 2))], [(1024, 2048, (1, 2))]]
    """
    found: list[list[Piece]] = [[] for _ in zones.numbers]
    each = [_share(count, len(group)) for group in zones.groups]
    edges = {0, count}
    for group, size in zip(zones.groups, each, strict=True):
        edges |= {min(k * size, count) for k in range(1, len(group))}
    for start, stop in pairwise(sorted(edges)):
        owners = tuple(group[start // size] for group, size in zip(zones.groups, each, strict=True))
        size = stop - start if zones.is_pair else _share(stop - start, len(owners))
        for home, at in enumerate(range(start, stop, size)):
            piece = Piece(at, min(at + size, stop), owners, home)
            for owner in owners:
                found[owner].append(piece)
    return tuple(map(tuple, found))


def _share(count: int, among: int) -> int:
    return -(-count // (among * ALIGNED)) * ALIGNED


class Routes:
    """What one member sends and gets in a reduction, as it is the same each time.

    Attributes:
        near: The others of its zone.
        own: The pieces that it owns for its zone.
        given: Those of them whose sum another member makes, by that one's rank.
        taken: Those whose sum it makes itself, by the ranks of other zones' owners; all, of two.
        parts: The pieces that the others of its zone own, by rank.
    """

    def __init__(self, count: int, rank: int, zones: Zones) -> None:
        every, here = pieces_of(count, zones), zones.numbers[rank]
        self.near, self.own, self.zone = zones.near(rank), every[rank], here
        self.parts: Mapping[int, Sequence[Piece]] = {p: every[p] for p in self.near if every[p]}
        given: defaultdict[int, list[Piece]] = defaultdict(list)
        taken: defaultdict[int, list[Piece]] = defaultdict(list)
        for piece in self.own:
            if not zones.is_pair and piece.home != here:
                given[piece.collector].append(piece)
                continue
            for owner in piece.owners:
                if owner != rank:
                    taken[owner].append(piece)
        self.given: Mapping[int, Sequence[Piece]] = given
        self.taken: Mapping[int, Sequence[Piece]] = taken
        self.home = tuple(piece for piece in self.own if piece.home == here)


@lru_cache(maxsize=1024)
def routes_of(count: int, rank: int, zones: Zones) -> Routes:
    """Of a message of `count` values."""
    return Routes(count, rank, zones)


def span(pieces: Sequence[Piece]) -> slice:
    """All of these pieces, which lie side by side."""
    return slice(pieces[0].start, pieces[-1].stop) if pieces else slice(0, 0)
