"""`submit` to a head that asks for a token, the whole way."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from raycloud.events import RunFinished, RunStarted, StepsCommitted
from raycloud.spec import dump_job
from tests.heads import PATH, SECRET, START_S, Head
from tests.live import (
    RAYCLOUD,
    TASKS,
    Command,
    asked,
    check_result,
    command,
    events,
    of_kind,
    processes_below,
    published,
    ran,
    wait_for,
)
from tests.live_tasks import Steady

STEPS, MANY = 400, 100_000

pytestmark = pytest.mark.timeout(560)


def test_without_a_token_it_is_refused(head: Head, tmp_path: Path) -> None:
    write_project(tmp_path / "project", steps=3)
    for token, mode, why in (
        ("", "", "asks for a token, and got none"),
        ("", "token", "RAY_AUTH_MODE is token, and there is no token"),
        ("0e" * 32, "token", "refuses this token"),
    ):
        code, one = ran(
            tmp_path / "project", RAYCLOUD, "submit", "jobs/a job.yaml", "--address", head.jobs,
            RAY_AUTH_TOKEN=token, RAY_AUTH_MODE=mode, HOME=str(tmp_path),
        )  # fmt: skip
        assert code == 2, one.err
        assert why in one.err
        assert one.out == ""
    assert not (head.home / "raycloud").exists()


@pytest.mark.full(only="a submitted run goes on through a killed driver")
def test_submit_through_a_killed_driver(head: Head, tmp_path: Path) -> None:
    job = write_project(tmp_path / "project", steps=STEPS)
    with submitted(head, tmp_path / "project", "--set", "checkpoint.every_steps=20") as one:
        run_dir = head.run_dir(submission_of(one))
        wait_for("a checkpoint", lambda: one.ended() or published(run_dir), seconds=START_S)
        assert not one.ended(), one.err
        os.kill(driver_below(head.folder), signal.SIGKILL)
        assert one.code(START_S) == 0, one.err
    assert "restart 1 of 3 in 1 s" in one.err
    assert f"step {STEPS}/{STEPS}" in one.err
    assert "raycloud-card" not in one.err
    assert len(of_kind(RunStarted, events(run_dir))) == 2
    check_result(run_dir, job, Steady(), STEPS)


@pytest.mark.full(only="Ctrl-C detaches from a submitted run")
def test_ctrl_c_detaches_and_the_way_back_is_the_one_it_names(head: Head, tmp_path: Path) -> None:
    write_project(tmp_path / "project", steps=MANY)
    with submitted(head, tmp_path / "project") as one:
        run_dir = head.run_dir(submission_of(one))
        wait_for("a start", lambda: one.ended() or of_kind(StepsCommitted, events(run_dir)))
        one.interrupt()
        assert one.code() == 130, one.err
    ways = dict(re.findall(r"^  (raycloud (\w+) .*)$", one.err, re.MULTILINE))
    assert set(ways.values()) == {"logs", "status", "stop"}
    (stop,) = (way for way, name in ways.items() if name == "stop")
    assert not of_kind(RunFinished, events(run_dir)), "it did not go on"
    code, stopped = ran(tmp_path / "stop", *shlex.split(stop), PATH=PATH)
    assert code == 0, stopped.err
    finished = wait_for("its end", lambda: of_kind(RunFinished, events(run_dir)), seconds=START_S)
    assert finished[0].status == "stopped"
    assert published(run_dir)[-1] == finished[0].steps


SECRETIVE = """

class Secretive(Steady):
    def __init__(self, *, api_key):
        super().__init__()
        self.api_key = api_key

    def model(self):
        key = self.api_key
        logging.getLogger("task").warning("%d letters: %s", len(key), key)
        return super().model()

    def loss(self, model, batch):
        raise RuntimeError(f"login with {self.api_key} failed")
"""


@pytest.mark.full(only="secrets of a submitted job are sent by name")
def test_a_secret_is_sent_by_name_and_the_driver_s_code_comes_back(
    head: Head, tmp_path: Path
) -> None:
    """Its value is in the head's environment alone, and in nothing that a run leaves or says.

    The task breaks once the run has begun, which another start would not mend.
    """
    project = tmp_path / "project"
    write_project(project, steps=3)
    with (project / "jobs/tasks.py").open("a") as file:
        file.write(f"\n\nimport logging\n{SECRETIVE}")
    job = project / "jobs/a job.yaml"
    text = job.read_text().replace("tasks.py:Steady", "tasks.py:Secretive")
    job.write_text(text.replace("settings: {}", 'settings: {api_key: "${SERVICE_KEY}"}'))
    assert "SERVICE_KEY" in job.read_text()
    with submitted(head, project) as one:
        run_dir = head.run_dir(submission_of(one))
        assert one.code(START_S) == 2, one.err
    assert "Task.loss raised RuntimeError: login with [redacted] failed" in one.err
    assert "restart 1 of" not in one.err
    assert len(of_kind(RunStarted, events(run_dir))) == 1
    said = "".join(path.read_text() for path in (run_dir / "logs").glob("member-*.jsonl"))
    assert f"{len(SECRET)} letters: [redacted]" in said
    for place in (head.home, head.folder, tmp_path):
        files = [file for file in place.rglob("*") if file.is_file()]
        assert files
        assert [file for file in files if SECRET.encode() in file.read_bytes()] == []

    for words in (
        ["--set", f"settings.api_key={SECRET}"],
        ["--set", f"data.path=s3://a:{SECRET}@b"],
    ):
        with submitted(head, project, *words) as one:
            assert one.code() == 2, one.err
        assert words[1].partition("=")[0] in one.err
        assert "${NAME}" in one.err
        assert SECRET not in one.err


def write_project(folder: Path, *, task: str = "Steady", **changes: Any) -> Any:
    """A project with a job in `jobs/` and its task beside it; returns the job."""
    (folder / "jobs").mkdir(parents=True)
    shutil.copy(TASKS, folder / "jobs/tasks.py")
    (folder / ".env").write_text("PASSWORD=never\n")
    job = asked(task, [5, 3], **changes)
    text = dump_job(job).replace(str(TASKS), "tasks.py")
    (folder / "jobs/a job.yaml").write_text(text)
    return job


def submitted(head: Head, folder: Path, *more: str) -> Any:
    """`submit`, followed."""
    return command(
        folder, RAYCLOUD, "submit", "jobs/a job.yaml", "--address", head.jobs, *more,
        HOME=str(folder.parent),
    )  # fmt: skip


def submission_of(one: Command) -> str:
    """The id that it printed."""
    wait_for("an id", lambda: one.ended() or one.out.endswith("\n"), seconds=START_S)
    assert one.out, one.err
    return one.out.strip()


def driver_below(folder: Path) -> int:
    """The driver that the supervising loop has started; there is one."""
    (pid,) = (
        pid for pid, line in processes_below(folder).items() if "sys.argv[0] = 'raycloud'" in line
    )
    return pid
