"""Speaking to a Jobs API: what is sent and to whom, how answers are told, a log that breaks."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import ray
from aiohttp import web

from raycloud.errors import JobError, MachineError
from raycloud.on_ray.submission import (
    Submission,
    client,
    exit_code,
    log_lines,
    outcome,
    submit,
)

TOKEN = "0f" * 32
LOG = [f"line {n}\n" for n in range(50)]


@dataclass
class Api:
    """What answers in the place of a head: Ray's paths, and what was asked of them."""

    token: str | None = None
    breaks: int = 0
    status: str = "SUCCEEDED"
    code: int | None = 0
    url: str = ""
    packages: dict[str, bytes] = field(default_factory=dict)
    submitted: list[dict[str, Any]] = field(default_factory=list)
    shown: list[str | None] = field(default_factory=list)
    followed: int = 0

    @web.middleware
    async def guard(self, request: web.Request, handler: Any) -> Any:
        self.shown.append(request.headers.get("Authorization"))
        if self.token is not None:
            if "Authorization" not in request.headers:
                return web.Response(status=401, text="Unauthorized: Missing token")
            if request.headers["Authorization"] != f"Bearer {self.token}":
                return web.Response(status=403, text="Forbidden: Invalid token")
        return await handler(request)

    async def version(self, _: web.Request) -> web.Response:
        known = {"version": "4", "ray_version": ray.__version__, "ray_commit": "x"}
        return web.json_response(known)

    async def has(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if request.match_info["name"] in self.packages else 404)

    async def put(self, request: web.Request) -> web.Response:
        self.packages[request.match_info["name"]] = await request.read()
        return web.Response()

    async def start(self, request: web.Request) -> web.Response:
        self.submitted.append(await request.json())
        told = self.submitted[-1]["submission_id"]
        return web.json_response({"job_id": told, "submission_id": told})

    async def job(self, request: web.Request) -> web.Response:
        if request.match_info["id"] == "gone":
            return web.Response(status=404, text="Job gone does not exist")
        ended = self.followed > self.breaks
        answer = {"type": "SUBMISSION", "entrypoint": "x", "submission_id": "x-1"}
        ending = {"status": self.status, "driver_exit_code": self.code, "message": "it says why"}
        return web.json_response(answer | (ending if ended else {"status": "RUNNING"}))

    async def tail(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        self.followed += 1
        broken = self.followed <= self.breaks
        text = "".join(LOG)
        for at in range(0, len(text) // 2 if broken else len(text), 7):
            await socket.send_str(text[at : at + 7])
        if broken and request.transport is not None:
            request.transport.abort()
        return socket


@contextlib.contextmanager
def serving(api: Api) -> Iterator[Api]:
    """Serve from a thread of its own."""
    loop, ready, done = asyncio.new_event_loop(), threading.Event(), asyncio.Event()

    async def serve() -> None:
        app = web.Application(middlewares=[api.guard], client_max_size=2**26)
        app.router.add_get("/api/version", api.version)
        app.router.add_get("/api/packages/{protocol}/{name}", api.has)
        app.router.add_put("/api/packages/{protocol}/{name}", api.put)
        app.router.add_post("/api/jobs/", api.start)
        app.router.add_get("/api/jobs/{id}", api.job)
        app.router.add_get("/api/jobs/{id}/logs/tail", api.tail)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        api.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()
        await done.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert ready.wait(20)
        yield api
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join()
        loop.close()


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No token but the test's, and everything that could lead elsewhere."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    nobody = "http://127.0.0.1:9"
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, nobody)
    (tmp_path / ".netrc").write_text("default login me password hunter2\n")
    (tmp_path / ".netrc").chmod(0o600)


def test_the_package_arrives_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    package = tmp_path / "package.zip"
    package.write_bytes(b"PK and what follows" * 1000)
    with serving(Api(token=TOKEN)) as api:
        asked = Submission(
            id="x-1", entrypoint="raycloud train", package=package, metadata={"raycloud.run": "x"}
        )
        for _ in range(2):
            assert submit(client(api.url), asked) == "x-1"
    assert list(api.packages.values()) == [package.read_bytes()]
    (name,) = api.packages
    assert hashlib.sha1(package.read_bytes()).hexdigest() in name
    first, second = api.submitted
    assert first == second
    assert first["runtime_env"]["working_dir"] == f"gcs://{name}"
    assert first["runtime_env"]["env_vars"] == {"RAY_JOB_STOP_WAIT_TIME_S": "300"}
    assert first["metadata"] == {"raycloud.run": "x"}
    assert set(api.shown) == {f"Bearer {TOKEN}"}


def test_no_token_is_shown_where_there_is_none() -> None:
    with serving(Api()) as api:
        client(api.url)
    assert set(api.shown) == {None}


def test_a_token_that_is_wanted_or_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(Api(token=TOKEN)) as api:
        with pytest.raises(JobError, match="asks for a token, and got none") as raised:
            client(api.url)
        assert "RAY_AUTH_TOKEN" in raised.value.hint
        monkeypatch.setenv("RAY_AUTH_TOKEN", "0e" * 32)
        with pytest.raises(JobError, match="refuses this token") as refused:
            client(api.url)
    assert "0e" * 32 not in str(refused.value)
    assert TOKEN not in str(raised.value) + str(refused.value)


def test_nobody_answers() -> None:
    with serving(Api()) as api:
        pass
    with pytest.raises(MachineError, match="no Jobs API answers") as raised:
        client(api.url)
    assert "8265" in raised.value.hint


def test_an_answer_that_leads_elsewhere_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)

    class Leading(Api):
        async def version(self, _: web.Request) -> web.Response:
            raise web.HTTPFound(elsewhere.url + "/api/version")

    with (
        serving(Api()) as elsewhere,
        serving(Leading()) as api,
        pytest.raises(MachineError),
    ):
        client(api.url)
    assert elsewhere.shown == []


@pytest.mark.parametrize("breaks", [0, 2])
def test_a_log_comes_once_however_often_it_breaks(breaks: int) -> None:
    with serving(Api(breaks=breaks)) as api:
        jobs = client(api.url)
        assert [line + "\n" for line in log_lines(jobs, "x-1")] == LOG
        assert api.followed >= breaks + 1
        assert exit_code(outcome(jobs, "x-1")) == 0


def test_a_log_of_a_job_that_is_not_there() -> None:
    with serving(Api()) as api, pytest.raises(MachineError, match="does not exist"):
        list(log_lines(client(api.url), "gone"))


@pytest.mark.parametrize(
    ("status", "code", "exits"),
    [
        ("SUCCEEDED", 0, 0), ("FAILED", 2, 2), ("FAILED", 3, 3), ("FAILED", -9, 3),
        ("STOPPED", None, 130), ("STOPPED", 130, 130), ("FAILED", 130, 130),
    ],
)  # fmt: skip
def test_it_ends_as_the_driver_ended(status: str, code: int | None, exits: int) -> None:
    with serving(Api(status=status, code=code, followed=1)) as api:
        assert exit_code(outcome(client(api.url), "x-1")) == exits


@pytest.mark.parametrize(("code", "why"), [(None, "it says why"), (127, "no `raycloud` on its")])
def test_a_driver_that_never_ran(code: int | None, why: str) -> None:
    with (
        serving(Api(status="FAILED", code=code, followed=1)) as api,
        pytest.raises(MachineError, match=why),
    ):
        exit_code(outcome(client(api.url), "x-1"))
