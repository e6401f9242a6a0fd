"""A job made ready to be sent: what it needs travels, or it is refused here and not there."""

from __future__ import annotations

import io
import shlex
import zipfile
from pathlib import Path

import pytest

from raycloud.errors import SpecError
from raycloud.packing import Package
from raycloud.packing.job import entrypoint, pack_job, submission_id, working_dir_of
from raycloud.spec import load_job

ROOT = Path(__file__).parents[2]


def packed(root: Path, job: str = "job.yaml", **fields: object) -> Package:
    """Pack a directory with a job in it."""
    file = root / job
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = {"format": 1, "task": "task.py:Net", "steps": 3} | fields
    file.write_text("".join(f"{name}: {value}\n" for name, value in lines.items()))
    (file.parent / "task.py").write_text("class Net: ...\n")
    return pack_job(load_job(file), file, root)


@pytest.mark.parametrize("root", [ROOT, ROOT / "jobs"])
def test_the_package_of_gpt_is_small(root: Path) -> None:
    file = ROOT / "jobs/gpt.yaml"
    package = pack_job(load_job(file), file, root)
    assert package.size_bytes < 1_000_000
    with zipfile.ZipFile(io.BytesIO(package.data)) as archive:
        assert {"gpt.yaml", "gpt.py"} <= {Path(name).name for name in archive.namelist()}


def test_data_beside_the_job_travels_or_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows/a.csv").write_text("x\n1\n")
    packed(tmp_path, data="{path: rows}")
    packed(tmp_path, data="{path: ./rows/a.csv}")
    packed(tmp_path, data="{path: /mnt/rows}")
    packed(tmp_path, data="{path: s3://bucket/rows}")
    with pytest.raises(SpecError, match="not in the working dir") as raised:
        packed(tmp_path, data="{path: elsewhere}")
    assert raised.value.field == "data.path"
    (tmp_path / ".gitignore").write_text("rows/\n")
    with pytest.raises(SpecError, match=r"by \.gitignore"):
        packed(tmp_path, data="{path: rows}")


def test_checkpoints_in_the_package_are_refused(tmp_path: Path) -> None:
    packed(tmp_path, checkpoint="{path: /mnt/checkpoints}")
    packed(tmp_path, checkpoint="{path: s3://bucket/checkpoints}")
    with pytest.raises(SpecError, match="Ray removes") as raised:
        packed(tmp_path, checkpoint="{path: checkpoints}")
    assert raised.value.field == "checkpoint.path"


def test_a_cache_of_data_stays(tmp_path: Path) -> None:
    (tmp_path / "blocks").mkdir()
    (tmp_path / "blocks/0").write_text("x" * 1000)
    package = packed(tmp_path, data="{cache: {path: blocks}}")
    assert [left.path for left in package.survey.left] == ["blocks/"]


def test_a_task_outside_is_refused(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text("class Net: ...\n")
    with pytest.raises(SpecError, match=r"does not hold .*task\.py") as raised:
        packed(tmp_path / "project", task="../task.py:Net")
    assert "--working-dir" in raised.value.hint


def test_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "project/jobs").mkdir(parents=True)
    job = tmp_path / "project/jobs/job.yaml"
    monkeypatch.chdir(tmp_path / "project")
    assert working_dir_of(Path("jobs/job.yaml"), None) == tmp_path / "project"
    assert working_dir_of(job, Path("jobs")) == Path("jobs")
    monkeypatch.chdir(tmp_path / "project/jobs")
    assert working_dir_of(Path("../job.yaml"), None) == tmp_path / "project"


def test_what_is_typed_reaches_the_head_as_words(tmp_path: Path) -> None:
    """A name or an override is never a command of the shell there."""
    evil = "name=$(touch x); `id` 'a' \"b\""
    command = entrypoint(tmp_path / "-a; $(id).yaml", tmp_path, "x-1", overrides=[evil], restarts=0)
    assert shlex.split(command) == [
        "raycloud", "train", "./-a; $(id).yaml", "--run-dir", "~/raycloud/runs/x-1",
        "--restarts", "0", "--cards", "--set", evil,
    ]  # fmt: skip


def test_ids_are_names_that_need_no_quotes() -> None:
    made = submission_id("Größe / $(rm)" + "x" * 99, 1_800_000_000.0, "0a1b")
    assert made == shlex.quote(made)
    assert made.endswith("-20270115-080000-0a1b")
    assert len(made) < 70
