"""Gang packing: bundles of unlike roles onto nodes, all or none, with fragmentation as a cost.

A GPU that is left free is lost where no bundle that may still come can use it: because its node has
no CPUs or memory left for it, or because what is left of a shared GPU is too little. A bundle goes
where the GPUs that are lost grow least: fragmentation gradient descent (Weng et al., "Beware of
Fragmentation: Scheduling GPU-Sharing Workloads with Fragmentation Gradient Descent", USENIX ATC
2023). Where they grow alike it goes to the node on which least is left (best fit). Unlike there, a
bundle that may come counts by the GPUs that it takes: rare ones that need a whole node would else
find none (`benchmarks.packing`).

Amounts are counted in whole ten-thousandths, as Ray counts them: nothing is lost in rounding.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from raycloud.errors import PlacementError

if TYPE_CHECKING:
    import numpy.typing as npt

    from raycloud.planner.inventory import Inventory, Node

Rule = Literal["fragmentation", "best_fit", "dot_product", "least_dot_product"]
RULES: tuple[Rule, ...] = ("fragmentation", "best_fit", "dot_product", "least_dot_product")

_UNITS = 10_000  # of a CPU or a GPU
_UNKNOWN_BYTES = 2**62  # of memory, which then limits nothing
_LEFTOVER = 1e-2  # GPUs that a whole node's rest is worth: it decides between equals
_MOST_KNOWN = 500_000  # pairs of a node's rest and a bundle whose score is kept


@dataclass(frozen=True, kw_only=True, slots=True)
class Bundle:
    """What one member reserves on one node.

    Attributes:
        cpus: CPUs.
        gpus: Whole GPUs; or, below 1, a part of one GPU, which others may share.
        memory_bytes: Main memory.
        labels: What the node must carry, as for `planner.inventory.Node.carries`.
    """

    cpus: float = 1.0
    gpus: float = 0.0
    memory_bytes: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what no node can give."""
        for name, value in (("cpus", self.cpus), ("gpus", self.gpus)):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"a bundle's {name} must be a number >= 0, got {value!r}")
        if self.gpus > 1 and self.gpus != int(self.gpus):
            raise ValueError(
                f"a bundle's gpus must be whole, or below 1 for a part of one, got {self.gpus!r}"
            )
        if self.memory_bytes < 0:
            raise ValueError(f"a bundle's memory_bytes must be >= 0, got {self.memory_bytes!r}")


def pack(inventory: Inventory, gang: Sequence[Bundle]) -> tuple[str, ...]:
    """The node of each bundle of a gang, all of them; more like them are expected to come.

    >>> from raycloud.planner.inventory import Inventory, Node
    >>> nodes = (Node(name="g", cpus=8, gpus=2), Node(name="c", cpus=8), Node(name="h", cpus=2))
    >>> trains, reads = Bundle(cpus=4, gpus=1), Bundle(cpus=2)
    >>> pack(Inventory(nodes=nodes), [reads, trains, reads, trains])
    ('h', 'g', 'c', 'g')

    Raises:
        PlacementError: They do not fit together, as far as `Packing.place` finds.
    """
    placed = Packing(inventory, typical=((bundle, 1.0) for bundle in gang)).place(gang)
    if placed is None:
        raise PlacementError(
            f"{len(gang)} bundles do not fit together on {len(inventory.nodes)} nodes",
            hint="lower what they reserve, leave some out, or add nodes",
        )
    return placed


class Packing:
    """What is free on the nodes of a cluster while gangs come one after the other.

    The same gangs in the same order are placed alike, in whatever order the inventory lists nodes.

    Args:
        inventory: What is free at first.
        typical: Bundles that may still come, and how often each does: by these a GPU is lost or
            not. Bundles without GPUs are left out.
        rule: How to score a node; `pack` and the planner take the first, the others are for
            comparison. `best_fit`: least of CPUs, memory and GPUs is left, each as a part of the
            largest node's. `dot_product`: the product of what the bundle takes and what is free is
            largest (Tetris: Grandl et al., SIGCOMM 2014), or smallest (`least_dot_product`).
    """

    def __init__(
        self,
        inventory: Inventory,
        *,
        typical: Iterable[tuple[Bundle, float]] = (),
        rule: Rule = "fragmentation",
    ) -> None:
        nodes = sorted(inventory.nodes, key=lambda node: node.name)
        self._names = tuple(node.name for node in nodes)
        self._kinds = tuple(dict.fromkeys(_labels(node.labels) for node in nodes))
        numbers = {labels: number for number, labels in enumerate(self._kinds)}
        self._likes = tuple(
            next(node for node in nodes if _labels(node.labels) == labels) for labels in self._kinds
        )
        self._rests = [_rest(node, numbers[_labels(node.labels)]) for node in nodes]
        self._most = (
            max((rest.cpu for rest in self._rests), default=0) or 1,
            max((r.memory for r in self._rests if r.memory < _UNKNOWN_BYTES), default=0) or 1,
            max((sum(rest.gpus) for rest in self._rests), default=0) or 1,
        )
        self._carried: dict[tuple[tuple[str, str], ...], tuple[bool, ...]] = {}
        self._rule = rule
        self._changed: list[int] = []  # nodes, one entry for each change of what is left there
        self._columns: dict[tuple[Rule, _Need], _Column] = {}
        self._known: dict[tuple[Rule, _Need, _Rest], tuple[float, _Rest] | None] = {}
        self.expect(typical)

    def expect(self, typical: Iterable[tuple[Bundle, float]]) -> None:
        """From now on these are the bundles that may still come."""
        needs = [(self._need(bundle), weight) for bundle, weight in typical]
        self._typical = _Typical(needs, self._carries)
        self._columns.clear()
        self._known.clear()

    @property
    def free_gpus(self) -> float:
        """GPUs that are free, parts of shared ones included."""
        return sum(sum(rest.gpus) for rest in self._rests) / _UNITS

    def fragmentation(self) -> float:
        """GPUs that are free and lost: what typical bundles cannot use, by the GPUs they take.

        >>> from raycloud.planner.inventory import Inventory, Node
        >>> one = Inventory(nodes=(Node(name="a", cpus=4, gpus=2),))
        >>> packing = Packing(one, typical=[(Bundle(cpus=3, gpus=1), 1.0), (Bundle(gpus=2), 1.0)])
        >>> packing.fragmentation()  # both can use both
        0.0
        >>> placed = packing.place([Bundle(cpus=2, gpus=0.5)])
        >>> packing.free_gpus, packing.fragmentation()  # too few CPUs, too few GPUs
        (1.5, 1.5)
        """
        counts = Counter(self._rests)
        lost = sum(self._typical.lost(rest) * count for rest, count in sorted(counts.items()))
        return lost / _UNITS

    def place(self, gang: Sequence[Bundle]) -> tuple[str, ...] | None:
        """The node of each bundle, all reserved from now on; None: not all fit, and none is.

        Larger bundles are placed first. Where the rule leaves one over, the others are tried. Of
        bundles that are all alike each rule places as many as fit at all; for unlike ones a way may
        exist that none of them finds (the problem is NP-hard).
        """
        needs = [self._need(bundle) for bundle in gang]
        order = sorted(range(len(needs)), key=lambda at: (_size(needs[at]), -at), reverse=True)
        one_kind = len(set(needs)) <= 1  # then another rule would find no more
        rules = sorted(RULES, key=lambda one: one != self._rule)
        for rule in rules[:1] if one_kind else rules:
            found = self._placed([needs[at] for at in order], rule)
            if found is not None:
                names = [""] * len(needs)
                for at, node in zip(order, found, strict=True):
                    names[at] = self._names[node]
                return tuple(names)
        return None

    def _placed(self, needs: Sequence[_Need], rule: Rule) -> list[int] | None:
        taken: list[tuple[int, _Rest]] = []
        for need in needs:
            column = self._column(rule, need)
            best = int(column.scores.argmin()) if len(column.scores) else 0
            if not len(column.scores) or math.isinf(column.scores[best]):
                for node, before in reversed(taken):
                    self._set(node, before)
                return None
            scored = self._score(rule, need, self._rests[best])
            assert scored is not None  # noqa: S101 - its score is finite
            taken.append((best, self._rests[best]))
            self._set(best, scored[1])
        return [node for node, _ in taken]

    def _set(self, node: int, rest: _Rest) -> None:
        self._rests[node] = rest
        self._changed.append(node)

    def _column(self, rule: Rule, need: _Need) -> _Column:
        """The score of each node for a bundle, as nodes are now."""
        column = self._columns.get((rule, need))
        if column is None:
            nodes: Iterable[int] = range(len(self._rests))
            column = self._columns[rule, need] = _Column(np.empty(len(self._rests)))
        else:
            nodes = set(self._changed[column.seen :])
        column.seen = len(self._changed)
        for node in nodes:
            scored = self._score(rule, need, self._rests[node])
            column.scores[node] = math.inf if scored is None else scored[0]
        return column

    def _score(self, rule: Rule, need: _Need, rest: _Rest) -> tuple[float, _Rest] | None:
        """The score of a node, where the least wins, and what would be left; None: no room."""
        key = rule, need, rest
        if key not in self._known:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[key] = self._scored(rule, need, rest)
        return self._known[key]

    def _scored(self, rule: Rule, need: _Need, rest: _Rest) -> tuple[float, _Rest] | None:
        if need.cpu > rest.cpu or need.memory > rest.memory or not self._carries(need, rest.kind):
            return None
        ways = list(_without(rest.gpus, need))
        if not ways:
            return None
        memory = rest.memory if rest.memory == _UNKNOWN_BYTES else rest.memory - need.memory
        left = [rest._replace(cpu=rest.cpu - need.cpu, memory=memory, gpus=gpus) for gpus in ways]
        if rule in {"dot_product", "least_dot_product"}:
            asked = need.cpu, need.memory, need.each * need.number
            pairs = zip(self._parts(rest), asked, self._most, strict=True)
            product = sum(part * amount / most for part, amount, most in pairs)
            return (-product if rule == "dot_product" else product), left[0]
        if rule == "best_fit":
            return sum(self._parts(left[0])), left[0]
        before = self._typical.lost(rest)
        costs = [
            (self._typical.lost(one) - before) / _UNITS + _LEFTOVER * sum(self._parts(one)) / 3.0
            for one in left
        ]
        best = min(range(len(left)), key=lambda at: costs[at])
        return costs[best], left[best]

    def _parts(self, rest: _Rest) -> tuple[float, float, float]:
        """What is left of CPUs, memory and GPUs, as parts of the largest node's."""
        memory = 0 if rest.memory == _UNKNOWN_BYTES else rest.memory
        most = self._most
        return rest.cpu / most[0], memory / most[1], sum(rest.gpus) / most[2]

    def _carries(self, need: _Need, kind: int) -> bool:
        """Whether nodes of this kind carry the labels that are asked for."""
        if need.labels not in self._carried:
            asked = dict(need.labels)
            self._carried[need.labels] = tuple(node.carries(asked) for node in self._likes)
        return self._carried[need.labels][kind]

    @staticmethod
    def _need(bundle: Bundle) -> _Need:
        whole = bundle.gpus >= 1
        return _Need(
            cpu=round(bundle.cpus * _UNITS),
            memory=bundle.memory_bytes,
            each=_UNITS if whole else round(bundle.gpus * _UNITS),
            number=int(bundle.gpus) if whole else int(bundle.gpus > 0),
            labels=_labels(bundle.labels),
        )


class _Need(NamedTuple):
    """A bundle: so much of each of `number` GPUs; CPU and GPU in units."""

    cpu: int
    memory: int
    each: int
    number: int
    labels: tuple[tuple[str, str], ...]


class _Rest(NamedTuple):
    """What is left on a node; of its GPUs, least first. Nodes of one kind carry the same labels."""

    kind: int
    cpu: int
    memory: int
    gpus: tuple[int, ...]


@dataclass(slots=True)
class _Column:
    """Scores by node, and how many changes of nodes they have followed."""

    scores: npt.NDArray[np.float64]
    seen: int = 0


class _Typical:
    """The bundles that may come, each by the GPUs that it takes."""

    def __init__(
        self, weighted: Iterable[tuple[_Need, float]], carries: Callable[[_Need, int], bool]
    ) -> None:
        weights = dict[_Need, float]()
        for need, weight in weighted:
            if need.number and weight > 0:
                gpus = need.each * need.number / _UNITS
                weights[need] = weights.get(need, 0.0) + weight * gpus
        self._needs = sorted(weights)
        total = math.fsum(weights.values()) or 1.0
        self._weights = np.array([weights[need] / total for need in self._needs])
        columns = np.array([need[:4] for need in self._needs], np.int64).reshape(-1, 4)
        self._cpu, self._memory, self._each, self._count = columns.T
        self._carries = carries
        self._allowed: dict[int, npt.NDArray[np.bool_]] = {}
        self._lost: dict[_Rest, float] = {}

    def lost(self, rest: _Rest) -> float:
        """GPU units, on average: where a bundle fits, those of GPUs too full for it; else all."""
        if not self._needs or not rest.gpus or not rest.gpus[-1]:
            return 0.0
        found = self._lost.get(rest)
        if found is None:
            if len(self._lost) >= _MOST_KNOWN:
                self._lost.clear()
            found = self._lost[rest] = self._count_lost(rest)
        return found

    def _count_lost(self, rest: _Rest) -> float:
        if rest.kind not in self._allowed:
            self._allowed[rest.kind] = np.array([self._carries(n, rest.kind) for n in self._needs])
        gpus = np.array(rest.gpus, np.int64)
        usable = gpus >= self._each[:, None]
        fits = (
            self._allowed[rest.kind]
            & (self._cpu <= rest.cpu)
            & (self._memory <= rest.memory)
            & (usable.sum(axis=1) >= self._count)
        )
        used = np.where(fits, usable @ gpus, 0)
        return float(self._weights @ (gpus.sum() - used))


def _labels(labels: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(labels.items()))


def _rest(node: Node, kind: int) -> _Rest:
    memory = _UNKNOWN_BYTES if node.memory_bytes is None else node.memory_bytes
    whole = int(node.gpus)
    part = math.floor((node.gpus - whole) * _UNITS + 1e-6)
    gpus = (*((part,) if part else ()), *((_UNITS,) * whole))
    return _Rest(kind, math.floor(node.cpus * _UNITS + 1e-6), memory, gpus)


def _size(need: _Need) -> tuple[int, int, int, _Need]:
    return need.each * need.number, need.cpu, need.memory, need


def _without(gpus: tuple[int, ...], need: _Need) -> Iterator[tuple[int, ...]]:
    """What may be left of a node's GPUs: a part is taken of the fullest that has room, or others.

    >>> need = _Need(cpu=0, memory=0, each=4000, number=1, labels=())
    >>> list(_without((2000, 5000, 10000), need))
    [(1000, 2000, 10000), (2000, 5000, 6000)]
    """
    if not need.number:
        yield gpus
    elif need.each == _UNITS:
        if gpus[-need.number :].count(_UNITS) == need.number:
            yield tuple(sorted((*gpus[: -need.number], *((0,) * need.number))))
    else:
        for at, left in enumerate(gpus):
            if left >= need.each and (at == 0 or gpus[at - 1] != left):
                yield tuple(sorted((*gpus[:at], left - need.each, *gpus[at + 1 :])))
