"""Routes: the fixture of the decision process, relays, rings and trees, and when to plan again."""

from __future__ import annotations

import math
from collections import Counter
from itertools import permutations

import pytest

from raycloud.net.stream import Place
from raycloud.net.zones import Zones, routes_of
from raycloud.planner.routes import (
    Link,
    Measured,
    SpanningTree,
    crossings,
    decide,
    pipelined_s,
    relayed,
)
from raycloud.recovery.rendezvous import Meeting

GBIT, MBIT = 1e9 / 8, 1e6 / 8
FIXTURE = {
    ("A", "D"): Link(bytes_per_s=1 * GBIT, succeeds=0.99),
    ("A", "B"): Link(bytes_per_s=5 * GBIT, succeeds=0.95),
    ("B", "D"): Link(bytes_per_s=5 * GBIT, succeeds=0.95),
    ("A", "C"): Link(bytes_per_s=10 * GBIT, succeeds=0.90),
    ("C", "D"): Link(bytes_per_s=2 * GBIT, succeeds=0.99),
}
STILL = ((1.0, 0.0), (0.0, 1.0))


def test_a_hundred_gigabytes_go_by_b() -> None:
    """Three states, each by hand: 160 / 0.95 = 168.421, 400 / 0.99 = 404.040, twice 168.421."""
    policy = decide(FIXTURE, "D", 100e9)
    assert policy.path("A", "D") == ("A", "B", "D")
    assert policy.seconds[0] == pytest.approx(
        {"A": 2 * 160 / 0.95, "B": 160 / 0.95, "C": 400 / 0.99, "D": 0.0}, abs=1e-9
    )
    assert [f"{policy.seconds[0][node]:.3f}" for node in "BCA"] == ["168.421", "404.040", "336.842"]


@pytest.mark.parametrize(
    ("without", "path", "seconds"),
    [(("B", "D"), ("A", "C", "D"), 492.929), (("C", "D"), ("A", "D"), 808.081)],
)
def test_where_a_link_is_gone_the_next_best_way_is_taken(
    without: tuple[str, str], path: tuple[str, ...], seconds: float
) -> None:
    gone = {pair: link for pair, link in FIXTURE.items() if pair not in {without, ("B", "D")}}
    policy = decide(gone, "D", 100e9)
    assert policy.path("A", "D") == path
    assert policy.seconds[0]["A"] == pytest.approx(seconds, abs=5e-4)
    assert policy.seconds[0].get("B", math.inf) == math.inf


def test_value_iteration_finds_what_dijkstra_does_where_states_are_alike() -> None:
    policy = decide([FIXTURE, FIXTURE], "D", 100e9, transitions=((0.4, 0.6), (0.1, 0.9)), slot_s=60)
    static = decide(FIXTURE, "D", 100e9)
    for state in range(2):
        assert policy.seconds[state] == pytest.approx(static.seconds[0], rel=1e-9)
        assert policy.path("A", "D", state) == ("A", "B", "D")


def test_a_node_waits_for_a_link_that_soon_recovers() -> None:
    """By hand: from the bad state 1 s of waiting and then 1 s of sending, half of the time."""
    good, bad = ({("a", "b"): Link(bytes_per_s=rate)} for rate in (100.0, 1.0))
    soon = decide([good, bad], "b", 100.0, transitions=((1.0, 0.0), (0.5, 0.5)), slot_s=1.0)
    assert (soon.hops[0]["a"], soon.hops[1]["a"]) == ("b", "a")
    assert soon.seconds[0]["a"] == pytest.approx(1.0)
    assert soon.seconds[1]["a"] == pytest.approx(1.0 + 0.5 * 1.0 + 0.5 * 3.0)  # V = 1 + (1 + V) / 2
    assert soon.path("a", "b", 1) == ("a",)
    never = decide([good, bad], "b", 100.0, transitions=STILL, slot_s=1.0)
    assert never.seconds[1]["a"] == pytest.approx(100.0)
    assert never.path("a", "b", 1) == ("a", "b")


def test_egress_that_is_paid_for_changes_the_way() -> None:
    links = {
        ("a", "c"): Link(bytes_per_s=1.0),
        ("a", "b"): Link(bytes_per_s=10.0, egress_s=0.5),
        ("b", "c"): Link(bytes_per_s=10.0, egress_s=0.5, latency_s=3.0),
    }
    assert decide(links, "c", 100.0).path("a", "c") == ("a", "c")
    free = {pair: Link(bytes_per_s=x.bytes_per_s) for pair, x in links.items()}
    assert decide(free, "c", 100.0).path("a", "c") == ("a", "b", "c")


@pytest.mark.parametrize(
    ("states", "transitions", "slot_s", "words"),
    [
        ([FIXTURE, FIXTURE], ((1.0,),), 1.0, "2 states"),
        ([FIXTURE, FIXTURE], ((0.5, 0.6), (0.5, 0.5)), 1.0, "sum to 1"),
        ([FIXTURE, FIXTURE], STILL, math.inf, "slot_s"),
        (
            [{("a", "D"): Link(bytes_per_s=1.0)}, {("a", "a"): Link(bytes_per_s=1.0)}],
            STILL,
            1.0,
            "never",
        ),
    ],
)
def test_what_is_no_process_is_refused(
    states: list[dict[tuple[str, str], Link]],
    transitions: tuple[tuple[float, ...], ...],
    slot_s: float,
    words: str,
) -> None:
    with pytest.raises(ValueError, match=words):
        decide(states, "D", 1.0, transitions=transitions, slot_s=slot_s)


@pytest.mark.parametrize(
    "wrong", [{"bytes_per_s": 0.0}, {"succeeds": 0.0}, {"succeeds": 1.1}, {"latency_s": -1.0}]
)
def test_what_is_no_link_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Link(**{"bytes_per_s": 1.0, **wrong})


def test_a_thin_direct_link_is_gone_around() -> None:
    """Stored whole on the way it would be 5 times as fast, passed on in pieces nearly 10."""
    links = {
        ("a", "c"): Link(bytes_per_s=5 * MBIT),
        ("a", "b"): Link(bytes_per_s=50 * MBIT),
        ("b", "c"): Link(bytes_per_s=50 * MBIT),
    }
    size, piece = 4e6, 2**18
    assert relayed(links, "a", "c", size, piece_bytes=piece) == "b"
    direct_s = pipelined_s(links, ("a", "c"), size, piece)
    assert direct_s == pytest.approx(6.4)
    assert pipelined_s(links, ("a", "b", "c"), size, piece) == pytest.approx(0.64 + piece / 6.25e6)
    assert decide(links, "c", size).path("a", "c") == ("a", "b", "c")
    assert relayed(links, "a", "c", size, piece_bytes=piece, worth=0.1) is None
    wide = links | {("a", "c"): Link(bytes_per_s=45 * MBIT)}
    assert relayed(wide, "a", "c", size, piece_bytes=piece) is None
    assert relayed({("a", "c"): links["a", "c"]}, "a", "c", size, piece_bytes=piece) is None
    unmeasured = {pair: link for pair, link in links.items() if pair != ("a", "c")}
    assert relayed(unmeasured, "a", "c", size, piece_bytes=piece) == "b"


def test_two_zones_whatever_the_order_of_arrival() -> None:
    """S9: two nodes in each of two zones, 100 Mbit/s inside and 20 between, in all 24 orders."""
    zones = {"a": "x", "b": "x", "c": "y", "d": "y"}
    for order in permutations(zones):
        rates = {
            (one, other): (100 if zones[one] == zones[other] else 20) * MBIT
            for one, other in permutations(order, 2)
        }
        tree = SpanningTree(order, rates)
        once = {("x", "y"): 1, ("y", "x"): 1}
        assert crossings(tree.ring, zones) == once
        assert tree.ring == ("a", "b", "c", "d")
        assert (
            len({tree.zones()[node] for node in "ab"} | {tree.zones()[node] for node in "cd"}) == 2
        )
        up = [(node, parent) for node, parent in tree.parents("a").items()]
        assert sum(zones[node] != zones[parent] for node, parent in up) == 1
        # where zones are labelled, what members form a ring of today
        labelled = Zones.of([zones[node] for node in order])
        assert crossings([order[rank] for rank in labelled.order], zones) == once


def test_ring_and_tree_of_a_run_cross_the_trunk_once_each_way_whoever_came_first() -> None:
    """S9, by what members really meet as, for every order of ranks.

    A ring leaves each zone once. Of a tree each value crosses once each way, in its zone's sum.
    """
    nodes = {"a": "x", "b": "x", "c": "y", "d": "y"}
    count = 10_000
    for order in permutations(nodes):
        meeting = Meeting(
            place=Place("127.0.0.1", 1, 1),
            generation=0,
            rank=0,
            members=(0, 1, 2, 3),
            shares=(1, 1, 1, 1),
            nodes=order,
            zones=tuple(nodes[node] for node in order),
        )
        ring = [order[rank] for rank in meeting.labelled.order]
        assert crossings(ring, nodes) == {("x", "y"): 1, ("y", "x"): 1}
        zones = meeting.near
        sent: Counter[tuple[str, str]] = Counter()
        for rank, node in enumerate(order):
            routes = routes_of(count, rank, zones)
            assert not routes.given
            for owner, pieces in routes.taken.items():
                for piece in pieces:
                    sent[nodes[node], nodes[order[owner]]] += piece.stop - piece.start
        assert sent == {("x", "y"): count, ("y", "x"): count}


def test_nodes_that_nothing_joins_are_told() -> None:
    with pytest.raises(ValueError, match="joins the nodes of a, c"):
        SpanningTree("abcd", {("a", "b"): 1.0, ("c", "d"): 1.0, ("a", "gone"): 5.0})
    assert SpanningTree("", {}).ring == ()
    assert SpanningTree("a", {}).zones() == {"a": "a"}


def test_alike_links_are_one_zone() -> None:
    rates = {pair: 90.0 + 10.0 * (pair == ("a", "b")) for pair in permutations("abc", 2)}
    assert set(SpanningTree("abc", rates).zones().values()) == {"a"}


def test_routes_are_planned_again_once_a_change_has_stayed() -> None:
    links = Measured()
    assert links.observe("a", "b", 100.0)
    told = [links.observe("a", "b", rate) for rate in (90.0, 30.0, 100.0, 30.0, 200.0, 29.0, 30.0)]
    assert told == [False] * 6 + [True]
    assert links.rates == {("a", "b"): 30.0}
    assert links.observe("c", "a", 5.0)
    assert links.forget("a")
    assert not links.rates
    assert not links.forget("a")
