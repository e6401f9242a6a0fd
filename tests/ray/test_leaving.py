"""Nodes that Ray drains, and SIGTERM to a member's process, on a real cluster of two nodes."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.core.generated import autoscaler_pb2
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raycloud.clock import SystemClock
from raycloud.on_ray.draining import REASON, draining
from raycloud.preemption import Leaving, on_sigterm
from tests.live import wait_for

PREEMPTION = autoscaler_pb2.DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION


@pytest.fixture(scope="module")
def nodes(ray_tmpdir: Path) -> Iterator[tuple[str, str]]:
    """The ids of two nodes, the head's first."""
    from ray.cluster_utils import Cluster

    from raycloud.on_ray.cluster import _EMBEDDED, _QUIET

    cluster = Cluster()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (_QUIET | _EMBEDDED).items():
            patch.setenv(name, value)
        added = [cluster.add_node(num_cpus=2, include_dashboard=False) for _ in range(2)]
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        try:
            yield added[0].node_id, added[1].node_id
        finally:
            ray.shutdown()
            cluster.shutdown()


@ray.remote(num_cpus=1, max_restarts=0, max_concurrency=4)
class Member:
    """As a member's actor: constructed in one thread, called in others."""

    def __init__(self, deadline_s: float) -> None:
        self.main = threading.current_thread() is threading.main_thread()
        self.heard: queue.SimpleQueue[Leaving] = queue.SimpleQueue()
        on_sigterm(self.heard.put, deadline_s)

    def where(self) -> tuple[int, bool, bool]:
        return os.getpid(), self.main, threading.current_thread() is threading.main_thread()

    def wait(self) -> tuple[Leaving, float]:
        return self.heard.get(timeout=60), time.time()

    def compute(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            sum(range(1000))


def member(node: str, deadline_s: float = 60.0) -> Any:
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    return Member.options(scheduling_strategy=there).remote(deadline_s)


def ended(one: Any) -> bool:
    """Whether it has; Ray lets methods that are called come to their end before."""
    try:
        ray.get(one.where.remote(), timeout=60)
    except RayActorError:
        return True
    return False


def test_a_member_hears_sigterm_while_it_computes_and_ends_with_the_second(
    nodes: tuple[str, str],
) -> None:
    one = member(nodes[0])
    process, constructed_in_main, called_in_main = ray.get(one.where.remote())
    assert (constructed_in_main, called_in_main) == (True, False)
    computing, waiting = one.compute.remote(2.0), one.wait.remote()
    ray.wait([computing], timeout=0.3)
    sent_s = time.time()
    os.kill(process, signal.SIGTERM)
    leaving, heard_s = ray.get(waiting)
    assert leaving == Leaving(reason=leaving.reason, deadline_s=60.0, node=False)
    assert "SIGTERM" in leaving.reason
    assert heard_s - sent_s < 1.0
    ray.get(computing)
    assert ray.get(one.where.remote())[0] == process  # and goes on
    os.kill(process, signal.SIGTERM)
    wait_for("its end", lambda: ended(one))


def test_a_member_ends_at_its_deadline(nodes: tuple[str, str]) -> None:
    one = member(nodes[0], 0.5)
    os.kill(ray.get(one.where.remote())[0], signal.SIGTERM)
    assert ray.get(one.wait.remote())[0].deadline_s == 0.5
    wait_for("its end", lambda: ended(one))


def test_nodes_that_ray_drains_are_listed(nodes: tuple[str, str]) -> None:
    clock = SystemClock()
    assert draining(clock) == {}
    one = member(nodes[1])  # an idle node that is drained ends at once
    process = ray.get(one.where.remote())[0]
    client = ray._raylet.GcsClient(address=ray.get_runtime_context().gcs_address)
    until_ms = int((clock.unix_s() + 60) * 1000)
    assert client.drain_node(nodes[1], PREEMPTION, "for a test", until_ms)[0]
    found = wait_for("the drained node", lambda: draining(clock))
    assert list(found) == [nodes[1]]
    leaving = found[nodes[1]]
    assert (leaving.reason, leaving.certain, leaving.node) == (REASON, True, True)
    assert leaving.deadline_s is not None
    assert 0 < leaving.deadline_s <= 60
    assert ray.get(one.where.remote())[0] == process  # nothing is ended
