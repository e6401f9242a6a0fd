"""A cluster that somebody describes."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from raycloud.errors import SpecError
from raycloud.planner.cost import Profile
from raycloud.planner.described import PAYLOAD, of_launcher, read_table
from raycloud.planner.inventory import PRICE_LABEL, ZONE_LABEL, capacity, price_per_hour
from raycloud.planner.plan import make
from raycloud.planner.speed import Speed
from raycloud.spec import Job, RoleResources

TABLE = """\
name,count,cpus,speed,mbit_s,delay_ms,zone,price_per_hour
fast, 1,8,1.0, 100,,a,2.4
slow, 2,8,0.25,20,40,b,0.6

"""
ONE = Profile(
    samples=6400,
    parameters=10**6,
    gradient_bytes=4 * 10**6,
    state_bytes=12 * 10**6,
    speeds=(Speed(fixed_s=0.1, micro_batch_s=0.1),),
)


def test_a_plan_for_a_table_has_shares_exchange_time_and_money() -> None:
    found = read_table(TABLE, "nodes.csv")
    assert [node.name for node in found.inventory.nodes] == ["fast", "slow-0", "slow-1"]
    assert found.inventory.nodes[1].labels == {ZONE_LABEL: "b", PRICE_LABEL: "0.6"}
    placed = ("fast", "slow-0", "slow-1")
    profile = found.profile(ONE, placed)
    assert [speed.seconds(1) for speed in profile.speeds] == pytest.approx([0.2, 0.8, 0.8])
    assert profile.link_bytes_per_s == pytest.approx(20e6 / 8 * PAYLOAD)
    assert profile.cores == (8.0, 8.0, 8.0)
    assert profile.round_trip_s == pytest.approx(0.16)
    job = Job(task="tasks.toy:Toy", epochs=2, global_batch=64, elastic={"max_workers": 3})
    plan = make(job, found.inventory, profile, placed=dict(enumerate(placed)), compare=True)
    assert plan.shares == (12, 2, 2)
    assert plan.steps == 200
    assert plan.price_per_hour == pytest.approx(3.6)
    assert plan.cost == pytest.approx(3.6 * plan.job_s / 3600)
    rows = {row["quantity"]: row for row in plan.prediction_rows()}
    assert rows["cost"]["note"] == "at 3.6 an hour for all nodes"
    assert rows["job_s"]["note"] == "of 200 steps, without start and checkpoints"


def test_without_all_prices_nothing_is_said_of_money() -> None:
    found = read_table("name,price_per_hour\na,1.0\nb,\n", "nodes.csv")
    job = Job(task="tasks.toy:Toy", steps=5)
    plan = make(job, found.inventory, found.profile(ONE, ("a", "b")), placed={0: "a", 1: "b"})
    assert (plan.steps, plan.price_per_hour, plan.cost) == (5, None, None)


def test_what_ray_up_takes_describes_a_cluster() -> None:
    text = (Path(__file__).parents[2] / "cluster.yaml").read_text()
    found = of_launcher(yaml.safe_load(text), "cluster.yaml")
    names = [node.name for node in found.inventory.nodes]
    assert names == [
        "head",
        "cpu-on-demand-0",
        "cpu-on-demand-1",
        *(f"gpu-spot-{k}" for k in range(4)),
    ]
    assert price_per_hour(found.inventory.nodes[-1].labels) == 0.485
    assert capacity(found.inventory, RoleResources(cpus=1, gpus=1)) == 4


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "nodes.csv, line 1 = '': is not the names of columns: name is missing"),
        ("cpus\n1\n", "is not the names of columns: name is missing"),
        ("name,colour\na,red\n", "'colour' is none"),
        ("name,cpus,cpus\na,1,1\n", "'cpus' is there twice"),
        ("name,cpus\na\n", "line 2 = 'a': has 1 values, and there are 2 columns"),
        ("name,cpus\na,many\n", "line 2: cpus = 'many': is no number of 0 or more"),
        ("name,speed\na,0\n", "line 2: speed = '0': is no number above 0"),
        ("name,speed\na,nan\n", "line 2: speed = 'nan': is no number above 0"),
        ("name,count\na,1.5\n", "line 2: count = '1.5': is no whole number of 0 or more"),
        ("name,count\na,1e9\n", "makes more than 100000 nodes"),
        ("name\na\na\n", "node names must differ"),
    ],
)
def test_a_table_that_is_wrong_is_refused(text: str, says: str) -> None:
    with pytest.raises(SpecError) as caught:
        read_table(text, "nodes.csv")
    assert says in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({}, "names no types of nodes"),
        ({"available_node_types": {"a": 3}}, "available_node_types.a = 3: is no type of nodes"),
        ({"available_node_types": {"a": {"resources": [1]}}}, "a.resources = [1]: is no mapping"),
        ({"available_node_types": {"a": {"labels": "x"}}}, "a.labels = 'x': is no mapping"),
        (
            {"available_node_types": {"a": {"resources": {"memory": "lots"}}}},
            "available_node_types.a: memory_gb = 'lots': is no number above 0",
        ),
        (
            {"available_node_types": {"a": {"resources": {"CPU": "x"}}}},
            "available_node_types.a: cpus = 'x': is no number of 0 or more",
        ),
    ],
)
def test_a_launcher_file_that_is_wrong_is_refused(record: dict[str, object], says: str) -> None:
    with pytest.raises(SpecError) as caught:
        of_launcher(record, "cluster.yaml")
    assert says in str(caught.value)
