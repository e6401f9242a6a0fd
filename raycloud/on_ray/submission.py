"""Ray's Jobs API: sending a working directory, following a job's log, and how a job ended.

Ray's own client would let `RAY_ADDRESS` take the place of the address that was given, follow a
redirect, and ask a proxy or `~/.netrc` on the way: each could carry the token elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import math
import re
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import urlsplit

import aiohttp
import ray
import requests
from ray.dashboard.modules.dashboard_sdk import SubmissionClient
from ray.exceptions import AuthenticationError
from ray.job_submission import JobSubmissionClient

from raycloud.clock import Clock, SystemClock
from raycloud.errors import JobError, MachineError, RaycloudError, SpecError
from raycloud.packing.working_dir import copied
from raycloud.spec import Environment
from raycloud.spec.environment import ray_token

if TYPE_CHECKING:
    from ray.dashboard.modules.job.pydantic_models import JobDetails
    from requests import PreparedRequest, Response

    from raycloud.packing.working_dir import WorkingDir

LOCAL = "http://127.0.0.1:8265"
_ASK_S = 30.0
_SEND_S = 600.0  # a package over a thin link
# A followed log in which nothing came for so long is opened again: its other side may be gone, as
# after a sleep of this machine.
QUIET_S = 60.0
_PROBE_S, _PROBES = 20, 3  # of a websocket's TCP connection, for the same reason
_REFUSED = (401, 403)
_NOT_FOUND = 404
_SERVER_ERROR = 500
_FAREWELLS = 3  # turns of a loop, in which an encrypted connection that was closed is let go
_MACHINE = 3
_EXITS = {"SUCCEEDED": 0, "STOPPED": 130}
_STOP_S = 300  # how long a stopped job may take to write its checkpoint before it is killed
_QUIET = logging.getLogger("raycloud.packing")
_NO_COMMAND = 127  # what a shell says of a command that is not there
_VERSION = "/api/version"
_CERTIFICATES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")  # as requests reads them

TOKEN_HINT = (
    "set RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH to a file that only you may read, or keep it in "
    "~/.ray/auth_token"
)
TUNNEL_HINT = "go through `ssh -L 8265:127.0.0.1:8265 HEAD` and --address http://127.0.0.1:8265"


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """Where a cluster's Jobs API answers, checked by `endpoint`.

    Attributes:
        url: `http://host:port` or `https://...`, without a path.
        token: What is shown there; None shows nothing.
        certificates: A file or folder of those that an https server is checked with; None: those
            that come with `requests`.
    """

    url: str
    token: str | None = field(repr=False)
    certificates: Path | None = None

    @property
    def headers(self) -> dict[str, str]:
        """What each request carries."""
        return {} if self.token is None else {"Authorization": f"Bearer {self.token}"}

    def refused(self) -> JobError:
        """What to raise where the cluster does not take what it was shown."""
        if self.token is None:
            what, hint = "asks for a token, and got none", TOKEN_HINT
        else:
            what, hint = "refuses this token", f"it is another cluster's: {TOKEN_HINT}"
        return JobError(f"the cluster at {self.url} {what}", hint=hint)


def endpoint(
    address: str | None, *, insecure: bool = False, environment: Environment | None = None
) -> Endpoint:
    """Decide whether a cluster may be spoken to; speaks to nobody.

    Args:
        address: `http://host:port`, `https://host:port` or `host:port`; None takes
            `RAY_API_SERVER_ADDRESS`, then a `RAY_ADDRESS` with `http`, then this machine's 8265.
        insecure: Whether a token and code may go out in clear.
        environment: None: this process's.

    Raises:
        SpecError: The address is none, or leads elsewhere than this machine without a token, or in
            clear; or the certificates for it are not where a variable says.
    """
    environment = environment or Environment.from_process()
    url, host = _parsed(address or environment.jobs_address or LOCAL)
    encrypted, loopback = url.startswith("https:"), _is_loopback(host)
    if not (encrypted or loopback or insecure):
        what = "is not this machine, and http sends the token and your code in clear"
        hint = f"{TUNNEL_HINT}; or give an https address; or, on a private network, --insecure"
        raise SpecError("--address", url, what, hint=hint)
    token = ray_token(environment)
    if token is None and not loopback:
        what = "is not this machine, and there is no token to show to it"
        hint = f"start the cluster with RAY_AUTH_MODE=token, and {TOKEN_HINT}"
        raise SpecError("--address", url, what, hint=hint)
    certificates = _certificates(environment) if encrypted else None
    return Endpoint(url=url, token=token, certificates=certificates)


def _certificates(environment: Environment) -> Path | None:
    """Where those lie that servers are checked with, if a variable says it."""
    said = {name: environment.variables.get(name, "").strip() for name in _CERTIFICATES}
    for name, place in said.items():
        if place and not Path(place).exists():
            what = "is neither a file nor a folder of certificates"
            raise SpecError(name, place, what, hint=f"name one that is there, or unset {name}")
        if place:
            return Path(place)
    return None


def _parsed(address: str) -> tuple[str, str]:
    """The address as a URL without a path, and its host."""
    shown, hint = address, f"write http://HOST:8265 or https://HOST, as in {LOCAL}"
    try:
        parts = urlsplit(address if "://" in address else f"http://{address}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise SpecError("--address", address, f"is no address: {error}", hint=hint) from None
    if parts.username is not None or parts.password is not None:
        what = "holds a password; a token is not written into an address"
        shown, hint = f"{parts.scheme}://...@{host}", TOKEN_HINT
    elif parts.scheme not in {"http", "https"} or not host:
        what = "is not the address of a Jobs API"
    elif parts.path.strip("/") or parts.query or parts.fragment:
        what = "has something after the port"
    else:
        named = f"[{host}]" if ":" in host else host
        return f"{parts.scheme}://{named}" + (f":{port}" if port else ""), host
    raise SpecError("--address", shown, what, hint=hint)


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


class AnswerError(RuntimeError):
    """An answer other than the one that was asked for; `status` is its HTTP status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"Request failed with status code {status}: {text}")
        self.status = status


class JobsClient(JobSubmissionClient):
    """A `JobSubmissionClient` for one endpoint."""

    def __init__(self, where: Endpoint) -> None:
        """Ask for the version there; what answers may be no Jobs API: `MachineError`."""
        self._client_ray_version = ray.__version__
        self._where = where
        certificates = where.certificates or requests.utils.DEFAULT_CA_BUNDLE_PATH
        verify = str(certificates) if where.url.startswith("https:") else True
        # Not JobSubmissionClient's: it takes the address from the environment.
        SubmissionClient.__init__(self, where.url, headers=where.headers, verify=verify)
        self._session = requests.Session()
        self._session.trust_env = False  # no proxy, and nothing but the endpoint's own token
        self._session.verify = verify
        answer = self._do_request("GET", _VERSION)
        if not answer.ok and answer.status_code != _NOT_FOUND:
            self._raise_error(answer)
        try:
            known = re.match(r"\d+\.\d", answer.json()["ray_version"])
        except (requests.JSONDecodeError, KeyError, TypeError):
            known = None
        if known is None:
            raise MachineError(
                f"something else than a Jobs API answers at {where.url}: {_VERSION} there names no "
                "version of Ray",
                hint="name the head's dashboard, port 8265 unless it was started with another",
            )

    def get_address(self) -> str:
        """Where it speaks to."""
        return self._where.url

    async def tail_job_logs(self, job_id: str) -> AsyncIterator[str]:
        """A submitted job's log from its beginning, as it comes, until the job has ended.

        As Ray's, but to no other address; silence is no error, a lost connection is.
        """
        traces = aiohttp.TraceConfig()
        traces.on_request_redirect.append(_not_elsewhere)
        url = f"{self._where.url}/api/jobs/{job_id}/logs/tail"
        headers = self._where.headers
        async with aiohttp.ClientSession(headers=headers, trace_configs=[traces]) as session:
            log = await session.ws_connect(url, ssl=self._ssl_context or True)
            connection = log.get_extra_info("socket")
            _probed(connection)
            try:
                async for message in log:
                    if message.type is aiohttp.WSMsgType.TEXT:
                        yield message.data
                    elif message.type is aiohttp.WSMsgType.ERROR:
                        raise ConnectionError(f"the log of {job_id} broke off: {log.exception()}")
                if log.close_code == aiohttp.WSCloseCode.ABNORMAL_CLOSURE:
                    raise ConnectionError(f"the log of {job_id} broke off")
            finally:  # without a farewell: Ray's side would not answer a websocket's
                with contextlib.suppress(OSError):
                    if connection is not None:
                        connection.shutdown(socket.SHUT_RDWR)

    def _do_request(
        self,
        method: str,
        endpoint: str,
        *,
        data: bytes | None = None,
        json_data: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Response:
        waits_s = _SEND_S if method == "PUT" else _ASK_S
        response = self._session.request(
            method,
            self._where.url + endpoint,
            data=data,
            json=json_data,
            auth=self._shown,
            allow_redirects=False,
            timeout=(_ASK_S, QUIET_S if kwargs.get("stream") else waits_s),
            **kwargs,
        )
        if response.status_code in _REFUSED:  # else the text of a log that is followed is not read
            raise self._where.refused()
        if response.is_redirect:
            raise requests.TooManyRedirects(_elsewhere(response.headers["Location"]))
        return response

    def _raise_error(self, r: Response) -> NoReturn:
        raise AnswerError(r.status_code, r.text)

    def _shown(self, request: PreparedRequest) -> PreparedRequest:
        """Requests reads `~/.netrc` unless something like this is given."""
        request.headers.update(self._where.headers)
        return request


async def _not_elsewhere(
    _session: aiohttp.ClientSession, _context: Any, met: aiohttp.TraceRequestRedirectParams
) -> None:
    """Aiohttp has no way to say of a websocket that it follows no redirect."""
    met.response.close()
    raise aiohttp.ClientError(_elsewhere(met.response.headers.get("Location", "")))


def _elsewhere(location: str) -> str:
    """What is said of a redirect: only its host, for the rest may be somebody's session."""
    parts = urlsplit(location)
    host = parts.netloc.rpartition("@")[2]
    return f"it leads to {f'{parts.scheme}://{host}' if host else 'another page'}, not followed"


def _probed(connection: Any) -> None:
    """Let the kernel find out within a minute or so when the other side is gone.

    Ray's side answers no pings of the websocket, so silence tells nothing.
    """
    if connection is None:
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):  # Linux
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)


def client(address: str | None, *, insecure: bool = False) -> JobsClient:
    """A client of the Jobs API at an address, once it has answered; raises as both do."""
    where = endpoint(address, insecure=insecure)
    with speaking(where.url):
        return JobsClient(where)


@contextlib.contextmanager
def speaking(url: str) -> Iterator[None]:
    """Turns what Ray's client raises into errors that say whose fault it is."""
    try:
        yield
    except RaycloudError:
        raise
    except AuthenticationError:  # by Ray's client itself, before it asks
        raise JobError(
            f"RAY_AUTH_MODE is token, and there is no token to show to the cluster at {url}",
            hint=TOKEN_HINT,
        ) from None
    except (aiohttp.ClientError, requests.RequestException, OSError) as error:
        root = _root(error)
        why = (str(root).strip() or type(root).__name__).splitlines()[-1].strip()
        raise MachineError(
            f"no Jobs API answers at {url}: {why}",
            hint="the head's dashboard answers there (port 8265), where ray[default] is installed; "
            f"from outside, {TUNNEL_HINT}",
        ) from error
    except RuntimeError as error:
        raise MachineError(
            f"the Jobs API at {url} failed: {str(error).partition(chr(10))[0]}",
            hint="look for dashboard.log and job logs on the head",
        ) from error


def packed_by_ray(root: Path, stays: Callable[[Path], bool]) -> Iterator[Path]:
    """The files below a working directory that Ray packs, by its ignore files and its defaults."""
    # Private: Ray tells nowhere what it packs. `test_what_is_checked_is_what_ray_packs` holds it.
    from ray._private import ray_constants
    from ray._private.runtime_env.packaging import _dir_travel, _get_excludes

    found: list[Path] = []
    defaults = _get_excludes(root, ray_constants.get_runtime_env_default_excludes())
    setting = ray_constants.RAY_RUNTIME_ENV_IGNORE_GITIGNORE
    ignores = Environment.from_process().variables.get(setting) != "1"
    _dir_travel(root, [defaults, stays], found.append, include_gitignore=ignores, logger=_QUIET)
    return (path for path in found if path.is_file())


def submit(
    jobs: JobSubmissionClient,
    working_dir: WorkingDir,
    *,
    submission_id: str,
    entrypoint: str,
    metadata: dict[str, str],
) -> str:
    """Send a copy of a working directory, and start its job; returns the submission's id.

    Raises as `copied` and `speaking` do.
    """
    waits = {"RAY_JOB_STOP_WAIT_TIME_S": str(_STOP_S)}
    with copied(working_dir) as copy, speaking(jobs.get_address()):
        return jobs.submit_job(
            submission_id=submission_id,
            entrypoint=entrypoint,
            metadata=metadata,
            runtime_env={"working_dir": str(copy), "env_vars": waits},
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """How a job is looked after while its cluster comes and goes."""

    gone_s: float = 30.0  # the cluster may be, from the first failure after which nothing has come
    again_s: float = 1.0  # before the next look
    soon_s: float = 0.1  # the same, while the log goes on


PATIENCE = Patience()


class Watch:
    """One look at a cluster after the other, of which some may fail."""

    def __init__(self, url: str, patience: Patience, clock: Clock) -> None:
        self._url, self._patience, self._clock = url, patience, clock
        self._gone_t: float | None = None
        self._heard_t = -math.inf

    @contextlib.contextmanager
    def look(self) -> Iterator[None]:
        """Around a look: what another one may mend is passed over, until patience ends.

        Raises as `speaking` does, where the cluster says that it cannot be, or is gone.
        """
        began_t = self._clock.monotonic_s()
        try:
            with speaking(self._url):
                yield
        except MachineError as error:
            now_t, gone_s = self._clock.monotonic_s(), self._patience.gone_s
            if self._heard_t >= began_t and now_t - self._heard_t >= gone_s:
                self._gone_t = None  # it was there, and had nothing to say
            self._gone_t = now_t if self._gone_t is None else self._gone_t
            if _is_final(error) or now_t - self._gone_t >= gone_s:
                raise

    def heard(self, *, news: bool = False) -> None:
        """It answers in this look; after news the next failure is a first one."""
        self._heard_t = self._clock.monotonic_s()
        if news:
            self._gone_t = None

    def rest(self, *, soon: bool = False) -> None:
        """Wait for the next look."""
        threading.Event().wait(self._patience.soon_s if soon else self._patience.again_s)


def log_lines(
    jobs: JobSubmissionClient,
    job_id: str,
    *,
    opened: Callable[[], Iterator[str]] | None = None,
    patience: Patience = PATIENCE,
) -> Iterator[str]:
    """The lines of a job's log, from its beginning, as they come, until the job has ended.

    A connection that breaks is made again, and no line comes twice. `opened` opens the log and
    gives its text as it comes; None: that of a submitted job.

    Raises:
        JobError: The token is refused.
        MachineError: The job is not there, or the cluster is gone for `patience.gone_s`.
    """
    watch = Watch(jobs.get_address(), patience, SystemClock())
    told, rest = 0, ""
    while True:
        met, before = 0, told
        with watch.look():
            ended = jobs.get_job_status(job_id).is_terminal()
            watch.heard()
            for chunk in opened() if opened else _chunks(jobs.tail_job_logs(job_id)):
                new, met = chunk[max(0, told - met) :], met + len(chunk)
                told = max(told, met)
                watch.heard(news=bool(new))
                *lines, rest = (rest + new).split("\n")
                yield from lines
            if ended:
                break
            watch.heard(news=True)
        watch.rest(soon=told > before)
    if rest:
        yield rest


def _chunks(tail: AsyncIterator[str]) -> Iterator[str]:
    """An asynchronous iterator's values, in this thread."""
    loop = asyncio.new_event_loop()
    try:
        while True:
            try:
                yield loop.run_until_complete(anext(tail))
            except StopAsyncIteration:
                return
    finally:
        with contextlib.suppress(Exception):
            loop.run_until_complete(tail.aclose())  # type: ignore[attr-defined]
        loop.run_until_complete(loop.shutdown_asyncgens())
        for _ in range(_FAREWELLS):
            loop.run_until_complete(asyncio.sleep(0))
        loop.close()


def outcome(jobs: JobSubmissionClient, job_id: str, *, patience: Patience = PATIENCE) -> JobDetails:
    """How a job ended, once it has; raises as `log_lines` does."""
    watch = Watch(jobs.get_address(), patience, SystemClock())
    while True:
        with watch.look():
            details = jobs.get_job_info(job_id)
            if details.status.is_terminal():
                return details
            watch.heard(news=True)
        watch.rest()


def exit_code(details: JobDetails) -> int:
    """The exit code of a job that has ended: its driver's, where that ended by itself.

    Raises:
        MachineError: The driver never ran, or died with the cluster.
    """
    code = details.driver_exit_code
    if code == _NO_COMMAND:
        raise MachineError(
            "the head has no `raycloud` on its PATH",
            hint="install the same version there, in the environment that runs `ray start`",
        )
    if details.status.value in _EXITS:
        return _EXITS[details.status.value]
    if code is None:
        said = (details.message or "the cluster does not say why").strip()
        raise MachineError(f"the job failed before its driver ended: {said}")
    return code if code >= 0 else _MACHINE


def _is_final(error: MachineError) -> bool:
    """Whether asking again is in vain: it is refused there, or the certificate is refused here."""
    root, broken = _root(error), (ssl.SSLEOFError, ssl.SSLZeroReturnError)
    if isinstance(root, ssl.SSLError) and not isinstance(root, broken):
        return True
    status: int = getattr(error.__cause__, "status", _SERVER_ERROR)
    return status < _SERVER_ERROR


def _root(error: BaseException) -> BaseException:
    """What an error came from: libraries wrap it several times."""
    while inner := error.__cause__ or (None if error.__suppress_context__ else error.__context__):
        error = inner
    return error
