"""Speaking to a Jobs API: what is sent and to whom, how answers are told, a log that breaks."""

from __future__ import annotations

import io
import ssl
import zipfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiohttp import web

from raycloud.clock import VirtualClock
from raycloud.errors import JobError, MachineError
from raycloud.on_ray.submission import (
    Endpoint,
    JobsClient,
    Patience,
    Watch,
    client,
    exit_code,
    log_lines,
    outcome,
    packed_by_ray,
    submit,
)
from raycloud.packing.working_dir import survey
from tests.jobs_server import LOG, Api, certificate_at, serving

TOKEN = "0f" * 32
BRISK = Patience(gone_s=60.0, again_s=0.01, soon_s=0.0)
HASTY = Patience(gone_s=0.0, again_s=0.0, soon_s=0.0)


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


def test_what_was_checked_arrives_packed_by_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    project = tmp_path / "project"
    project.mkdir()
    for name in ("a.py", ".env", "server.pem"):
        (project / name).write_text("x")
    found = survey(project, packed_by_ray)
    with serving(Api(token=TOKEN)) as api:
        for _ in range(2):
            sent = submit(
                client(api.url),
                found,
                submission_id="x-1",
                entrypoint="raycloud train",
                metadata={"raycloud.run": "x"},
            )
            assert sent == "x-1"
    ((name, package),) = api.packages.items()
    with zipfile.ZipFile(io.BytesIO(package)) as archive:
        assert archive.namelist() == ["a.py"]
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
    with pytest.raises(MachineError, match=r"no Jobs API answers at .*: .*refused") as raised:
        client(api.url)
    assert "8265" in raised.value.hint


class Leading(Api):
    """Sends those who come for the version, or for a log, to somebody else."""

    def __init__(self, elsewhere: str, *, log: bool = False) -> None:
        super().__init__()
        self._elsewhere, self._log = elsewhere, log

    async def version(self, request: web.Request) -> web.StreamResponse:
        if self._log:
            return await super().version(request)
        raise web.HTTPFound(f"{self._elsewhere}/login?session=hunter2")

    async def tail(self, request: web.Request) -> web.StreamResponse:
        raise web.HTTPTemporaryRedirect(self._elsewhere + request.path)


def test_an_answer_that_leads_elsewhere_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    with serving(Api()) as elsewhere:
        with serving(Leading(elsewhere.url)) as api:
            with pytest.raises(MachineError, match=f"it leads to {elsewhere.url}, not") as raised:
                client(api.url)
            assert "hunter2" not in str(raised.value)
        with serving(Leading(elsewhere.url, log=True)) as api:
            jobs = client(api.url)
            with pytest.raises(MachineError, match=f"it leads to {elsewhere.url}, not"):
                list(log_lines(jobs, "x-1", patience=HASTY))
            assert f"Bearer {TOKEN}" in api.shown
    assert elsewhere.shown == []


def test_no_proxy_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy would be given the token, and the package, in clear."""
    with serving(Api()) as api, serving(Api()) as proxy:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url)
        jobs = JobsClient(Endpoint(url=api.url, token=TOKEN))
        assert [line + "\n" for line in log_lines(jobs, "x-1", patience=BRISK)] == LOG
        assert proxy.asked == []
        assert set(api.shown) == {f"Bearer {TOKEN}"}


def test_a_server_is_checked_with_the_certificates_that_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    own = certificate_at(tmp_path / "own.pem")
    with serving(Api(), certificate=own) as api:
        with pytest.raises(MachineError, match="certificate verify failed"):
            client(api.url)
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(own))
        jobs = client(api.url)
        assert [line + "\n" for line in log_lines(jobs, "x-1", patience=BRISK)] == LOG


def test_a_certificate_that_is_refused_is_not_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the log as of all else: another look would not mend it."""
    own, other = (certificate_at(tmp_path / f"{name}.pem") for name in ("own", "other"))
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(own))
    with serving(Api(), certificate=own) as api:
        jobs, misled = client(api.url), client(api.url)
        misled._session.verify = str(other)
        looks = len(api.asked)
        with pytest.raises(MachineError, match="certificate verify failed"):
            list(log_lines(misled, "x-1"))
        jobs._ssl_context = ssl.create_default_context(cafile=str(other))
        with pytest.raises(MachineError, match="certificate verify failed"):
            list(log_lines(jobs, "x-1"))
        assert len(api.asked) == looks + 1  # for the status; neither came to a log


class Json(Api):
    """Some other service, whose version is this."""

    def __init__(self, said: Any) -> None:
        super().__init__()
        self._said = said

    async def version(self, _: web.Request) -> web.StreamResponse:
        if self._said is None:
            raise web.HTTPNotFound
        if isinstance(self._said, str) and self._said.startswith("<"):
            return web.Response(text=self._said, content_type="text/html")
        return web.json_response(self._said)


@pytest.mark.parametrize(
    "said",
    [
        {"version": "1.2"}, {"ray_version": "main"}, {"ray_version": None}, {"ray_version": 3},
        ["x"], "text", 7, None, "<html>Welcome</html>",
    ],
)  # fmt: skip
def test_another_service_is_told_from_a_jobs_api(said: Any) -> None:
    with (
        serving(Json(said)) as api,
        pytest.raises(MachineError, match="something else than a Jobs API answers") as raised,
    ):
        client(api.url)
    assert "8265" in raised.value.hint


@pytest.mark.parametrize("breaks", [0, 2])
def test_a_log_comes_once_however_often_it_breaks(breaks: int) -> None:
    with serving(Api(breaks=breaks)) as api:
        jobs = client(api.url)
        assert [line + "\n" for line in log_lines(jobs, "x-1", patience=BRISK)] == LOG
        assert api.followed >= breaks + 1
        assert exit_code(outcome(jobs, "x-1")) == 0


class Returning(JobsClient):
    """Brings the server back before its third look at a server that has gone."""

    def __init__(self, api: Api, servers: ExitStack) -> None:
        super().__init__(Endpoint(url=api.url, token=None))
        self._api, self._servers = api, servers
        self.looks: int | None = None

    def get_job_info(self, job_id: str) -> Any:
        if self.looks is not None:
            self.looks += 1
            if self.looks == 3:
                self._servers.enter_context(
                    serving(self._api, port=urlsplit(self._api.url).port or 0)
                )
        return super().get_job_info(job_id)


def test_a_cluster_that_goes_away_and_comes_back() -> None:
    api = Api(breaks=1)
    with ExitStack() as servers:
        with serving(api):
            jobs = Returning(api, servers)
            lines = log_lines(jobs, "x-1", patience=BRISK)
            found = [next(lines)]
        jobs.looks = 0
        found += lines
        assert [line + "\n" for line in found] == LOG
        assert jobs.looks >= 3
    jobs.looks = 0
    with servers:
        assert exit_code(outcome(jobs, "x-1", patience=BRISK)) == 0
    assert jobs.looks == 3


def test_a_cluster_that_stays_away() -> None:
    with serving(Api(breaks=1)) as api:
        jobs = client(api.url)
        lines = log_lines(jobs, "x-1", patience=HASTY)
        next(lines)
    for gone in (lambda: list(lines), lambda: outcome(jobs, "x-1", patience=HASTY)):
        with pytest.raises(MachineError, match="no Jobs API answers"):
            gone()


def test_a_log_that_was_silent_for_long_has_all_patience_again() -> None:
    clock = VirtualClock()
    watch = Watch("http://x", Patience(gone_s=30.0), clock)
    for _ in range(3):  # each time it answers, has nothing to say for an hour, and breaks off
        with watch.look():
            watch.heard()
            clock.advance(3600.0)
            raise ConnectionError("reset")
        with watch.look():
            clock.advance(29.0)
            raise ConnectionError("refused")
    clock.advance(1.0)
    with pytest.raises(MachineError, match="refused"), watch.look():
        raise ConnectionError("refused")


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
