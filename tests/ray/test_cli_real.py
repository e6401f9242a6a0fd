"""The command as people use it: the job of this repository, and a cluster that runs already."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from raycloud.events import Evaluated, GenerationFormed, RunStarted
from raycloud.spec import dump_job
from tests.live import (
    RAYCLOUD,
    ROOT,
    Command,
    asked,
    check_result,
    command,
    ended,
    events,
    exact_steps,
    of_kind,
    processes_below,
    published,
    ran,
    wait_for,
)
from tests.live_tasks import Steady
from tests.logs import read_summary

GPT = ROOT / "jobs/gpt.yaml"
SMALL = ("--set", "settings.width=32", "--set", "settings.depth=1", "--set", "steps=12")
END_S = 90.0  # see conftest.py
TOKEN = {"RAY_AUTH_MODE": "token"}  # Ray wants it said wherever an address is given

SCRIPT = """
import raycloud

if __name__ == "__main__":
    job = raycloud.load_job("job.yaml", overrides=["steps=10"])
    run = raycloud.train(job, run_dir="first")
    print(repr(run))
    again = raycloud.train(job, run_dir="second")
    print(again.status, again.summary["steps"], again.metrics == run.metrics)
"""


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Command:
    """`jobs/gpt.yaml`, small and short, on a Ray of the command's own; ended."""
    folder = tmp_path_factory.mktemp("gpt")
    code, one = ran(
        folder, RAYCLOUD, "train", GPT, *SMALL, "--set", "checkpoint.every_steps=6",
        "--set", "evaluate.max_samples=32", "--run-dir", "run", "--plain",
    )  # fmt: skip
    assert code == 0, one.err
    return one


def test_gpt_trains_and_shows_what_it_learnt(gpt: Command, ray_tmpdir: Path) -> None:
    assert ended(processes_below(ray_tmpdir), END_S) == {}
    run_dir = gpt.folder / "run"
    assert published(run_dir) == [6, 12]
    assert exact_steps(run_dir) == 12
    log = events(run_dir)
    assert [len(f.members) for f in of_kind(GenerationFormed, log)][:1] == [2]
    measured = of_kind(Evaluated, log)[-1]
    assert measured.step == 12
    assert 0 < measured.metrics["loss"] < 6  # nats per byte; a guess is 5.5
    assert measured.sample
    assert measured.sample.startswith("def ")
    summary = read_summary(run_dir / "summary.json")
    assert summary.eval == measured.metrics
    assert summary.sample == measured.sample
    assert (summary.job, summary.status, summary.samples) == ("gpt", "finished", 12 * 32)


def test_plain_output_is_lines_for_a_log(gpt: Command) -> None:
    assert "\x1b" not in gpt.err + gpt.out
    assert "\r" not in gpt.err + gpt.out
    lines = gpt.err.splitlines()
    assert any(line.startswith("generation 0 from step 0: 2 workers, shares") for line in lines)
    assert any(line.startswith("step 12/12 · loss ") for line in lines)
    assert any(line.startswith("held out after step 12: loss") for line in lines)
    assert any(line.startswith("checkpoint of step 6") for line in lines)
    assert not any("ray" in line.lower().replace("raycloud", "") for line in lines), gpt.err
    assert gpt.out.startswith("gpt finished: 12 steps, 384 samples")
    assert "def " in gpt.out


def test_report_shows_the_summary_again(gpt: Command, tmp_path: Path) -> None:
    code, one = ran(tmp_path / "text", RAYCLOUD, "report", gpt.folder / "run")
    assert code == 0, one.err
    assert one.out.splitlines()[:4] == gpt.out.splitlines()[:4]
    code, one = ran(tmp_path / "json", RAYCLOUD, "report", gpt.folder / "run", "--json")
    assert code == 0, one.err
    assert json.loads(one.out) == json.loads((gpt.folder / "run/summary.json").read_text())


@pytest.fixture(scope="module")
def running(
    gpt: Command, ray_tmpdir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The address of a cluster that someone has started with `ray start --head`."""
    ray = Path(sys.executable).with_name("ray")
    with command(
        tmp_path_factory.mktemp("head"), ray, "start", "--head", "--block", "--num-cpus=2",
        "--port=0", "--include-dashboard=false", "--disable-usage-stats",
        "--node-ip-address=127.0.0.1", **TOKEN,
    ) as head:  # fmt: skip
        yield wait_for("the head", lambda: _address(head))
        head.process.send_signal(signal.SIGTERM)
        head.code()
    assert ended(processes_below(ray_tmpdir), END_S) == {}


def _address(head: Command) -> str | None:
    """What it tells others to join it by."""
    assert head.process.poll() is None, head.err
    found = re.search(r"--address='([\d.]+:\d+)'", head.out)
    return found[1] if found else None


@pytest.mark.full
def test_a_cluster_that_runs_already_is_used_and_left(
    tmp_path: Path, ray_tmpdir: Path, running: str
) -> None:
    (tmp_path / "job.yaml").write_text(dump_job(asked("Steady", [5, 3], steps=20)))
    before = _raylets(ray_tmpdir)
    assert len(before) == 1
    run_dir = tmp_path / "run"
    with command(
        tmp_path, RAYCLOUD, "train", "job.yaml", "--run-dir", run_dir, "--address", running, **TOKEN
    ) as one:
        wait_for("a start", lambda: one.ended() or of_kind(RunStarted, events(run_dir)))
        assert _raylets(ray_tmpdir) == before, "a Ray of its own was started"
        assert one.code() == 0, one.err
    check_result(run_dir, asked("Steady", [5, 3]), Steady(), 20)
    assert _raylets(ray_tmpdir) == before


@pytest.mark.full(only="two runs in one process")
def test_python_with_two_runs_in_one_process_on_ray_address(
    tmp_path: Path, ray_tmpdir: Path, running: str
) -> None:
    (tmp_path / "job.yaml").write_text(dump_job(asked("Steady")))
    (tmp_path / "script.py").write_text(SCRIPT)
    before = _raylets(ray_tmpdir)
    variables = {"RAY_ADDRESS": running} | TOKEN
    with command(tmp_path, sys.executable, "script.py", **variables) as one:
        wait_for("a start", lambda: one.ended() or of_kind(RunStarted, events(tmp_path / "first")))
        assert _raylets(ray_tmpdir) == before, "a Ray of its own was started"
        assert one.code() == 0, one.err
    assert one.out.startswith("run finished: 10 steps, 140 samples")
    assert one.out.rstrip().endswith("finished 10 True")
    assert exact_steps(tmp_path / "second") == 10


def _raylets(folder: Path) -> set[int]:
    return {pid for pid, line in processes_below(folder).items() if "/raylet" in line.split()[0]}
