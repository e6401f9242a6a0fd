"""Runs of a cluster: which logs are read for their cards and how much of them, and a quiet one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from typer.testing import CliRunner

from raycloud import cli
from raycloud.clock import VirtualClock
from raycloud.errors import MachineError, RunDirectoryError
from raycloud.on_ray import submission
from raycloud.on_ray.jobs_api import ENDED_CARDS, JobsApi
from raycloud.on_ray.registration import Registration
from raycloud.on_ray.submission import Patience
from raycloud.report.run_status import RunStatus, to_line
from tests.jobs_server import Api, serving

BRISK = Patience(gone_s=60.0, again_s=0.0, soon_s=0.0)


@pytest.fixture(autouse=True)
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No token, and no cluster but the test's."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)


def listed(name: str, *, alive: bool = True, at: int = 0, submitted: bool = True) -> dict[str, Any]:
    """A run as Ray lists it."""
    said = Registration(run=f"run-{name}", job="gpt", directory=f"/runs/{name}", log=f"{name}.log")
    return {
        "type": "SUBMISSION" if submitted else "DRIVER",
        "job_id": name,
        "submission_id": name if submitted else None,
        "driver_info": {"id": name, "node_ip_address": "10.0.0.1", "pid": "7"},
        "status": "RUNNING" if alive else "FAILED",
        "entrypoint": "raycloud train job.yaml",
        "start_time": 1000 * at,
        "metadata": said.to_metadata(),
        "driver_node_id": "n1",
    }


def card(name: str, step: int = 3) -> str:
    one = RunStatus(run=f"run-{name}", job="gpt", status="running", t=1.0, step=step)
    return to_line(one) + "\n"


def test_a_card_is_looked_for_in_the_end_of_a_log_only() -> None:
    long = "a line\n" * 5000 + card("a")
    api = Api(jobs=[listed("a"), listed("b", submitted=False)])
    api.logs = {"a": long, "b.log": long}
    with serving(api):
        runs = JobsApi.at(api.url).with_cards(JobsApi.at(api.url).runs())
    assert [run.card.step for run in runs if run.card] == [3, 3]
    logs = [path for path in api.asked if "/logs" in path]
    assert len(logs) == 2
    assert all(path.startswith("/api/v0/logs/file?lines=400&") for path in logs)


def test_a_log_that_cannot_be_read_hides_no_other_run() -> None:
    api = Api(jobs=[listed("a", at=3), listed("b", at=2), listed("c", alive=False, at=1)])
    api.logs = {"a": card("a")}
    with serving(api):
        jobs = JobsApi.at(api.url)
        runs = jobs.with_cards(jobs.runs())
        assert jobs.find("b").unread  # it can be found and stopped all the same
    assert [run.id for run in runs] == ["a", "b", "c"]
    cards = [run.standing(VirtualClock(9.0)) for run in runs]
    assert [one.status for one in cards] == ["running", "unreadable", "failed"]
    assert cards[0].error is None
    for one in cards[1:]:
        assert "its log cannot be read" in (one.error or "")
        assert "Agent for node id" in (one.error or "")


def test_a_run_that_has_not_begun_has_no_log_to_read() -> None:
    waiting = listed("a") | {"status": "PENDING", "driver_node_id": None, "driver_info": None}
    with serving(Api(jobs=[waiting])) as api:
        jobs = JobsApi.at(api.url)
        (run,) = jobs.with_cards(jobs.runs())
    assert (run.standing(VirtualClock()).status, run.unread) == ("waiting", "")


def test_of_ended_runs_the_newest_are_asked() -> None:
    ended = [listed(f"e{n}", alive=False, at=n) for n in range(ENDED_CARDS + 5)]
    alive = [listed(f"a{n}", at=-n) for n in range(30)]
    api = Api(jobs=[*ended, *alive])
    api.logs = {one["submission_id"]: card(one["submission_id"]) for one in api.jobs}
    with serving(api):
        jobs = JobsApi.at(api.url)
        runs = jobs.runs()
        found = jobs.with_cards(runs)
    assert [run.id for run in found] == [run.id for run in runs]
    assert {run.id for run in found if run.card is None} == {f"e{n}" for n in range(5)}
    logs = [path for path in api.asked if "/logs" in path]
    assert len(logs) == len(runs) - 5
    assert all("submission_id=a" in path for path in logs[:20])  # some are asked at once


def test_no_run_has_an_empty_name() -> None:
    """As `raycloud stop "$ID"` says it where ID is not set."""
    unnamed = listed("a") | {"metadata": {}}
    with serving(Api(jobs=[unnamed], logs={"a": ""})) as api:
        jobs = JobsApi.at(api.url)
        for name in ("", " "):
            with pytest.raises(RunDirectoryError, match="knows no run"):
                jobs.find(name)
        assert jobs.find("a").name == ""
    assert not any("stop" in path for path in api.asked)


class Quiet(Api):
    """A driver's log that is silent in its middle, longer than anybody listens."""

    opened = 0

    def __init__(self, **known: Any) -> None:
        super().__init__(**known)
        self._again = asyncio.Event()

    async def job(self, request: web.Request) -> web.Response:
        ended = listed("q", submitted=False, alive=self.opened < 2)
        return web.json_response(ended)

    async def stream(self, request: web.Request) -> web.StreamResponse:
        self.opened += 1
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"one\ntwo\n")
        if self.opened == 1:
            await self._again.wait()
        elif self.opened == 2:
            self._again.set()
            await response.write(b"three\n" + b"fo")
            assert request.transport is not None
            request.transport.abort()
        else:
            await response.write(b"three\nfour\n")
        return response


def test_a_quiet_log_is_no_error_and_no_line_comes_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "QUIET_S", 0.05)
    api = Quiet(jobs=[listed("q", submitted=False)], logs={"q.log": ""})
    with serving(api):
        jobs = JobsApi.at(api.url)
        lines = jobs.follow(jobs.find("q"), patience=BRISK)
        assert [next(lines), next(lines)] == ["one", "two"]
        assert list(lines) == ["three", "four"]
    assert api.opened == 3


def test_a_log_that_nobody_can_read_is_given_up() -> None:
    with serving(Api(jobs=[listed("d", submitted=False)])) as api:
        jobs = JobsApi.at(api.url)
        hasty = Patience(gone_s=0.0, again_s=0.0, soon_s=0.0)
        with pytest.raises(MachineError, match="Agent for node id"):
            list(jobs.follow(jobs.find("d"), patience=hasty))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current directory that is a run's."""
    (tmp_path / "job.yaml").write_text("task: raycloud.metrics:Mean\nsteps: 1\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(*words: str) -> Any:
    return CliRunner().invoke(cli.app, words)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("command", ["stop", "logs", "status"])
def test_an_empty_name_is_not_the_current_directory(command: str) -> None:
    for name in ("", " "):
        result = call(command, name)
        assert (result.exit_code, result.stdout) == (2, "")
        assert "names no run" in result.stderr


def test_status_says_why_runs_stand_there_bare() -> None:
    ended = [listed(f"e{n}", alive=False, at=n) for n in range(ENDED_CARDS + 2)]
    api = Api(jobs=[*ended, listed("b", at=99)], logs={one["job_id"]: "" for one in ended})
    with serving(api):
        text = call("status", "--address", api.url)
        record = call("status", "--address", api.url, "--json")
    assert text.exit_code == record.exit_code == 0, text.stderr
    assert "b: its log cannot be read: " in text.stdout
    assert text.stdout.endswith("2 older runs were not asked: `raycloud status RUN` shows one\n")
    runs = json.loads(record.stdout)["runs"]
    assert len(runs) == ENDED_CARDS + 3
    assert "its log cannot be read" in runs[0]["error"]


def test_logs_as_json_are_an_object_a_line() -> None:
    lines = ['note\x07 token="hunter2hunter2"', '{"mine": 1}', "raycloud-card {broken", "", "ü"]
    api = Api(jobs=[listed("a")])
    api.logs = {"a": "\n".join([lines[0], card("a", 7).strip(), *lines[1:]]) + "\n"}
    with serving(api):
        result = call("logs", "a", "--json", "--address", api.url)
    assert result.exit_code == 0, result.stderr
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert [one["kind"] for one in found] == ["note", "card", "note", "note", "note", "note"]
    assert (found[1]["step"], found[1]["status"]) == (7, "running")
    assert [one["text"] for one in found[2:]] == lines[1:]
    assert "hunter2" not in result.stdout


def test_a_members_entries_are_json_as_they_are_kept(here: Path) -> None:
    (here / "logs").mkdir()
    entry = '{"t": 0, "level": "INFO", "logger": "task", "message": "ü"}'
    (here / "logs/member-7.jsonl").write_text(entry + "\ntorn {\n[1]\n")
    result = call("logs", str(here), "--member", "7", "--json")
    assert result.exit_code == 0, result.stderr
    kept, *others = result.stdout.splitlines()
    assert kept == entry
    assert [json.loads(one) for one in others] == [
        {"kind": "note", "text": "torn {"},
        {"kind": "note", "text": "[1]"},
    ]
