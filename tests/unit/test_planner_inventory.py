"""What fits where, and the words when it does not."""

from __future__ import annotations

import pytest

from raycloud.errors import PlacementError
from raycloud.planner.inventory import Inventory, Node, capacity, require
from raycloud.spec import RoleResources

GIB = 2**30


def inventory(*nodes: Node) -> Inventory:
    """Machines, briefly."""
    return Inventory(nodes=nodes)


@pytest.mark.parametrize(
    ("resources", "fits"),
    [
        (RoleResources(cpus=1), 8),
        (RoleResources(cpus=3), 2),
        (RoleResources(cpus=9), 0),
        (RoleResources(cpus=1, gpus=1), 2),
        (RoleResources(cpus=1, memory_bytes=3 * GIB), 5),
        (RoleResources(cpus=2, gpus=1, memory_bytes=GIB, labels={"zone": "a"}), 2),
        (RoleResources(labels={"zone": "b"}), 0),
        (RoleResources(labels={"kind": "x"}), 0),
    ],
)
def test_each_resource_limits_how_many_fit(resources: RoleResources, fits: int) -> None:
    node = Node(name="n", cpus=8, gpus=2, memory_bytes=16 * GIB, labels={"zone": "a"})
    assert node.fits(resources) == fits
    assert capacity(inventory(node, Node(name="other", cpus=0)), resources) == fits


@pytest.mark.parametrize(
    ("asked", "carried", "missing"),
    [("a", True, False), ("!a", False, True), ("in(a, b)", True, False), ("!in(b,c)", True, True)],
)
def test_labels_are_selected_as_ray_does(asked: str, carried: bool, missing: bool) -> None:
    assert Node(name="n", labels={"zone": "a"}).carries({"zone": asked}) is carried
    assert Node(name="n").carries({"zone": asked}) is missing


def test_unknown_memory_limits_nothing() -> None:
    assert Node(name="n", cpus=2).fits(RoleResources(memory_bytes=GIB)) == 2


def test_fractions_of_a_cpu_do_not_make_a_member() -> None:
    assert Node(name="n", cpus=1.9).fits(RoleResources(cpus=1)) == 1


def test_names_tell_nodes_apart() -> None:
    with pytest.raises(ValueError, match="got a more than once"):
        inventory(Node(name="a"), Node(name="b"), Node(name="a"))


def test_enough_room_returns_how_much() -> None:
    assert require(inventory(Node(name="a", cpus=4)), RoleResources(), 2) == 4


@pytest.mark.parametrize(
    ("nodes", "resources", "says", "remedy"),
    [
        ((), RoleResources(), "room for 0 on no nodes", "start a cluster"),
        (
            (Node(name="id", address="10.0.0.1", cpus=2),),
            RoleResources(cpus=1),
            "4 workers with 1 CPU each do not fit: there is room for 2 on "
            "1 node (10.0.0.1: 2 CPUs)",
            "set elastic.min_workers to at most 2, lower resources.worker or add nodes",
        ),
        (
            (Node(name="a", cpus=2, gpus=0), Node(name="b", cpus=4)),
            RoleResources(cpus=8, gpus=1),
            "8 CPUs, 1 GPU each",
            "lower resources.worker.cpus to at most 4 and resources.worker.gpus to at most 0",
        ),
        (
            (Node(name="a", cpus=2, memory_bytes=GIB),),
            RoleResources(memory_bytes=4 * GIB),
            "4 GiB of memory each do not fit: there is room for 0 on 1 node (a: 2 CPUs, 1 GiB)",
            f"resources.worker.memory_bytes to at most {GIB}",
        ),
        (
            (Node(name="a", labels={"zone": "x", "other": "1"}), Node(name="b")),
            RoleResources(labels={"zone": "y"}),
            "labels zone=y each do not fit: there is room for 0 on 2 nodes "
            "(a: 1 CPU, zone=x; b: 1 CPU, no label zone)",
            "no node carries the labels of resources.worker.labels",
        ),
        (
            (Node(name="a", cpus=8), Node(name="b", cpus=1, gpus=1)),
            RoleResources(cpus=4, gpus=1),
            "there is room for 0",
            "no single node has all of it at once",
        ),
    ],
    ids=["no nodes", "too few", "too small", "memory", "labels", "never together"],
)
def test_too_little_room_says_what_is_there_and_what_would_do(
    nodes: tuple[Node, ...], resources: RoleResources, says: str, remedy: str
) -> None:
    with pytest.raises(PlacementError) as caught:
        require(inventory(*nodes), resources, 4)
    assert says in caught.value.message
    assert remedy in caught.value.hint


def test_many_nodes_are_counted_rather_than_listed() -> None:
    nodes = [Node(name=f"n{i}", cpus=0) for i in range(30)]
    with pytest.raises(PlacementError, match=r"30 nodes \(n0: 0 CPUs; .*; 22 more\)"):
        require(inventory(*nodes), RoleResources(), 1)


def test_another_role_is_named() -> None:
    with pytest.raises(PlacementError) as caught:
        require(inventory(Node(name="a", cpus=1)), RoleResources(), 2, role="server")
    assert "2 servers" in caught.value.message
    assert caught.value.hint == "lower resources.server or add nodes"
