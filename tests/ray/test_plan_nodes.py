"""A plan for several nodes: each is measured, and so are the links between them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray._private.state import actors
from ray.util.placement_group import placement_group, remove_placement_group

import raycloud
from raycloud.clock import SystemClock
from raycloud.events import GenerationFormed, MemberReady, Predicted
from raycloud.on_ray.attach import NODE_LABEL, inventory
from raycloud.on_ray.fleet import Fleet
from raycloud.on_ray.servers import Servers
from raycloud.planner.placement import place
from raycloud.planner.plan import Plan, from_json
from raycloud.spec import RoleResources
from tests.live import asked, of_kind

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[str]]:
    """Three nodes on this machine; their ids, in order."""
    from ray.cluster_utils import Cluster

    from raycloud.on_ray.attach import _EMBEDDED, _QUIET

    cluster = Cluster()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (_QUIET | _EMBEDDED).items():
            patch.setenv(name, value)
        for _ in range(3):
            cluster.add_node(num_cpus=1, include_dashboard=False)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        try:
            yield sorted(node["NodeID"] for node in ray.nodes())
        finally:
            ray.shutdown()
            cluster.shutdown()


@pytest.fixture(scope="module")
def plan(nodes: list[str]) -> Plan:
    """Of a job for all of them."""
    assert len(nodes) == 3
    return raycloud.plan(asked("Steady", 3))


def test_each_worker_is_where_it_was_measured(plan: Plan, nodes: list[str]) -> None:
    assert sorted(member.node for member in plan.members) == nodes
    assert len({member.speed for member in plan.members}) == 3  # each has measured for itself
    assert sum(plan.shares) == plan.micro_batches


def test_the_exchange_is_in_the_prediction(plan: Plan) -> None:
    predicted = plan.predicted
    assert predicted.exchange_s is not None
    assert predicted.exposed_s is not None
    assert predicted.step_s > predicted.compute_s + predicted.exposed_s
    assert predicted.low_s < predicted.step_s < predicted.high_s
    assert plan.alternatives[0].predicted == predicted


def test_nothing_stays_reserved(plan: Plan) -> None:
    assert plan.members
    left = ray.available_resources()
    assert left["CPU"] == ray.cluster_resources()["CPU"]


def test_a_run_has_its_workers_where_the_plan_puts_them(tmp_path: Path, nodes: list[str]) -> None:
    run = raycloud.train(asked("Steady", 3, steps=4), run_dir=tmp_path / "run")
    ready = {one.member: one.node for one in of_kind(MemberReady, run.events)}
    assert sorted(ready.values()) == nodes
    assert [ready[member] for member in range(3)] == list(place(inventory(), 3, RoleResources()))
    [formed] = of_kind(GenerationFormed, run.events)
    assert formed.exchanged  # they have measured their links before the first step
    before, known, *_ = of_kind(Predicted, run.events)
    assert (before.step, known.step, before.seen, known.seen) == (0, 0, False, False)
    assert known.step_s > before.step_s
    predicted = from_json((tmp_path / "run" / "plan.json").read_text()).predicted
    assert predicted.exchange_s is not None


def test_a_second_plan_takes_what_the_first_has_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: list[str]
) -> None:
    monkeypatch.setenv("RAYCLOUD_CACHE", str(tmp_path))
    job = asked("Steady", len(nodes))
    first = raycloud.plan(job, reuse=True)
    again = raycloud.plan(job, reuse=True)
    assert first.kept_s is None
    assert again.kept_s is not None
    assert again.kept_s > 0.0
    assert again.predicted.exchange_s == first.predicted.exchange_s
    assert {x.speed for x in again.members} <= {x.speed for x in first.members}
    anew = raycloud.plan(job)
    assert anew.kept_s is None
    assert {x.speed for x in anew.members}.isdisjoint(x.speed for x in first.members)


def test_where_a_place_was_taken_meanwhile_another_will_do(nodes: list[str]) -> None:
    taken = placement_group([{"CPU": 1}], bundle_label_selector=[{NODE_LABEL: nodes[0]}])
    fleet = Fleet(RoleResources(), SystemClock())
    try:
        ray.get(taken.ready())
        assert fleet.secure([0, 1], 2, on=nodes[:1]) == 2
    finally:
        fleet.close()
        remove_placement_group(taken)


def test_servers_are_where_they_are_to_be(tmp_path: Path, nodes: list[str]) -> None:
    """A shard's copies on nodes of their own: each may lose one."""
    job = asked("Steady", 1, servers={"shards": 4, "copies": 1})
    servers = Servers(job, str(tmp_path))
    servers.begin(inventory())
    try:
        every = [name for shard in servers.layouts[0] for name in shard]
        for name in every:
            ray.get(ray.get_actor(name).busy.remote())
        there = {one["Name"]: one["Address"]["NodeID"] for one in actors().values()}
        wanted = [nodes[(shard + copy) % 3] for shard in range(4) for copy in range(2)]
        assert [there[name] for name in every] == wanted
    finally:
        servers.close()


def test_few_servers_are_on_the_nodes_whose_workers_are_ready_first(
    tmp_path: Path, nodes: list[str]
) -> None:
    three = {"min_workers": 3, "max_workers": 3}
    job = asked("Steady", 3, servers={"shards": 1, "copies": 1}, elastic=three)
    servers = Servers(job, str(tmp_path))
    servers.begin(inventory())
    try:
        [[first, copy]] = servers.layouts[0]
        servers.see(nodes[2])
        ray.get(ray.get_actor(first).busy.remote())
        with pytest.raises(ValueError, match=copy):
            ray.get_actor(copy)
        servers.see(nodes[2])  # another worker there
        servers.start_all()  # there is no better node than another one
        ray.get(ray.get_actor(copy).busy.remote())
        there = {one["Name"]: one["Address"]["NodeID"] for one in actors().values()}
        assert there[first] == nodes[2]
        assert there[copy] == nodes[0]
    finally:
        servers.close()
