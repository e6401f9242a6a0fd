"""`--resume must|allow|never`: the table in raycloud/spec/rundir.py, row by row."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from pathlib import Path

import pytest

from raycloud.errors import RunDirectoryError, SpecError
from raycloud.spec import RESUMES, Job, Resume, RunDirectory, choose, dump_job, goes_on, resume_word


def saved(run: RunDirectory) -> bool:
    return run.checkpoints.is_dir()


def nothing(path: Path) -> None:
    assert not path.exists()


def unsaved_run(path: Path) -> None:
    path.mkdir()
    RunDirectory(path).job_yaml.write_text(dump_job(Job(task="gpt.py:Gpt", steps=10)))
    RunDirectory(path).events_jsonl.write_text("first\n")
    RunDirectory(path).tensorboard.mkdir()


def saved_run(path: Path) -> None:
    unsaved_run(path)
    manifest = path / "checkpoints/step-00000004/manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.touch()


def started(path: Path, resume: Resume) -> bool:
    """As `raycloud.train` does; returns whether it goes on."""
    goes = goes_on(path, resume, saved)
    assert choose(path, "gpt", resume=goes).path == path
    return goes


@pytest.mark.parametrize(
    ("there", "resume", "goes"),
    [
        (nothing, "never", False),
        (nothing, "allow", False),
        (nothing, "must", None),
        (saved_run, "never", None),
        (saved_run, "allow", True),
        (saved_run, "must", True),
        (unsaved_run, "never", None),
        (unsaved_run, "allow", False),
    ],
)
def test_the_table(
    tmp_path: Path, there: Callable[[Path], None], resume: Resume, goes: bool | None
) -> None:
    path = tmp_path / "run"
    there(path)
    before = sorted(path.rglob("*"))
    if goes is None:
        with pytest.raises(RunDirectoryError):
            started(path, resume)
        assert sorted(path.rglob("*")) == before
    else:
        assert started(path, resume) is goes


def test_the_command_that_goes_on_can_be_typed_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "my run"
    saved_run(path)
    with pytest.raises(RunDirectoryError) as caught:
        started(path, "never")
    assert f"`raycloud train --resume --run-dir '{path}'`" in caught.value.hint


def test_what_is_set_aside_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "run"
    unsaved_run(path)
    left = {file.name for file in path.iterdir()}
    for n in (1, 2, 3):
        assert not started(path, "allow")
        assert {file.name for file in (path / f"unsaved-{n}").iterdir()} == left
        RunDirectory(path).job_yaml.write_text(f"n: {n}")
        RunDirectory(path).events_jsonl.write_text("next\n")
        RunDirectory(path).tensorboard.mkdir()
    assert (path / "unsaved-1/events.jsonl").read_text() == "first\n"
    assert (path / "unsaved-3/job.yaml").read_text() == "n: 2"


def test_a_run_that_is_going_is_not_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "run"
    unsaved_run(path)
    before = sorted(path.rglob("*"))
    with RunDirectory(path).events_jsonl.open("a") as log:
        fcntl.flock(log.fileno(), fcntl.LOCK_EX)
        with pytest.raises(RunDirectoryError, match="another process is writing"):
            started(path, "allow")
    assert sorted(path.rglob("*")) == before


def test_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "chapter.tex").touch()
    with pytest.raises(RunDirectoryError, match="what it holds is not a run"):
        started(tmp_path, "allow")
    assert [file.name for file in tmp_path.iterdir()] == ["chapter.tex"]


def test_allow_wants_a_place() -> None:
    with pytest.raises(RunDirectoryError, match="does not say which run"):
        goes_on(None, "allow", saved)


@pytest.mark.parametrize("asked", ["", "maybe", "True", 1.5, None])
def test_no_other_words(asked: object) -> None:
    with pytest.raises(SpecError) as caught:
        resume_word(asked)  # type: ignore[arg-type]
    assert all(word in caught.value.hint for word in RESUMES)
