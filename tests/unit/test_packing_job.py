"""A job made ready to be sent: what it needs travels, or it is refused here and not there."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from raycloud.errors import SpecError
from raycloud.on_ray.submission import packed_by_ray
from raycloud.packing.working_dir import (
    WorkingDir,
    entrypoint,
    submission_id,
    survey_for,
    working_dir_of,
)
from raycloud.spec import SpecErrors, load_job

ROOT = Path(__file__).parents[2]


def packed(root: Path, job: str = "job.yaml", **fields: object) -> WorkingDir:
    """Look through a directory with a job in it."""
    file = root / job
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = {"format": 1, "task": "task.py:Net", "steps": 3} | fields
    file.write_text("".join(f"{name}: {value}\n" for name, value in lines.items()))
    (file.parent / "task.py").write_text("class Net: ...\n")
    return survey_for(load_job(file), file, root, packed_by_ray)


@pytest.mark.parametrize("root", [ROOT, ROOT / "jobs"])
def test_the_package_of_gpt_is_small(root: Path) -> None:
    file = ROOT / "jobs/gpt.yaml"
    found = survey_for(load_job(file), file, root, packed_by_ray)
    assert sum(found.sizes.values()) < 8_000_000
    assert {"gpt.yaml", "gpt.py"} <= {Path(name).name for name in found.sizes}


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
    with pytest.raises(SpecError, match=r"a \.gitignore or \.rayignore names it"):
        packed(tmp_path, data="{path: rows}")


@pytest.mark.parametrize(
    "path", [".", "./", "*.py", "rows/*.csv", "**/*.csv", "rows/../rows/a.csv", "rows/[ab].csv"]
)
def test_patterns_and_the_directory_itself_travel(tmp_path: Path, path: str) -> None:
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows/a.csv").write_text("x\n1\n")
    packed(tmp_path, data=f'{{path: "{path}"}}')


def test_a_pattern_of_what_stays_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="not in the working dir"):
        packed(tmp_path, data='{path: "../rows/*.csv"}')
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows/a.csv").write_text("x\n1\n")
    (tmp_path / ".gitignore").write_text("rows/\n")
    with pytest.raises(SpecError, match=r"a \.gitignore or \.rayignore names it"):
        packed(tmp_path, data='{path: "rows/*.csv"}')


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("settings.api_key=hunter2", "settings.api_key"),
        ("settings.credentials.user=hunter2", "settings.credentials.user"),
        ("settings.api_keys=[hunter2]", "settings.api_keys.0"),
        ("data.path=https://me:hunter2@host/x", "data.path"),
        ("checkpoint.path=https://host/x?token=hunter2", "checkpoint.path"),
        ("tracking.mlflow.uri=https://hunter2@host", "tracking.mlflow.uri"),
    ],
)
def test_a_secret_after_set_is_not_sent(tmp_path: Path, override: str, field: str) -> None:
    packed(tmp_path)
    file = tmp_path / "job.yaml"
    with pytest.raises(SpecError, match="could read on the cluster") as raised:
        survey_for(load_job(file, [override]), file, tmp_path, packed_by_ray)
    assert raised.value.field == field
    assert "[redacted]" in raised.value.message
    assert "hunter2" not in str(raised.value)
    assert "${NAME}" in raised.value.hint
    named = override.replace("[hunter2]", "['${NAME}']").replace("hunter2", "${NAME}")
    survey_for(load_job(file, [named]), file, tmp_path, packed_by_ray)
    later = [override, f"{field.removesuffix('.0')}=null"]  # the command would have both
    with pytest.raises(SpecError, match="could read on the cluster"):
        entrypoint(file, tmp_path, "x-1", overrides=later, restarts=0)


def test_a_secret_in_the_file_is_not_sent(tmp_path: Path) -> None:
    fields = {"settings": "{api_key: hunter2, hf_token: hunter3}", "data": "{path: 's3://a:b@c'}"}
    with pytest.raises(SpecErrors) as raised:
        packed(tmp_path, **fields)
    assert [one.field for one in raised.value.all] == [
        "settings.api_key", "settings.hf_token", "data.path",
    ]  # fmt: skip
    file = tmp_path / "job.yaml"
    hidden = ["settings.api_key=${A}", "settings.hf_token=${B}", "data.path=s3://c"]
    with pytest.raises(SpecErrors, match="could read on the cluster"):
        survey_for(load_job(file, hidden), file, tmp_path, packed_by_ray)
    packed(tmp_path, settings="{api_key: '${A}', note: say}", data="{path: 's3://a:${B}@c'}")


def test_checkpoints_in_the_package_are_refused(tmp_path: Path) -> None:
    packed(tmp_path, checkpoint="{path: /mnt/checkpoints}")
    packed(tmp_path, checkpoint="{path: s3://bucket/checkpoints}")
    with pytest.raises(SpecError, match="Ray removes") as raised:
        packed(tmp_path, checkpoint="{path: checkpoints}")
    assert raised.value.field == "checkpoint.path"


def test_a_cache_of_data_stays(tmp_path: Path) -> None:
    (tmp_path / "blocks").mkdir()
    (tmp_path / "blocks/0").write_text("x" * 1000)
    found = packed(tmp_path, data="{cache: {path: blocks}}")
    assert found.left == {"blocks": "a cache of data"}


def test_a_needed_file_that_stays_is_refused(tmp_path: Path) -> None:
    packed(tmp_path)
    file = tmp_path / "job.yaml"
    (tmp_path / "task.py").write_text("login('ghp_" + "a1B2" * 9 + "')")
    with pytest.raises(SpecError, match=r"task\.py.*does not travel.*GitHub token") as raised:
        survey_for(load_job(file), file, tmp_path, packed_by_ray)
    assert "environment" in raised.value.hint
    (tmp_path / ".gitignore").write_text("task.py\n")
    with pytest.raises(SpecError, match=r"does not travel: a \.gitignore"):
        packed(tmp_path)


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
