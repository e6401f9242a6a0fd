"""Packing never gives more than there is, all or nothing, and alike whatever the order of nodes."""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from raycloud.planner.inventory import Inventory, Node, capacity
from raycloud.planner.packing import RULES, Bundle, Packing, Rule
from raycloud.spec import RoleResources
from tests.tiers import examples

LABELS = st.sampled_from([{}, {"zone": "a"}, {"zone": "b"}])
NODES = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0, 8.0]),
        st.sampled_from([0.0, 0.5, 1.0, 2.0, 4.0]),
        st.sampled_from([None, 4, 8]),
        LABELS,
    ),
    max_size=5,
).map(
    lambda rows: tuple(
        Node(name=f"n{at}", cpus=cpus, gpus=gpus, memory_bytes=memory, labels=labels)
        for at, (cpus, gpus, memory, labels) in enumerate(rows)
    )
)
BUNDLES = st.builds(
    Bundle,
    cpus=st.sampled_from([0.0, 0.1, 1.0, 2.0]),
    gpus=st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.7, 1.0, 2.0]),
    memory_bytes=st.sampled_from([0, 3, 4]),
    labels=st.sampled_from([{}, {"zone": "a"}, {"zone": "!a"}]),
)
GANGS = st.lists(st.lists(BUNDLES, max_size=4), max_size=5)
RULE = st.sampled_from(RULES)


def fit_on_gpus(parts: list[Fraction], gpus: list[Fraction]) -> bool:
    """Whether parts fit, each on one GPU: by trying all ways."""
    if not parts:
        return True
    return any(
        left >= parts[0] and fit_on_gpus(parts[1:], [*gpus[:at], left - parts[0], *gpus[at + 1 :]])
        for at, left in enumerate(gpus)
    )


def exact(number: float) -> Fraction:
    """A number as it is written."""
    return Fraction(str(number))


@examples(150)
@given(nodes=NODES, gangs=GANGS, rule=RULE)
def test_no_node_gives_more_than_it_has(
    nodes: tuple[Node, ...], gangs: list[list[Bundle]], rule: Rule
) -> None:
    packing = Packing(
        Inventory(nodes=nodes), typical=[(b, 1.0) for g in gangs for b in g], rule=rule
    )
    taken = defaultdict[str, list[Bundle]](list)
    for gang in gangs:
        free, lost = packing.free_gpus, packing.fragmentation()
        placed = packing.place(gang)
        if placed is None:
            assert (packing.free_gpus, packing.fragmentation()) == (free, lost)
            continue
        for bundle, name in zip(gang, placed, strict=True):
            taken[name].append(bundle)
    for node in nodes:
        there = taken[node.name]
        assert sum(exact(one.cpus) for one in there) <= exact(node.cpus)
        assert node.memory_bytes is None or sum(b.memory_bytes for b in there) <= node.memory_bytes
        assert all(node.carries(one.labels) for one in there)
        whole = sum(int(one.gpus) for one in there if one.gpus >= 1)
        parts = sorted((exact(b.gpus) for b in there if 0 < b.gpus < 1), reverse=True)
        gpus = [Fraction(1)] * (int(node.gpus) - whole)
        if node.gpus != int(node.gpus):
            gpus.append(exact(node.gpus) - int(node.gpus))
        assert whole <= int(node.gpus)
        assert fit_on_gpus(parts, gpus)
    free = sum(exact(n.gpus) for n in nodes) - sum(
        (exact(b.gpus) for there in taken.values() for b in there), Fraction(0)
    )
    assert abs(packing.free_gpus - float(free)) < 1e-9
    assert -1e-9 <= packing.fragmentation() <= packing.free_gpus + 1e-9


@examples(75)
@given(nodes=NODES, gangs=GANGS, rule=RULE, shuffle=st.randoms(use_true_random=False))
def test_the_order_of_nodes_does_not_matter(
    nodes: tuple[Node, ...], gangs: list[list[Bundle]], rule: Rule, shuffle: st.DataObject
) -> None:
    other = list(nodes)
    shuffle.shuffle(other)  # type: ignore[attr-defined]
    typical = [(bundle, 1.0) for gang in gangs for bundle in gang]
    both = [
        Packing(Inventory(nodes=tuple(one)), typical=mix, rule=rule)
        for one, mix in ((nodes, typical), (other, typical[::-1]))
    ]
    for gang in gangs:
        first, second = (packing.place(gang) for packing in both)
        assert first == second
    assert both[0].fragmentation() == both[1].fragmentation()


@examples(75)
@given(
    nodes=NODES,
    cpus=st.integers(1, 3),
    gpus=st.integers(0, 1),
    memory=st.sampled_from([None, 3]),
    rule=RULE,
)
def test_bundles_that_are_alike_fit_as_the_capacity_says(
    nodes: tuple[Node, ...], cpus: int, gpus: int, memory: int | None, rule: Rule
) -> None:
    there = Inventory(nodes=nodes)
    room = capacity(there, RoleResources(cpus=cpus, gpus=gpus, memory_bytes=memory))
    bundle = Bundle(cpus=cpus, gpus=gpus, memory_bytes=memory or 0)
    assert Packing(there, rule=rule).place([bundle] * room) is not None
    assert Packing(there, rule=rule).place([bundle] * (room + 1)) is None


@examples(100)
@given(nodes=NODES, gang=st.lists(BUNDLES, max_size=4))
def test_one_bundle_finds_room_wherever_there_is_any(
    nodes: tuple[Node, ...], gang: list[Bundle]
) -> None:
    """A gang that is placed exists; of a single bundle also: one that is not does not."""
    there = Inventory(nodes=nodes)
    for bundle, rule in product(gang, RULES):
        fits = any(
            node.carries(bundle.labels)
            and bundle.cpus <= node.cpus
            and (node.memory_bytes is None or bundle.memory_bytes <= node.memory_bytes)
            and (bundle.gpus <= int(node.gpus) or 1 > node.gpus >= bundle.gpus)
            for node in nodes
        )
        assert (Packing(there, rule=rule).place([bundle]) is not None) == fits
