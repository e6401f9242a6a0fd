"""The command line: what it passes on, what it prints, and its exit codes."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from raycloud import cli
from raycloud.cli import shell
from raycloud.errors import (
    InternalError,
    JobError,
    MachineError,
    MemberLostError,
    PlacementError,
    RaycloudError,
    SpecError,
    TaskError,
)
from raycloud.events import Event, GenerationFormed, RunFinished, RunStarted, StepsCommitted
from raycloud.report.log import to_line
from tests import logs
from tests.logs import fold

JOB = "task: raycloud.metrics:Mean\nsteps: 4\nglobal_batch: 8\nmicro_batch: 4\n"


def events(status: str = "finished") -> list[tuple[float, Event]]:
    return [
        (10.0, RunStarted(job="gpt", version="0.1.0")),
        (14.0, GenerationFormed(generation=0, members=(0,), shares=(2,), first_step=0)),
        (15.0, commit(0, 1)),
        (18.0, commit(1, 4)),
        (19.0, RunFinished(status=status, steps=4, error="oh" if status == "failed" else None)),
    ]


def commit(first: int, last: int) -> StepsCommitted:
    steps = last - first
    report = logs.commit(0, first, last, loss=2.5)
    return replace(report, wall_s=1.0 * steps, compute_s=1.0 * steps, bytes_sent=0, bytes_dense=0)


@dataclass
class FakeRun:
    status: str
    summary: dict[str, Any]
    directory: Path


@dataclass
class FakePlan:
    def to_json(self) -> str:
        return '{"format": 1}\n'


class Fake:
    """Stands for `raycloud.on_ray.run`: tells events, keeps what it was called with."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.status = "finished"
        self.meanwhile: Callable[[], None] = lambda: None

    def train(self, job: Any, **rest: Any) -> FakeRun:
        self.calls.append({"job": job, **rest})
        for _, event in events(self.status):
            rest["observer"](event)
            self.meanwhile()
        summary = fold(events(self.status)).to_record()
        return FakeRun(self.status, summary, Path("runs/gpt-1"))

    def plan(
        self, job: Any, *, address: str | None = None, cluster: Path | None, reuse: bool
    ) -> FakePlan:
        told = {"job": job, "address": address, "cluster": cluster, "reuse": reuse}
        self.calls.append(told)
        self.meanwhile()
        return FakePlan()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    made, module = Fake(), ModuleType("raycloud.on_ray.run")
    module.train = made.train  # type: ignore[attr-defined]
    dry_run = ModuleType("raycloud.on_ray.dry_run")
    dry_run.plan = made.plan  # type: ignore[attr-defined]
    room = ModuleType("raycloud.on_ray")
    room.run, room.dry_run = module, dry_run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "raycloud.on_ray", room)
    monkeypatch.setitem(sys.modules, "raycloud.on_ray.run", module)
    monkeypatch.setitem(sys.modules, "raycloud.on_ray.dry_run", dry_run)
    for name in ("RAY_ADDRESS", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    return made


@pytest.fixture
def job_file(tmp_path: Path) -> str:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return str(path)


def call(*args: str, obj: float | None = None) -> Any:
    return CliRunner().invoke(cli.app, args, obj=obj)


def test_train_passes_everything_on(fake: Fake, job_file: str, tmp_path: Path) -> None:
    result = call(
        *("train", job_file, "--set", "steps=7", "--set", "elastic.max_workers=3"),
        *("--run-dir", str(tmp_path / "r"), "--address", "host:1", "--resume"),
        obj=12.5,
    )
    assert result.exit_code == 0, result.output
    (called,) = fake.calls
    assert (called["job"].steps, called["job"].elastic.max_workers) == (7, 3)
    assert (called["run_dir"], called["address"]) == (tmp_path / "r", "host:1")
    assert (called["resume"], called["started_s"]) == ("must", 12.5)


def test_train_shows_progress_and_result(fake: Fake, job_file: str) -> None:
    result = call("train", job_file)
    assert result.exit_code == 0
    assert result.stderr == (
        "generation 0 from step 0: 1 worker, shares 2\n"
        "step 1/4 · loss 2.5 · 1 worker · 0 B sent · generation 0\n"
        f"{result.stderr.splitlines()[-1]}\n"
    )
    assert result.stderr.splitlines()[-1].startswith("step 4/4 · loss 2.5 · ")
    assert result.stdout.startswith("gpt finished: 4 steps, 32 samples in 9.0 s\n")
    assert result.stdout.endswith("tensorboard --logdir runs/gpt-1\n")
    assert "\x1b" not in result.output
    assert fake.calls[0]["address"] is None


def test_the_cluster_of_the_environment(
    fake: Fake, job_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "host:2")
    call("train", job_file)
    call("plan", job_file, "--json")
    assert [called["address"] for called in fake.calls] == ["host:2", "host:2"]


def test_resume_takes_the_job_of_the_run(fake: Fake, job_file: str) -> None:
    result = call("train", "--resume", "--run-dir", str(Path(job_file).parent))
    assert result.exit_code == 0, result.output
    assert fake.calls[0]["job"].steps == 4


@pytest.mark.parametrize(
    ("words", "how"),
    [
        ((), "never"),
        (("--resume",), "must"),
        (("--resume", "must"), "must"),
        (("--resume=allow",), "allow"),
        (("--resume", "never"), "never"),
    ],
)
def test_how_to_resume(fake: Fake, job_file: str, words: tuple[str, ...], how: str) -> None:
    assert call("train", *words, job_file).exit_code == 0  # the job file is not taken for a word
    assert call("train", job_file, *words, "--plain").exit_code == 0
    assert [called["resume"] for called in fake.calls] == [how, how]


def test_no_such_way_to_resume(fake: Fake, job_file: str) -> None:
    result = call("train", job_file, "--resume=maybe")
    assert result.exit_code == 2
    assert "maybe" in result.stderr
    assert fake.calls == []


def test_nothing_to_train(fake: Fake, tmp_path: Path) -> None:
    assert call("train").exit_code == 2
    assert "give a job file" in call("train").stderr
    assert "--run-dir DIR" in call("train", "--resume").stderr
    result = call("train", "--resume", "--run-dir", str(tmp_path))
    assert result.exit_code == 2
    assert result.stderr == (
        f"error: no run to resume: {tmp_path} has no job.yaml\n\n"
        "hint: name the directory of an earlier run, or start one: leave --resume out\n"
    )
    assert fake.calls == []


def raising(error: BaseException) -> Callable[[], None]:
    def meanwhile() -> None:
        raise error

    return meanwhile


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (JobError("a"), 2),
        (SpecError("steps", -1, "must be positive"), 2),
        (TaskError("a"), 2),
        (MachineError("a"), 3),
        (PlacementError("a"), 3),
        (MemberLostError("a"), 3),
        (InternalError("a"), 4),
        (RaycloudError("a"), 4),
        (ZeroDivisionError("a"), 4),
        (KeyboardInterrupt(), 130),
    ],
)
@pytest.mark.parametrize("command", ["train", "plan"])
def test_exit_codes(
    fake: Fake, job_file: str, error: BaseException, code: int, command: str
) -> None:
    fake.meanwhile = raising(error)
    result = call(command, job_file)
    assert result.exit_code == code
    assert result.stderr.count("error: ") == 1
    assert "Traceback" not in result.stderr


def test_an_error_and_its_hint(fake: Fake, job_file: str) -> None:
    fake.meanwhile = raising(
        PlacementError("no room for 2 workers\x1b[2J", hint="wait, or lower it")
    )
    result = call("plan", job_file)
    assert result.stderr == "error: no room for 2 workers?[2J\n\nhint: wait, or lower it\n"
    assert result.stdout == ""


def test_a_mistake_in_the_job(fake: Fake, job_file: str) -> None:
    result = call("train", job_file, "--set", "stepz=3")
    assert result.exit_code == 2
    assert "stepz" in result.stderr
    assert "hint: " in result.stderr
    assert fake.calls == []


def test_unexpected_errors_are_short_unless_debugged(fake: Fake, job_file: str) -> None:
    fake.meanwhile = raising(ZeroDivisionError("nought"))
    result = call("plan", job_file)
    assert result.stderr.startswith("error: unexpected ZeroDivisionError: nought\n\nhint: ")
    assert "--debug" in result.stderr
    fake.meanwhile = raising(InternalError("a promise is broken"))
    assert call("plan", job_file).stderr.endswith("with the traceback that --debug shows\n")
    fake.meanwhile = raising(ZeroDivisionError("nought"))
    debugged = call("plan", job_file, "--debug")
    assert debugged.exit_code == 4
    assert "Traceback (most recent call last)" in debugged.stderr


@pytest.mark.parametrize(("status", "code"), [("finished", 0), ("stopped", 0)])
def test_how_the_run_ended(fake: Fake, job_file: str, status: str, code: int) -> None:
    fake.status = status
    result = call("train", job_file)
    assert result.exit_code == code
    assert result.stdout.startswith(f"gpt {status}: 4 steps")


def test_the_first_interrupt_asks_to_stop(
    fake: Fake, job_file: str, capfd: pytest.CaptureFixture[str]
) -> None:
    def meanwhile() -> None:
        if not fake.calls[0]["stop"].is_set():
            os.kill(os.getpid(), signal.SIGINT)

    fake.status, fake.meanwhile = "stopped", meanwhile
    before = signal.getsignal(signal.SIGINT)
    result = call("train", job_file)
    assert result.exit_code == 130
    assert fake.calls[0]["stop"].reason == "Ctrl-C"
    assert "gpt stopped" in result.stdout
    assert "Ctrl-C again ends at once" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGINT) is before


def test_a_run_that_finished_all_the_same(
    fake: Fake, job_file: str, capfd: pytest.CaptureFixture[str]
) -> None:
    fake.meanwhile = lambda: fake.calls[0]["stop"].request("Ctrl-C")
    assert call("train", job_file).exit_code == 0
    assert capfd.readouterr().err == ""


def test_the_second_interrupt_ends_at_once(
    fake: Fake, job_file: str, capfd: pytest.CaptureFixture[str]
) -> None:
    fake.meanwhile = lambda: os.kill(os.getpid(), signal.SIGINT)
    result = call("train", job_file)
    assert result.exit_code == 130
    assert "\nerror: stopped at once\n" in result.stderr
    assert result.stdout == ""
    assert capfd.readouterr().err.count("Ctrl-C again") == 1


@pytest.fixture
def run_dir(tmp_path: Path) -> str:
    lines = [to_line(t, event) + "\n" for t, event in events()]
    (tmp_path / "events.jsonl").write_text("".join(lines) + lines[0][:30])
    return str(tmp_path)


def test_report(run_dir: str) -> None:
    result = call("report", run_dir)
    assert result.exit_code == 0
    assert result.stdout.startswith("gpt finished: 4 steps, 32 samples in 9.0 s\n")
    summary = json.loads(call("report", run_dir, "--json").stdout)
    assert (summary["format"], summary["steps"], summary["first_step_s"]) == (1, 4, 5.0)


def test_plan_as_json(fake: Fake, job_file: str) -> None:
    result = call("plan", job_file, "--json", "--set", "steps=9")
    assert result.stdout == '{"format": 1}\n'
    assert fake.calls[0]["job"].steps == 9
    assert fake.calls[0]["reuse"]
    assert call("plan", job_file, "--json", "--measure").exit_code == 0
    assert not fake.calls[1]["reuse"]


def test_in_a_terminal(fake: Fake, job_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for module in (shell, cli.train):
        monkeypatch.setattr(module, "is_plain", lambda _stream, *, plain: plain)
    result = call("train", job_file)
    assert result.exit_code == 0, result.output
    assert "generation 0 from step 0" in result.stderr
    assert "gpt finished: 4 steps" in result.stdout
    fake.meanwhile = raising(JobError("no", hint="yes"))
    result = call("train", job_file)
    assert result.stderr.endswith("error: no\n\nhint: yes\n")  # a runner takes the colour off
    assert call("train", job_file, "--plain").exit_code == 2


@pytest.mark.parametrize(("ignored", "reason"), [(False, "SIGHUP"), (True, None)])
def test_a_closed_terminal_asks_to_stop_unless_that_is_ignored(
    ignored: bool, reason: str | None
) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    stop = cli.train.StopSwitch()
    try:
        with cli.train._interrupts(stop):
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert stop.reason == reason
