"""Whether machines are there, over real links: gone, cut, frozen, starved, behind a full queue."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import testbed
from benchmarks.testbed import NodeSpec
from benchmarks.testbed.groups import LEAST_CORES
from tests.live import wait_for
from tests.testbed.conftest import MakeBed
from tests.testbed.programs import PORT
from tests.testbed.remains import LIMIT_S, first, let_pass, listening, said, start
from tests.tiers import variants

pytestmark = pytest.mark.alone

NAMES = ("n1", "n2", "n3")
SETTLED = 40  # turns
THIN_BITS_PER_S = 20e6


def asked(bed: testbed.Testbed, folder: Path) -> testbed.Process:
    """The head asks the machines of three members, which are all there."""
    driver = start(bed.head, folder, "ask", bed.head.address)
    place = first(driver, "place")
    for member, name in enumerate(NAMES):
        start(bed[name], folder, "answer", member, *place)
    until(driver, lambda found: found["reached"] == [0, 1, 2])
    mark = len(said(driver.log))
    wait_for("turns", lambda: len(said(driver.log)) >= mark + SETTLED, seconds=LIMIT_S)
    return driver


def turns(driver: testbed.Process, since: int = 0) -> list[dict[str, Any]]:
    """What was found out."""
    return [line for line in said(driver.log)[since:] if "reached" in line]


def until(driver: testbed.Process, holds: Any, since: int = 0) -> dict[str, Any]:
    """The first finding of which something holds."""

    def look() -> Sequence[dict[str, Any]]:
        return [found for found in turns(driver, since) if holds(found)]

    found: dict[str, Any] = wait_for("a finding", look, seconds=LIMIT_S)[0]
    return found


def nodes(**fields: Any) -> list[NodeSpec]:
    return [NodeSpec(name=name, **fields) for name in NAMES]


@pytest.mark.parametrize("what", variants("kill", "both", "out", "in"))
def test_who_is_gone_or_cut_off_is_found_and_nobody_else(
    make_bed: MakeBed, tmp_path: Path, what: Any
) -> None:
    bed = make_bed(*nodes())
    driver = asked(bed, tmp_path)
    assert not any(found["cut"] for found in turns(driver))
    mark = len(said(driver.log))
    if what == "kill":
        bed["n2"].kill()
    else:
        bed["n2"].cut(what)
    found = until(driver, lambda found: found["cut"], mark)
    assert found["reached"] == [0, 2]
    assert found["cut"].keys() == {"1"}
    assert 0.2 <= found["cut"]["1"] < 1.0  # when it is told first


@pytest.mark.full
def test_two_that_are_gone_at_once_are_found_together(make_bed: MakeBed, tmp_path: Path) -> None:
    bed = make_bed(*nodes())
    driver = asked(bed, tmp_path)
    mark = len(said(driver.log))
    for name in ("n1", "n2"):
        bed[name].cut("both")
    found = until(driver, lambda found: found["cut"], mark)
    assert (found["reached"], sorted(found["cut"])) == ([2], ["0", "1"])


@pytest.mark.full
def test_who_is_frozen_or_starved_is_there(make_bed: MakeBed, tmp_path: Path) -> None:
    bed = make_bed(*nodes())
    driver = asked(bed, tmp_path)
    start(bed["n2"], tmp_path, "burn", 4)
    bed["n2"].throttle(LEAST_CORES)
    bed["n1"].freeze()
    mark = len(said(driver.log))
    let_pass(4.0)
    bed["n1"].thaw()
    found = turns(driver, mark)
    assert len(found) > 40
    assert not any(one["cut"] for one in found)


@pytest.mark.full(only="a member behind a full queue is not taken for gone")
@pytest.mark.parametrize("delay_s", [0.0, 0.05])
def test_who_is_behind_a_full_queue_is_there(
    make_bed: MakeBed, tmp_path: Path, delay_s: float
) -> None:
    """Bytes without end, to it and from it, by a thin link, whose queue overflows."""
    thin = {"egress_bits_per_s": THIN_BITS_PER_S, "ingress_bits_per_s": THIN_BITS_PER_S}
    bed = make_bed(*nodes(**thin, delay_s=delay_s))
    driver = asked(bed, tmp_path)
    for port, (sender, receiver) in enumerate((("n1", "n2"), ("n2", "n3"), ("n3", "n1"))):
        sink = listening(bed[receiver], tmp_path, "sink", PORT + port)
        start(bed[sender], tmp_path, "source", bed[receiver].address, PORT + port)
        first(sink, "received")
    mark = len(said(driver.log))
    let_pass(8.0)
    found = turns(driver, mark)
    assert len(found) > 80
    assert not any(one["cut"] for one in found)
