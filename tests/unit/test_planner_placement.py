"""Members go near each other, and GPUs are taken where the fewest are lost to others."""

from __future__ import annotations

from collections import Counter

import pytest

from raycloud.planner.inventory import ZONE_LABEL, Inventory, Node, capacity
from raycloud.planner.placement import place
from raycloud.spec import RoleResources

GPU = RoleResources(cpus=1, gpus=1)


def inventory(*nodes: Node) -> Inventory:
    return Inventory(nodes=nodes)


def machine(name: str, gpus: float = 0, *, cpus: float = 16, zone: str = "") -> Node:
    return Node(name=name, cpus=cpus, gpus=gpus, labels={ZONE_LABEL: zone} if zone else {})


def test_members_spread_and_neighbours_stay_together() -> None:
    nodes = (Node(name="a", cpus=4), Node(name="b", cpus=4), Node(name="c", cpus=4))
    assert place(inventory(*nodes), 3, RoleResources()) == ("a", "b", "c")
    assert place(inventory(*nodes), 7, RoleResources()) == ("a", "a", "a", "b", "b", "c", "c")


def test_the_order_of_the_inventory_does_not_matter() -> None:
    nodes = [Node(name=f"n{i}", cpus=1 + i % 5) for i in range(20)]
    once = place(inventory(*nodes), 30, RoleResources())
    assert place(inventory(*reversed(nodes)), 30, RoleResources()) == once


def test_no_node_holds_more_than_fits() -> None:
    nodes = [Node(name=f"n{i}", cpus=i % 7) for i in range(50)]
    everything = inventory(*nodes)
    most = capacity(everything, RoleResources(cpus=2))
    placed = Counter(place(everything, most, RoleResources(cpus=2)))
    assert placed == {node.name: node.cpus // 2 for node in nodes if node.cpus >= 2}
    assert place(everything, 0, RoleResources()) == ()


def test_thousands_of_members_are_placed() -> None:
    nodes = [Node(name=f"n{i:05}", cpus=4) for i in range(2_500)]
    assert len(place(inventory(*nodes), 10_000, RoleResources())) == 10_000


def test_a_negative_number_of_members_is_refused() -> None:
    with pytest.raises(ValueError, match="members >= 0"):
        place(inventory(), -1, RoleResources())


def test_members_with_gpus_are_on_as_few_nodes_as_hold_them() -> None:
    eight = [machine(name, 8) for name in "abcd"]
    assert place(inventory(*eight), 8, GPU) == ("a",) * 8
    assert Counter(place(inventory(*eight), 19, GPU)) == {"a": 8, "b": 8, "c": 3}


def test_the_rest_goes_where_the_fewest_gpus_are_left() -> None:
    nodes = inventory(machine("a", 8), machine("b", 4), machine("c", 2), machine("d", 1))
    assert place(nodes, 2, GPU) == ("c", "c")
    assert place(nodes, 3, GPU) == ("b", "b", "b")
    assert Counter(place(nodes, 9, GPU)) == {"a": 8, "d": 1}


def test_a_gpu_that_nobody_else_could_use_is_taken_first() -> None:
    short = machine("z", 2, cpus=2)  # two more members' CPUs would leave none
    assert place(inventory(machine("a", 2, cpus=3), short), 1, RoleResources(cpus=2, gpus=1)) == (
        "z",
    )


@pytest.mark.parametrize("resources", [GPU, RoleResources()], ids=["gpus", "cpus"])
def test_members_are_in_one_zone_where_they_fit(resources: RoleResources) -> None:
    nodes = inventory(
        machine("a", 2, cpus=2, zone="east"),
        machine("b", 2, cpus=2, zone="west"),
        machine("c", 2, cpus=2, zone="west"),
        machine("d", 8, cpus=1, zone="north"),
        machine("e", 1, cpus=1, zone="south"),
    )
    assert set(place(nodes, 4, resources)) == {"b", "c"}
    assert {"a", "b"} < set(place(nodes, 7, resources))  # no zone holds them


def test_of_zones_the_one_with_fewer_nodes_or_with_more_room_is_taken() -> None:
    nodes = inventory(
        *(machine(f"w{number}", 1, cpus=8, zone="west") for number in range(4)),
        machine("e", 4, cpus=4, zone="east"),
    )
    assert place(nodes, 4, GPU) == ("e",) * 4
    assert place(nodes, 4, RoleResources()) == ("w0", "w1", "w2", "w3")


def test_without_gpus_the_zone_with_more_nodes_is_taken() -> None:
    big = machine("big", cpus=64, zone="east")
    small = [machine(f"s{number}", cpus=4, zone="west") for number in range(3)]
    assert place(inventory(big, *small), 4, RoleResources()) == ("s0", "s0", "s1", "s2")


def test_thousands_of_labelled_nodes_with_gpus() -> None:
    nodes = [
        Node(
            name=f"n{i:05}", cpus=64, gpus=8, labels={"ray.io/node-id": str(i), "rack": str(i % 9)}
        )
        for i in range(5_000)
    ]
    asked = RoleResources(cpus=1, gpus=1, labels={"rack": "!in(0, 1)"})
    placed = place(inventory(*nodes), 8_003, asked)
    assert len(set(placed)) == 1_001
    assert {int(name[1:]) % 9 for name in placed} == set(range(2, 9))


def test_a_node_of_any_zone_that_holds_all_is_taken_where_the_fewest_gpus_are_left() -> None:
    nodes = inventory(
        machine("e", 8, zone="east"),
        machine("w1", 2, zone="west"),
        machine("w2", 8, zone="west"),
        machine("x", 3),
    )
    assert place(nodes, 2, GPU) == ("w1", "w1")
    assert place(nodes, 3, GPU) == ("x", "x", "x")


def test_a_node_without_a_label_counts_as_a_zone_with_gpus_and_is_spread_over_without() -> None:
    nodes = inventory(machine("a", 4, zone="east"), machine("b", 4, zone="east"), machine("x", 8))
    assert place(nodes, 8, GPU) == ("x",) * 8
    assert set(place(nodes, 3, RoleResources())) == {"a", "b", "x"}


def test_of_nodes_with_as_much_room_those_without_lost_gpus_are_filled() -> None:
    nodes = inventory(machine("a", 8, cpus=4), machine("b", 4, cpus=4), machine("c", 4, cpus=4))
    assert set(place(nodes, 8, GPU)) == {"b", "c"}
