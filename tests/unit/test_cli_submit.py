"""`submit`: what it says would travel, and what it says when it loses sight of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from typer.testing import CliRunner

from raycloud import cli
from raycloud.on_ray import submission
from raycloud.on_ray.submission import Patience
from tests.jobs_server import LOG, Api, serving


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a job; a home, and no token."""
    folder = tmp_path / "project"
    folder.mkdir()
    text = "task: raycloud.metrics:Mean\nsteps: 4\nglobal_batch: 8\nmicro_batch: 4\n"
    (folder / "job.yaml").write_text(text)
    (folder / "ü.txt").write_text("12345")
    (folder / ".env").write_text("PASSWORD=never\n")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    return folder


def call(*words: str) -> Any:
    return CliRunner().invoke(cli.app, words)


def test_what_would_travel_as_json(project: Path) -> None:
    result = call("submit", "job.yaml", "--dry-run", "--json")
    assert result.exit_code == 0, result.stderr
    record = json.loads(result.stdout)
    sizes = {one["path"]: one["bytes"] for one in record["files"]}
    assert sizes == {"job.yaml": (project / "job.yaml").stat().st_size, "ü.txt": 5}
    assert [one["path"] for one in record["left"]] == [".env"]
    assert record["left"][0]["reason"]
    assert record["total_bytes"] == sum(sizes.values())
    assert (record["format"], record["working_dir"]) == (2, str(project))


def test_json_is_of_what_would_travel() -> None:
    result = call("submit", "job.yaml", "--json", "--address", "http://127.0.0.1:9")
    assert result.exit_code == 2
    assert "--dry-run" in result.stderr


class Vanishing(Api):
    """Its job's log breaks off, and then nobody knows of it any more."""

    async def job(self, request: web.Request) -> web.Response:
        if self.followed:
            return web.Response(status=503, text="starting")
        return await super().job(request)


def test_who_loses_sight_of_a_run_is_told_the_ways_back(monkeypatch: pytest.MonkeyPatch) -> None:
    hasty = Patience(gone_s=0.0, again_s=0.0, soon_s=0.0)
    monkeypatch.setitem(submission.log_lines.__kwdefaults__, "patience", hasty)
    with serving(Vanishing(breaks=1)) as api:
        result = call("submit", "job.yaml", "--address", api.url)
    assert result.exit_code == 3, result.stderr
    assert LOG[0] in result.stderr
    name = result.stdout.strip()
    told, _, error = result.stderr.partition("error: ")
    assert f"lost sight of {name}, which may go on" in told
    for word in ("logs", "status", "stop"):
        assert f"  raycloud {word} {name}" in told
    assert error
