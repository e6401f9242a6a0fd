"""`raycloud config show`: all of a job, explained, or what departs from defaults; no secrets."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from raycloud import cli
from raycloud.spec import RunDirectory, dump_job, load_job
from raycloud.spec.job import Job
from raycloud.spec.schema import fields_of, schema_of, takes, walk

ROOT = Path(__file__).parents[2]
JOBS = sorted((ROOT / "jobs").glob("*.yaml"))
ODD = """\
task: raycloud.metrics:Mean
epochs: 3
name: odd
settings: {a.b: 1, deep: {x: [1, {y: null}], "z: z": "# no comment"}, word: "no", empty: {}}
elastic: {min_workers: 3, max_workers: 3, shares: [3, 0, 5]}
resources: {worker: {labels: {ray.io/market: "!spot", zone: "in(a, b)"}}}
data: {path: "s3://bucket/a b#c"}
"""

HOW = pytest.mark.parametrize("how", [(), ("--comments",), ("--diff",)], ids="".join)


def call(*args: object) -> Any:
    return CliRunner().invoke(cli.app, ["config", "show", *map(str, args)])


def shown(*args: object) -> str:
    result = call(*args)
    assert result.exit_code == 0, result.output
    text: str = result.stdout
    return text


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    path = tmp_path / "odd.yaml"
    path.write_text(ODD)
    return path


@HOW
@pytest.mark.parametrize("job", JOBS, ids=lambda path: path.name)
def test_what_is_shown_is_the_same_job(job: Path, how: tuple[str, ...], tmp_path: Path) -> None:
    again = tmp_path / "again.yaml"
    again.write_text(shown(job, *how, "--set", "seed=3"))
    assert load_job(again) == load_job(job, overrides=("seed=3",)).resolved()


@HOW
def test_also_where_the_job_is_odd(odd: Path, how: tuple[str, ...], tmp_path: Path) -> None:
    again = tmp_path / "again.yaml"
    again.write_text(shown(odd, *how))
    assert load_job(again) == load_job(odd).resolved()


def test_every_field_is_explained(odd: Path) -> None:
    text = shown(odd, "--comments")
    comments = " ".join(line.strip().lstrip("# ") for line in text.splitlines() if "# " in line)
    tree = schema_of(Job)
    for field, node in walk(tree):
        if "resources.server." in field:
            continue
        assert " ".join(node["description"].split()) in comments, field
        assert re.search(rf"^ *{field.rpartition('.')[2]}:", text, re.M), field
        if fields_of(node) and not takes(node, "null"):
            continue
    assert max(map(len, text.splitlines())) <= 100


def test_diff_names_what_is_changed_and_its_default(odd: Path) -> None:
    text = shown(ROOT / "jobs/gpt.yaml", "--diff", "--set", "precision=bf16")
    assert "precision: bf16  # default: fp32\n" in text
    assert "steps: 600  # default: null\n" in text
    assert "  every_steps: 200  # default: auto\n" in text
    assert "  width: 96\n" in text
    assert "global_batch" not in text  # 32, as without it
    odd_text = shown(odd, "--diff")
    assert "labels:  # default: {}\n" in odd_text
    assert "  shares:  # default: auto\n" in odd_text


def test_a_job_at_its_defaults_is_two_lines(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("task: raycloud.metrics:Mean\nsteps: 1\n")
    text = shown(tmp_path / "a.yaml", "--diff")
    assert text == "task: raycloud.metrics:Mean\nsteps: 1  # default: null\n"


def test_as_json(odd: Path) -> None:
    whole = json.loads(shown(odd, "--json"))
    assert whole["format"] == 1
    assert Job.model_validate(whole["job"]) == load_job(odd).resolved()
    fields = json.loads(shown(odd, "--json", "--diff"))["job"]
    assert fields["elastic.shares"] == {"value": [3, 0, 5], "default": "auto"}
    assert fields["settings.a.b"] == {"value": 1, "default": None}


def test_the_directory_of_a_run(odd: Path, tmp_path: Path) -> None:
    RunDirectory(tmp_path).job_yaml.write_text(dump_job(load_job(odd)))
    assert shown(tmp_path) == shown(odd)


@HOW
def test_no_secret_is_shown(tmp_path: Path, how: tuple[str, ...]) -> None:
    (tmp_path / "a.yaml").write_text(
        "task: raycloud.metrics:Mean\nsteps: 1\nsettings: {api_key: canary-1}\n"
        "data: {path: 's3://me:canary-2@host/a'}\n"
        "checkpoint: {path: 'https://host/a?token=canary-3'}\n"
    )
    for more in ((), ("--json",)) if "--comments" not in how else ((),):
        text = shown(tmp_path / "a.yaml", *how, *more)
        assert "canary" not in text
        assert text.count("[redacted]") == 3


@HOW
def test_names_of_secrets_and_users_stay(tmp_path: Path, how: tuple[str, ...]) -> None:
    (tmp_path / "a.yaml").write_text(
        "task: raycloud.metrics:Mean\nsteps: 1\nsettings: {hf_token: '${HF_TOKEN}'}\n"
        "data: {path: 'sftp://me@host/a'}\ncheckpoint: {path: 'https://me:${PW}@host/a'}\n"
    )
    again = tmp_path / "again.yaml"
    again.write_text(shown(tmp_path / "a.yaml", *how))
    assert load_job(again) == load_job(tmp_path / "a.yaml").resolved()


@pytest.mark.parametrize("other", ["--diff", "--json"])
def test_comments_stand_alone(odd: Path, other: str) -> None:
    assert call(odd, "--comments", other).exit_code == 2


def test_a_mistake_is_told(odd: Path) -> None:
    result = call(odd, "--set", "stepz=3")
    assert result.exit_code == 2
    assert "stepz" in result.stderr
    assert result.stdout == ""


def test_it_is_also_yaml_for_others(odd: Path) -> None:
    read = yaml.safe_load(shown(odd, "--comments"))
    assert read["settings"]["word"] == "no"
