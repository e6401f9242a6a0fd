"""Run directories: nothing is overwritten, and a resumed run keeps its order of samples."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from raycloud.errors import RunDirectoryError, SpecError
from raycloud.spec import Job, RunDirectory, SpecErrors, check_resume, choose, dump_job


def job(**values: Any) -> Job:
    return Job(**{"task": "gpt.py:Gpt", "steps": 10, **values})


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def make_run(path: Path) -> Path:
    path.mkdir(parents=True)
    RunDirectory(path).job_yaml.write_text(dump_job(job()))
    return path


def test_what_lies_where(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    names = ("job_yaml", "plan_json", "events_jsonl", "ledger", "checkpoints", "tensorboard")
    assert [getattr(run, name).relative_to(tmp_path).as_posix() for name in names] == [
        "job.yaml",
        "plan.json",
        "events.jsonl",
        "ledger",
        "checkpoints",
        "tensorboard",
    ]
    assert run.summary_json == tmp_path / "summary.json"


def test_the_job_of_a_run(runs: Path) -> None:
    run = RunDirectory(make_run(runs / "gpt-1"))
    assert run.job() == job().resolved()


def test_first_free_number(runs: Path) -> None:
    chosen = [choose(None, "gpt", resume=False, root=runs).path.name for _ in range(3)]
    assert chosen == ["gpt-1", "gpt-2", "gpt-3"]
    assert choose(None, "other", resume=False, root=runs).path == runs / "other-1"
    assert all((runs / name).is_dir() for name in chosen)


def test_a_number_that_is_taken_by_a_file(runs: Path) -> None:
    runs.mkdir()
    (runs / "gpt-1").touch()
    assert choose(None, "gpt", resume=False, root=runs).path.name == "gpt-2"


def test_many_runs_that_start_at_once_do_not_share(runs: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        started = [pool.submit(choose, None, "gpt", resume=False, root=runs) for _ in range(40)]
        chosen = [future.result().path for future in started]
    assert sorted(chosen) == sorted(runs / f"gpt-{n}" for n in range(1, 41))


def test_a_directory_of_ones_own(runs: Path) -> None:
    assert choose(runs / "a" / "b", "gpt", resume=False).path == runs / "a" / "b"
    assert choose(str(runs / "a" / "b"), "gpt", resume=False).path.is_dir()  # still empty


def test_resume(runs: Path) -> None:
    path = make_run(runs / "gpt-1")
    assert choose(path, "gpt", resume=True).path == path


def ended_early(runs: Path) -> Path:
    return make_run(runs / "gpt-7")


def taken(runs: Path) -> Path:
    path = ended_early(runs)
    (path / "checkpoints/step-00000004").mkdir(parents=True)
    (path / "checkpoints/step-00000004/manifest.json").touch()
    return path


def not_a_run(runs: Path) -> Path:
    (runs / "thesis").mkdir(parents=True)
    (runs / "thesis" / "chapter.tex").touch()
    return runs / "thesis"


def a_file(runs: Path) -> Path:
    runs.mkdir()
    (runs / "notes").touch()
    return runs / "notes"


def below_a_file(runs: Path) -> Path:
    return a_file(runs) / "inner"


def missing(runs: Path) -> Path:
    return runs / "gpt-9"


def missing_beside_runs(runs: Path) -> Path:
    make_run(runs / "gpt-2")
    make_run(runs / "gpt-10")
    make_run(runs / "gpt-x")
    return missing(runs)


@pytest.mark.parametrize(
    ("place", "resume", "message", "hint"),
    [
        (
            taken,
            False,
            "RUNS/gpt-7 holds a run already",
            "go on with `raycloud train --resume --run-dir RUNS/gpt-7`, or give another --run-dir",
        ),
        (
            ended_early,
            False,
            "RUNS/gpt-7 holds a run that ended before its first checkpoint",
            "set it aside and begin again with "
            "`raycloud train --resume allow --run-dir RUNS/gpt-7`, or give another --run-dir",
        ),
        (
            not_a_run,
            False,
            "RUNS/thesis is not empty, and what it holds is not a run",
            "give another --run-dir",
        ),
        (a_file, False, "RUNS/notes is a file, not a run directory", "give another --run-dir"),
        (
            below_a_file,
            False,
            "the run directory RUNS/notes/inner cannot be used: Not a directory",
            "give a directory that can be written with --run-dir",
        ),
        (
            missing,
            True,
            "no run to resume: RUNS/gpt-9 does not exist",
            "leave out --resume to start one",
        ),
        (
            missing_beside_runs,
            True,
            "no run to resume: RUNS/gpt-9 does not exist",
            "go on with `raycloud train --resume --run-dir RUNS/gpt-10`",
        ),
        (
            not_a_run,
            True,
            "no run to resume: RUNS/thesis has no job.yaml",
            "leave out --resume to start one",
        ),
        (
            a_file,
            True,
            "no run to resume: RUNS/notes has no job.yaml",
            "leave out --resume to start one",
        ),
        (
            lambda runs: make_run(runs / "gpt-3") and None,
            True,
            "--resume does not say which run",
            "go on with `raycloud train --resume --run-dir RUNS/gpt-3`",
        ),
        (
            lambda _: None,
            True,
            "--resume does not say which run",
            "name its directory: --run-dir DIR; or leave out --resume to start one",
        ),
    ],
)
def test_refused(
    runs: Path, place: Callable[[Path], Path | None], resume: bool, message: str, hint: str
) -> None:
    path = place(runs)
    before = sorted(runs.rglob("*"))
    with pytest.raises(RunDirectoryError) as caught:
        choose(path, "gpt", resume=resume, root=runs)
    assert caught.value.message.replace(str(runs), "RUNS") == message
    assert caught.value.hint.replace(str(runs), "RUNS") == hint
    assert sorted(runs.rglob("*")) == before


def test_a_name_too_long(runs: Path) -> None:
    with pytest.raises(RunDirectoryError, match="cannot be used: File name too long"):
        choose(runs / ("x" * 300), "gpt", resume=False)


@pytest.mark.parametrize(
    "change",
    [
        {"steps": 99},
        {"steps": None, "epochs": 2},
        {"global_batch": 64, "micro_batch": 8},
        {"elastic": {"min_workers": 2, "max_workers": 5, "shares": "equal"}},
        {"checkpoint": {"every_steps": 3, "keep": 1}},
        {"resources": {"worker": {"cpus": 4}}},
        {"settings": {"rate": 1e-3}},
        {"task": "elsewhere/gpt.py:Gpt"},  # moved with its project
        {"precision": "bf16", "clip_norm": 1.0, "name": "again"},
    ],
)
def test_what_a_resumed_run_may_change(change: dict[str, Any]) -> None:
    check_resume(job(), job(**change))


@pytest.mark.parametrize(
    ("change", "message", "hint"),
    [
        ({"seed": 3}, "seed = 3: the run to resume has 0", "write seed 0,"),
        ({"drop_last": True}, "drop_last = True: the run to resume has False", "drop_last false,"),
        ({"data": {"shuffle": False}}, "data.shuffle = False: the run to resume has True", "true,"),
        (
            {"data": {"path": "/b"}},
            "data.path = '/b': the run to resume has None",
            "write data.path null,",
        ),
        (
            {"task": "gpt.py:Small"},
            "task = 'gpt.py:Small': the run to resume has 'gpt.py:Gpt'",
            "write task gpt.py:Gpt,",
        ),
        (
            {"task": "models.gpt:Gpt"},
            "task = 'models.gpt:Gpt': the run to resume has 'gpt.py:Gpt'",
            "write task gpt.py:Gpt,",
        ),
    ],
)
def test_what_a_resumed_run_may_not_change(change: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(SpecError) as caught:
        check_resume(job(), job(**change))
    assert caught.value.message == f"{message}, which its order of samples follows"
    assert hint in caught.value.hint
    assert caught.value.hint.endswith("or start a new run: without --resume, in another --run-dir")


def test_a_resumed_run_keeps_the_place_of_its_checkpoints() -> None:
    with pytest.raises(SpecError, match="keeps its checkpoints at null") as caught:
        check_resume(job(), job(checkpoint={"path": "s3://b/x"}))
    assert caught.value.field == "checkpoint.path"
    assert caught.value.hint == "write checkpoint.path null, or move them and start a new run"


def test_all_that_may_not_change_comes_in_one_error() -> None:
    with pytest.raises(SpecErrors, match=re.escape("2 mistakes in the job")) as caught:
        check_resume(job(), job(seed=1, drop_last=True))
    assert [caught.value.field, caught.value.all[1:][0].field] == ["seed", "drop_last"]


def test_relative_and_absolute_data_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check_resume(job(data={"path": f"{tmp_path}/text"}), job(data={"path": "./text"}))
