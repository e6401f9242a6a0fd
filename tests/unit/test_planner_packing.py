"""Packing: what goes where on a few nodes, and how many real pods find room on real ones."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks.packing import (
    OTHERS,
    all_that_fit,
    planned,
    read_nodes,
    read_pods,
    until_one_does_not_fit,
)
from raycloud.errors import PlacementError
from raycloud.planner.inventory import Inventory, Node
from raycloud.planner.packing import RULES, Bundle, Packing, Rule, pack

TRACES = Path(__file__).parents[2].parent / "shared" / "data" / "cluster"
GIB = 2**30
TRAINS, READS = Bundle(cpus=4, gpus=1), Bundle(cpus=2)


def inventory(*nodes: Node) -> Inventory:
    """Machines, briefly."""
    return Inventory(nodes=nodes)


def test_what_takes_no_gpu_leaves_those_free() -> None:
    there = inventory(Node(name="g", cpus=8, gpus=2), Node(name="c", cpus=64))
    assert pack(there, [READS, READS, TRAINS, TRAINS]) == ("c", "c", "g", "g")


def test_a_part_of_a_gpu_goes_where_a_part_is_taken() -> None:
    packing = Packing(
        inventory(Node(name="a", cpus=8, gpus=2), Node(name="b", cpus=8, gpus=1)),
        typical=[(Bundle(gpus=1), 1.0), (Bundle(gpus=0.5), 1.0)],
    )
    half = Bundle(gpus=0.5)
    first = packing.place([half])
    assert packing.place([half]) == first
    assert packing.free_gpus == 2.0
    assert packing.fragmentation() == 0.0


def test_parts_of_two_gpus_are_no_whole_one() -> None:
    packing = Packing(inventory(Node(name="a", cpus=8, gpus=2)))
    part = Bundle(gpus=0.6)
    assert packing.place([part, part]) == ("a", "a")
    assert packing.free_gpus == pytest.approx(0.8)
    assert packing.place([part]) is None
    assert packing.place([Bundle(gpus=0.4), Bundle(gpus=0.4)]) == ("a", "a")
    assert packing.free_gpus == 0.0


@pytest.mark.parametrize("rule", RULES)
def test_a_gang_is_placed_whole_or_not_at_all(rule: Rule) -> None:
    there = inventory(Node(name="a", cpus=5, gpus=1), Node(name="b", cpus=5, gpus=1))
    packing = Packing(there, rule=rule)
    assert packing.place([TRAINS, TRAINS, READS]) is None
    assert packing.free_gpus == 2.0
    assert packing.place([TRAINS, TRAINS]) is not None
    assert packing.free_gpus == 0.0
    assert packing.place([]) == ()


def test_what_one_rule_leaves_over_another_may_place() -> None:
    """The first rule fills the smaller node, after which 6 CPUs are nowhere in one piece."""
    there = inventory(Node(name="a", cpus=10), Node(name="b", cpus=11))
    gang = [Bundle(cpus=c) for c in (6, 5, 5, 5)]
    assert sorted(pack(there, gang)) == ["a", "a", "b", "b"]


def test_labels_and_memory_are_kept() -> None:
    there = inventory(
        Node(name="a", cpus=8, memory_bytes=4 * GIB, labels={"market": "spot"}),
        Node(name="b", cpus=8, memory_bytes=64 * GIB),
        Node(name="c", cpus=1),
    )
    assert pack(there, [Bundle(memory_bytes=8 * GIB)] * 2) == ("c", "b")  # unknown limits nothing
    assert pack(there, [Bundle(labels={"market": "spot"})]) == ("a",)
    assert pack(there, [Bundle(cpus=8, labels={"market": "!spot"})]) == ("b",)
    with pytest.raises(PlacementError, match="2 bundles do not fit together on 3 nodes"):
        pack(there, [Bundle(cpus=8, labels={"market": "spot"})] * 2)
    with pytest.raises(PlacementError, match="on 0 nodes"):
        pack(inventory(), [READS])


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"cpus": -1}, "cpus"),
        ({"cpus": float("nan")}, "cpus"),
        ({"gpus": 1.5}, "gpus"),
        ({"memory_bytes": -1}, "memory_bytes"),
    ],
)
def test_what_no_node_can_give_is_refused(wrong: dict[str, float], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Bundle(**wrong)  # type: ignore[arg-type]


def test_the_same_mix_in_other_words_is_the_same() -> None:
    """Weights count by their parts, and what comes twice counts twice."""
    there = inventory(Node(name="a", cpus=4, gpus=2, labels={}))
    asked = Bundle(cpus=5, gpus=1)
    mixes = [
        [(asked, 1.0), (asked, 1.0), (TRAINS, 1.0)],
        [(TRAINS, 2.0), (READS, 9.0), (asked, 4.0)],
    ]
    lost = [Packing(there, typical=mix).fragmentation() for mix in mixes]
    assert lost == [pytest.approx(4 / 3)] * 2


@pytest.mark.full(only="packing of real pods")
@pytest.mark.timeout(180)
def test_real_pods_find_at_least_the_room_that_other_rules_leave_them() -> None:
    path = TRACES / "openb_node_list_all_node.csv"
    if not path.exists():
        pytest.skip("no real cluster's nodes beside the repository (shared/data/cluster)")
    nodes, pods = read_nodes(path), read_pods(TRACES / "openb_pod_list_default.csv")
    ways = "fragmentation, seen", *OTHERS
    first = {way: until_one_does_not_fit(nodes, pods, way) for way in ways}
    whole = {way: all_that_fit(nodes, pods, way) for way in ways}
    for rule in OTHERS:
        assert first[ways[0]]["gpus"] >= first[rule]["gpus"]
        for left in ("free_gpus", "fragmented_gpus", "fragmented_gpus_by_pod"):
            assert whole[ways[0]][left] <= whole[rule][left]


def test_a_real_cluster_is_planned_in_a_second() -> None:
    path = TRACES / "openb_node_list_all_node.csv"
    if not path.exists():
        pytest.skip("no real cluster's nodes beside the repository (shared/data/cluster)")
    began_s = time.process_time()
    found = planned(read_nodes(path), 1523)
    assert found["same_for_another_order_of_nodes"]
    assert time.process_time() - began_s < 5.0  # planned three times, on whatever runs the tests
