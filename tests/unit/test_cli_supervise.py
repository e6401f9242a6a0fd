"""The loop that starts a driver again: after which ends, how often, how soon, and who is told."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from raycloud import cli
from raycloud.cli.supervise import final_code, pause_s, resumed, supervise, without_try
from raycloud.clock import SystemClock
from raycloud.spec import RunDirectory, dump_job, load_job
from tests.live import RAYCLOUD, command, ended, wait_for
from tests.tiers import variants

LOOP = """
import sys
from pathlib import Path
from raycloud.cli.supervise import supervise
from raycloud.clock import SystemClock
child = [sys.executable, "-c", Path(sys.argv[2]).read_text()]
sys.exit(supervise(lambda _: child, restarts=int(sys.argv[1]), clock=SystemClock()))
"""
ASKED = """
import os, signal, sys
from pathlib import Path
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
Path("pid").write_text(str(os.getpid()))
print(signal.sigwait({signal.SIGTERM}).name, flush=True)
sys.exit(130)
"""


@pytest.mark.parametrize("code", [0, 1, 2, 4, 130])
def test_ends_that_another_start_would_not_mend(code: int) -> None:
    assert final_code(code, asked=False, left=9) == code
    assert final_code(code, asked=True, left=9) == code


@pytest.mark.parametrize("code", [3, -signal.SIGKILL, -signal.SIGSEGV])
def test_ends_that_another_start_may_mend(code: int) -> None:
    assert final_code(code, asked=False, left=9) is None
    assert final_code(code, asked=False, left=0) == 3


def test_pauses_grow_up_to_a_minute() -> None:
    assert [pause_s(n) for n in (1, 2, 3, 7, 99)] == [1.0, 2.0, 4.0, 60.0, 60.0]


def test_a_driver_that_was_asked_to_end_is_not_started_again() -> None:
    assert final_code(-signal.SIGKILL, asked=True, left=9) == 130
    assert final_code(3, asked=True, left=9) == 3


def counted(folder: Path, *ends: str) -> Callable[[int], list[str]]:
    """Commands that end in these ways, in order, and leave a mark each."""
    return lambda start: ["sh", "-c", f"echo {start} >> '{folder}/starts'; {ends[start]}"]


def test_it_starts_again_until_it_ends_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    commands = counted(tmp_path, "kill -KILL $$", "exit 0", "exit 0")
    assert supervise(commands, restarts=2, clock=SystemClock()) == 0
    assert (tmp_path / "starts").read_text().split() == ["0", "1"]
    assert capsys.readouterr().err == (
        "the driver was killed by SIGKILL; restart 1 of 2 in 1 s, from the last checkpoint\n"
    )
    assert signal.getsignal(signal.SIGTERM) is before


def test_it_gives_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commands = counted(tmp_path, "exit 3", "kill -SEGV $$")
    assert supervise(commands, restarts=1, clock=SystemClock()) == 3
    assert capsys.readouterr().err.splitlines() == [
        "the driver ended with exit code 3; restart 1 of 1 in 1 s, from the last checkpoint",
        "the driver was killed by SIGSEGV; all 1 restarts are used up",
    ]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_it_passes_on_what_it_is_told(tmp_path: Path, number: signal.Signals) -> None:
    """Only the loop is told; the driver is asked, ends in its own time, and is not restarted."""
    (tmp_path / "child.py").write_text(ASKED)
    with command(tmp_path, sys.executable, "-c", LOOP, "5", "child.py") as loop:
        pid = wait_for("the driver", (tmp_path / "pid").is_file)
        loop.process.send_signal(number)
        assert loop.code() == 130, loop.err
    assert pid
    assert loop.out == "SIGTERM\n"
    assert loop.err == ""


def test_a_pause_ends_when_it_is_told(tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text("raise SystemExit(3)")
    with command(tmp_path, sys.executable, "-c", LOOP, "9", "child.py") as loop:
        wait_for("a long pause", lambda: "in 4 s" in loop.err)
        loop.process.send_signal(signal.SIGTERM)
        assert loop.code(3.0) == 130
    assert "in 8 s" not in loop.err


def test_the_driver_does_not_outlive_the_loop(tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text(ASKED)
    with command(tmp_path, sys.executable, "-c", LOOP, "5", "child.py") as loop:
        wait_for("the driver", (tmp_path / "pid").is_file)
        pid = int(wait_for("its number", (tmp_path / "pid").read_text))
        loop.process.kill()
        loop.code()
        assert ended({pid: "the driver"}, 10.0) == {}


def test_only_the_main_thread_supervises(tmp_path: Path) -> None:
    """Signals are its business; elsewhere Python itself refuses."""
    seen: list[BaseException] = []

    def work() -> None:
        try:
            supervise(lambda _: ["true"], restarts=0, clock=SystemClock())
        except ValueError as error:
            seen.append(error)

    before = len(list(Path("/proc/self/fd").iterdir()))
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert "main thread" in str(seen[0])
    assert len(list(Path("/proc/self/fd").iterdir())) <= before  # fewer: someone else's is closed


@pytest.mark.parametrize("resume", variants("must", "allow"))
def test_going_on_without_a_place_is_refused_and_leaves_none(tmp_path: Path, resume: str) -> None:
    (tmp_path / "job.yaml").write_text("format: 1\ntask: raycloud.metrics:Mean\nsteps: 3\n")
    words = ("train", "job.yaml", "--restarts", "2", "--resume", "never", "--resume", resume)
    with command(tmp_path, RAYCLOUD, *words) as one:
        assert one.code() == 2
    assert "does not say which run" in one.err
    assert "restart" not in one.err
    assert not (tmp_path / "runs").exists()


def test_a_job_that_cannot_be_is_refused_once(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("format: 1\ntask: gone.py:Net\nsteps: 3\n")
    with command(tmp_path, RAYCLOUD, "train", "job.yaml", "--restarts", "5") as one:
        assert one.code() == 2
    assert "no file gone.py" in one.err
    assert "restart" not in one.err
    with command(tmp_path, RAYCLOUD, "train", "job.yaml", "--restarts", "5", "--try") as one:
        assert one.code() == 2
    assert "a job is tried once" in one.err


SECRETS = ["--set", "settings.credentials.user=hunter2", "--set=data.path=https://me:hunter3@h/a"]


def context(*args: str) -> typer.Context:
    command = typer.main.get_command(cli.app)
    train = command.get_command(typer.Context(command), "train")  # type: ignore[attr-defined]
    made: typer.Context = train.make_context("train", list(args))
    return made


def test_a_command_is_told_as_it_was_typed() -> None:
    typed = context("a b.yaml", "--try", "--set", "steps=3", "--set", "settings.api_key=${KEY}")
    assert without_try(typed) == (
        "raycloud train 'a b.yaml' --set steps=3 --set 'settings.api_key=${KEY}'"
    )
    again = context("job.yaml", "--resume", "never", "--run-dir", "d")
    assert resumed(again, "allow") == "raycloud train job.yaml --run-dir d --resume allow"


def test_but_for_its_secrets() -> None:
    shown = "--set 'settings.credentials.user=[redacted]' '--set=data.path=https://[redacted]@h/a'"
    assert without_try(context("a.yaml", "--try", *SECRETS)) == f"raycloud train a.yaml {shown}"
    assert resumed(context("a.yaml", *SECRETS), "must") == (
        f"raycloud train a.yaml {shown} --resume must"
    )


def test_also_where_a_run_is_there_already(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text("task: raycloud.metrics:Mean\nsteps: 1\n")
    Path("run").mkdir()
    RunDirectory(Path("run")).job_yaml.write_text(dump_job(load_job("job.yaml")))
    result = CliRunner().invoke(cli.app, ["train", "job.yaml", "--run-dir", "run", *SECRETS])
    assert result.exit_code == 2
    assert "settings.credentials.user=[redacted]" in result.stderr
    assert "hunter" not in result.output
