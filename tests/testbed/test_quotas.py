"""Quotas: the CPU seconds of a machine's processes over the seconds of the clock; groups."""

from __future__ import annotations

import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import testbed
from benchmarks.testbed import NodeSpec, QuotaError
from benchmarks.testbed.groups import Group
from benchmarks.testbed.quota import GroupV2, find, group
from benchmarks.testbed.shell import wait_for
from tests.testbed.conftest import MakeBed
from tests.testbed.measuring import come_first, nearest
from tests.testbed.remains import LIMIT_S, first, let_pass, runs, start

pytestmark = pytest.mark.alone

WINDOW_S = 2.0


def cores(machine: testbed.Machine) -> float:
    """CPU seconds per second of the clock."""
    before_s = machine.cpu_s()
    took_s = let_pass(WINDOW_S)
    return (machine.cpu_s() - before_s) / took_s


def check_cores(machine: testbed.Machine, asked: float) -> None:
    # Who is throttled waits for a CPU all the time, so that it says nothing.
    found = nearest(lambda: cores(machine), lambda one: abs(one / asked - 1))
    assert found == pytest.approx(asked, rel=0.1)


@pytest.mark.full(only="a quota that changes")
def test_a_quota_holds_and_changes(make_bed: MakeBed, tmp_path: Path) -> None:
    bed = make_bed(NodeSpec(name="n1", cores=0.2), NodeSpec(name="n2", cores=0.4))
    burning = [start(bed[name], tmp_path, "burn") for name in ("n1", "n2")]
    for process in burning:
        first(process, "pid")
    come_first(bed.head)  # and with it the bed as a whole
    free = cores(bed["n1"])
    assert free > 0.25  # no quota until it is asked for
    bed.limit()
    check_cores(bed["n1"], 0.2)
    check_cores(bed["n2"], 0.4)
    bed["n2"].throttle(0.1)
    check_cores(bed["n2"], 0.1)
    bed["n1"].throttle(0.4)
    check_cores(bed["n1"], 0.4)
    bed["n1"].throttle(None)
    assert cores(bed["n1"]) > 0.45
    with pytest.raises(QuotaError, match=r"cores: 0.05 is not possible; use at least 0.1"):
        bed["n1"].throttle(0.05)


@pytest.mark.full
def test_busy_processes_share_the_quota_of_their_node(make_bed: MakeBed, tmp_path: Path) -> None:
    bed = make_bed(NodeSpec(name="n1", cores=0.4), NodeSpec(name="n2", cores=0.4))
    bed.limit()
    first(start(bed["n1"], tmp_path, "burn", 2), "pid")
    first(start(bed["n2"], tmp_path, "burn", 1), "pid")
    wait_for("both", lambda: len(bed["n1"].processes()) == 2, limit_s=LIMIT_S)
    check_cores(bed["n1"], 0.4)
    check_cores(bed["n2"], 0.4)


@pytest.mark.full
def test_frozen_processes_use_no_cpu_and_go_on(make_bed: MakeBed, tmp_path: Path) -> None:
    bed = make_bed(NodeSpec(name="n1"))
    bed["n1"].throttle(0.2)
    first(start(bed["n1"], tmp_path, "burn", 2), "pid")
    bed["n1"].freeze()
    before_s = bed["n1"].cpu_s()
    let_pass(0.5)
    assert bed["n1"].cpu_s() - before_s < 0.01
    bed["n1"].thaw()
    bed["n1"].thaw()
    check_cores(bed["n1"], 0.2)


@pytest.mark.full
def test_cpu_seconds_count_what_has_ended(make_bed: MakeBed, tmp_path: Path) -> None:
    machine = make_bed(NodeSpec(name="n1"))["n1"]
    busy = "import time\nwhile time.process_time() < 0.5: pass"
    process = machine.start(
        [sys.executable, "-I", "-c", busy], environment={}, log=tmp_path / "log"
    )
    assert process.wait(LIMIT_S) == 0
    assert 0.5 <= machine.cpu_s() < 0.8
    machine.kill()
    assert 0.5 <= machine.cpu_s() < 0.8


@pytest.fixture(params=["this machine's", "version 2"])
def made(request: pytest.FixtureRequest) -> Iterator[Group]:
    """A group of this machine's cgroups; and one of version 2, without quotas if it has none."""
    name = f"raycloud-testbed-test/{uuid.uuid4().hex[:8]}"
    mounts = Path("/proc/mounts").read_text().splitlines()
    roots = [line.split()[1] for line in mounts if " cgroup2 " in line]
    if request.param == "version 2" and not roots:
        pytest.skip("cgroups of version 2 are not mounted here")
    one = (
        group(name)
        if request.param == "this machine's"
        else GroupV2(name, Path(roots[0]), limits=find().version == 2)
    )
    one.make()
    yield one
    one.kill()
    one.remove()
    for folder in one.folders:
        folder.parent.rmdir()
    assert not one.exists


@pytest.fixture
def children(made: Group) -> Iterator[list[int]]:
    """Two living processes in the group: a shell, and one that it started."""
    script = "read go; (trap '' TERM; while :; do sleep 1000; done) & echo; wait"
    process = subprocess.Popen(
        ["/bin/sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    made.join(process.pid)
    process.stdin.write(b"go\n")
    process.stdin.close()
    process.stdout.readline()
    wait_for("all", lambda: len(made.members()) == 3, limit_s=LIMIT_S)
    yield list(made.members())
    process.kill()
    process.stdout.close()
    process.wait()


def test_a_group_holds_what_its_processes_start(made: Group, children: list[int]) -> None:
    assert len(children) == 3
    assert made.cpu_s() > 0
    assert made.exists
    assert made.below() == ()
    made.signal(signal.SIGTERM)
    made.kill()
    assert made.members() == ()
    assert not any(runs(pid) for pid in children)


def test_a_frozen_group_can_be_killed(made: Group, children: list[int]) -> None:
    made.freeze()
    assert all(runs(pid) for pid in children)
    made.kill()
    assert not any(runs(pid) for pid in children)


def test_a_group_that_is_gone_is_left_alone(made: Group) -> None:
    made.remove()
    made.remove()
    made.strike()
    made.kill()
    assert made.members() == ()
    assert made.below() == ()
    assert not made.exists
    made.make()
