"""Two workers on nodes of their own, between which packets vanish while the driver hears both."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks import testbed
from benchmarks.testbed.cluster import Cluster
from benchmarks.testbed.link import DEVICE
from benchmarks.testbed.shell import inside
from raycloud.events import ExchangeBroken, MemberLost, Recovered, StepsCommitted
from raycloud.net.sockets import HUNG_S
from raycloud.report.log import read_events
from raycloud.spec import Job, dump_job
from tests.connections import ports_to
from tests.live import RAYCLOUD, ROOT, asked, check_result, events, of_kind, wait_for
from tests.live_tasks import Steady
from tests.testbed.remains import let_pass, remains

STEPS = 400
BEGUN = 10
OUT_S = 4.0

pytestmark = pytest.mark.timeout(280)


@dataclass(frozen=True, slots=True)
class Live:
    """Two nodes with Ray and a worker's place each."""

    bed: testbed.Testbed
    cluster: Cluster

    def member(self, name: str) -> int:
        """The process id of the worker on a node."""
        for pid in self.bed[name].processes():
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::MemberActor"):
                    return pid
        raise AssertionError(f"no worker is on {name}")


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    if why := testbed.missing():
        pytest.skip(why)
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("RAY", "PYTHON"))}
    with contextlib.ExitStack() as stack:
        nodes = tuple(testbed.NodeSpec(name=name) for name in ("n1", "n2"))
        bed = stack.enter_context(testbed.Testbed(testbed.Spec(nodes=nodes)))
        cluster = Cluster(
            bed,
            directory=tmp_path_factory.mktemp("ray"),
            environment={**kept, "PYTHONPATH": str(ROOT)},
        )
        stack.enter_context(cluster)
        cluster.join("n1", "n2")
        yield Live(bed, cluster)
        pids = [pid for machine in (bed.head, *bed.nodes.values()) for pid in machine.processes()]
    assert remains(bed.id, pids) == []


def swallow(machine: testbed.Machine, matches: Sequence[str]) -> None:
    """Let packets vanish that this machine sends, where all of `matches` fit; nobody is told."""
    fit = " ".join(f"match {match}" for match in matches)
    inside(
        machine.namespace,
        tc=[
            f"qdisc replace dev {DEVICE} root handle 1: htb default 1 r2q 100000",
            f"class add dev {DEVICE} parent 1: classid 1:1 htb rate 10gbit",
            f"class add dev {DEVICE} parent 1: classid 1:2 htb rate 10gbit",
            f"qdisc add dev {DEVICE} parent 1:2 blackhole",
            f"filter add dev {DEVICE} parent 1: protocol ip u32 {fit} flowid 1:2",
        ],
    )


def let_through(machine: testbed.Machine) -> None:
    inside(machine.namespace, tc=[f"qdisc del dev {DEVICE} root"])


@pytest.fixture
def run(live: Live, tmp_path: Path) -> Iterator[tuple[Job, Path, testbed.Process]]:
    """A run of two workers that has begun, and goes slowly until the file `gate` is there."""
    job = asked("Paced", 2, steps=STEPS, settings={"gate": str(tmp_path / "gate")})
    (tmp_path / "job.yaml").write_text(dump_job(job))
    run_dir = tmp_path / "run"
    command = [RAYCLOUD, "train", tmp_path / "job.yaml", "--run-dir", run_dir, "--plain"]
    command += ["--address", live.cluster.address]
    driver = live.bed.head.start(
        [str(word) for word in command],
        environment=live.cluster.environment,
        log=tmp_path / "driver.log",
    )

    def begun() -> bool:
        assert driver.poll() is None, driver.log.read_text()
        told = of_kind(StepsCommitted, events(run_dir))
        return {e.member for e in told if e.last_step >= BEGUN} == {0, 1}

    wait_for("its first steps", begun)
    yield job, run_dir, driver
    for machine in live.bed.nodes.values():
        with contextlib.suppress(testbed.ToolError):
            let_through(machine)


def goes_on(live: Live, run_dir: Path, driver: testbed.Process) -> None:
    def recovered() -> bool:
        assert driver.poll() is None, driver.log.read_text()
        return bool(of_kind(Recovered, events(run_dir)))

    wait_for("it goes on", recovered)


def check_end(run: tuple[Job, Path, testbed.Process]) -> list[Recovered]:
    """It ends as if nothing had been, and nobody was lost."""
    job, run_dir, driver = run
    Path(job.settings["gate"]).touch()
    assert driver.wait(90.0) == 0, driver.log.read_text()
    check_result(run_dir, job, Steady(), STEPS)
    assert not of_kind(MemberLost, events(run_dir))
    return of_kind(Recovered, events(run_dir))


@pytest.mark.full(only="workers between which packets vanish")
def test_where_one_connection_hangs_they_meet_over_others(
    live: Live, run: tuple[Job, Path, testbed.Process]
) -> None:
    _, run_dir, driver = run
    one, other = live.bed["n1"], live.bed["n2"]
    here, there = ports_to(live.member("n1"), other.address)[0]
    swallow(one, [f"ip sport {here} 0xffff", f"ip dport {there} 0xffff"])
    swallow(other, [f"ip sport {there} 0xffff", f"ip dport {here} 0xffff"])
    hung_t = time.time()
    goes_on(live, run_dir, driver)
    told = [(t, e) for t, e in read_events(run_dir / "events.jsonl") if t > hung_t]
    broken_s = [t - hung_t for t, e in told if isinstance(e, ExchangeBroken)]
    resumed_s = [t - hung_t for t, e in told if isinstance(e, Recovered)]
    assert broken_s[0] < HUNG_S + 3.0
    assert resumed_s[0] < HUNG_S + 8.0
    assert [(one.lost, one.lost_steps) for one in check_end(run)] == [((), 0)]


@pytest.mark.full(only="workers between which packets vanish")
def test_where_all_between_two_hangs_they_go_on_once_it_is_mended(
    live: Live, run: tuple[Job, Path, testbed.Process]
) -> None:
    _, run_dir, driver = run
    one, other = live.bed["n1"], live.bed["n2"]
    swallow(one, [f"ip dst {other.address}/32"])
    swallow(other, [f"ip dst {one.address}/32"])

    def broken() -> bool:
        assert driver.poll() is None, driver.log.read_text()
        return bool(of_kind(ExchangeBroken, events(run_dir)))

    wait_for("the exchange broke", broken, seconds=3.0 * HUNG_S)
    let_pass(OUT_S)
    assert not of_kind(Recovered, events(run_dir))
    for machine in (one, other):
        let_through(machine)
    goes_on(live, run_dir, driver)
    assert len(check_end(run)) == 1
