"""What Tab offers: asked as a shell asks, and in a real bash."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from raycloud import cli
from raycloud.cli.supervise import Resuming
from raycloud.project.templates import TEMPLATES
from raycloud.spec import RESUMES, load_job
from raycloud.spec.job import Job
from raycloud.spec.schema import schema_of, settable

RAYCLOUD = Path(sys.executable).with_name("raycloud")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with jobs, other YAML and runs, the newest of them gpt-2."""
    monkeypatch.chdir(tmp_path)
    for name, text in (
        ("gpt.yaml", "# mine\nname: gpt\ntask: a:B\n"),
        ("grow.yml", "task: a:B"),
        ("cluster.yaml", "max_workers: 3\n"),
        ("notes.txt", "task: a:B"),
        (".hidden.yaml", "task: a:B"),
        ("jobs/one.yaml", "task: a:B"),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    for n, run in enumerate(("gpt-1", "gpt-10", "gpt-2")):
        (tmp_path / "runs" / run).mkdir(parents=True)
        (tmp_path / "runs" / run / "events.jsonl").touch()
        os.utime(tmp_path / "runs" / run, (n, n))
    (tmp_path / "runs" / "no-run").mkdir()
    return tmp_path


def offered(*words: str) -> list[str]:
    """What is offered for the last word, as zsh would ask; each with its description cut off."""
    result = CliRunner().invoke(
        cli.app,
        [],
        prog_name="raycloud",
        env={"_RAYCLOUD_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(["raycloud", *words]),
             "COMP_CWORD": str(len(words))},
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    return str(result.stdout).split()


def test_job_files(project: Path) -> None:
    assert offered("train", "g") == ["gpt.yaml", "grow.yml"]
    for command in (
        ["train"],
        ["plan"],
        ["simulate"],
        ["config", "show"],
        ["train", "--resume=allow"],
    ):
        assert offered(*command, "jobs/o") == ["jobs/one.yaml"]
        assert offered(*command, "c") == []
    assert offered("train", "j") == ["jobs/"]
    assert offered("train", "missing/x") == []


def test_runs(project: Path) -> None:
    newest_first = ["runs/gpt-2", "runs/gpt-10", "runs/gpt-1"]
    assert offered("train", "--run-dir", "ru") == newest_first
    assert offered("train", "--run-dir", "runs/gpt-1") == ["runs/gpt-1", "runs/gpt-10"]
    assert offered("train", "--run-dir", "jo") == ["jobs/"]
    assert offered("report", "runs/gpt-1") == ["runs/gpt-1", "runs/gpt-10"]


def test_no_runs_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert offered("train", "--run-dir", "ru") == []


def test_what_cannot_be_looked_into_is_not_offered(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(project / "pipe.yaml")
    assert offered("train", "pi") == []
    assert offered("status", "~nobody-is-called-so/") == []
    assert offered("train", "~nobody-is-called-so/x") == []
    stat = Path.stat

    def refused(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        if "locked" in path.parts:
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, follow_symlinks=follow_symlinks)

    for place in ("locked", "runs/locked"):
        (project / place).mkdir()
    monkeypatch.setattr(Path, "stat", refused)
    assert offered("train", "--run-dir", "ru") == ["runs/gpt-2", "runs/gpt-10", "runs/gpt-1"]
    assert offered("train", "l") == []
    assert offered("report", "l") == []


def test_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", unknown)
    assert offered("train", "~/") == []


def test_fields() -> None:
    assert offered("train", "--set", "elastic.m") == [
        "elastic.min_workers=1",
        "elastic.max_workers=auto",
    ]
    assert offered("plan", "--set", "prec") == ["precision=fp32", "precision=bf16"]
    assert offered("config", "show", "--set", "sync.codec") == [
        "sync.codec=none",
        "sync.codec=bf16",
        "sync.codec=int8",
        "sync.codec=int4",
        "sync.codec=topk",
        "sync.codec=auto",
    ]
    assert offered("train", "--set", "stepz") == []


def test_words() -> None:
    assert offered("train", "--resume", "") == list(RESUMES)
    assert offered("init", "--from", "") == list(TEMPLATES)
    assert "train" in offered("t")
    assert "--try" in offered("train", "--t")


def test_the_words_of_resume_are_those_of_the_spec() -> None:
    assert {word.value for word in Resuming} == set(RESUMES)


@pytest.mark.parametrize("offer", [offer for offer, _ in settable(schema_of(Job))])
def test_every_offer_is_taken(tmp_path: Path, offer: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("task: raycloud.metrics:Mean\n")
    usual = () if offer.startswith(("steps=", "epochs=")) else ("steps=10",)
    if offer == "task=":
        return
    beside = {  # what it goes together with
        "sync.topology=servers": ("servers=1", "sync.staleness=auto"),
        "sync.staleness=unbounded": ("servers=1", "sync.topology=servers"),
        "sync.codec=topk": ("sync.period=16",),
        "rate_scaling=adascale": ("base_batch=8", "elastic.min_workers=2"),
    }
    load_job(path, overrides=(*usual, offer, *beside.get(offer, ())))


def test_every_offer_says_what_it_is() -> None:
    assert all(meaning for _, meaning in settable(schema_of(Job)))


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_for_the_shells(shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.run(
        [RAYCLOUD, "--show-completion", shell],
        env=os.environ | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "_RAYCLOUD_COMPLETE" in done.stdout


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
def test_in_a_real_bash(project: Path) -> None:
    """The script that is shown, sourced; Tab pressed by calling the function it registers."""
    script = subprocess.run(
        [RAYCLOUD, "--show-completion", "bash"],
        env=os.environ | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    press = (
        f"PATH={RAYCLOUD.parent}:$PATH\n{script}\n"
        "COMP_WORDS=(raycloud train --set elastic.sh); COMP_CWORD=3\n"
        "eval \"$(complete -p raycloud | sed -n 's/.*-F \\([^ ]*\\) .*/\\1/p') raycloud\"\n"
        'printf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", press], capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["elastic.shares=auto", "elastic.shares=equal"], done.stderr
