"""A schedule happens to a bed without Ray; what each fault does is in the tests of machines."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import testbed
from benchmarks.testbed import NodeSpec
from benchmarks.testbed.schedule import Event, Schedule, ScheduleError, apply
from tests.live import wait_for
from tests.testbed.conftest import MakeBed
from tests.testbed.remains import first, listening, runs, said, start

LIMIT_S = 20.0


def happens(bed: testbed.Testbed, action: Any, node: str = "n1", **fields: Any) -> str:
    outcome = apply(Event(at_s=0, action=action, node=node, **fields), bed)
    assert outcome.happened, outcome.detail
    return outcome.detail


def heard(process: testbed.Process) -> int:
    """How many datagrams have arrived."""
    return sum("sent_s" in line for line in said(process.log))


def flows(process: testbed.Process, number: int = 1) -> None:
    """Wait until so many more arrive."""
    before = heard(process)
    wait_for("more datagrams", lambda: heard(process) >= before + number, seconds=LIMIT_S)


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.full
def test_a_process_is_killed_by_its_command_line(make_bed: MakeBed, tmp_path: Path) -> None:
    bed = make_bed(NodeSpec(name="n1"))
    older, younger, other = (
        start(bed["n1"], tmp_path, *words) for words in (["burn", "1"], ["burn", "1"], ["wait"])
    )
    for process in (older, younger, other):
        first(process, "pid")
    bed["n1"].throttle(0.5)
    assert happens(bed, "kill-process", matching="burn 1") == f"n1: killed process {younger.pid}"
    assert younger.wait(LIMIT_S) == -9
    assert happens(bed, "kill-process", matching="burn 1") == f"n1: killed process {older.pid}"
    assert older.wait(LIMIT_S) == -9
    event = Event(at_s=0, action="kill-process", node="n1", matching="burn 1")
    outcome = apply(event, bed)
    assert not outcome.happened
    assert outcome.detail == "n1: no process matches 'burn 1'"
    assert other.poll() is None


@pytest.mark.full
def test_freeze_and_thaw(make_bed: MakeBed, tmp_path: Path) -> None:
    bed = make_bed(NodeSpec(name="n1"), NodeSpec(name="n2"))
    ear, other = (listening(m, tmp_path, "hear", 5000) for m in (bed["n1"], bed.head))
    for machine in (bed["n1"], bed.head):
        start(bed["n2"], tmp_path, "speak", machine.address, 5000)
    flows(ear)
    assert happens(bed, "freeze") == "n1: freeze"
    count = heard(ear)
    flows(other, 20)  # as many are sent to n1 meanwhile
    assert heard(ear) == count
    assert happens(bed, "thaw") == "n1: thaw"
    flows(ear)


@pytest.mark.full
def test_cut_and_mend_and_rate_and_throttle(make_bed: MakeBed, tmp_path: Path) -> None:
    bed = make_bed(NodeSpec(name="n1"), NodeSpec(name="n2"))
    ears = {name: listening(bed[name], tmp_path, "hear", 5000) for name in bed.nodes}
    start(bed["n2"], tmp_path, "speak", bed["n1"].address, 5000)
    start(bed["n1"], tmp_path, "speak", bed["n2"].address, 5000)
    for ear in ears.values():
        flows(ear)
    assert happens(bed, "cut", direction="in") == "n1: cut in"
    count = heard(ears["n1"])
    flows(ears["n2"])
    flows(ears["n2"])
    assert heard(ears["n1"]) <= count + 1  # one may have been on its way
    assert happens(bed, "mend") == "n1: mend"
    flows(ears["n1"])
    assert happens(bed, "rate", egress_bits_per_s=1e6) == "n1: rate, sends 1e+06 bit/s"
    assert happens(bed, "rate", ingress_bits_per_s=None) == "n1: rate, receives all"
    assert happens(bed, "throttle", cores=0.5) == "n1: throttle to 0.5 cores"
    assert happens(bed, "throttle") == "n1: throttle no more"
    for ear in ears.values():
        flows(ear)


@pytest.mark.full
def test_a_drain_is_a_notice_and_then_death(make_bed: MakeBed, tmp_path: Path) -> None:
    bed = make_bed(NodeSpec(name="n1"), NodeSpec(name="n2", cores=0.5))
    waiting = start(bed["n1"], tmp_path, "wait")
    stubborn = start(bed["n1"], tmp_path, "stubborn")
    for process in (waiting, stubborn):
        first(process, "pid")
    schedule = Schedule([Event(at_s=0.1, action="drain", node="n1", deadline_s=1)])
    began_s, details = time.monotonic(), []

    def played() -> bool:
        due = schedule.due(time.monotonic() - began_s)
        details.extend(apply(event, bed).detail for event in due)
        return schedule.next_s is None

    wait_for("the notice", lambda: played() or details, seconds=LIMIT_S)
    assert waiting.wait(LIMIT_S) == 7
    assert first(waiting, "terminated")
    wait_for("the deadline", played, seconds=LIMIT_S)
    assert time.monotonic() - began_s >= 1.1
    assert details == ["n1: drain, to be killed in 1 s", "n1: kill-node"]
    assert list(bed.nodes) == ["n2"]
    assert not runs(stubborn.pid)


def test_nodes_go_and_come(make_bed: MakeBed, tmp_path: Path) -> None:
    bed = make_bed(NodeSpec(name="n1", cores=0.5), NodeSpec(name="n2"))
    address = bed["n1"].address
    assert happens(bed, "kill-node") == "n1: kill-node"
    for action in ("kill-node", "freeze", "drain"):
        fields = {"deadline_s": 1} if action == "drain" else {}
        outcome = apply(Event(at_s=0, action=action, node="n1", **fields), bed)
        assert (outcome.happened, outcome.detail) == (False, "n1 is not there")
    assert happens(bed, "add") == f"n1 is there, at {address}"
    third = NodeSpec(name="n3", cores=0.5, zone="b")
    assert happens(bed, "add", "n3", spec=third) == "n3 is there, at 10.77.0.13"
    assert list(bed.nodes) == ["n2", "n1", "n3"]
    assert first(start(bed["n3"], tmp_path, "whoami"), "interfaces") == ["eth0", "lo"]
    with pytest.raises(ScheduleError, match="add of 'n3': it is there; kill or drain it before"):
        apply(Event(at_s=0, action="add", node="n3", spec=third), bed)
    with pytest.raises(ScheduleError, match="add of 'n4': the bed's spec has no such node"):
        apply(Event(at_s=0, action="add", node="n4"), bed)


@pytest.mark.full
def test_the_quota_of_who_comes_is_set(make_bed: MakeBed, tmp_path: Path) -> None:
    bed = make_bed(NodeSpec(name="n1", cores=0.5))
    happens(bed, "kill-node")
    happens(bed, "add")
    process = bed["n1"].start(
        [sys.executable, "-c", "while True: pass"], environment={}, log=tmp_path / "burn.log"
    )
    wait_for("it has burnt", lambda: bed["n1"].cpu_s() > 0.2, seconds=LIMIT_S)
    began_s, before_s = time.monotonic(), bed["n1"].cpu_s()
    wait_for("a second", lambda: time.monotonic() - began_s > 1, seconds=LIMIT_S)
    assert (bed["n1"].cpu_s() - before_s) / (time.monotonic() - began_s) < 0.55
    assert process.poll() is None
