"""Which node each member of a gang of alike members goes to.

Members that exchange gradients are best near each other: within one zone where they all fit in one,
and those with GPUs on as few nodes as hold them, whose links are the fastest. Of the nodes that do
equally well, GPUs are taken where the fewest are lost to others: see `planner.packing`. Members
without GPUs are spread over the nodes, since each node has a memory and a link of its own.
"""

from __future__ import annotations

import heapq
from dataclasses import replace
from typing import TYPE_CHECKING

from raycloud.planner.inventory import ZONE_LABEL, Inventory, Node, capacity, require
from raycloud.planner.packing import Bundle, Packing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from raycloud.spec import RoleResources


def place(inventory: Inventory, members: int, resources: RoleResources) -> tuple[str, ...]:
    """The node of each of `members` members, neighbours in rank together.

    Where a labelled zone holds them all, they are in one: with GPUs in that which needs the fewest
    nodes, without in that where they have the most nodes. Without GPUs each member goes to the node
    that has the fewest so far (ties: most room left, then name); with GPUs nodes are filled, that
    with the most room first (ties: fewest GPUs left), and the last is one where the rest fits and
    the fewest GPUs are lost.
    Members are numbered node by node, so that a ring in rank order leaves each node once. The order
    in which the inventory lists its nodes does not matter.

    >>> from raycloud.spec import RoleResources
    >>> nodes = (Node(name="a", cpus=2), Node(name="b", cpus=1), Node(name="c", cpus=4))
    >>> place(Inventory(nodes=nodes), 5, RoleResources(cpus=1))
    ('c', 'c', 'a', 'a', 'b')
    >>> nodes = (Node(name="g", cpus=8, gpus=4), Node(name="h", cpus=8, gpus=2))
    >>> place(Inventory(nodes=nodes), 2, RoleResources(cpus=1, gpus=1))
    ('h', 'h')

    Raises:
        PlacementError: They do not fit.
        ValueError: `members` is negative.
    """
    if members < 0:
        raise ValueError(f"place() takes members >= 0, got {members}")
    require(inventory, resources, members)
    way = _filled if resources.gpus else _spread
    placed = way(_near(inventory, members, resources), members, resources)
    room = {node.name: node.fits(resources) for node in inventory.nodes}
    by_room = sorted(placed, key=lambda name: (-placed[name], -room[name], name))
    return tuple(name for name in by_room for _ in range(placed[name]))


def _near(inventory: Inventory, members: int, resources: RoleResources) -> Inventory:
    """The nodes of the zone that all members fit in best; all nodes where there is none.

    With GPUs a node without a label is a zone of its own; without, such nodes are spread over.
    """
    zones: dict[tuple[str, str], list[Node]] = {}
    for node in inventory.nodes:
        if node.fits(resources):
            zone = node.labels.get(ZONE_LABEL, "")
            zones.setdefault((zone, "" if zone else node.name), []).append(node)
    found = {zone: Inventory(nodes=tuple(nodes)) for zone, nodes in zones.items()}
    room = {zone: capacity(nodes, resources) for zone, nodes in found.items()}
    holds = [zone for zone in found if room[zone] >= members]
    if not holds or not (resources.gpus or all(zone for zone, _ in found)):
        return inventory
    if resources.gpus:
        need = {zone: _fewest(found[zone].nodes, members, resources) for zone in holds}
        if (least := min(need.values())) == 1:  # any node that holds them all will do
            alike = [found[zone].nodes for zone in holds if need[zone] == least]
            return Inventory(nodes=tuple(node for nodes in alike for node in nodes))
        return found[min(holds, key=lambda zone: (need[zone], room[zone], zone))]
    most = {zone: len(_spread(found[zone], members, resources)) for zone in holds}
    return found[min(holds, key=lambda zone: (-most[zone], -room[zone], zone))]


def _fewest(nodes: Sequence[Node], members: int, resources: RoleResources) -> int:
    """How many nodes members need at least."""
    count = 0
    for fits in sorted((node.fits(resources) for node in nodes), reverse=True):
        if members <= 0:
            break
        members, count = members - fits, count + 1
    return count


def _spread(inventory: Inventory, members: int, resources: RoleResources) -> dict[str, int]:
    """How many members each node has, as evenly as they fit."""
    room = {node.name: node.fits(resources) for node in inventory.nodes}
    placed = dict[str, int]()
    queue = [(0, -fits, name) for name, fits in room.items() if fits]
    heapq.heapify(queue)
    for _ in range(members):
        count, minus_left, name = heapq.heappop(queue)
        placed[name] = count + 1
        if minus_left < -1:
            heapq.heappush(queue, (count + 1, minus_left + 1, name))
    return placed


def _filled(inventory: Inventory, members: int, resources: RoleResources) -> dict[str, int]:
    """How many members each node has, on as few nodes as hold them."""
    placed = dict[str, int]()
    room = sorted(
        (-fits, node.gpus - fits * resources.gpus, node.name, node)
        for node in inventory.nodes
        if (fits := node.fits(resources))
    )
    for minus_fits, _, name, _ in room:
        if members <= -minus_fits:
            break
        placed[name] = -minus_fits
        members += minus_fits
    if members:
        rest = [  # which carry what is asked for; a label of each node's own would take long
            replace(node, labels={})
            for minus, _, name, node in room
            if -minus >= members and name not in placed
        ]
        typical = [(_bundle(resources, 1), 1.0)]
        packing = Packing(Inventory(nodes=tuple(rest)), typical=typical)
        found = packing.place([_bundle(resources, members)])
        assert found is not None  # noqa: S101 - each of these nodes holds them
        placed[found[0]] = members
    return placed


def _bundle(resources: RoleResources, members: int) -> Bundle:
    """What so many members reserve on one node, apart from its labels."""
    return Bundle(
        cpus=members * resources.cpus,
        gpus=members * resources.gpus,
        memory_bytes=members * (resources.memory_bytes or 0),
    )
