"""`submit`: a package runs where it is unpacked; and, on a head with a token, the whole way."""

from __future__ import annotations

import importlib.util
import io
import os
import re
import shlex
import shutil
import signal
import socket
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from raycloud.events import RunFinished, RunStarted, StepsCommitted
from raycloud.packing.job import entrypoint, pack_job
from raycloud.report.card import parse_line
from raycloud.spec import dump_job, load_job
from tests.live import (
    RAYCLOUD,
    TASKS,
    Command,
    asked,
    check_result,
    command,
    ended,
    events,
    of_kind,
    processes_below,
    published,
    ran,
    wait_for,
)
from tests.live_tasks import Steady

STEPS, MANY = 400, 100_000
START_S = 200.0  # a head and a run, on a machine that does much else
END_S = 90.0  # see conftest.py
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # where the head finds `raycloud`
SERVED = importlib.util.find_spec("aiohttp_cors") is not None

pytestmark = pytest.mark.timeout(560)
with_dashboard = pytest.mark.skipif(
    not SERVED, reason="a head serves the Jobs API with ray[default] only, which is not installed"
)


@dataclass(frozen=True, slots=True)
class Head:
    """A head that someone has started.

    Attributes:
        jobs: Where its Jobs API answers.
        home: The home directory of what runs there.
    """

    jobs: str
    home: Path

    def run_dir(self, submission: str) -> Path:
        """Where the run of a submission is kept."""
        return self.home / "raycloud/runs" / submission


@pytest.fixture(scope="module")
def head(ray_tmpdir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    """A head with a dashboard that asks for the token of these tests."""
    ray, home = Path(sys.executable).with_name("ray"), tmp_path_factory.mktemp("home")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = (
        ray, "start", "--head", "--block", "--num-cpus=4", "--port=0", f"--dashboard-port={port}",
        "--dashboard-agent-listen-port=0", "--disable-usage-stats", "--node-ip-address=127.0.0.1",
    )  # fmt: skip
    surroundings = {"RAY_AUTH_MODE": "token", "HOME": str(home), "PATH": PATH}
    for last in (False, False, True):  # Ray gives up after 30 s, which a busy machine may take
        with command(tmp_path_factory.mktemp("head"), *words, **surroundings) as one:
            wait_for(
                "the Jobs API",
                lambda: one.ended() or _listens(port),
                seconds=START_S,
            )
            if one.ended() and not last:
                continue
            assert not one.ended(), one.err
            yield Head(jobs=f"http://127.0.0.1:{port}", home=home)
            one.process.send_signal(signal.SIGTERM)
            one.code()
            break
    assert ended(processes_below(ray_tmpdir), END_S) == {}


def test_a_package_runs_where_it_is_unpacked(ray_tmpdir: Path, tmp_path: Path) -> None:
    """What the head does: unpack, run the command in a shell. Its driver is killed on the way."""
    project, there, home = tmp_path / "project", tmp_path / "unpacked", tmp_path / "home"
    home.mkdir()
    job = write_project(project, steps=STEPS)
    file = project / "jobs/a job.yaml"
    package = pack_job(load_job(file), file, project)
    with zipfile.ZipFile(io.BytesIO(package.data)) as archive:
        archive.extractall(there)
    shutil.rmtree(project)
    words = entrypoint(file, project, "x-1", overrides=["checkpoint.every_steps=20"], restarts=9)
    run_dir = home / "raycloud/runs/x-1"
    with command(there, "sh", "-c", f"exec {words}", HOME=str(home), PATH=PATH) as one:
        wait_for("a checkpoint", lambda: one.ended() or published(run_dir), seconds=START_S)
        assert not one.ended(), one.err
        os.kill(driver_below(ray_tmpdir), signal.SIGKILL)
        assert one.code(START_S) == 0, one.err
    assert ended(processes_below(ray_tmpdir), END_S) == {}
    assert "the driver was killed by SIGKILL; restart" in one.err
    assert len(of_kind(RunStarted, events(run_dir))) == 2
    check_result(run_dir, job, Steady(), STEPS)
    cards = [card for line in one.out.splitlines() if (card := parse_line(line))]
    assert (cards[-1].step, cards[-1].steps, cards[-1].status) == (STEPS, STEPS, "finished")
    assert "Traceback" not in one.err


@with_dashboard
def test_without_a_token_it_is_refused(head: Head, tmp_path: Path) -> None:
    write_project(tmp_path / "project", steps=3)
    for token, why in (("", "asks for a token, and got none"), ("0e" * 32, "refuses this token")):
        code, one = ran(
            tmp_path / "project", RAYCLOUD, "submit", "jobs/a job.yaml", "--address", head.jobs,
            RAY_AUTH_TOKEN=token, HOME=str(tmp_path),
        )  # fmt: skip
        assert code == 2, one.err
        assert why in one.err
        assert one.out == ""
    assert not (head.home / "raycloud").exists()


@with_dashboard
def test_submit_through_a_killed_driver(head: Head, ray_tmpdir: Path, tmp_path: Path) -> None:
    job = write_project(tmp_path / "project", steps=STEPS)
    with submitted(head, tmp_path / "project", "--set", "checkpoint.every_steps=20") as one:
        run_dir = head.run_dir(submission_of(one))
        wait_for("a checkpoint", lambda: one.ended() or published(run_dir), seconds=START_S)
        assert not one.ended(), one.err
        os.kill(driver_below(ray_tmpdir), signal.SIGKILL)
        assert one.code(START_S) == 0, one.err
    assert "restart 1 of 3 in 1 s" in one.err
    assert f"step {STEPS}/{STEPS}" in one.err
    assert "raycloud-card" not in one.err
    assert len(of_kind(RunStarted, events(run_dir))) == 2
    check_result(run_dir, job, Steady(), STEPS)


@with_dashboard
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


@with_dashboard
def test_it_ends_with_the_drivers_code(head: Head, tmp_path: Path) -> None:
    write_project(tmp_path / "project", steps=3)
    with submitted(head, tmp_path / "project", "--set", "settings={nonsense: 1}") as one:
        assert one.code(START_S) == 2, one.err
    assert "nonsense" in one.err
    assert "restart" not in one.err


def write_project(folder: Path, *, steps: int) -> Any:
    """A project with a job in `jobs/` and its task beside it; returns the job."""
    (folder / "jobs").mkdir(parents=True)
    shutil.copy(TASKS, folder / "jobs/tasks.py")
    (folder / ".env").write_text("PASSWORD=never\n")
    job = asked("Steady", [5, 3], steps=steps)
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


def _listens(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0
