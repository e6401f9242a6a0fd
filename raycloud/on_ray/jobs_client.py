"""Ray's own client of the Jobs API, held to the one address that was checked.

Ray's would let `RAY_ADDRESS` take the place of the address that was given, follow a redirect, and
ask a proxy or `~/.netrc` on the way: each could carry the token elsewhere. Of the environment, only
the certificates that a server is checked with are taken (`Endpoint.certificates`).
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import urlsplit

import aiohttp
import ray
import requests
from ray.dashboard.modules.dashboard_sdk import SubmissionClient
from ray.job_submission import JobSubmissionClient

from raycloud.errors import JobError, MachineError, SpecError
from raycloud.spec import Environment
from raycloud.spec.environment import ray_token

if TYPE_CHECKING:
    from requests import PreparedRequest, Response

LOCAL = "http://127.0.0.1:8265"
_ASK_S = 30.0
_SEND_S = 600.0  # a package over a thin link
# A followed log in which nothing came for so long is opened again: its other side may be gone, as
# after a sleep of this machine.
QUIET_S = 60.0
_PROBE_S, _PROBES = 20, 3  # of a websocket's TCP connection, for the same reason
_REFUSED = (401, 403)
_NOT_FOUND = 404
_VERSION = "/api/version"
_CERTIFICATES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")  # as requests reads them

TOKEN_HINT = (
    "set RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH to a file that only you may read, or keep it in "
    "~/.ray/auth_token"
)
TUNNEL_HINT = "go through `ssh -L 8265:127.0.0.1:8265 HEAD` and --address http://127.0.0.1:8265"


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """Where a cluster's Jobs API answers, checked.

    Attributes:
        url: `http://host:port` or `https://...`, without a path.
        loopback: Whether that is this machine.
        token: What is shown there; None shows nothing.
        certificates: A file or folder of those that an https server is checked with; None: those
            that come with `requests`.
    """

    url: str
    loopback: bool
    token: str | None = field(repr=False)
    certificates: Path | None = None

    @property
    def headers(self) -> dict[str, str]:
        """What each request carries."""
        return {} if self.token is None else {"Authorization": f"Bearer {self.token}"}

    def refused(self) -> JobError:
        """What to raise where the cluster does not take what it was shown."""
        if self.token is None:
            return JobError(
                f"the cluster at {self.url} asks for a token, and got none", hint=TOKEN_HINT
            )
        return JobError(
            f"the cluster at {self.url} refuses this token",
            hint=f"it is another cluster's: {TOKEN_HINT}",
        )


def endpoint(
    address: str | None, *, insecure: bool = False, environment: Environment | None = None
) -> Endpoint:
    """Decide whether a cluster may be spoken to; speaks to nobody.

    Args:
        address: `http://host:port`, `https://host:port` or `host:port`; None takes
            `RAY_API_SERVER_ADDRESS`, then a `RAY_ADDRESS` with `http`, then this machine's 8265.
        insecure: Whether a token and code may go out in clear.
        environment: The settings to look at; None: this process's.

    Raises:
        SpecError: The address is none, or leads elsewhere than this machine without a token, or in
            clear; or the certificates for it are not where a variable says.
    """
    environment = environment or Environment.from_process()
    url, host = _parsed(address or environment.jobs_address or LOCAL)
    loopback = _is_loopback(host)
    if url.startswith("http:") and not loopback and not insecure:
        raise SpecError(
            "--address",
            url,
            "is not this machine, and http sends the token and your code in clear",
            hint=f"{TUNNEL_HINT}; or give an https address; or, on a private network, --insecure",
        )
    token = ray_token(environment)
    if token is None and not loopback:
        raise SpecError(
            "--address",
            url,
            "is not this machine, and there is no token to show to it",
            hint=f"start the cluster with RAY_AUTH_MODE=token, and {TOKEN_HINT}",
        )
    certificates = _certificates(environment) if url.startswith("https:") else None
    return Endpoint(url=url, loopback=loopback, token=token, certificates=certificates)


def _certificates(environment: Environment) -> Path | None:
    """Where those lie that servers are checked with, if a variable says it."""
    for name in _CERTIFICATES:
        if said := environment.variables.get(name, "").strip():
            if Path(said).exists():
                return Path(said)
            raise SpecError(
                name,
                said,
                "is neither a file nor a folder of certificates",
                hint=f"name one that is there, or unset {name}",
            )
    return None


def _parsed(address: str) -> tuple[str, str]:
    """The address as a URL without a path, and its host."""
    hint = f"write http://HOST:8265 or https://HOST, as in {LOCAL}"
    try:
        parts = urlsplit(address if "://" in address else f"http://{address}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise SpecError("--address", address, f"is no address: {error}", hint=hint) from None
    if parts.username is not None or parts.password is not None:
        raise SpecError(
            "--address",
            f"{parts.scheme}://...@{host}",
            "holds a password; a token is not written into an address",
            hint=TOKEN_HINT,
        )
    if parts.scheme not in {"http", "https"} or not host:
        raise SpecError("--address", address, "is not the address of a Jobs API", hint=hint)
    if parts.path.strip("/") or parts.query or parts.fragment:
        raise SpecError("--address", address, "has something after the port", hint=hint)
    named = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{named}" + (f":{port}" if port else ""), host


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
        """Ask for the version there.

        Raises:
            ConnectionError: Nobody answers.
            JobError: The token is refused, or one is wanted.
            MachineError: What answers is no Jobs API.
        """
        self._client_ray_version = ray.__version__
        self._where = where
        self._session = requests.Session()
        self._session.trust_env = False  # no proxy, and nothing but the endpoint's own token
        encrypted = where.url.startswith("https:")
        certificates = where.certificates or Path(requests.utils.DEFAULT_CA_BUNDLE_PATH)
        self._session.verify = str(certificates) if encrypted else True
        # Not JobSubmissionClient's: it takes the address from the environment.
        SubmissionClient.__init__(self, address=where.url, headers=where.headers)
        # One that trusts a file or a folder of certificates, as requests does.
        file, folder = (None, certificates) if certificates.is_dir() else (certificates, None)
        trusting = ssl.create_default_context(cafile=file, capath=folder) if encrypted else True
        self._trusted: ssl.SSLContext | bool = trusting
        self._see_that_it_is_one()

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
            log = await session.ws_connect(url, ssl=self._trusted)
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

    def _see_that_it_is_one(self) -> None:
        """Ask for the version: a server of another kind has none, or says it otherwise."""
        try:
            self._check_connection_and_version()
        except (requests.JSONDecodeError, KeyError, TypeError) as error:
            raise self._another(f"{_VERSION} there names no version of Ray") from error
        except AnswerError as error:
            if error.status == _NOT_FOUND:
                raise self._another(f"it knows no {_VERSION}") from error
            raise
        except ValueError as error:
            if isinstance(error, OSError):  # a certificate that is refused is both
                raise
            raise self._another(f"{_VERSION} there says {error}") from error

    def _another(self, why: str) -> MachineError:
        return MachineError(
            f"something else than a Jobs API answers at {self._where.url}: {why}",
            hint="name the head's dashboard, port 8265 unless it was started with another",
        )

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
        if endpoint == _VERSION and response.status_code == _NOT_FOUND:
            self._raise_error(response)
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
