"""Ray on a bed: one cluster for all of these, which therefore stand in order."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks import testbed
from benchmarks.testbed import cluster as on_ray
from benchmarks.testbed.cluster import Cluster, ClusterError
from benchmarks.testbed.schedule import Event, Schedule, apply
from tests.live import wait_for
from tests.testbed.remains import let_pass, remains, runs

LIMIT_S = 60.0
NOTICE_S = 1.5

# Places a burning actor on n1 by its label, and says where it is; another on n2 keeps that busy,
# since Ray ends a node that has notice as soon as it is idle.
DRIVER = """
import json, os, ray, threading, time
ray.init(logging_level="ERROR", log_to_driver=False)

@ray.remote(num_cpus=1, label_selector={"node": "n1"})
class Burner:
    def where(self):
        groups = open("/proc/self/cgroup").read()
        return dict(node=os.environ["TESTBED_NODE"], address=os.environ["TESTBED_ADDRESS"],
                    groups=groups, network=os.readlink("/proc/self/ns/net"), pid=os.getpid(),
                    ray=ray.util.get_node_ip_address())

    def burn(self):
        while True:
            pass

burner, other = Burner.remote(), Burner.options(label_selector={"node": "n2"}).remote()
assert ray.get(other.where.remote())["node"] == "n2"
print(json.dumps(ray.get(burner.where.remote())), flush=True)
burner.burn.remote()
threading.Event().wait()
"""

# A node that is cut off is seen to be dead after a minute by default.
QUICK = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}

pytestmark = pytest.mark.timeout(180)


@dataclass(frozen=True, slots=True)
class Live:
    """A bed of two nodes with Ray, and what it was before anything happened."""

    bed: testbed.Testbed
    cluster: Cluster
    folder: Path
    ids: dict[str, str]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    if why := testbed.missing():
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("ray")
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("RAY", "PYTHON"))}
    spec = testbed.Spec(
        nodes=(
            testbed.NodeSpec(name="n1", cores=0.4, spot=True, labels={"raycloud.io/disk": "ssd"}),
            testbed.NodeSpec(name="n2", cores=0.4, zone="b", egress_bits_per_s=1e9),
        )
    )
    with contextlib.ExitStack() as stack:
        bed = stack.enter_context(testbed.Testbed(spec))
        cluster = stack.enter_context(Cluster(bed, directory=folder, environment=kept | QUICK))
        cluster.join(*bed.nodes)
        yield Live(bed, cluster, folder, dict(cluster.node_ids()))
        files, pids = cluster.files, bed.head.processes()
    assert not files.exists()
    assert remains(bed.id, list(pids)) == []


def nodes(live: Live) -> dict[str, dict[str, Any]]:
    """What Ray says of its living nodes, by name."""
    return {n["labels"]["node"]: n for n in live.cluster.nodes() if n["alive"]}


def network(pid: int) -> str:
    """The network namespace of a process."""
    return str(Path(f"/proc/{pid}/ns/net").readlink())


@pytest.mark.full(only="Ray on a testbed: nodes, quotas, drains and kills")
def test_nodes_are_there_with_their_labels_and_addresses(live: Live) -> None:
    found = nodes(live)
    assert {name: node["address"] for name, node in found.items()} == {
        "head": "10.77.0.10",
        "n1": "10.77.0.11",
        "n2": "10.77.0.12",
    }
    assert {name: node["id"] for name, node in found.items()} == live.ids
    labels = {
        name: {k: v for k, v in node["labels"].items() if k != "ray.io/node-id"}
        for name, node in found.items()
    }
    assert labels == {
        "head": {
            "node": "head",
            "ray.io/market-type": "on-demand",
            "ray.io/availability-zone": "a",
        },
        "n1": {
            "node": "n1",
            "ray.io/market-type": "spot",
            "ray.io/availability-zone": "a",
            "raycloud.io/disk": "ssd",
        },
        "n2": {
            "node": "n2",
            "ray.io/market-type": "on-demand",
            "ray.io/availability-zone": "b",
        },
    }


@pytest.mark.full(only="Ray on a testbed: nodes, quotas, drains and kills")
def test_an_actor_runs_where_its_label_says_and_within_the_quota(live: Live) -> None:
    log, n1 = live.folder / "driver.log", live.bed["n1"]
    driver = live.bed.head.start(
        [sys.executable, "-c", DRIVER], environment=live.cluster.environment, log=log
    )

    def said() -> dict[str, Any] | None:
        assert driver.poll() is None, log.read_text()
        lines = [line for line in log.read_text().splitlines() if line.startswith("{")]
        return json.loads(lines[0]) if lines else None

    where = wait_for("the actor", said, seconds=LIMIT_S)
    assert where["node"] == "n1"
    assert where["address"] == where["ray"] == n1.address
    assert f"/{live.bed.id}/n1\n" in where["groups"]
    assert where["pid"] in n1.processes()
    assert where["network"] == network(n1.processes()[0])
    assert where["network"] != network(os.getpid())

    def holds() -> bool:
        before_s = n1.cpu_s()
        elapsed_s = let_pass(1.0)
        cores = (n1.cpu_s() - before_s) / elapsed_s
        assert cores < 0.4 * 1.1
        return cores > 0.4 * 0.9  # not where the machine stole the time

    live.bed.limit()
    let_pass(0.2)  # what it had saved up
    wait_for("it gets its quota", holds, seconds=LIMIT_S)


@pytest.mark.full(only="Ray on a testbed: nodes, quotas, drains and kills")
def test_what_is_not_there_is_named(live: Live) -> None:
    with pytest.raises(ClusterError, match="drain: Ray sees no living node 'n9'; let it join"):
        live.cluster.drain("n9", 1.0)
    with pytest.raises(KeyError, match="'n9' is no living machine"):
        live.cluster.join("n9")


@pytest.mark.full(only="Ray on a testbed: nodes, quotas, drains and kills")
def test_a_drain_shows_and_ends_in_death_and_the_node_comes_back(live: Live) -> None:
    bed, cluster = live.bed, live.cluster
    schedule = Schedule([Event(at_s=0, action="drain", node="n2", deadline_s=NOTICE_S)])
    began_s, noticed_s = time.monotonic(), time.time()

    def played() -> bool:
        for event in schedule.due(time.monotonic() - began_s):
            assert apply(event, bed, cluster=cluster).happened
        return "n2" in cluster.draining() or "n2" not in bed.nodes

    wait_for("it drains", played, seconds=LIMIT_S)
    assert cluster.draining()["n2"] == pytest.approx(noticed_s + NOTICE_S, abs=0.5)
    pids = bed["n2"].processes()
    wait_for("it is killed", lambda: played() and "n2" not in bed.nodes, seconds=LIMIT_S)
    assert time.monotonic() - began_s >= NOTICE_S
    assert not any(map(runs, pids))
    wait_for("Ray sees it", lambda: "n2" not in cluster.node_ids(), seconds=LIMIT_S)

    back = apply(Event(at_s=0, action="add", node="n2"), bed, cluster=cluster)
    assert back.happened
    assert bed["n2"].address == "10.77.0.12"
    assert cluster.node_ids()["n2"] != live.ids["n2"]
    assert "n2" not in cluster.draining()


@pytest.mark.full(only="Ray on a testbed: nodes, quotas, drains and kills")
def test_ray_sees_a_killed_node_and_who_comes_at_once_under_its_name(live: Live) -> None:
    before = live.cluster.node_ids()["n2"]
    live.bed["n2"].kill()
    apply(Event(at_s=0, action="add", node="n2"), live.bed, cluster=live.cluster)
    assert live.cluster.node_ids()["n2"] != before

    def dead() -> bool:
        return any(n["id"] == before and not n["alive"] for n in live.cluster.nodes())

    wait_for("Ray sees the old one dead", dead, seconds=LIMIT_S)


@pytest.mark.full(only="Ray on a testbed: nodes, quotas, drains and kills")
def test_a_raylet_that_ends_is_told_with_its_log(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    live.bed.add(testbed.NodeSpec(name="n3"))
    monkeypatch.setattr(on_ray, "_STORE_BYTES", 1)  # too small for Ray
    with pytest.raises(ClusterError, match=r"Ray sees n3: not, n3 ended with [12]\n.*n3\.log:\n"):
        live.cluster.join("n3")
    live.bed.remove("n3")
