"""A cluster that somebody describes: a table of its nodes, or the file that `ray up` takes.

A table is CSV with a line of names first. `name` has to be there, the others may be left out:

    name, count (1), cpus (1), gpus (0), memory_gb, speed (1), mbit_s, delay_ms (0), zone,
    price_per_hour

`speed` is how many times as fast a worker is there as where the task is measured, `mbit_s` what a
node's link carries, headers included, `delay_ms` what it adds one way. A node without GPUs computes
on the cores that carry its messages.
"""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from raycloud.errors import SpecError
from raycloud.planner.cost import LOOPBACK_BYTES_PER_S
from raycloud.planner.inventory import PRICE_LABEL, ZONE_LABEL, Inventory, Node
from raycloud.planner.roles import Machine
from raycloud.planner.speed import Speed

if TYPE_CHECKING:
    from raycloud.planner.cost import Profile
    from raycloud.spec import RoleResources

MOST = 100_000  # nodes
_GB = 10**9
# Of a link's bits: a packet of 1,500 bytes has 20 of IP's header and 32 of TCP's with its
# timestamps (RFC 9293, RFC 7323), and 14 of Ethernet's.
PAYLOAD = 1448 / 1514
_BYTES = 125_000.0 * PAYLOAD  # by Mbit/s
# By the name of a column: what it is if it is left out, and its least. None: it may be unknown.
_NUMBERS: Mapping[str, tuple[float | None, float]] = {
    "count": (1.0, 0.0),
    "cpus": (1.0, 0.0),
    "gpus": (0.0, 0.0),
    "memory_gb": (None, 0.0),
    "speed": (1.0, 0.0),
    "mbit_s": (None, 0.0),
    "delay_ms": (0.0, 0.0),
    "price_per_hour": (None, 0.0),
}
_ABOVE_ZERO = ("speed", "mbit_s", "memory_gb")
_COLUMNS = ("name", "zone", *_NUMBERS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Described:
    """What is said of a cluster.

    Attributes:
        inventory: Its nodes.
        speed: By node, if it is another one than 1.
        bytes_per_s: What its link carries of messages, by node, where that is said.
        delay_s: That it adds one way, by node, where it adds any.
    """

    inventory: Inventory
    speed: Mapping[str, float] = field(default_factory=dict)
    bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    delay_s: Mapping[str, float] = field(default_factory=dict)

    def profile(self, measured: Profile, placed: Sequence[str]) -> Profile:
        """Of workers on these nodes, by what one worker has measured where the task was tried."""
        [one] = measured.speeds
        by = [self.speed.get(node, 1.0) for node in placed]
        counts = Counter(placed)
        rate, round_trip_s = self.link(counts)
        nodes = {node.name: node for node in self.inventory.nodes if node.name in counts}
        cores = tuple(nodes[name].cpus / counts[name] for name in placed)
        apart = any(node.gpus for node in nodes.values()) or min(cores, default=0.0) <= 0.0
        return replace(
            measured,
            speeds=tuple(
                replace(one, fixed_s=one.fixed_s / x, micro_batch_s=one.micro_batch_s / x)
                for x in by
            ),
            link_bytes_per_s=rate,
            round_trip_s=round_trip_s,
            cores=() if apart else cores,
        )

    def machines(
        self, measured: Profile, collate_s: float, resources: RoleResources
    ) -> tuple[Machine, ...]:
        """How fast each kind of work is on the nodes; making batches takes the same on each core.

        Args:
            measured: By what one worker has measured where the task was tried.
            collate_s: Seconds of the batch of a micro-batch there.
            resources: What a worker reserves.
        """
        [one] = measured.speeds
        found = []
        for node in self.inventory.nodes:
            fits, by = node.fits(resources), self.speed.get(node.name, 1.0)
            speed = Speed(fixed_s=one.fixed_s / by, micro_batch_s=one.micro_batch_s / by)
            machine = Machine(
                node=node.name,
                collate_s=max(collate_s, 1e-9),
                workers=fits,
                speed=speed if fits else None,
                processes=int(node.cpus),
                beside=max(0, int(node.cpus) - fits * resources.cpus) if fits else 0,
            )
            found.append(machine)
        return tuple(found)

    def repeated(self, count: int) -> Described:
        r"""So many nodes like these, in the same proportions, each with a name of its own.

        >>> two = read_table("name,speed\na,2\nb,1\n", "nodes.csv")
        >>> [node.name for node in two.repeated(3).inventory.nodes], two.repeated(3).speed
        (['a', 'a~1', 'b'], {'a': 2.0, 'a~1': 2.0})

        Raises:
            SpecError: More than 100,000.
        """
        if count > MOST:
            raise SpecError("--nodes", count, f"is more than {MOST} nodes", hint="lower it")
        before = self.inventory.nodes
        nodes, named = [], dict[str, list[str]]()
        for at in range(count):
            node = before[at * len(before) // count]
            names = named.setdefault(node.name, [])
            names.append(f"{node.name}~{len(names)}" if names else node.name)
            nodes.append(replace(node, name=names[-1], host=names[-1]))

        def each(told: Mapping[str, float]) -> dict[str, float]:
            return {one: told[name] for name in named if name in told for one in named[name]}

        return Described(
            inventory=Inventory(nodes=tuple(nodes)),
            speed=each(self.speed),
            bytes_per_s=each(self.bytes_per_s),
            delay_s=each(self.delay_s),
        )

    def link(self, used: Iterable[str]) -> tuple[float | None, float]:
        """Between these nodes, the slowest rate, and the seconds there and back of the farthest."""
        used = set(used)
        if len(used) == 1:
            return LOOPBACK_BYTES_PER_S, 0.0
        rates = [rate for node, rate in self.bytes_per_s.items() if node in used]
        delays = sorted((s for node, s in self.delay_s.items() if node in used), reverse=True)
        return min(rates, default=None), 2 * sum(delays[:2])  # out of one node, into another


def read_table(text: str, name: str) -> Described:
    r"""A cluster from a CSV table; `name` is that of its file.

    >>> found = read_table("name,count,cpus,speed\nfast,2,8,2.0\nslow,1,4,\n", "nodes.csv")
    >>> [node.name for node in found.inventory.nodes], found.speed["fast-1"]
    (['fast-0', 'fast-1', 'slow'], 2.0)

    Raises:
        SpecError: A column or a value is wrong; names it and its line.
    """
    rows = list(csv.reader(io.StringIO(text)))
    heads = [head.strip() for head in rows[0]] if rows else []
    unknown = [head for head in heads if head not in _COLUMNS]
    twice = [head for head, count in Counter(heads).items() if count > 1]
    wrong = [f"{head!r} is none" for head in unknown]
    wrong += [f"{head!r} is there twice" for head in twice]
    if "name" not in heads:
        wrong.append("name is missing")
    if wrong:
        raise SpecError(
            f"{name}, line 1",
            ",".join(heads),
            f"is not the names of columns: {wrong[0]}",
            hint=f"begin with a line of some of {', '.join(_COLUMNS)}; name has to be there",
        )
    return _made(_of_table(rows[1:], heads, name), name)


def of_launcher(record: Mapping[str, Any], name: str) -> Described:
    """A cluster from what `ray up` takes: as many of each type of node as it may have.

    Raises:
        SpecError: It has no types of nodes, or says of one what cannot be.
    """
    types = record.get("available_node_types")
    if not isinstance(types, Mapping) or not types:
        raise SpecError(
            f"{name}: available_node_types",
            types,
            "names no types of nodes",
            hint="give a file that `ray up` takes, or a CSV table of nodes",
        )
    return _made(_of_types(types, str(record.get("head_node_type", "")), name), name)


def _of_table(
    rows: Sequence[Sequence[str]], heads: Sequence[str], name: str
) -> Iterator[tuple[str, dict[str, Any], dict[str, str]]]:
    for line, row in enumerate(rows, 2):
        if not any(cell.strip() for cell in row):
            continue
        where = f"{name}, line {line}"
        if len(row) != len(heads):
            raise SpecError(
                where,
                ",".join(row),
                f"has {len(row)} values, and there are {len(heads)} columns",
                hint="write one value for each column; it may be empty",
            )
        cells = dict(zip(heads, (cell.strip() for cell in row), strict=True))
        zone = {ZONE_LABEL: cells["zone"]} if cells.get("zone") else {}
        yield where, {key: text for key, text in cells.items() if text and key != "zone"}, zone


def _of_types(
    types: Mapping[str, Any], head: str, name: str
) -> Iterator[tuple[str, dict[str, Any], dict[str, str]]]:
    for kind, told in types.items():
        where = f"{name}: available_node_types.{kind}"
        if not isinstance(told, Mapping):
            raise SpecError(where, told, "is no type of nodes", hint="write its resources below it")
        resources, labels = (told.get(name) or {} for name in ("resources", "labels"))
        for part, value in (("resources", resources), ("labels", labels)):
            if not isinstance(value, Mapping):
                raise SpecError(
                    f"{where}.{part}", value, "is no mapping", hint="write a value for each name"
                )
        count = told.get("max_workers", told.get("min_workers", 1))
        cells = {
            "name": str(kind),
            "count": 1 if kind == head else count,
            "cpus": resources.get("CPU", 0),
            "gpus": resources.get("GPU", 0),
        }
        if "memory" in resources:
            cells["memory_gb"] = (_number(where, "memory_gb", resources["memory"]) or 0.0) / _GB
        if PRICE_LABEL in labels:
            cells["price_per_hour"] = labels[PRICE_LABEL]
        yield where, cells, {str(key): str(text) for key, text in labels.items()}


def _made(rows: Iterator[tuple[str, dict[str, Any], dict[str, str]]], name: str) -> Described:
    nodes: list[Node] = []
    speed, rates, delays = dict[str, float](), dict[str, float](), dict[str, float]()
    for where, cells, labels in rows:
        numbers = {key: _number(where, key, cells.get(key)) for key in _NUMBERS}
        count, price = int(numbers["count"] or 0), numbers["price_per_hour"]
        if len(nodes) + count > MOST:
            raise SpecError(where, count, f"makes more than {MOST} nodes", hint="lower count")
        more = {} if price is None else {PRICE_LABEL: f"{price:g}"}
        memory = numbers["memory_gb"]
        for at in range(count):
            node = str(cells.get("name", "")) + (f"-{at}" if count > 1 else "")
            nodes.append(
                Node(
                    name=node,
                    host=node,
                    cpus=numbers["cpus"] or 0.0,
                    gpus=numbers["gpus"] or 0.0,
                    memory_bytes=None if memory is None else int(memory * _GB),
                    labels={**labels, **more},
                )
            )
            if numbers["speed"] != 1.0:
                speed[node] = numbers["speed"] or 1.0
            if (rate := numbers["mbit_s"]) is not None:
                rates[node] = rate * _BYTES
            if delay := numbers["delay_ms"]:
                delays[node] = delay / 1000
    if not nodes:
        raise SpecError(name, 0, "describes no nodes", hint="add a line with a node's name")
    try:
        inventory = Inventory(nodes=tuple(nodes))
    except ValueError as error:
        raise SpecError(name, "name", str(error), hint="give each line another name") from None
    return Described(inventory=inventory, speed=speed, bytes_per_s=rates, delay_s=delays)


def _number(where: str, column: str, told: Any) -> float | None:
    usual, least = _NUMBERS[column]
    if told is None:
        return usual
    try:
        number = float(told)
    except (TypeError, ValueError):
        number = math.nan
    whole = column != "count" or number == int(number if math.isfinite(number) else 0)
    if not (math.isfinite(number) and number >= least and whole) or (
        column in _ABOVE_ZERO and number == 0.0
    ):
        what = "whole number" if column == "count" else "number"
        above = "above 0" if column in _ABOVE_ZERO else f"of {least:g} or more"
        raise SpecError(f"{where}: {column}", told, f"is no {what} {above}", hint="correct it")
    return number
