"""Links: rates hold in both directions, a cut passes nothing, and the counters count."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from benchmarks import testbed
from benchmarks.testbed import NodeSpec, SpecError
from tests.live import wait_for
from tests.testbed.conftest import MakeBed
from tests.testbed.measuring import come_first, nearest
from tests.testbed.programs import PORT
from tests.testbed.remains import LIMIT_S, first, let_pass, listening, said, start
from tests.tiers import variants

pytestmark = pytest.mark.alone

MBIT = 1_000_000
WARM_UP_S = 1.0
WINDOW_S = 2.0


def flow(
    sender: testbed.Machine, receiver: testbed.Machine, folder: Path, port: int = PORT
) -> testbed.Process:
    """Bytes that never end; returns the receiving process."""
    come_first(sender, receiver)
    sink = listening(receiver, folder, "sink", port)
    start(sender, folder, "source", receiver.address, port)
    first(sink, "received")
    return sink


def pour(
    sender: testbed.Machine, receiver: testbed.Machine, folder: Path, rate: float
) -> testbed.Process:
    """Datagrams at a rate, as many as come through; returns the receiving process.

    Where bytes go both ways over a link, those of TCP would depend on when its answers come
    through, which wait in the same queue.
    """
    come_first(sender, receiver)
    counting = listening(receiver, folder, "count", PORT)
    start(sender, folder, "pour", receiver.address, PORT, rate)
    first(counting, "received")
    return counting


def bits_per_s(sinks: list[testbed.Process], seconds: float) -> list[float]:
    """What each receives, over the lines that it says from now on, all at the same time."""
    marks = [len(said(sink.log)) for sink in sinks]
    let_pass(seconds)
    found = []
    for sink, mark in zip(sinks, marks, strict=True):
        lines = [line for line in said(sink.log)[mark:] if "t_s" in line]
        found.append(
            8
            * (lines[-1]["received"] - lines[0]["received"])
            / (lines[-1]["t_s"] - lines[0]["t_s"])
        )
    return found


def check_rates(bed: testbed.Testbed, sinks: list[testbed.Process], asked: list[float]) -> None:
    def off(found: list[float]) -> float:
        return max(abs(one / wanted - 1) for one, wanted in zip(found, asked, strict=True))

    def pids() -> list[int]:
        return [pid for machine in (bed.head, *bed.nodes.values()) for pid in machine.processes()]

    let_pass(WARM_UP_S)
    found = nearest(lambda: bits_per_s(sinks, WINDOW_S), off, pids=pids)
    assert found == pytest.approx(asked, rel=0.1)


@pytest.mark.parametrize("rate", variants(20 * MBIT, 100 * MBIT))
def test_a_rate_holds_in_both_directions(make_bed: MakeBed, tmp_path: Path, rate: float) -> None:
    """n1 is limited in what it sends, n2 in what it receives; the head in neither."""
    bed = make_bed(
        NodeSpec(name="n1", egress_bits_per_s=rate), NodeSpec(name="n2", ingress_bits_per_s=rate)
    )
    sinks = [flow(bed["n1"], bed.head, tmp_path), flow(bed.head, bed["n2"], tmp_path)]
    check_rates(bed, sinks, [rate, rate])


@pytest.mark.full
def test_both_directions_of_one_node_are_limited_apart(make_bed: MakeBed, tmp_path: Path) -> None:
    bed = make_bed(NodeSpec(name="n1", egress_bits_per_s=20 * MBIT, ingress_bits_per_s=50 * MBIT))
    found = [
        pour(bed["n1"], bed.head, tmp_path, 60 * MBIT),
        pour(bed.head, bed["n1"], tmp_path, 60 * MBIT),
    ]
    check_rates(bed, found, [20 * MBIT, 50 * MBIT])


@pytest.mark.full
def test_a_rate_changes_while_bytes_flow(make_bed: MakeBed, tmp_path: Path) -> None:
    bed = make_bed(NodeSpec(name="n1", egress_bits_per_s=100 * MBIT), NodeSpec(name="n2"))
    sinks = [flow(bed["n1"], bed.head, tmp_path), flow(bed.head, bed["n2"], tmp_path)]
    bed["n1"].rate(egress_bits_per_s=20 * MBIT)
    bed["n2"].rate(ingress_bits_per_s=40 * MBIT)  # none before
    check_rates(bed, sinks, [20 * MBIT, 40 * MBIT])
    bed["n1"].rate(egress_bits_per_s=80 * MBIT, ingress_bits_per_s=MBIT * 10)
    bed["n2"].rate(egress_bits_per_s=10 * MBIT)  # ingress stays
    check_rates(bed, sinks, [80 * MBIT, 40 * MBIT])
    bed["n1"].rate(egress_bits_per_s=None)
    let_pass(WARM_UP_S)
    assert bits_per_s(sinks[:1], WINDOW_S)[0] > 150 * MBIT
    with pytest.raises(SpecError, match=r"egress_bits_per_s: 20 is not possible.*20_000_000"):
        bed["n1"].rate(egress_bits_per_s=20)


@pytest.mark.full
def test_a_trunk_is_limited_in_each_direction(make_bed: MakeBed, tmp_path: Path) -> None:
    trunk = testbed.TrunkSpec(zones=("a", "b"), rate_bits_per_s=20 * MBIT)
    bed = make_bed(NodeSpec(name="n1"), NodeSpec(name="n2", zone="b"), trunks=(trunk,))
    found = [
        pour(bed["n1"], bed["n2"], tmp_path, 30 * MBIT),
        pour(bed["n2"], bed["n1"], tmp_path, 30 * MBIT),
    ]
    check_rates(bed, found, [20 * MBIT, 20 * MBIT])
    inside = flow(bed.head, bed["n1"], tmp_path, PORT + 1)
    let_pass(WARM_UP_S)
    assert bits_per_s([inside], WINDOW_S)[0] > 60 * MBIT


@pytest.mark.full
def test_zones_without_a_trunk_are_joined(make_bed: MakeBed, tmp_path: Path) -> None:
    bed = make_bed(
        NodeSpec(name="n1"), NodeSpec(name="n2", zone="b"), NodeSpec(name="n3", zone="c")
    )
    listening(bed["n2"], tmp_path, "serve", PORT)
    bed.add(NodeSpec(name="n4", zone="d"))
    for name in ("head", "n1", "n3", "n4"):
        first(start(bed[name], tmp_path, "reach", bed["n2"].address, PORT), "reached")


@pytest.mark.full
@pytest.mark.parametrize(
    ("direction", "passing"), [("out", {"n2n1"}), ("in", {"n1n2"}), ("both", set())]
)
def test_a_cut_link_passes_nothing_and_mends(
    make_bed: MakeBed, tmp_path: Path, direction: str, passing: set[str]
) -> None:
    bed = make_bed(NodeSpec(name="n1", egress_bits_per_s=20 * MBIT), NodeSpec(name="n2"))
    hears = {}
    for one, other in (("n1", "n2"), ("n2", "n1")):
        hears[one + other] = listening(bed[other], tmp_path, "hear", PORT)
        start(bed[one], tmp_path, "speak", bed[other].address, PORT)

    def sent(way: str, since_s: float, until_s: float = float("inf")) -> list[float]:
        """When the datagrams that have come through were sent."""
        times = [line["sent_s"] for line in said(hears[way].log) if "sent_s" in line]
        return [sent_s for sent_s in times if since_s < sent_s < until_s]

    for hearing in hears.values():
        first(hearing, "sent_s")
    bed["n1"].cut(direction)
    cut_s = time.monotonic()
    let_pass(1.0)
    for way in passing:
        wait_for(f"{way} passes", lambda way=way: len(sent(way, cut_s)) > 50, seconds=LIMIT_S)
    bed["n1"].rate(egress_bits_per_s=30 * MBIT)  # which does not mend it
    let_pass(0.2)
    mend_s = time.monotonic()
    bed["n1"].mend()
    mended_s = time.monotonic()
    for way in hears:
        wait_for(f"{way} mends", lambda way=way: len(sent(way, mended_s)) > 20, seconds=LIMIT_S)
    for way in hears.keys() - passing:
        assert sent(way, cut_s, mend_s) == []
    sinks = [flow(bed["n1"], bed["n2"], tmp_path, PORT + 1)]  # the new rate is there
    check_rates(bed, sinks, [30 * MBIT])


@pytest.mark.full
def test_cuts_add_up_until_mended(make_bed: MakeBed, tmp_path: Path) -> None:
    bed = make_bed(NodeSpec(name="n1"))
    listening(bed["n1"], tmp_path, "serve", PORT)
    bed["n1"].cut("in")
    bed["n1"].cut("out")
    bed["n1"].cut("both")
    reach = start(bed.head, tmp_path, "reach", bed["n1"].address, PORT)
    with pytest.raises(testbed.LateError):
        reach.wait(1.0)
    bed["n1"].mend()
    bed["n1"].mend()
    first(reach, "reached")


@pytest.mark.full
def test_traffic_is_what_was_sent(make_bed: MakeBed, tmp_path: Path) -> None:
    """Between the payload and the payload with the headers of whole packets."""
    count = 5_000_000
    bed = make_bed(NodeSpec(name="n1"), NodeSpec(name="n2", zone="b"))
    before = {name: bed[name].traffic() for name in ("n1", "n2", "head")}
    crossed = bed.trunk_bytes()
    sink = listening(bed["n2"], tmp_path, "sink", PORT)
    assert start(bed["n1"], tmp_path, "source", bed["n2"].address, PORT, count).wait(LIMIT_S) == 0
    assert sink.wait(LIMIT_S) == 0
    assert said(sink.log)[-1]["received"] == count
    after = {name: bed[name].traffic() for name in ("n1", "n2", "head")}
    sent = after["n1"].sent_bytes - before["n1"].sent_bytes
    received = after["n2"].received_bytes - before["n2"].received_bytes
    sys.stderr.write(f"payload {count}, sent {sent}, received {received}\n")
    assert count < received <= sent < 1.06 * count
    assert count < bed.trunk_bytes() - crossed < 1.2 * count  # both ways
    assert after["n1"].sent_packets - before["n1"].sent_packets > count / 70_000
    answers = after["n1"].received_bytes - before["n1"].received_bytes
    assert 0 < answers < 0.1 * count
    # A switch does not send to all what is for one.
    assert after["head"].received_bytes - before["head"].received_bytes < 0.05 * count
