"""Run directories: nothing is overwritten, and a resumed run keeps its order of samples."""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from raycloud.errors import MachineError, RunDirectoryError, SpecError
from raycloud.spec import (
    RESUMES,
    Job,
    Resume,
    RunDirectory,
    SpecErrors,
    check_resume,
    choose,
    dump_job,
    goes_on,
    resume_word,
)
from raycloud.spec.rundir import (
    ask_range,
    ask_servers,
    parse_range,
    take_range,
    take_servers,
)


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


WHY = "a step has 8 micro-batches"


@pytest.mark.parametrize(
    ("text", "fewest", "most"), [("4", 4, 4), ("2:6", 2, 6), ("1:8", 1, 8), ("3:", 3, 3)]
)
def test_a_range_is_a_number_or_two(text: str, fewest: int, most: int) -> None:
    assert parse_range(text, 8, WHY) == {"min_workers": fewest, "max_workers": most}


@pytest.mark.parametrize("text", ["", "a", "0", "4:2", "0:2", "-1", "2:6:8", "1.5", ":4"])
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="no range of workers") as refused:
        parse_range(text, 8, WHY)
    assert "2:6" in refused.value.hint


def test_more_workers_than_micro_batches_are_refused() -> None:
    with pytest.raises(SpecError, match="8 micro-batches") as refused:
        parse_range("2:9", 8, WHY)
    assert "at most 8" in refused.value.hint


def test_a_wish_is_taken_once_and_the_last_one_counts(tmp_path: Path) -> None:
    assert take_range(tmp_path) is None
    ask_range(tmp_path, {"min_workers": 1, "max_workers": 2})
    ask_range(tmp_path, {"min_workers": 2, "max_workers": 6})
    assert take_range(tmp_path) == {"min_workers": 2, "max_workers": 6}
    assert take_range(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


GOOD = {"format": 1, "min_workers": 1, "max_workers": 2}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "null",
        "{",
        json.dumps({**GOOD, "format": 2}),
        json.dumps({"format": 1, "min_workers": 1}),
        json.dumps({**GOOD, "min_workers": 3}),
        json.dumps({**GOOD, "min_workers": 0}),
        json.dumps({**GOOD, "min_workers": True}),
        json.dumps({**GOOD, "max_workers": "2"}),
        json.dumps({**GOOD, "more": "x" * 20_000}),
        "[" * 5_000,
    ],
)
def test_a_wish_that_lies_is_passed_over_once(tmp_path: Path, content: str) -> None:
    (tmp_path / "range.request").write_text(content)
    with pytest.raises(ValueError):  # noqa: PT011 - each says something else
        take_range(tmp_path)
    assert take_range(tmp_path) is None


def test_a_pipe_in_its_place_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "range.request")
    with pytest.raises(ValueError, match="cannot be taken"):
        take_range(tmp_path)
    assert take_range(tmp_path) is None


def test_where_it_cannot_be_left_that_is_said(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="cannot leave a wish"):
        ask_range(tmp_path / "gone", {"min_workers": 1, "max_workers": 1})


def test_a_wish_for_servers_is_taken_once(tmp_path: Path) -> None:
    assert take_servers(tmp_path) is None
    for count in (2, 3):
        ask_servers(tmp_path, count)
    assert take_servers(tmp_path) == 3
    assert take_servers(tmp_path) is None
    (tmp_path / "servers.request").write_text(json.dumps({"format": 1, "servers": "3"}))
    with pytest.raises(ValueError, match="'3' is no number of servers"):
        take_servers(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("count", [0, -1, 1025])
def test_what_is_no_number_of_servers_is_refused(tmp_path: Path, count: int) -> None:
    with pytest.raises(SpecError, match="no number of servers") as refused:
        ask_servers(tmp_path, count)
    assert "from 1 to 1024" in refused.value.hint
