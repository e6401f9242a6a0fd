"""What goes wrong is told: whose fault, where, and what would do; and nothing stays reserved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util import placement_group_table

import raycloud
from raycloud.errors import (
    DivergedError,
    JobError,
    PlacementError,
    RaycloudError,
    RunDirectoryError,
    TaskError,
)
from raycloud.events import RunFinished
from raycloud.spec import dump_job
from tests.live import (
    RAYCLOUD,
    asked,
    events,
    exact_steps,
    of_kind,
    published,
    ran,
    wait_for,
)
from tests.logs import read_summary
from tests.tiers import variants

CPUS = 2

pytestmark = pytest.mark.usefixtures("cluster")


def failed(run_dir: Path, kind: type[RaycloudError], message: str, **settings: Any) -> Any:
    """Run a task that breaks, on one worker; returns the error, after looking at what is left."""
    return _fails(asked("Faulty", 1, settings=settings), run_dir, kind, message)


def _fails(job: Any, run_dir: Path, kind: type[RaycloudError], message: str) -> Any:
    with pytest.raises(kind, match=message) as caught:
        raycloud.train(job, run_dir=run_dir)
    assert type(caught.value) is kind
    finished = of_kind(RunFinished, events(run_dir))
    assert [e.status for e in finished] == ["failed"]
    summary = read_summary(run_dir / "summary.json")
    assert summary.status == "failed"
    assert summary.error
    _all_free()
    return caught.value


def _all_free() -> None:
    wait_for("all CPUs free", lambda: ray.available_resources().get("CPU") == CPUS)
    states = {group["state"] for group in placement_group_table().values()}
    assert states <= {"REMOVED"}


def test_loss_that_raises_names_the_line_of_the_task(tmp_path: Path) -> None:
    """On two workers, in the middle of the run: the other one is ended too."""
    settings = {"fault": "loss", "after": 60}
    job = asked("Faulty", 2, settings=settings, checkpoint={"every_steps": 2})
    (tmp_path / "job.yaml").write_text(dump_job(job))
    error = _fails(job, tmp_path / "run", TaskError, "Task.loss raised RuntimeError: the shapes do")
    assert "live_tasks.py" in error.message
    assert 'raise RuntimeError("the shapes do not match")' in error.message
    assert published(tmp_path / "run")
    assert exact_steps(tmp_path / "run") > 0


def test_command_tells_a_task_error_and_ends_with_2(tmp_path: Path, cluster: str) -> None:
    (tmp_path / "job.yaml").write_text(dump_job(asked("Faulty", 1, settings={"fault": "model"})))
    code, one = ran(tmp_path, RAYCLOUD, "train", "job.yaml", RAY_ADDRESS=cluster)
    assert code == 2
    assert "error: member 0: Task.model raised ValueError: no such width" in one.err
    assert 'raise ValueError("no such width")' in one.err
    assert "InternalError" not in one.err
    assert one.out == ""
    assert (tmp_path / "runs/run-1/summary.json").is_file()


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    variants(
        ({"fault": "data"}, TaskError, "Task.data raised KeyError: .*label"),
        ({"fault": "nan", "after": 100}, DivergedError, r"gradient's norm is nan at step \d+"),
        ({"fault": "batch", "after": 100}, TaskError, r"sample 7 .*\(epoch \d, samples \[\d+,"),
        ({"fault": "metric"}, TaskError, "Task.metrics gave 'accuracy' as str"),
        fast=2,
    ),
    ids=["data", "nan", "batch", "metric"],
)
def test_broken_task(
    tmp_path: Path, settings: dict[str, Any], kind: type[RaycloudError], message: str
) -> None:
    error = failed(tmp_path / "run", kind, message, **settings)
    assert error.message.startswith("member ")
    assert error.hint or "live_tasks.py" in error.message  # what would do, or where it was raised


@pytest.mark.full
def test_members_that_see_different_data_do_not_begin(tmp_path: Path) -> None:
    settings = {"fault": "sizes", "first": str(tmp_path / "first")}
    job = asked("Faulty", 2, settings=settings)
    error = _fails(job, tmp_path / "run", JobError, "members see different data")
    assert "64" in error.message
    assert "70" in error.message


@pytest.mark.full
def test_checkpoints_of_another_run_are_not_written_over(tmp_path: Path) -> None:
    job = asked("Steady", 1, steps=3, checkpoint={"path": str(tmp_path / "kept")})
    raycloud.train(job, run_dir=tmp_path / "one")
    with pytest.raises(RunDirectoryError, match=r"another run \(newest: step 3\)"):
        raycloud.train(job, run_dir=tmp_path / "two")
    assert not (tmp_path / "two").exists()


def test_impossible_resources_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    job = asked("Steady", 1, resources={"worker": {"cpus": 1000}})
    with pytest.raises(PlacementError, match=r"1000 CPUs") as caught:
        raycloud.train(job, run_dir=tmp_path / "run")
    assert "lower" in caught.value.hint
    _all_free()


@pytest.mark.full
def test_more_workers_than_the_cluster_holds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlacementError, match=r"3"):
        raycloud.train(asked("Steady", 3), run_dir=tmp_path / "run")
    _all_free()


def test_address_where_no_cluster_answers(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(dump_job(asked("Steady")))
    code, one = ran(tmp_path, RAYCLOUD, "train", "job.yaml", "--address", "127.0.0.1:9")
    assert code == 3
    assert "no Ray cluster answers at '127.0.0.1:9'" in one.err
    assert "hint: " in one.err
    assert not list(tmp_path.glob("runs/*"))
