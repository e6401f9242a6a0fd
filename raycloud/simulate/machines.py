"""The machines: places for members on nodes in zones, which come and go."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from raycloud.planner.speed import Speed

if TYPE_CHECKING:
    from raycloud.simulate.scenario import Scenario


@dataclass(frozen=True, kw_only=True, slots=True)
class Notice:
    """What is said of a node, or of a process, that will be gone at `gone_s`.

    `drained`: Ray says it, and places nothing there any more; else each member hears it.
    """

    gone_s: float
    told: bool = True
    drained: bool = False


class Machines:
    """Nodes with places, numbered from 0; each node has the next ones.

    By node: `speeds` are of a worker there, `slow` times as long for now; `cut` counts the faults
    that keep it from being reached, `unreached` those of them that keep packets from it.
    """

    def __init__(self, scenario: Scenario) -> None:
        places, costing = scenario.places, scenario.costing
        number = len(places)
        there = scenario.there or number
        self._counts = places
        self._first = [0, *accumulate(places)]
        self._zones = scenario.zones
        self._up = [node < there for node in range(number)]
        self._free = [n for n in range(sum(places)) if self._up[self.node_of(n)]]
        self.now_s: Callable[[], float] = lambda: 0.0
        self._since_s = [0.0 if up else None for up in self._up]
        self._held_s = [0.0] * number
        if costing is None:
            seconds = (scenario.speeds[n % len(scenario.speeds)] for n in range(number))
            self.speeds = [Speed(fixed_s=0.0, micro_batch_s=one) for one in seconds]
        else:
            self.speeds = [costing.speed(node) for node in range(number)]
        self.slow = [1.0] * number
        self.cut = [0] * number
        self.unreached = [0] * number
        self.notices: dict[int, Notice] = {}

    @property
    def room(self) -> int:
        """How many members the nodes hold that are there, and are not going to be gone."""
        return sum(n for n, up in zip(self._counts, self._up, strict=True) if up) - sum(
            self._counts[node] for node in self.notices if self._up[node]
        )

    def seconds(self, node: int, micro_batches: float) -> float:
        """How long a worker there computes now."""
        return self.slow[node] * self.speeds[node].seconds(micro_batches)

    def held_s(self) -> list[float]:
        """How long each node has been there so far."""
        now_s = self.now_s()
        return [
            held_s if since_s is None else held_s + now_s - since_s
            for held_s, since_s in zip(self._held_s, self._since_s, strict=True)
        ]

    @property
    def within_reach(self) -> int:
        """The same of the nodes that can be reached."""
        nodes = (n for n, up in enumerate(self._up) if up and n not in self.notices)
        return sum(self._counts[node] for node in nodes if not self.cut[node])

    def acknowledges(self, place: int) -> bool:
        """Whether a packet that is sent to the node of a place is acknowledged."""
        node = self.node_of(place)
        return self._up[node] and not self.unreached[node]

    @property
    def there(self) -> list[int]:
        """Nodes that are there."""
        return [node for node, up in enumerate(self._up) if up]

    @property
    def away(self) -> list[int]:
        """Nodes that are not."""
        return [node for node, up in enumerate(self._up) if not up]

    @property
    def open(self) -> int:
        """Free places on nodes where members can be placed."""
        return sum(not self._shut(self.node_of(place)) for place in self._free)

    def _shut(self, node: int) -> bool:
        """It cannot be reached, or nothing is placed there any more."""
        return self.cut[node] > 0 or (node in self.notices and self.notices[node].drained)

    def node_of(self, place: int) -> int:
        """Which node a place is on."""
        return bisect_right(self._first, place) - 1

    def in_zone(self, zone: int) -> list[int]:
        """Nodes of a zone that are there."""
        return [node for node in self.there if node % self._zones == zone % self._zones]

    def seat(self) -> int | None:
        """Take the lowest free place where a member can be placed; None: there is none."""
        shut = (self._shut(self.node_of(place)) for place in self._free)
        first = next((i for i, is_shut in enumerate(shut) if not is_shut), None)
        return None if first is None else self._free.pop(first)

    def leave(self, place: int) -> None:
        """Give a place back."""
        if self._up[self.node_of(place)]:
            insort(self._free, place)

    def vanish(self, node: int) -> None:
        """The node is gone, with its places."""
        self._held_s[node] = self.held_s()[node]
        self._since_s[node] = None
        self._up[node] = False
        self.notices.pop(node, None)
        self._free = [place for place in self._free if self.node_of(place) != node]

    def come(self, node: int) -> None:
        """The node is there again, empty."""
        if not self._up[node]:
            self._up[node] = True
            self._since_s[node] = self.now_s()
            places = range(self._first[node], self._first[node + 1])
            self._free = sorted({*self._free, *places})
