"""Commands that are told to be typed again: as they were typed, and without secrets."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from raycloud import cli
from raycloud.cli.supervise import resumed, without_try
from raycloud.spec import RunDirectory, dump_job, load_job

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
