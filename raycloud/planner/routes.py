"""Routes: ring and tree along the best-bottleneck spanning tree, and transfers that are relayed.

Nodes are named. A link has the rate that was measured; where only one direction was, it stands for
both. Everything here is arithmetic on what was measured: the same links give the same routes, in
whatever order they and the nodes are listed.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

Pair = tuple[str, str]  # from, to

_APART = 4.0  # times the rate between two zones, at least, is that inside each
_WORTH = 0.8  # of the direct seconds: a relay that takes more is not worth a third node's link
_CHANGED = 1.5  # times a rate, up or down, that is another one
_SWEEPS = 10_000
_EXACT = 1e-12  # of a value, below which no sweep changes it


class Joint(NamedTuple):
    """A link of the spanning tree."""

    one: str
    other: str
    bytes_per_s: float


class SpanningTree:
    """The best-bottleneck (maximum) spanning tree: between any two nodes no path is wider.

    Kruskal's algorithm, widest link first. Nodes that are joined by links of at least some rate
    become one group, and stand side by side in `ring`, for every such rate at once: so a ring
    leaves each zone once and enters it once, and a tree has one link between two zones.

    Args:
        nodes: All nodes, by name.
        rates: Bytes per second by pair of nodes. A pair that was measured both ways counts as its
            slower way; pairs that were not measured are not used.

    Raises:
        ValueError: The links do not join all nodes.

    Attributes:
        joints: Its links, widest first.
        ring: All nodes, in the order of the ring.
    """

    def __init__(self, nodes: Collection[str], rates: Mapping[Pair, float]) -> None:
        known = set(nodes)
        self._rates = _both_ways(
            {pair: rate for pair, rate in rates.items() if known.issuperset(pair)}
        )
        groups = {node: [node] for node in sorted(known)}
        joints: list[Joint] = []
        for (one, other), rate in sorted(self._rates.items(), key=lambda x: (-x[1], x[0])):
            if groups[one] is groups[other]:
                continue
            joints.append(Joint(one, other, rate))
            joined = self._side_by_side(groups[one], groups[other])
            groups.update(dict.fromkeys(joined, joined))
        if len(joints) < len(groups) - 1:
            apart = sorted({group[0] for group in groups.values()})
            raise ValueError(f"no measured link joins the nodes of {', '.join(apart)}")
        self.joints = tuple(joints)
        self.ring: tuple[str, ...] = tuple(next(iter(groups.values()), ()))

    def _side_by_side(self, a: Sequence[str], b: Sequence[str]) -> list[str]:
        """Two groups, each turned so that the slower of the ring's two new links is the faster."""
        ways = [[*x, *y] for x in (a, a[::-1]) for y in (b, b[::-1])]

        def slower(way: Sequence[str]) -> tuple[float, float]:
            one, other = self._rate(way[len(a) - 1], way[len(a)]), self._rate(way[-1], way[0])
            return min(one, other), max(one, other)

        best = max(map(slower, ways))
        return min(way for way in ways if slower(way) == best)

    def _rate(self, one: str, other: str) -> float:
        return self._rates.get((min(one, other), max(one, other)), 0.0)

    def bottleneck(self, source: str, target: str) -> float:
        """The rate of the widest path between two nodes, in bytes per second.

        >>> rates = {("a", "b"): 5.0, ("a", "c"): 50.0, ("c", "b"): 40.0}
        >>> SpanningTree("abc", rates).bottleneck("a", "b")
        40.0
        """
        path = self.path(source, target)
        return min((self._rate(*pair) for pair in pairwise(path)), default=math.inf)

    def path(self, source: str, target: str) -> tuple[str, ...]:
        """The way along the tree."""
        parents = self.parents(target)
        found = [source]
        while found[-1] != target:
            found.append(parents[found[-1]])
        return tuple(found)

    def parents(self, root: str) -> dict[str, str]:
        """To whom each node but the root passes on what it and those below it have summed.

        The sum comes back along the same links: each is crossed once in each direction.

        >>> rates = {("a", "b"): 9.0, ("b", "c"): 1.0, ("c", "d"): 9.0, ("a", "d"): 1.0}
        >>> SpanningTree("abcd", rates).parents("a")
        {'b': 'a', 'd': 'a', 'c': 'd'}
        """
        beside: dict[str, list[str]] = {}
        for one, other, _ in self.joints:
            beside.setdefault(one, []).append(other)
            beside.setdefault(other, []).append(one)
        found, turn = dict[str, str](), [root]
        for node in turn:
            for other in sorted(beside.get(node, ())):
                if other != root and other not in found:
                    found[other] = node
                    turn.append(other)
        return found

    def zones(self, *, apart: float = _APART) -> dict[str, str]:
        """The zone of each node, named after its first node, where links tell zones apart.

        The tree is cut where its links, widest first, fall off most, if one is at least `apart`
        times the next; else all nodes are one zone.

        >>> trunk = {(x, y): 1.0 for x in "ab" for y in "cd"}
        >>> SpanningTree("cbda", {("a", "b"): 9.0, ("c", "d"): 8.0} | trunk).zones()
        {'a': 'a', 'b': 'a', 'c': 'c', 'd': 'c'}
        """
        falls = [
            one.bytes_per_s / other.bytes_per_s if other.bytes_per_s else math.inf
            for one, other in pairwise(self.joints)
        ]
        most = max(falls, default=0.0)
        kept = self.joints if most < apart else self.joints[: falls.index(most) + 1]
        zones = {node: node for node in sorted(self.ring)}
        for one, other, _ in kept:
            first, second = sorted((zones[one], zones[other]))
            zones |= {node: first for node, zone in zones.items() if zone == second}
        return zones


def crossings(order: Sequence[str], zones: Mapping[str, str]) -> dict[Pair, int]:
    """How often a ring in this order goes from one zone to another, by the zones.

    >>> crossings("acbd", {"a": "x", "b": "x", "c": "y", "d": "y"})
    {('x', 'y'): 2, ('y', 'x'): 2}
    """
    found: dict[Pair, int] = {}
    for one, other in zip(order, [*order[1:], *order[:1]], strict=True):
        if zones[one] != zones[other]:
            pair = zones[one], zones[other]
            found[pair] = found.get(pair, 0) + 1
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """A link in one direction, in one state.

    Attributes:
        bytes_per_s: Its rate.
        succeeds: The probability that a transfer over it does; else it is tried again.
        latency_s: One way.
        egress_s: What a transferred byte costs, in seconds: price x seconds that money is worth.
    """

    bytes_per_s: float
    succeeds: float = 1.0
    latency_s: float = 0.0
    egress_s: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what is no link."""
        if not self.bytes_per_s > 0:
            raise ValueError(f"a link's bytes_per_s must be > 0, got {self.bytes_per_s!r}")
        if not 0 < self.succeeds <= 1:
            raise ValueError(f"a link's succeeds must be in (0, 1], got {self.succeeds!r}")
        if not min(self.latency_s, self.egress_s) >= 0:
            raise ValueError("a link's latency_s and egress_s must be >= 0")

    def cost_s(self, size_bytes: float) -> float:
        """Seconds of one try: bytes / bandwidth + latency + egress."""
        return size_bytes / self.bytes_per_s + self.latency_s + size_bytes * self.egress_s


@dataclass(frozen=True, slots=True)
class Policy:
    """What is best in each state.

    Attributes:
        seconds: Expected seconds to the target from each node, by the state of links; infinite
            where no link leads there.
        hops: To which node to send from each node; to itself: wait for a better state.
    """

    seconds: tuple[Mapping[str, float], ...]
    hops: tuple[Mapping[str, str], ...]

    def path(self, source: str, target: str, state: int = 0) -> tuple[str, ...]:
        """The nodes from source to target while links stay as they are, waiting left out."""
        found = [source]
        while found[-1] != target and found[-1] in self.hops[state]:
            following = self.hops[state][found[-1]]
            if following == found[-1]:
                break
            found.append(following)
        return tuple(found)


def decide(
    links: Mapping[Pair, Link] | Sequence[Mapping[Pair, Link]],
    target: str,
    size_bytes: float,
    *,
    transitions: Sequence[Sequence[float]] = ((1.0,),),
    slot_s: float = math.inf,
) -> Policy:
    """Solve the Markov decision process of a transfer that is stored whole on each node it passes.

    V(n) = min over m of [c(n, m) + p V(m) + (1 - p) V(n)], by value iteration on its solved form
    V(n) = min over m of [c(n, m) / p + V(m)], which Dijkstra's algorithm gives exactly where links
    have one state. With several states s, which follow one another as a Markov chain once a slot,
    V(n, s) = min over m of [c + sum over s' of P^k(s, s') (p V(m, s') + (1 - p) V(n, s'))] where k
    is the slots that the transfer takes; and a node may wait a slot for another state.

    >>> gbit = 1e9 / 8
    >>> rates = {"AD": (1, 0.99), "AB": (5, 0.95), "BD": (5, 0.95)}
    >>> rates |= {"AC": (10, 0.9), "CD": (2, 0.99)}
    >>> links = {(a, b): Link(bytes_per_s=r * gbit, succeeds=p) for (a, b), (r, p) in rates.items()}
    >>> policy = decide(links, "D", 100e9)
    >>> {node: round(seconds, 3) for node, seconds in sorted(policy.seconds[0].items())}
    {'A': 336.842, 'B': 168.421, 'C': 404.04, 'D': 0.0}
    >>> policy.path("A", "D")
    ('A', 'B', 'D')

    Args:
        links: The links by pair of nodes; or for each state of the links.
        target: Where the bytes shall be.
        size_bytes: How many.
        transitions: P(s, s'): the probability that state s' follows s.
        slot_s: After so long the next state follows.

    Raises:
        ValueError: `transitions` is no stochastic matrix of as many states, or slots have no end.
    """
    states = (links,) if isinstance(links, Mapping) else tuple(links)
    matrix = np.array(transitions, float)
    if matrix.shape != (len(states), len(states)):
        raise ValueError(f"{len(states)} states of links need as many rows and columns of P")
    if (matrix < 0).any() or not np.allclose(matrix.sum(axis=1), 1.0):
        raise ValueError("each row of transitions must be probabilities that sum to 1")
    if len(states) == 1:
        return _solve_static(states[0], target, size_bytes)
    if not 0 < slot_s < math.inf:
        raise ValueError(f"links with {len(states)} states need a slot_s > 0, got {slot_s!r}")
    return _solve_markov(states, target, size_bytes, matrix, slot_s)


def _solve_static(links: Mapping[Pair, Link], target: str, size_bytes: float) -> Policy:
    seconds, hops = dict.fromkeys(_nodes([links], target), math.inf), dict[str, str]()
    into: dict[str, list[tuple[str, Link]]] = {}
    for (source, there), link in sorted(links.items()):
        into.setdefault(there, []).append((source, link))
    queue = [(0.0, target)]
    seconds[target] = 0.0
    while queue:
        so_far_s, node = heapq.heappop(queue)
        if so_far_s > seconds[node]:
            continue
        for source, link in into.get(node, ()):
            through_s = so_far_s + link.cost_s(size_bytes) / link.succeeds
            if through_s < seconds[source]:
                seconds[source], hops[source] = through_s, node
                heapq.heappush(queue, (through_s, source))
    return Policy((seconds,), (hops,))


def _solve_markov(
    states: Sequence[Mapping[Pair, Link]],
    target: str,
    size_bytes: float,
    matrix: npt.NDArray[np.float64],
    slot_s: float,
) -> Policy:
    """Value iteration from below; nodes from which no link ever leads on are left out."""
    union = {pair: link for links in states for pair, link in links.items()}
    reached = _solve_static(union, target, size_bytes).seconds[0]
    nodes = [node for node, seconds in reached.items() if math.isfinite(seconds)]
    tries = [
        _tries(
            {p: x for p, x in links.items() if target != p[0] and p[0] in nodes and p[1] in nodes},
            size_bytes,
            matrix,
            slot_s,
            state,
        )
        for state, links in enumerate(states)
    ]
    values = {node: np.zeros(len(states)) for node in nodes}
    hops: list[dict[str, str]] = [{} for _ in states]
    for _ in range(_SWEEPS):
        moved = 0.0
        for state, ways in enumerate(tries):
            best = {
                node: (slot_s + float(matrix[state] @ values[node]), node)
                for node in nodes
                if node != target
            }
            for one in ways:
                there, here = values[one.target], values[one.source]
                mean = one.succeeds * there + (1.0 - one.succeeds) * here
                offer = one.seconds + float(one.after @ mean), one.target
                best[one.source] = min(best[one.source], offer)
            for node, (seconds, following) in best.items():
                moved = max(moved, abs(seconds - values[node][state]) / seconds)
                values[node][state], hops[state][node] = seconds, following
        if moved < _EXACT:
            without_end = dict.fromkeys(reached, math.inf)
            return Policy(
                tuple(
                    without_end | {node: float(row[state]) for node, row in values.items()}
                    for state in range(len(states))
                ),
                tuple(hops),
            )
    raise ValueError(f"there are states of links from which some never lead to {target}")


class _Try(NamedTuple):
    """One try to send over a link: it takes so long, and then links are in states with `after`."""

    source: str
    target: str
    succeeds: float
    seconds: float
    after: npt.NDArray[np.float64]


def _tries(
    links: Mapping[Pair, Link],
    size_bytes: float,
    matrix: npt.NDArray[np.float64],
    slot_s: float,
    state: int,
) -> list[_Try]:
    found = []
    for (source, there), link in sorted(links.items()):
        cost_s = link.cost_s(size_bytes)
        after = np.linalg.matrix_power(matrix, max(1, round(cost_s / slot_s)))[state]
        found.append(_Try(source, there, link.succeeds, cost_s, after))
    return found


def _nodes(states: Iterable[Mapping[Pair, Link]], target: str) -> list[str]:
    return sorted({target, *(node for links in states for pair in links for node in pair)})


def pipelined_s(
    links: Mapping[Pair, Link], path: Sequence[str], size_bytes: float, piece_bytes: float
) -> float:
    """Seconds along a path whose nodes pass on each piece once it is there.

    The widest part does not count: size / bottleneck + sum over hops of latency + what the first
    piece takes over each link that is not the bottleneck. A failed try of a piece is repeated.

    >>> links = {("a", "b"): Link(bytes_per_s=2.0), ("b", "c"): Link(bytes_per_s=1.0)}
    >>> pipelined_s(links, "abc", 100.0, 1.0), pipelined_s(links, "abc", 100.0, 100.0)
    (100.5, 150.0)
    """
    hops = [links[pair] for pair in pairwise(path)]
    rates = [1.0 / (1.0 / x.bytes_per_s + x.egress_s) * x.succeeds for x in hops]
    if not rates:
        return 0.0
    piece = min(piece_bytes, size_bytes)
    first = sum(piece / rate for rate in rates) - piece / min(rates)
    return size_bytes / min(rates) + first + sum(link.latency_s for link in hops)


def relayed(
    links: Mapping[Pair, Link],
    source: str,
    target: str,
    size_bytes: float,
    *,
    piece_bytes: float,
    worth: float = _WORTH,
) -> str | None:
    """The third node through which a transfer in pieces is faster; None: it goes direct.

    >>> rates = {("a", "c"): 5e6 / 8, ("a", "b"): 50e6 / 8, ("b", "c"): 50e6 / 8}
    >>> links = {pair: Link(bytes_per_s=rate) for pair, rate in rates.items()}
    >>> relayed(links, "a", "c", 4e6, piece_bytes=2**18)
    'b'

    Args:
        links: As measured; a direct link that was not counts as if there were none.
        source: Who has the bytes.
        target: Who is to have them.
        size_bytes: How many.
        piece_bytes: How many are passed on together.
        worth: The part of the direct link's seconds that a relay must not exceed.
    """
    thirds = {there for (one, there) in links if one == source and (there, target) in links}
    ways = sorted(
        (pipelined_s(links, (source, third, target), size_bytes, piece_bytes), third)
        for third in thirds - {source, target}
    )
    if not ways:
        return None
    direct_s = (
        pipelined_s(links, (source, target), size_bytes, piece_bytes)
        if (source, target) in links
        else math.inf
    )
    return ways[0][1] if ways[0][0] <= worth * direct_s else None


class Measured:
    """Rates of links as they are measured; says when routes are to be planned again.

    Args:
        changed: A rate that is so many times the one that was planned with, or so many times
            smaller, is another one.

    Attributes:
        rates: Bytes per second by pair of nodes, as routes are planned with.
    """

    def __init__(self, *, changed: float = _CHANGED) -> None:
        self._changed = changed
        self._odd: dict[Pair, float] = {}
        self.rates: dict[Pair, float] = {}

    def observe(self, source: str, target: str, bytes_per_s: float) -> bool:
        """Take a measurement; True: it is new, or the second in turn that shows the same change.

        >>> links = Measured()
        >>> [links.observe("a", "b", rate) for rate in (10.0, 11.0, 2.0, 10.0, 2.0, 2.1)]
        [True, False, False, False, False, True]
        >>> links.rates
        {('a', 'b'): 2.1}
        """
        pair = source, target
        known, odd = self.rates.get(pair), self._odd.pop(pair, None)
        if known is not None and self._alike(known, bytes_per_s):
            return False
        if known is None or (odd is not None and self._alike(odd, bytes_per_s)):
            self.rates[pair] = bytes_per_s
            return True
        self._odd[pair] = bytes_per_s
        return False

    def forget(self, node: str) -> bool:
        """The node is gone; True: routes knew it."""
        gone = [pair for pair in self.rates if node in pair]
        for pair in gone:
            del self.rates[pair]
            self._odd.pop(pair, None)
        return bool(gone)

    def _alike(self, one: float, other: float) -> bool:
        return max(one, other) < self._changed * min(one, other)


def _both_ways(rates: Mapping[Pair, float]) -> dict[Pair, float]:
    """The slower way of each pair, by the pair in order of names."""
    found: dict[Pair, float] = {}
    for (one, other), rate in rates.items():
        pair = min(one, other), max(one, other)
        if one != other and rate > 0:
            found[pair] = min(rate, found.get(pair, math.inf))
    return found
