"""What machines there are, and how many members fit on them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from raycloud.errors import PlacementError

if TYPE_CHECKING:
    from raycloud.spec import RoleResources

ZONE_LABEL = "ray.io/availability-zone"
PRICE_LABEL = "raycloud.io/price-per-hour"
WATTS_LABEL = "raycloud.io/watts"  # of the whole machine, where all its cores are busy
_SHOWN_NODES = 8  # in an error; the rest is counted


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A machine, and what of it a run may use.

    Attributes:
        name: Unique in the inventory.
        address: Where other machines reach it.
        host: What people call it; empty where that is not known.
        cpus: Logical CPUs; may be a fraction where the cluster hands out fractions.
        gpus: GPUs.
        memory_bytes: Memory; None where it is not known, which then limits nothing.
        labels: What is said of the machine, e.g. its zone or its type.
    """

    name: str
    address: str = ""
    host: str = ""
    cpus: float = 1.0
    gpus: float = 0.0
    memory_bytes: int | None = None
    labels: Mapping[str, str] = field(default_factory=dict)

    def fits(self, resources: RoleResources) -> int:
        """How many members with `resources` fit on this machine while nothing else runs there.

        >>> from raycloud.spec import RoleResources
        >>> Node(name="a", cpus=8, gpus=2).fits(RoleResources(cpus=2, gpus=1))
        2
        """
        if not self.carries(resources.labels):
            return 0
        counts = [int(self.cpus // resources.cpus)]
        if resources.gpus:
            counts.append(int(self.gpus // resources.gpus))
        if resources.memory_bytes and self.memory_bytes is not None:
            counts.append(self.memory_bytes // resources.memory_bytes)
        return min(counts)

    def carries(self, selectors: Mapping[str, str]) -> bool:
        """Whether the labels are as asked: each a value, `!value`, `in(a, b)` or `!in(a, b)`.

        As in Ray, a machine without the label satisfies what begins with `!`.

        >>> node = Node(name="a", labels={"zone": "a1"})
        >>> node.carries({"zone": "in(a1, a2)", "market": "!spot"}), node.carries({"zone": "!a1"})
        (True, False)
        """
        return all(_matches(self.labels.get(key), asked) for key, asked in selectors.items())


def price_per_hour(labels: Mapping[str, str]) -> float | None:
    """What a machine is labelled to cost an hour; None: nothing is said, or no sum of money.

    >>> price_per_hour({PRICE_LABEL: "2.40"}), price_per_hour({PRICE_LABEL: "?"})
    (2.4, None)
    """
    return _number(labels.get(PRICE_LABEL, ""))


def core_watts(labels: Mapping[str, str], cores: float) -> float | None:
    """What a busy core of a machine takes, by what the whole one is labelled to; None: nothing is.

    >>> core_watts({WATTS_LABEL: "320"}, 16), core_watts({}, 16)
    (20.0, None)
    """
    watts = _number(labels.get(WATTS_LABEL, ""))
    return None if watts is None or cores <= 0 else watts / cores


def _number(text: str) -> float | None:
    try:
        found = float(text)
    except ValueError:
        return None
    return found if math.isfinite(found) and found >= 0 else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Inventory:
    """The machines of a cluster."""

    nodes: tuple[Node, ...]

    def __post_init__(self) -> None:
        """Refuse machines that share a name."""
        counts = Counter(node.name for node in self.nodes)
        if twice := sorted(name for name, count in counts.items() if count > 1):
            raise ValueError(f"node names must differ, got {', '.join(twice)} more than once")

    def largest_first(self) -> list[str]:
        """The names of the machines, by how many CPUs they have.

        >>> Inventory(nodes=(Node(name="n1", cpus=2), Node(name="n2", cpus=4))).largest_first()
        ['n2', 'n1']
        """
        return [node.name for node in sorted(self.nodes, key=lambda node: -node.cpus)]

    def zones(self, names: Sequence[str]) -> tuple[str, ...]:
        """The zones of nodes by name, as they are labelled; empty where they are not.

        >>> there = Inventory(nodes=(Node(name="n1", labels={ZONE_LABEL: "a"}), Node(name="n2")))
        >>> there.zones(["n2", "n1", "n3"])
        ('', 'a', '')
        """
        known = {node.name: node.labels.get(ZONE_LABEL, "") for node in self.nodes}
        return tuple(known.get(name, "") for name in names)


def capacity(inventory: Inventory, resources: RoleResources) -> int:
    """How many members with `resources` fit on all machines together.

    >>> from raycloud.spec import RoleResources
    >>> two = Inventory(nodes=(Node(name="a", cpus=4), Node(name="b", cpus=3)))
    >>> capacity(two, RoleResources(cpus=2))
    3
    """
    return sum(node.fits(resources) for node in inventory.nodes)


def require(
    inventory: Inventory, resources: RoleResources, members: int, *, role: str = "worker"
) -> int:
    """The `capacity`, at least `members`.

    Args:
        inventory: The machines there are.
        resources: What one member reserves.
        members: Fewest members that will do, e.g. `elastic.min_workers`.
        role: Section of `resources` in the job file, for the message.

    Raises:
        PlacementError: Fewer fit. Says what was asked, what is there, and what would do.
    """
    room = capacity(inventory, resources)
    if room >= members:
        return room
    asked = describe_resources(resources)
    raise PlacementError(
        f"{members} {role}{'s' if members > 1 else ''} with {asked} each do not fit: "
        f"there is room for {room} on {_describe(inventory, resources)}",
        hint=_remedy(inventory, resources, room, role),
    )


def describe_resources(resources: RoleResources) -> str:
    """What one member reserves, in words.

    >>> from raycloud.spec import RoleResources
    >>> describe_resources(RoleResources(cpus=2, gpus=1, labels={"zone": "a"}))
    '2 CPUs, 1 GPU, labels zone=a'
    """
    parts = [_count(resources.cpus, "CPU")]
    if resources.gpus:
        parts.append(_count(resources.gpus, "GPU"))
    if resources.memory_bytes:
        parts.append(f"{_gib(resources.memory_bytes)} of memory")
    if resources.labels:
        shown = ", ".join(f"{key}={value}" for key, value in sorted(resources.labels.items()))
        parts.append(f"labels {shown}")
    return ", ".join(parts)


def _matches(label: str | None, asked: str) -> bool:
    wanted = asked.removeprefix("!")
    values = wanted[3:-1].split(",") if wanted.startswith("in(") else [wanted]
    return (label in {value.strip() for value in values}) != asked.startswith("!")


def _remedy(inventory: Inventory, resources: RoleResources, room: int, role: str) -> str:
    """What would do, from what is in the way."""
    alone = f"resources.{role}"
    if not inventory.nodes:
        return "start a cluster with at least one node, or give the address of one that runs"
    labelled = [node for node in inventory.nodes if node.carries(resources.labels)]
    if not labelled:
        return f"no node carries the labels of {alone}.labels: correct them or label a node"
    if room:
        return (
            f"set elastic.min_workers to at most {room}, lower {alone} or add nodes"
            if role == "worker"
            else f"lower {alone} or add nodes"
        )
    short = []
    if max(node.cpus for node in labelled) < resources.cpus:
        short.append(f"{alone}.cpus to at most {max(node.cpus for node in labelled):g}")
    if max(node.gpus for node in labelled) < resources.gpus:
        short.append(f"{alone}.gpus to at most {max(node.gpus for node in labelled):g}")
    memory = [node.memory_bytes for node in labelled if node.memory_bytes is not None]
    if memory and len(memory) == len(labelled) and max(memory) < (resources.memory_bytes or 0):
        short.append(f"{alone}.memory_bytes to at most {max(memory)}")
    if not short:
        return f"no single node has all of it at once: lower {alone} or add a larger node"
    return f"lower {' and '.join(short)}, or add larger nodes"


def _describe(inventory: Inventory, resources: RoleResources) -> str:
    """The machines there are, in words."""
    if not inventory.nodes:
        return "no nodes"
    shown = [_describe_node(node, resources) for node in inventory.nodes[:_SHOWN_NODES]]
    rest = len(inventory.nodes) - len(shown)
    more = [f"{rest} more"] if rest else []
    return f"{_count(len(inventory.nodes), 'node')} ({'; '.join(shown + more)})"


def _describe_node(node: Node, resources: RoleResources) -> str:
    """A machine by its address, with the labels that were asked for."""
    parts = [_count(node.cpus, "CPU")]
    if node.gpus:
        parts.append(_count(node.gpus, "GPU"))
    if node.memory_bytes is not None:
        parts.append(_gib(node.memory_bytes))
    parts += [
        f"{key}={node.labels[key]}" if key in node.labels else f"no label {key}"
        for key in sorted(resources.labels)
    ]
    return f"{node.address or node.name}: {', '.join(parts)}"


def _count(number: float, unit: str) -> str:
    return f"{number:g} {unit}{'' if number == 1 else 's'}"


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.3g} GiB"
