"""The spanning tree against brute force; rings that cross each trunk once; the equation."""

from __future__ import annotations

import math
from itertools import combinations, pairwise, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycloud.planner.routes import Link, SpanningTree, crossings, decide
from tests.tiers import examples

RATES = st.sampled_from([1.0, 2.0, 5.0, 5.5, 20.0])


@examples(75)
@given(data=st.data(), size=st.integers(2, 5))
def test_no_path_is_wider_than_that_of_the_tree(data: st.DataObject, size: int) -> None:
    nodes = "abcde"[:size]
    rates = {pair: data.draw(RATES) for pair in combinations(nodes, 2)}
    tree = SpanningTree(nodes, rates)
    both = rates | {(other, one): rate for (one, other), rate in rates.items()}
    for source, target in combinations(nodes, 2):
        between = [node for node in nodes if node not in {source, target}]
        paths = [
            (source, *some, target)
            for count in range(size - 1)
            for some in permutations(between, count)
        ]
        widest = max(min(both[pair] for pair in pairwise(path)) for path in paths)
        assert tree.bottleneck(source, target) == widest
        assert tree.path(source, target)[0] == source
    assert sorted(tree.ring) == list(nodes)
    assert len(tree.joints) == size - 1


@examples(100)
@given(
    data=st.data(),
    sizes=st.lists(st.integers(1, 4), min_size=2, max_size=4),
    noise=st.floats(0.0, 0.3),
)
def test_each_zone_is_left_once_and_entered_once_in_any_order(
    data: st.DataObject, sizes: list[int], noise: float
) -> None:
    zones = {f"{zone}{at}": f"{zone}" for zone, size in enumerate(sizes) for at in range(size)}
    chance = data.draw(st.randoms(use_true_random=False))
    rates = {
        (one, other): (100.0 if zones[one] == zones[other] else 20.0)
        * chance.uniform(1.0 - noise, 1.0 + noise)
        for one, other in permutations(zones, 2)
    }
    order = data.draw(st.permutations(sorted(zones)))
    mixed = {pair: rates[pair] for pair in data.draw(st.permutations(sorted(rates)))}
    tree = SpanningTree(order, mixed)
    found = crossings(tree.ring, zones)
    assert set(found.values()) == {1}
    for zone in set(zones.values()):
        assert sum(times for pair, times in found.items() if pair[0] == zone) == 1
        assert sum(times for pair, times in found.items() if pair[1] == zone) == 1
    over = [joint for joint in tree.joints if zones[joint.one] != zones[joint.other]]
    assert len(over) == len(sizes) - 1
    root = data.draw(st.sampled_from(sorted(zones)))
    parents = tree.parents(root)
    assert set(parents) == set(zones) - {root}
    assert sum(zones[node] != zones[parent] for node, parent in parents.items()) == len(sizes) - 1
    same = SpanningTree(sorted(zones), rates)
    assert (tree.ring, tree.joints, tree.zones()) == (same.ring, same.joints, same.zones())


@examples(50)
@given(data=st.data())
def test_the_values_satisfy_the_equation(data: st.DataObject) -> None:
    """V(n) = min over m of c + p V(m) + (1 - p) V(n), in each state, and no way is better."""
    pairs = data.draw(st.lists(st.sampled_from(list(permutations("abcd", 2))), unique=True))
    link = st.builds(
        Link,
        bytes_per_s=st.sampled_from([1.0, 3.0, 10.0]),
        succeeds=st.sampled_from([0.5, 0.9, 1.0]),
        latency_s=st.sampled_from([0.0, 1.0]),
    )
    links = {pair: data.draw(link) for pair in pairs}
    values = decide(links, "d", 30.0).seconds[0]
    iterated = decide([links, links], "d", 30.0, transitions=((0.5, 0.5),) * 2, slot_s=10.0)
    for node in sorted({node for pair in pairs for node in pair} - {"d"}):
        offers = [
            x.cost_s(30.0) + x.succeeds * values[there] + (1.0 - x.succeeds) * values[node]
            for (source, there), x in links.items()
            if source == node and math.isfinite(values[there])
        ]
        assert values[node] == pytest.approx(min(offers, default=math.inf))
        assert iterated.seconds[0][node] == pytest.approx(values[node])
