"""Faults on three nodes, SIGTERM to a member's process, and then nodes that Ray drains."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.core.generated import autoscaler_pb2
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import raycloud
from raycloud.clock import SystemClock
from raycloud.events import (
    Event,
    GenerationFormed,
    MemberLeaving,
    MemberLost,
    MemberReady,
    Recovered,
    StepsCommitted,
)
from raycloud.faults import Action, Fault
from raycloud.on_ray.attach import REASON, draining
from raycloud.on_ray.chaos import Chaos, prepared
from raycloud.preemption import PreemptionNotice, on_sigterm
from raycloud.spec import Job
from tests.live import asked, check_result, of_kind, wait_for
from tests.live_tasks import Steady
from tests.ray.test_regroup import Opening, Trouble

PREEMPTION = autoscaler_pb2.DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION
FAULTS = (
    Fault(action=Action.KILL, at_step=20),
    Fault(action=Action.CUT, at_step=21, rank=1),
    Fault(action=Action.FREEZE, at_step=60, seconds=0.3),
)


@pytest.fixture(scope="module")
def nodes(ray_tmpdir: Path) -> Iterator[tuple[str, ...]]:
    """The ids of three nodes, the head's first."""
    from ray.cluster_utils import Cluster

    from raycloud.on_ray.attach import _EMBEDDED, _QUIET

    cluster = Cluster()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (_QUIET | _EMBEDDED).items():
            patch.setenv(name, value)
        added = [cluster.add_node(num_cpus=n, include_dashboard=False) for n in (2, 2, 1)]
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        try:
            yield tuple(node.node_id for node in added)
        finally:
            ray.shutdown()
            cluster.shutdown()


@contextlib.contextmanager
def unseen(_: Job) -> Iterator[Callable[[Event], None]]:
    yield lambda _: None


@pytest.mark.full(only="faults are injected on several nodes")
@pytest.mark.timeout(300)
def test_workers_of_several_nodes_are_harmed(nodes: tuple[str, ...], tmp_path: Path) -> None:
    elastic = {"min_workers": 1, "max_workers": 3}
    settings = {"gate": str(tmp_path / "gate")}  # which never opens
    job = prepared(asked("Paced", 3, elastic=elastic, settings=settings), steps=120)
    said: list[str] = []
    address = ray.get_runtime_context().gcs_address
    outcome = Chaos(tmp_path / "out", address, said.append, unseen).run(job, FAULTS)
    assert [(hit.fault.action, hit.why) for hit in outcome.hits] == [
        (fault.action, "") for fault in FAULTS
    ], said
    assert outcome.left == ()
    assert outcome.proved
    assert len(outcome.disturbed.pauses) >= 1
    assert outcome.pause_of(outcome.hits[0]) is not None


@ray.remote(num_cpus=1, max_restarts=0, max_concurrency=4)
class Member:
    """As a member's actor: constructed in one thread, called in others."""

    def __init__(self, deadline_s: float) -> None:
        self.main = threading.current_thread() is threading.main_thread()
        self.heard: queue.SimpleQueue[PreemptionNotice] = queue.SimpleQueue()
        on_sigterm(self.heard.put, deadline_s)

    def where(self) -> tuple[int, bool, bool]:
        return os.getpid(), self.main, threading.current_thread() is threading.main_thread()

    def wait(self) -> tuple[PreemptionNotice, float]:
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


@pytest.mark.full
def test_a_member_hears_sigterm_while_it_computes_and_ends_with_the_second(
    nodes: tuple[str, ...],
) -> None:
    one = member(nodes[0])
    process, constructed_in_main, called_in_main = ray.get(one.where.remote())
    assert (constructed_in_main, called_in_main) == (True, False)
    computing, waiting = one.compute.remote(2.0), one.wait.remote()
    ray.wait([computing], timeout=0.3)
    sent_s = time.time()
    os.kill(process, signal.SIGTERM)
    leaving, heard_s = ray.get(waiting)
    assert leaving == PreemptionNotice(reason=leaving.reason, deadline_s=60.0, node=False)
    assert "SIGTERM" in leaving.reason
    assert heard_s - sent_s < 1.0
    ray.get(computing)
    assert ray.get(one.where.remote())[0] == process  # and goes on
    os.kill(process, signal.SIGTERM)
    wait_for("its end", lambda: ended(one))


@pytest.mark.full(only="a member that was given notice ends at its deadline")
def test_a_member_ends_at_its_deadline(nodes: tuple[str, ...]) -> None:
    one = member(nodes[0], 0.5)
    os.kill(ray.get(one.where.remote())[0], signal.SIGTERM)
    assert ray.get(one.wait.remote())[0].deadline_s == 0.5
    wait_for("its end", lambda: ended(one))


@pytest.mark.full
def test_a_worker_that_gets_sigterm_leaves_and_is_replaced(
    nodes: tuple[str, ...], ray_tmpdir: Path, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    job = asked(
        "Paced",
        2,
        steps=300,
        elastic={"min_workers": 1, "max_workers": 2},
        settings={"gate": str(gate)},
    )
    trouble = Trouble(ray_tmpdir, [20], lambda pid: os.kill(pid, signal.SIGTERM))
    run = raycloud.train(job, run_dir=tmp_path / "run", observer=Opening(gate, 2, trouble))
    check_result(run, job, Steady(), 300)
    [notice] = of_kind(MemberLeaving, run.events)
    assert "SIGTERM" in notice.reason
    assert not of_kind(MemberLost, run.events)
    assert not of_kind(Recovered, run.events)
    groups = [set(e.members) for e in of_kind(GenerationFormed, run.events)]
    assert groups[-1] == {0, 1, 2} - {notice.member}


def drain(node: str, seconds: float) -> None:
    client = ray._raylet.GcsClient(address=ray.get_runtime_context().gcs_address)
    until_ms = int((SystemClock().unix_s() + seconds) * 1000)
    assert client.drain_node(node, PREEMPTION, "for a test", until_ms)[0]


def test_nodes_that_ray_drains_are_listed(nodes: tuple[str, ...]) -> None:
    clock = SystemClock()
    assert draining(clock) == {}
    one = member(nodes[2])  # an idle node that is drained ends at once
    process = ray.get(one.where.remote())[0]
    drain(nodes[2], 60.0)
    found = wait_for("the drained node", lambda: draining(clock))
    assert list(found) == [nodes[2]]
    leaving = found[nodes[2]]
    assert (leaving.reason, leaving.certain, leaving.node) == (REASON, True, True)
    assert leaving.deadline_s is not None
    assert 0 < leaving.deadline_s <= 60
    assert ray.get(one.where.remote())[0] == process  # nothing is ended


def test_workers_leave_a_node_that_is_drained(nodes: tuple[str, ...], tmp_path: Path) -> None:
    """Three of them on two nodes of two CPUs; the third node drains already."""
    job = asked(
        "Paced",
        3,
        steps=300,
        elastic={"min_workers": 1, "max_workers": 3},
        settings={"gate": str(tmp_path / "gate")},
    )
    placed: dict[int, str] = {}
    drained: list[str] = []
    all_there = threading.Event()

    def watching(event: Event) -> None:
        if isinstance(event, MemberReady):
            placed[event.member] = event.node
        if isinstance(event, GenerationFormed) and len(event.members) == 3:
            all_there.set()  # where one was late, those that were there have begun without it
        if isinstance(event, StepsCommitted) and all_there.is_set() and not drained:
            drained.append(next(node for node in placed.values() if node != nodes[0]))
            drain(drained[0], 120.0)
        if isinstance(event, GenerationFormed) and drained:
            (tmp_path / "gate").touch()

    run = raycloud.train(job, run_dir=tmp_path / "run", observer=watching)
    check_result(run, job, Steady(), 300)
    leave = {m for m, node in placed.items() if node == drained[0]}
    assert {e.member for e in of_kind(MemberLeaving, run.events)} == leave
    assert not of_kind(MemberLost, run.events)
    assert not of_kind(Recovered, run.events)
    last = set(of_kind(GenerationFormed, run.events)[-1].members)
    assert {0, 1, 2} - leave <= last  # and a newcomer, where the head has room for one
    assert not last & leave
