"""Ctrl-C: the first makes a checkpoint and ends, the second ends at once; nothing stays behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import raycloud
from raycloud.events import (
    ChangeApplied,
    CheckpointPublished,
    PartWritten,
    RunFinished,
    StepsCommitted,
    StopRequested,
)
from raycloud.spec import dump_job
from tests.live import (
    RAYCLOUD,
    Command,
    asked,
    check_result,
    checkpoint,
    command,
    ended,
    events,
    exact_steps,
    of_kind,
    processes_below,
    wait_for,
)
from tests.live_tasks import Steady
from tests.logs import read_summary
from tests.terminals import terminal
from tests.tiers import variants

MANY = 100_000  # steps: more than any run here gets to
END_S = 90.0  # see conftest.py

pytestmark = pytest.mark.timeout(280)  # three commands' starts, and as many ends


def test_interrupt_checkpoints_ends_and_can_be_resumed(ray_tmpdir: Path, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(dump_job(asked("Steady", [5, 3], steps=MANY)))
    run_dir = tmp_path / "run"
    with _training(tmp_path, run_dir) as one:
        wait_for("training", lambda: _steps(one, run_dir) >= 10)
        processes = processes_below(ray_tmpdir)
        assert any("raylet" in line for line in processes.values())
        one.interrupt()
        assert one.code() == 130, one.err
    assert ended(processes_below(ray_tmpdir), END_S) == {}

    assert "stopping after a checkpoint; Ctrl-C again ends at once" in one.err
    assert "Traceback" not in one.err
    assert "run stopped" in one.out

    log = events(run_dir)
    assert [e.reason for e in of_kind(StopRequested, log)] == ["Ctrl-C"]
    halted = of_kind(ChangeApplied, log)[-2:]
    assert {e.member for e in halted} == {0, 1}
    step = halted[0].step
    assert {e.step for e in halted} == {step}
    assert {(e.member, e.step) for e in of_kind(PartWritten, log)} == {(0, step), (1, step)}
    assert [e.step for e in of_kind(CheckpointPublished, log)] == [step]
    assert [(e.status, e.steps, e.error) for e in of_kind(RunFinished, log)] == [
        ("stopped", step, None)
    ]
    summary = read_summary(run_dir / "summary.json")
    assert (summary.status, summary.steps) == ("stopped", step)
    assert exact_steps(run_dir) == step

    longer = asked("Steady", [5, 3], steps=step + 10)
    run = raycloud.train(longer, run_dir=run_dir, resume=True)  # starts a Ray, and ends it
    assert (run.status, run.summary["steps"]) == ("finished", step + 10)
    check_result(run, longer, Steady(), step + 10)


@pytest.mark.parametrize("number", variants(signal.SIGTERM, signal.SIGHUP))
def test_a_signal_to_the_whole_group_reaches_no_process_of_ray(
    ray_tmpdir: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """As `timeout` sends SIGTERM, and a shell whose terminal closes SIGHUP."""
    (tmp_path / "job.yaml").write_text(dump_job(asked("Steady", 2, steps=MANY)))
    run_dir = tmp_path / "run"
    with _training(tmp_path, run_dir) as one:
        wait_for("training", lambda: _steps(one, run_dir) >= 10)
        os.killpg(one.process.pid, number)
        assert one.code(END_S / 2) == 130, one.err
    assert ended(processes_below(ray_tmpdir), END_S) == {}
    assert [e.reason for e in of_kind(StopRequested, events(run_dir))] == [number.name]
    assert checkpoint(run_dir).step == read_summary(run_dir / "summary.json").steps


@pytest.mark.full(only="a second Ctrl-C ends at once")
def test_second_interrupt_ends_at_once(ray_tmpdir: Path, tmp_path: Path) -> None:
    """Members wait for data that never comes, so that the first one cannot end the run."""
    settings = {"gate": str(tmp_path / "never"), "free": 5 * 25}
    job = asked("Gated", [5, 3], steps=MANY, settings=settings, checkpoint={"every_steps": 10})
    (tmp_path / "job.yaml").write_text(dump_job(job))
    run_dir = tmp_path / "run"
    with _training(tmp_path, run_dir) as one:
        wait_for("a checkpoint", lambda: len(of_kind(CheckpointPublished, events(run_dir))) == 2)
        one.interrupt()
        wait_for("the first is seen", lambda: of_kind(StopRequested, events(run_dir)))
        assert one.process.poll() is None
        one.interrupt()
        assert one.code() == 130, one.err
    assert ended(processes_below(ray_tmpdir), END_S) == {}

    assert "stopped at once" in one.err
    assert "--resume" in one.err
    assert "Traceback" not in one.err
    assert "fault in raycloud" not in one.err
    summary = read_summary(run_dir / "summary.json")
    assert (summary.status, summary.checkpoint_step) == ("stopped", 20)
    assert checkpoint(run_dir).step == 20
    assert exact_steps(run_dir) >= 20


@pytest.mark.full
def test_a_closed_terminal_checkpoints_and_ends(ray_tmpdir: Path, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(dump_job(asked("Steady", steps=MANY)))
    run_dir = tmp_path / "run"
    with terminal(RAYCLOUD, "train", tmp_path / "job.yaml", "--run-dir", run_dir) as one:
        wait_for("training", lambda: len(of_kind(StepsCommitted, events(run_dir))) >= 2)
        one.hang_up()
        assert one.code(END_S) == 130
    assert ended(processes_below(ray_tmpdir), END_S) == {}

    log = events(run_dir)
    assert [e.reason for e in of_kind(StopRequested, log)] == ["SIGHUP"]
    summary = read_summary(run_dir / "summary.json")
    assert (summary.status, summary.checkpoint_step) == ("stopped", summary.steps)
    assert checkpoint(run_dir).step == summary.steps == exact_steps(run_dir)


def _training(folder: Path, run_dir: Path):
    return command(folder, RAYCLOUD, "train", folder / "job.yaml", "--run-dir", run_dir)


def _steps(one: Command, run_dir: Path) -> int:
    assert one.process.poll() is None, one.err
    return max((e.last_step for e in of_kind(StepsCommitted, events(run_dir))), default=0)
