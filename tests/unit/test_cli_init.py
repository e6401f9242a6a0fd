"""`raycloud init`: what it writes, that it is a project in order, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from raycloud import cli
from raycloud.errors import JobError
from raycloud.project.templates import TEMPLATES, name_for, write_project
from raycloud.rows import Rows
from raycloud.spec import load_job
from raycloud.spec.job import Job
from raycloud.spec.schema import render_schema
from raycloud.task import Task

FILES = ["task.py", "job.yaml", "job.schema.json", "README.md", ".gitignore"]
EVERY = pytest.mark.parametrize("template", TEMPLATES)


def call(*args: object) -> Any:
    return CliRunner().invoke(cli.app, ["init", *map(str, args)])


@EVERY
def test_what_is_written_and_said(tmp_path: Path, template: str) -> None:
    place = tmp_path / "a" / "My Model"
    result = call(place, "--from", template)
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in place.iterdir()) == sorted(FILES)
    assert not any("{{" in path.read_text() for path in place.iterdir())
    assert load_job(place / "job.yaml").name == "my-model"
    assert result.stdout.splitlines()[-2:] == [
        f"try it:    raycloud train '{place}/job.yaml' --try",
        f"train it:  raycloud train '{place}/job.yaml'",
    ]


def test_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert call().stdout.endswith("train it:  raycloud train job.yaml\n")
    assert (tmp_path / "job.yaml").is_file()


@EVERY
def test_the_first_line_names_the_schema_that_lies_beside(tmp_path: Path, template: str) -> None:
    write_project(tmp_path, template)
    first = (tmp_path / "job.yaml").read_text().splitlines()[0]
    mark, _, schema = first.partition("$schema=")
    assert mark == "# yaml-language-server: "
    assert (tmp_path / schema).read_text() == render_schema(Job)


@EVERY
def test_the_task_is_tidy(tmp_path: Path, template: str) -> None:
    write_project(tmp_path, template)
    ruff = Path(sys.executable).with_name("ruff")
    for check in (["check", "--select=E,F,I,B,UP,SIM,RET"], ["format", "--check"]):
        done = subprocess.run(
            [ruff, *check, "--no-cache", "--isolated", "--line-length=100", tmp_path / "task.py"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout


@EVERY
def test_the_task_keeps_its_contract_and_learns(tmp_path: Path, template: str) -> None:
    write_project(tmp_path, template)
    job = load_job(tmp_path / "job.yaml")
    names: dict[str, type[Task]] = {}
    exec(compile((tmp_path / "task.py").read_text(), "task.py", "exec"), names)
    task = names[str(job.task).rpartition(":")[2]](**job.settings)
    torch.manual_seed(job.seed)
    model, splits = task.model(), task.data(None)
    if template == "text":
        text = b"all work and no play makes a dull text. " * 200
        samples: Any = Rows(task.preprocess(Rows({"text": [text]})))
        chosen = [samples] * 25
    else:
        train: Any = splits.train
        chosen = [[train[(64 * s + i) % len(train)] for i in range(64)] for s in range(200)]
    optimizer, losses = task.optimizer(model), []
    for rows in chosen:
        loss = task.loss(model, task.batch(rows, None))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("name", FILES)
def test_nothing_is_overwritten(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    result = call(tmp_path)
    assert result.exit_code == 2
    assert result.stderr == (
        f"error: {tmp_path} holds {name} already\n\n"
        "hint: name another directory: `raycloud init NEW_DIRECTORY`\n"
    )
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, "mine")]


def test_not_through_a_link_that_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").symlink_to(tmp_path / "elsewhere")
    assert call(tmp_path).exit_code == 2
    assert not (tmp_path / "elsewhere").exists()


def test_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = Path.open

    def full(path: Path, *args: Any, **rest: Any) -> Any:
        if path.name == "README.md":
            raise OSError(28, "No space left on device")
        return written(path, *args, **rest)

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(JobError, match="cannot be written: No space left on device"):
        write_project(tmp_path, "text")
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    result = call(tmp_path / "a" / "b")
    assert result.exit_code == 2
    assert "cannot be written: Not a directory" in result.stderr


def test_no_such_template(tmp_path: Path) -> None:
    result = call(tmp_path, "--from", "vision")
    assert result.exit_code == 2
    assert "'vision' is none of classifier, text" in result.stderr.replace("\n", " ")
    assert list(tmp_path.iterdir()) == []


def test_help_names_every_template() -> None:
    text = " ".join(call("--help").stdout.replace("│", " ").split())
    assert f"What to start from: {' or '.join(TEMPLATES)}." in text


@pytest.mark.parametrize(
    ("directory", "name"),
    [("gpt", "gpt"), ("Größe 3", "gr-e-3"), ("__x__", "x"), ("日本", "text"), ("a" * 99, "a" * 63)],
)
def test_names(directory: str, name: str) -> None:
    assert name_for(Path("/w") / directory, "text") == name
