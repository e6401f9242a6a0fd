"""`status`, `logs` and `stop`, of a run here and of runs on a head that asks for a token."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from raycloud.events import CheckpointPublished, MemberReady, RunFinished, StopRequested
from raycloud.on_ray.jobs_api import JobsApi
from raycloud.report.run_status import RunStatus, parse_line
from raycloud.spec import dump_job
from tests.heads import END_S, PRICE, START_S, TOKEN, Head
from tests.live import (
    RAYCLOUD,
    Command,
    asked,
    command,
    ended,
    events,
    exact_steps,
    of_kind,
    processes_below,
    ran,
    wait_for,
)
from tests.logs import read_summary

MANY = 100_000  # steps: more than any run here gets to
pytestmark = pytest.mark.timeout(560)


def test_run_here_stands_speaks_and_stops(ray_tmpdir: Path, tmp_path: Path) -> None:
    """On a Ray of its own; SIGTERM that comes twice is one request."""
    _write_job(tmp_path)
    run_dir = tmp_path / "runs/one"
    with command(tmp_path, RAYCLOUD, "train", "job.yaml", "--run-dir", "runs/one") as driver:
        wait_for("a checkpoint", lambda: _saved(driver, run_dir), seconds=START_S)
        card = _status(tmp_path, "runs/one")
        assert (card["status"], card["run"], card["workers"]) == ("running", "one", 2)
        assert card["step"] >= 20
        assert card["checkpoint_step"] >= 20
        assert card["cost"] is None
        with command(tmp_path / "logs", RAYCLOUD, "logs", run_dir, "--follow") as follower:
            wait_for("its lines", lambda: "checkpoint of step 20" in follower.out)
            with command(tmp_path / "stop", RAYCLOUD, "stop", run_dir) as stops:
                wait_for("the request", lambda: "stopping after a checkpoint" in driver.err)
                driver.process.send_signal(signal.SIGTERM)
                assert stops.code() == 0, stops.err
                assert f"process {driver.process.pid}" in stops.out
            assert driver.code() == 130, driver.err
            assert follower.code() == 0, follower.err
    assert "stopping after a checkpoint: SIGTERM" in follower.out
    assert re.search(r"^step \d+/100000 · loss ", follower.out, re.MULTILINE)
    log = events(run_dir)
    assert [e.reason for e in of_kind(StopRequested, log)] == ["SIGTERM"]
    step = of_kind(RunFinished, log)[0].steps
    assert of_kind(CheckpointPublished, log)[-1].step == step == exact_steps(run_dir)
    assert _status(tmp_path, "one")["status"] == "stopped"
    code, one = ran(tmp_path, RAYCLOUD, "stop", "runs/one")
    assert code == 2
    assert "nobody on this machine drives" in one.err
    assert ended(processes_below(ray_tmpdir), END_S) == {}


@pytest.mark.full
def test_run_that_joined_a_cluster_is_found_there(head: Head, tmp_path: Path) -> None:
    _write_job(tmp_path)
    run_dir = tmp_path / "joined"
    where = ("--address", head.jobs)
    with command(
        tmp_path, RAYCLOUD, "train", "job.yaml", "--run-dir", run_dir,
        "--address", head.joined, **TOKEN,
    ) as driver:  # fmt: skip
        wait_for("a checkpoint", lambda: _saved(driver, run_dir), seconds=START_S)
        jobs = JobsApi.at(head.jobs)
        wait_for("a card", lambda: _card(jobs, "joined").step >= 20)
        card = _status(tmp_path, "joined", *where)
        assert (card["status"], card["directory"]) == ("running", str(run_dir))
        assert card["cost"] > 0
        code, listed = ran(tmp_path / "all", RAYCLOUD, "status", *where)
        assert code == 0, listed.err
        assert re.search(rf"{card['id']} \(joined\) +running +\d+/100000", listed.out)

        entry = {"t": 0, "level": "INFO", "logger": "task", "message": "hello", "step": 3}
        (run_dir / "logs").mkdir(exist_ok=True)
        (run_dir / "logs/member-7.jsonl").write_text(json.dumps(entry) + "\n")
        told = ("logs", "joined", "--member", "7", *where)
        code, one = ran(tmp_path / "member", RAYCLOUD, *told)
        assert (code, one.out) == (0, "00:00:00 INFO task: hello (step 3)\n"), one.err

        follow = ("logs", card["id"], "--follow", *where)
        with command(tmp_path / "logs", RAYCLOUD, *follow) as follower:
            wait_for("its lines", lambda: "checkpoint of step 20" in follower.out)
            code, one = ran(tmp_path / "stop", RAYCLOUD, "stop", "joined", *where)
            assert (code, one.out) == (0, f"asked {card['id']} to write a checkpoint and end\n")
            assert driver.code() == 130, driver.err
            assert follower.code() == 0, follower.err
    assert re.search(r"^step \d+/100000 · loss .* · cost ", follower.out, re.MULTILINE)
    assert _card(jobs, "joined").status == "stopped"

    log = events(run_dir)
    assert {ready.price_per_hour for ready in of_kind(MemberReady, log)} == {PRICE}
    summary = read_summary(run_dir / "summary.json")
    assert (summary.nodes, summary.priced_nodes) == (1, 1)
    assert summary.cost is not None
    assert 0 < summary.cost < summary.wall_s  # one a second, less what came before the members


@pytest.mark.full(only="status, logs and stop of a submitted run")
def test_submitted_run_stands_and_stops(head: Head, tmp_path: Path) -> None:
    """Ray sends SIGTERM to a job and to all its children: one request."""
    _write_job(tmp_path)
    run_dir = tmp_path / "sent"
    jobs = JobsApi.at(head.jobs)
    job_id = jobs._jobs.submit_job(
        entrypoint=f"{RAYCLOUD} train {tmp_path}/job.yaml --run-dir {run_dir} --cards",
        metadata={"raycloud.job": "run"},
        runtime_env={"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "120"}},
    )
    wait_for("a checkpoint", lambda: _published(run_dir), seconds=START_S)
    wait_for("a card", lambda: _card(jobs, job_id).step >= 20)
    card = _card(jobs, job_id)
    assert (card.status, card.directory) == ("running", str(run_dir))
    assert jobs.find(job_id).submitted
    lines = jobs.log(jobs.find(job_id))
    assert any(parse_line(line) for line in lines)
    assert any(line.startswith("checkpoint of step 20 ") for line in lines)
    jobs.stop(jobs.find(job_id))
    wait_for("its end", lambda: not jobs.find(job_id).alive)
    log = events(run_dir)
    assert [e.status for e in of_kind(RunFinished, log)] == ["stopped"]
    assert of_kind(CheckpointPublished, log)[-1].step == exact_steps(run_dir)
    assert _card(jobs, job_id).status == "stopped"
    code, one = ran(tmp_path, RAYCLOUD, "stop", job_id, "--address", head.jobs)
    assert code == 2
    assert "has ended already" in one.err


@pytest.mark.full
def test_without_the_token_nothing_is_shown(head: Head, tmp_path: Path) -> None:
    code, one = ran(tmp_path, RAYCLOUD, "status", "--address", head.jobs, RAY_AUTH_TOKEN="0" * 64)
    assert (code, one.out) == (2, "")
    assert "token" in one.err


def _write_job(folder: Path) -> None:
    job = asked("Steady", [5, 3], steps=MANY, checkpoint={"every_steps": 20})
    (folder / "job.yaml").write_text(dump_job(job))


def _status(folder: Path, *words: str) -> dict[str, Any]:
    """The one run that `status` shows."""
    code, one = ran(folder, RAYCLOUD, "status", *words, "--json")
    assert code == 0, one.err
    (run,) = json.loads((folder / "out").read_text())["runs"]
    return dict(run)


def _card(jobs: JobsApi, job_id: str) -> RunStatus:
    from raycloud.clock import SystemClock

    return jobs.find(job_id).standing(SystemClock())


def _saved(driver: Command, run_dir: Path) -> bool:
    assert not driver.ended(), driver.err
    return _published(run_dir)


def _published(run_dir: Path) -> bool:
    return bool(of_kind(CheckpointPublished, events(run_dir)))
