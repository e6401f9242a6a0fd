"""Secrets put wherever a run can meet them appear in nothing that it writes or says."""

from __future__ import annotations

import importlib.util
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import pyarrow as pa
import pyarrow.csv
import pytest

from tests.live import RAYCLOUD, ROOT, Command, command, exact_steps, published
from tests.stores import Store, serving

ENVIRONMENT = "canaryEnvironment5b1f"
DATA = "canaryData/77c2"  # a slash that should have been percent-encoded
TOKEN = "canaryToken90ae"
CHECKPOINT = "canaryCheckpoint41d3"
TRACKING = "canaryTracking6e08"
SETTING = "canarySetting2c9d"
DATABASE = "canaryDatabase8f57"
STEPS = 300
SECRETS = (ENVIRONMENT, DATA, "canaryData%2F77c2", TOKEN, CHECKPOINT, TRACKING, SETTING, DATABASE)

JOB = """\
format: 1
name: canary
task: {task}:Canary
settings: {{api_key: "{key}", database: "{database}", fails_after: 240}}
steps: {steps}
global_batch: 8
micro_batch: 4
elastic: {{max_workers: 1}}
data: {{path: "{data}", cache: {{path: {folder}/cache}}}}
checkpoint: {{path: "{checkpoint}", every_steps: 50}}
tracking:
  mlflow: {{uri: "{uri}"}}
  wandb: {{mode: {wandb}}}
"""

END_S = 240.0  # data, training and trackers, on a busy machine

pytestmark = pytest.mark.timeout(900)

HAVE_MLFLOW = importlib.util.find_spec("mlflow") is not None
HAVE_WANDB = importlib.util.find_spec("wandb") is not None


@dataclass(frozen=True)
class Field:
    """A folder with a job file, and the variables that its secrets are named by."""

    folder: Path
    variables: dict[str, str]

    def raycloud(self, at: str, *arguments: object, **variables: str) -> tuple[int, Command]:
        """Run the command in the folder; its output goes to a folder of its own beside it."""
        told = {"WANDB_SILENT": "true"} | self.variables | variables
        with command(self.folder.parent / at, RAYCLOUD, *arguments, **told) as one:
            return one.code(END_S), one


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The host of a server with the points."""
    table = pa.table({"x": [float(n) for n in range(64)]})
    sink = io.BytesIO()
    pyarrow.csv.write_csv(table, sink)
    with serving(Store(files={"/points.csv": sink.getvalue()})) as store:
        yield store.url.removeprefix("http://")


@pytest.fixture(scope="module")
def named(server: str, tmp_path_factory: pytest.TempPathFactory) -> Field:
    """A job that names its secrets; the values are in the environment."""
    folder = tmp_path_factory.mktemp("named") / "job"
    folder.mkdir()
    text = JOB.format(
        steps=STEPS,
        task=ROOT / "tests/canary_task.py",
        key="${CANARY_KEY}",
        database="pg://me:${CANARY_DATABASE}@host/db",
        data=f"http://me:${{CANARY_DATA}}@{server}/points.csv?token=${{CANARY_TOKEN}}",
        folder=folder,
        checkpoint=f"canary://me:${{CANARY_CHECKPOINT}}@host{folder}/checkpoints",
        uri=f"http://me:${{CANARY_TRACKING}}@{server}" if HAVE_MLFLOW else "null",
        wandb="offline" if HAVE_WANDB else "off",
    )
    (folder / "job.yaml").write_text(text.replace('"null"', "null"))
    variables = {
        "CANARY_PASSWORD": ENVIRONMENT,
        "CANARY_KEY": SETTING,
        "CANARY_DATABASE": DATABASE,
        "CANARY_DATA": DATA,
        "CANARY_TOKEN": TOKEN,
        "CANARY_CHECKPOINT": CHECKPOINT,
        "CANARY_TRACKING": TRACKING,
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    }
    return Field(folder, variables)


def literal(field: Field) -> str:
    """The same job with the secrets in it, as people write it who do not know better."""
    text = (field.folder / "job.yaml").read_text().replace("mode: offline", "mode: off")
    for name, value in field.variables.items():
        text = text.replace(f"${{{name}}}", quote(value, safe=""))
    return text


def leaks(*places: Path) -> list[str]:
    """Each file below these places that holds a secret, in its name or in it, with which."""
    found = []
    for place in places:
        for file in (place, *place.rglob("*")):
            inside = file.read_bytes() if file.is_file() else b""
            found += [
                f"{file}: {secret}"
                for secret in SECRETS
                if secret.encode() in inside or secret in str(file)
            ]
    return found


@pytest.fixture(scope="module")
def failed(named: Field) -> Command:
    """A run that ended in a traceback with all secrets in it, said with `--debug`."""
    run = named.folder.parent / "run"
    code, one = named.raycloud(
        "failed", "train", named.folder / "job.yaml", "--run-dir", run, "--debug"
    )
    assert code == 2, one.err
    assert "login failed: [redacted], http://" in one.err
    assert published(run), "the failure came before the first checkpoint"
    return one


@pytest.mark.full(only="secrets in what a failed run leaves")
def test_nothing_that_a_failed_run_leaves_holds_a_secret(
    failed: Command, named: Field, ray_tmpdir: Path
) -> None:
    run = named.folder.parent / "run"
    assert (run / "job.yaml").is_file()
    assert leaks(named.folder.parent) == []
    logs = [*ray_tmpdir.rglob("logs")]
    assert logs, "Ray's own logs have moved"
    assert leaks(*logs) == []
    assert "${CANARY_DATA}" in (run / "job.yaml").read_text()
    lines = (run / "logs/member-0.jsonl").read_text().splitlines()
    said = {record["logger"]: record["message"] for record in map(json.loads, lines)}
    assert said["canary"].startswith("password is [redacted], key is [redacted], for pg://")


def test_nothing_that_reads_the_run_says_a_secret(failed: Command, named: Field) -> None:
    run = named.folder.parent / "run"
    say_why = (["report", run], ["report", run, "--json"], ["status", run], ["logs", run])
    say_more = (
        ["status", run, "--json"],
        ["logs", run, "--json"],
        ["logs", run, "--member", "0"],
        ["watch", run, "--plain"],
        ["watch", run, "--json"],
        ["compare", run, run],
        ["config", "show", run, "--comments"],
        ["config", "show", named.folder / "job.yaml", "--diff"],
    )
    for number, words in enumerate((*say_why, *say_more)):
        code, one = named.raycloud(f"reads-{number}", *words)
        assert code == 0, one.err
        assert one.out
        assert "login failed" in one.out or words in say_more, words
    assert leaks(named.folder.parent) == []


@pytest.mark.full
def test_a_run_goes_on_once_the_environment_has_its_secrets(failed: Command, named: Field) -> None:
    """On a Ray of its own, as in what follows: workers of another one have their environment."""
    run = named.folder.parent / "run"
    before = published(run)
    on = ("train", "--resume", "--run-dir", run, "--set", "settings.fails_after=0")
    code, one = named.raycloud("without", *on, CANARY_CHECKPOINT="")
    assert code == 2
    assert "the environment variable CANARY_CHECKPOINT is not set" in one.err
    code, one = named.raycloud("with", *on)
    assert code == 0, one.err
    assert exact_steps(run) == STEPS
    assert published(run)[: len(before)] == before
    assert leaks(named.folder.parent) == []


@pytest.mark.full(only="secrets in the job file are left out of the run directory")
def test_secrets_in_the_job_file_are_left_out_and_asked_for_again(named: Field) -> None:
    place = named.folder.parent.with_name("literal")
    place.mkdir()
    job, run = place / "job.yaml", place / "run"
    job.write_text(literal(named).replace("/checkpoints", "/others"))
    bare = Field(place / "job", {"CANARY_PASSWORD": ENVIRONMENT, "WANDB_SILENT": "true"})
    code, one = bare.raycloud("stops", "train", job, "--run-dir", run)
    assert code == 2, one.err
    on = ("--resume", "--run-dir", run, "--set", "settings.fails_after=0")
    code, alone = bare.raycloud("alone", "train", *on)
    assert code == 2
    assert "secrets are not kept in a run directory" in alone.err
    assert "name the job file" in alone.err
    code, again = bare.raycloud("again", "train", job, *on)
    assert code == 0, again.err
    assert exact_steps(run) == STEPS
    job.unlink()
    assert leaks(place) == []


def test_what_is_looked_for_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"x": f"pg://me:{DATABASE}@h"}))
    assert leaks(tmp_path) == [f"{tmp_path}/a.json: {DATABASE}"]
