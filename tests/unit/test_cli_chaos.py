"""`raycloud chaos`: what it asks for, what it refuses, and its exit codes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from raycloud import cli
from raycloud.errors import CheckpointError, TaskError
from raycloud.faults import Fault, load_schedule
from raycloud.on_ray import chaos as on_ray
from raycloud.report.chaos import Outcome, bound_of, outcome_text
from raycloud.spec import Job
from tests.unit.test_report_chaos import outcome  # noqa: F401 - a fixture

JOB = "task: raycloud.metrics:Mean\nsteps: 100\nglobal_batch: 8\nmicro_batch: 2\n"
THREE = "elastic: {max_workers: 3}\n"


def call(*arguments: object, **variables: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli.app, ["chaos", *map(str, arguments)], env=variables)
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(JOB + THREE)
    return path


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, outcome: Outcome) -> list[Any]:  # noqa: F811
    """What was run; in place of two runs, their outcome."""
    seen: list[Any] = [outcome]

    def run(self: on_ray.Chaos, asked: Job, faults: Sequence[Fault]) -> Outcome:
        seen[1:] = [asked, faults, self._directory, self._address]
        return seen[0]

    monkeypatch.setattr(on_ray.Chaos, "run", run)
    return seen


def test_faults_are_drawn_told_and_kept(job: Path, ran: list[Any], tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, told, notes = call(job, "--seed", 3, "--faults", 4, "--steps", 50, "--out", out)
    assert code == 0, notes
    assert told.startswith("rings: the run under faults is the undisturbed run\n")
    _, asked, faults, directory, address = ran
    assert (asked.steps, asked.checkpoint.path, directory) == (50, None, out)
    assert address is None
    assert json.loads((out / "chaos.json").read_text())["seed"] == 3
    assert load_schedule(out / "schedule.yaml") == faults
    assert len(faults) == 4
    for fault in faults:
        assert f"planned: {fault}\n" in notes
    assert json.loads((out / "chaos.json").read_text())["proved"] is True
    assert (out / "chaos.html").read_text().startswith("<!doctype html>")


def test_a_schedule_is_taken(job: Path, ran: list[Any], tmp_path: Path) -> None:
    file = tmp_path / "faults.yaml"
    file.write_text("format: 1\nfaults: [{at_step: 20, action: kill}]\n")
    code, told, _ = call(job, "--schedule", file, "--out", tmp_path / "out", "--json")
    assert code == 0
    assert json.loads(told)["format"] == 1
    assert ran[2] == load_schedule(file)
    assert json.loads(told)["seed"] is None
    assert ran[4] is None


def test_what_is_not_proved_ends_with_1(job: Path, ran: list[Any], tmp_path: Path) -> None:
    ran[0] = replace(ran[0], bound=replace(bound_of("float64"), value=0.0))
    assert call(job, "--seed", 1, "--out", tmp_path / "out")[0] == 1


KILL = "{at_step: 20, action: kill}"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ("give the faults",)),
        (["--seed", "1", "--schedule", "x.yaml"], ("give the faults",)),
        (["--schedule", "nowhere.yaml"], ("nowhere.yaml",)),
        (["--seed", "-1"], ("'--seed'", "greater than or equal to 0")),
        (["--seed", "one"], ("'--seed'", "as an integer")),
        (["--seed", "1", "--faults", "0"], ("'--faults'", "greater than or equal to 1")),
        (["--seed", "1", "--steps", "1"], ("'--steps'", "greater than or equal to 2")),
        (["--schedule", "."], ("schedule = '.'", "cannot be read", "`--seed` draws one")),
        (
            ["--seed", "1", "--set", "elastic.max_workers=1"],
            ("elastic.max_workers = 1", "another worker", "--set elastic.max_workers=3"),
        ),
        (
            ["--seed", "1", "--set", "steps=null", "--set", "epochs=2"],
            ("steps = None", "drawn for a number of steps", "--steps"),
        ),
        (
            ["--seed", "1", "--set", "errors.on_nan=retry"],
            ("errors.on_nan = 'retry'", "must be stop, skip or rollback", "left out, it is stop"),
        ),
    ],
)
def test_an_argument_that_cannot_be_is_named_with_its_value_and_a_remedy(
    arguments: list[str], words: tuple[str, ...], job: Path, ran: list[Any]
) -> None:
    code, _, notes = call(job, *arguments)
    told = " ".join(notes.replace("│", " ").split())
    assert (code, len(ran)) == (2, 1), told
    for word in words:
        assert word in told


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("format: 1\nfaults: [", ("schedule = ", "line 2")),
        ("format: 3\nfaults: []", ("format = 3", "must be 1")),
        (
            "format: 1\nfaults: [{at_step: 20, action: burn}]",
            ("faults[0].action = 'burn'", "must be kill, freeze, terminate or cut"),
        ),
        (
            f"format: 1\nfaults: [{KILL}, {{at_s: -2, action: kill}}]",
            ("faults[1].at_s = -2", "must be a number from 0 to 3600"),
        ),
        (
            "format: 1\nfaults: [{at_step: 20, action: kill, many: 3}]",
            ("faults[0].many = 3", "one has to be left", "--set elastic.max_workers=4"),
        ),
        (
            "format: 1\nfaults: [{at_step: 100, action: kill}]",
            ("faults[0].at_step = 100", "the run ends with step 100", "raise --steps"),
        ),
    ],
)
def test_a_schedule_that_cannot_be_is_refused_before_anything_runs(
    text: str, words: tuple[str, ...], job: Path, ran: list[Any], tmp_path: Path
) -> None:
    file = tmp_path / "faults.yaml"
    file.write_text(text)
    code, _, notes = call(job, "--schedule", file, "--out", tmp_path / "out")
    told = " ".join(notes.replace("│", " ").split())
    assert (code, len(ran)) == (2, 1), told
    for word in words:
        assert word in told
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("fails", ["the run", "the comparison"])
def test_where_the_run_by_one_worker_fails_the_other_two_are_told_of(
    fails: str,
    outcome: Outcome,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    apart = replace(outcome.difference, precision="float32")
    shown: list[str] = []
    trained: list[Job] = []

    def difference(_: Any, name: str) -> Any:
        if name == "alone":
            raise CheckpointError("there is no checkpoint")
        return apart

    def train(job: Job, **_: Any) -> None:
        trained.append(job)
        if fails == "the run":
            raise TaskError("the loss is not finite")

    monkeypatch.setattr(on_ray.Chaos, "_difference", difference)
    monkeypatch.setattr(on_ray, "train", train)
    trial = on_ray.Chaos(tmp_path, None, shown.append, lambda _: nullcontext(lambda _: None))
    asked = Job(task="raycloud.metrics:Mean", steps=5, elastic={"max_workers": 3})
    assert trial._held(asked) == (apart, None)
    assert [job.most_workers for job in trained] == [1]
    why = "the loss is not finite" if fails == "the run" else "there is no checkpoint"
    assert shown[-1] == f"what rounding does is not known, since that run failed: {why}"
    told = replace(outcome, difference=apart, bound=None)
    assert not told.proved
    assert (
        "  parameters    NOT KNOWN: 4e-15 apart at most in model/a, over 7 tensors; what rounding "
        "does in float32 could not be found out\n"
    ) in outcome_text(told)
    json.dumps(told.to_record(), allow_nan=False)


def test_a_cluster_is_taken(job: Path, ran: list[Any], tmp_path: Path) -> None:
    code, _, _ = call(job, "--seed", 1, "--out", tmp_path / "out", RAY_ADDRESS="10.0.0.1:6379")
    assert (code, ran[4]) == (0, "10.0.0.1:6379")


def test_a_place_that_is_taken_is_refused(job: Path, ran: list[Any], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    code, _, notes = call(job, "--seed", 1, "--out", tmp_path / "out")
    assert (code, len(ran)) == (2, 1)
    assert "--out" in notes
