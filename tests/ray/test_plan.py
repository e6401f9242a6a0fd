"""What a job would do, found out on the machines there are; nothing is trained or kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import ray

import raycloud
from raycloud.errors import PlacementError, TaskError
from raycloud.planner.plan import from_json
from raycloud.spec import dump_job
from raycloud.spec.load import with_values
from tests import live_data
from tests.blocks import write_points
from tests.live import RAYCLOUD, asked, members_below, ran, wait_for
from tests.stores import Store, serving

CPUS = 2

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.mark.full
def test_plan_of_a_job(tmp_path: Path, ray_tmpdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plan = raycloud.plan(asked("Steady", [5, 3]))
    assert plan.shares == (5, 3)
    assert (plan.global_batch, plan.micro_batches, plan.steps_per_epoch) == (16, 8, 5)
    assert plan.parameters == 6 * 16 + 16 + 2 * 16 + 2 * (16 * 3 + 3)
    assert plan.gradient_bytes == 8 * plan.parameters  # float64
    assert plan.predicted.step_s > 0
    assert plan.predicted.samples_per_s > 0
    node = ray.nodes()[0]["NodeID"]
    assert [(m.member, m.node, m.share) for m in plan.members] == [(0, node, 5), (1, node, 3)]
    assert from_json(plan.to_json()) == plan

    assert list(tmp_path.iterdir()) == []
    wait_for("the worker's end", lambda: not members_below(ray_tmpdir))
    assert ray.is_initialized()


@pytest.mark.full
def test_command_shows_the_plan_as_json(tmp_path: Path, cluster: str) -> None:
    job = tmp_path / "job.yaml"
    write_points(tmp_path / "points.parquet", 0, 80)
    store = Store(files={"/points.parquet": (tmp_path / "points.parquet").read_bytes()})
    with serving(store) as there:
        data = {"path": f"{there.url}/points.parquet", "prices": {"per_1000_requests": 2.0}}
        made = asked("Steady", 2, name="planned", data=data)
        job.write_text(dump_job(with_values(made, {"task": f"{live_data.TASKS}:Points"})))
        code, one = ran(tmp_path / "json", RAYCLOUD, "plan", job, "--json", RAY_ADDRESS=cluster)
    assert code == 0, one.err
    storage = from_json(one.out).storage
    assert storage is not None
    reading = storage.reading
    assert reading is not None
    assert (reading.source, reading.files) == (data["path"], 1)
    assert reading.bytes == len(store.files["/points.parquet"])
    assert reading.read_s > 0
    assert reading.read_cost == pytest.approx(0.002)
    assert reading.again_cost == pytest.approx(0.002 * reading.epochs)
    record = json.loads(one.out)
    assert record["format"] == 2
    assert record["job"] == "planned"
    assert sum(member["share"] for member in record["members"]) == 8
    assert record["predicted"]["step_s"] > 0
    assert from_json(one.out).parameters == record["parameters"]
    assert not list(tmp_path.rglob("runs"))


@pytest.mark.full
def test_what_cannot_be_planned_is_refused() -> None:
    with pytest.raises(TaskError, match=r"Task.model raised ValueError: no such width"):
        raycloud.plan(asked("Faulty", settings={"fault": "model"}))
    with pytest.raises(PlacementError, match="1000 CPUs"):
        raycloud.plan(asked("Steady", resources={"worker": {"cpus": 1000}}))
