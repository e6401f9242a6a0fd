"""A job on a described cluster, on the virtual clock: what it takes, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from raycloud.errors import SpecError
from raycloud.planner.cost import Profile
from raycloud.planner.described import Described, read_table
from raycloud.planner.speed import Speed
from raycloud.simulate.jobs import Circumstances, carried_out, policies, reported, resized
from raycloud.simulate.traces import Held, Paced
from raycloud.spec import Job

ONE = Profile(
    samples=6400,
    parameters=10**6,
    gradient_bytes=4 * 10**6,
    state_bytes=12 * 10**6,
    speeds=(Speed(fixed_s=0.05, micro_batch_s=0.1),),
)
CLUSTER = read_table(
    "name,count,mbit_s,zone,price_per_hour\nfast,1,100,a,2.4\nslow,3,100,b,0.6\n", "n.csv"
)
QUIET = Circumstances(faults_per_day=0.0)


def job(**fields: Any) -> Job:
    """Of 300 steps, 32 micro-batches each."""
    told = {"task": "tasks.toy:Toy", "steps": 300, "micro_batch": 2, **fields}
    return Job(**{"elastic": {"max_workers": 4}, "global_batch": 64, **told})


def test_undisturbed_it_takes_what_was_planned_and_a_start() -> None:
    found = carried_out(job(), ONE, CLUSTER, QUIET)
    assert (found.status, found.steps, found.workers, found.nodes) == ("finished", 300, 4, 4)
    assert found.planned_s == pytest.approx(300 * found.step_s)
    assert found.planned_s < found.job_s < 1.05 * found.planned_s + 15.0
    assert found.goodput == pytest.approx(300 * found.step_s / found.job_s, rel=0.05)
    assert found.utilization == pytest.approx(found.goodput * 0.85 / found.step_s, rel=0.05)
    assert found.cost == pytest.approx((2.4 + 3 * 0.6) * found.job_s / 3600)
    assert found.exposed_s is not None
    assert found.exposed_s > 0
    assert (found.recoveries, found.of_present, found.broken) == (0, None, ())


def test_the_same_seed_gives_the_same_and_faults_cost() -> None:
    around = Circumstances(faults_per_day=500.0, seed=3)
    found = carried_out(job(), ONE, CLUSTER, around)
    assert found == carried_out(job(), ONE, CLUSTER, around)
    assert found.faults
    assert not found.broken
    assert found.goodput < carried_out(job(), ONE, CLUSTER, QUIET).goodput


def test_machines_that_are_held_for_a_while_are_paid_for_a_while() -> None:
    trace = Held(name="spot.json", gap_s=60.0, counts=(4, 4, 1, 4))
    elastic = {"max_workers": 4, "min_workers": 1}
    found = carried_out(job(elastic=elastic), ONE, CLUSTER, Circumstances(trace=trace))
    assert (found.status, found.steps, found.broken) == ("finished", 300, ())
    assert found.faults["hold"] > 2
    assert found.of_present is not None
    assert 0.6 < found.of_present < 1.0
    assert found.cost is not None
    assert found.cost < (2.4 + 3 * 0.6) * found.job_s / 3600


def test_control_follows_batch_times_and_backups_take_from_who_is_late() -> None:
    rows = tuple((100.0, 100.0, 100.0, 100.0 if at % 40 < 20 else 300.0) for at in range(40))
    around = Circumstances(trace=Paced(name="job.csv", rows=rows))
    seconds = {}
    for name, elastic in (
        ("equal", {"shares": "equal"}),
        ("auto", {}),
        ("backups", {"backup_micro_batches": 8}),
    ):
        asked = job(elastic={"max_workers": 4, **elastic})
        found = carried_out(asked, ONE, CLUSTER, around)
        assert (found.status, found.broken) == ("finished", ())
        seconds[name] = found.job_s
    assert seconds["backups"] < seconds["auto"] < 0.9 * seconds["equal"]


def test_policies_are_played_with_the_jobs_micro_batches_and_backups() -> None:
    rows = ((100.0, 100.0, 100.0, 300.0),) * 5
    asked = job(elastic={"max_workers": 4, "backup_micro_batches": 8})
    found = {
        one.policy: one for one in policies(asked, ONE, CLUSTER, Paced(name="job.csv", rows=rows))
    }
    best = 1.0 - 4 / (3 + 1 / 3) / 3.0
    assert found["perfect foresight"].fractional == pytest.approx(best)
    assert found["lag-1"].fractional == pytest.approx(best)
    assert found["equal"].whole == 0.0
    assert found["equal"].backed_up is not None
    assert 0.2 < found["equal"].backed_up < best


def test_many_nodes_like_these() -> None:
    record = reported(job(), ONE, CLUSTER, replace(QUIET, nodes=(2, 16), weak=True), name="n.csv")
    two, many = record["sizes"]
    assert (two["nodes"], two["workers"], two["global_batch"]) == (2, 2, 32)
    assert (many["nodes"], many["workers"], many["global_batch"]) == (16, 16, 256)
    assert many["cost"] == pytest.approx((4 * 2.4 + 12 * 0.6) * many["job_s"] / 3600)
    assert many["exposed_s"] > two["exposed_s"]
    assert record["policies"] == []
    strong, _ = resized(job(), CLUSTER, nodes=16)
    assert (strong.global_batch, strong.most_workers) == (64, 16)


FOUR = Held(name="spot.json", gap_s=60.0, counts=(3, 2))
TWO = Paced(name="job.csv", rows=((1.0, 2.0), (2.0, 1.0)))


@pytest.mark.parametrize(
    ("fields", "around", "says"),
    [
        ({}, {"trace": FOUR}, "--trace = 'spot.json': is of 3 machines, and the job is on 4"),
        ({}, {"trace": TWO}, "--trace = 'job.csv': is of 2 workers, and the job has 4"),
        ({}, {"trace": TWO, "nodes": (8,)}, "--nodes = '8': a trace is of one number of nodes"),
        ({}, {"nodes": (0,)}, "--nodes = 0: is no number of nodes"),
        ({}, {"nodes": (200_000,)}, "--nodes = 200000: is more than 100000 nodes"),
        (
            {"elastic": {"shares": [8, 8, 8, 8], "min_workers": 4, "max_workers": 4}},
            {"nodes": (8,)},
            "elastic.shares = (8, 8, 8, 8): is for one number of workers",
        ),
    ],
)
def test_what_cannot_be_carried_out_is_refused(
    fields: dict[str, Any], around: dict[str, Any], says: str
) -> None:
    with pytest.raises(SpecError) as caught:
        reported(job(**fields), ONE, CLUSTER, Circumstances(**around), name="n.csv")
    assert says in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize("name", ["faults_per_day", "start_s", "word_s"])
def test_numbers_that_are_none_are_refused(name: str) -> None:
    with pytest.raises(SpecError) as caught:
        Circumstances(**{name: -1.0})
    assert f"--{name.replace('_', '-')} = -1.0: is no number of 0 or more" in str(caught.value)
    assert caught.value.hint


def test_a_trace_of_one_moment_is_refused() -> None:
    with pytest.raises(SpecError, match="tells of one moment"):
        policies(job(), ONE, CLUSTER, Paced(name="job.csv", rows=((1.0,) * 4,)))


def test_a_cluster_without_nodes_is_refused() -> None:
    with pytest.raises(SpecError) as caught:
        read_table("name,cpus\n", "n.csv")
    assert "n.csv = 0: describes no nodes" in str(caught.value)


def test_nodes_are_repeated_in_proportion() -> None:
    found: Described = CLUSTER.repeated(8)
    assert [node.name for node in found.inventory.nodes][:3] == ["fast", "fast~1", "slow-0"]
    assert len(found.bytes_per_s) == 8
    assert [node.name for node in CLUSTER.repeated(2).inventory.nodes] == ["fast", "slow-1"]
